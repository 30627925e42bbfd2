"""Vectors and scores that vLLM computes on a CPU. Runs in the environment of vLLM, as a script; see `oracles.ask`.

The request: `ids` of a text; `models` with the `folder`, the `task` of vLLM and where its answer goes (`out`, float32);
and `results`, the file for what became of each model: nothing, or the error.
"""

import numpy as np
from vllm import LLM, PoolingParams
from vllm.config.pooler import PoolerConfig

from helpers.vllm_answers import answer_each


def run(model: dict, request: dict) -> dict:
    """The answer of a model goes to its file."""
    of_tokens = {"pooler_config": PoolerConfig(task=model["task"], tok_pooling_type="ALL")}
    llm = LLM(
        model["folder"],
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **(of_tokens if model["task"].startswith("token") else {}),
    )
    asked, params = [{"prompt_token_ids": request["ids"]}], PoolingParams(use_activation=False)
    (output,) = llm.encode(asked, pooling_task=model["task"], pooling_params=params, use_tqdm=False)
    np.save(model["out"], output.outputs.data.float().numpy())
    llm.llm_engine.engine_core.shutdown()
    return {}


if __name__ == "__main__":
    answer_each("models", run)

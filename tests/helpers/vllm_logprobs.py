"""Log-probabilities that vLLM computes on a CPU. Runs in the environment of vLLM, as a script; see `oracles.ask`.

The request: `ids` of a text, `models` with the `folder`, the `dtype` to compute in, and where its log-probabilities go
(`out`, [T, V] float64), and `results`, the file for what became of each model: the text that it writes, or the error.
The first model of a process decides whether there is a group for experts: all models have some, or none has.
"""

import gc
import json
import os
import sys
from pathlib import Path

import numpy as np
from vllm import LLM, SamplingParams

GENERATED = 16


def run(model: dict, ids: list[int]) -> list[int]:
    """The tokens that a model writes after `ids`; its log-probabilities go to their file."""
    llm = LLM(
        model["folder"],
        dtype=model["dtype"],
        enforce_eager=True,
        max_model_len=len(ids) + GENERATED,
        max_logprobs=-1,
        max_num_seqs=2,
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=GENERATED, logprobs=-1, prompt_logprobs=-1, detokenize=False, ignore_eos=True
    )
    (output,) = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    logprobs = np.full((len(ids), max(rows[0]) + 1), np.nan)
    for row, entries in zip(logprobs, rows, strict=True):
        for token, entry in entries.items():
            row[token] = entry.logprob
    np.save(model["out"], logprobs)
    llm.llm_engine.engine_core.shutdown()
    return list(output.outputs[0].token_ids)


def main() -> None:
    request = json.load(sys.stdin)
    results = []
    for model in request["models"]:
        try:
            results.append({"text": run(model, request["ids"])})
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
        gc.collect()
        Path(request["results"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # its threads would keep the process

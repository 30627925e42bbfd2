"""Log-probabilities that vLLM computes on a CPU. Runs in the environment of vLLM, as a script; see `oracles.ask`.

The request: `ids` of a text, or a `prompt` with the files of its `images`; `models` with the `folder`, the `dtype` to
compute in, and where its log-probabilities go (`out`, [T, V] float64); and `results`, the file for what became of each
model: the `ids` that it read and the text that it writes, or the error.
The first model of a process decides whether there is a group for experts: all models have some, or none has.
"""

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams

from helpers.vllm_answers import answer_each

GENERATED = 16


def run(model: dict, request: dict) -> dict:
    """The tokens that a model reads and writes; its log-probabilities go to their file."""
    images = [Image.open(path).convert("RGB") for path in request.get("images", ())]
    asked = {"prompt_token_ids": request["ids"]} if not images else {"prompt": request["prompt"]}
    llm = LLM(
        model["folder"],
        dtype=model["dtype"],
        enforce_eager=True,
        max_model_len=request.get("length", 0) or len(request["ids"]) + GENERATED,
        max_logprobs=-1,
        max_num_seqs=2,
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=not images,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=GENERATED, logprobs=-1, prompt_logprobs=-1, detokenize=False, ignore_eos=True
    )
    media = {"multi_modal_data": {"image": images}} if images else {}
    (output,) = llm.generate(asked | media, sampling, use_tqdm=False)
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    logprobs = np.full((len(rows), max(rows[0]) + 1), np.nan)
    for row, entries in zip(logprobs, rows, strict=True):
        for token, entry in entries.items():
            row[token] = entry.logprob
    np.save(model["out"], logprobs)
    llm.llm_engine.engine_core.shutdown()
    return {"ids": list(output.prompt_token_ids), "text": list(output.outputs[0].token_ids)}


if __name__ == "__main__":
    answer_each("models", run)

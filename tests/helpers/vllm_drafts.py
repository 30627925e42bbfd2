"""Tokens that vLLM generates on a CPU, alone and with drafts. Runs in the environment of vLLM, as a script; see
`oracles.ask`.

The request: `prompts` of token ids and the `tokens` to generate for each; `runs` with the folder of a `target`, the
`dtype` to compute in and `speculative`, the config of a draft, or null; and `results`, the file for what became of each
run: the `texts`, how many tokens were `drafted` and `accepted`, or the error. A target that is null is the one that the
draft in the folder `model` names.
"""

from vllm import LLM, SamplingParams

from helpers.vllm_answers import answer_each

COUNTERS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def run(case: dict, request: dict) -> dict:
    """The tokens of a run, and how many drafts were accepted."""
    llm = LLM(
        case["target"],
        dtype=case["dtype"],
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        enable_prefix_caching=False,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        speculative_config=case["speculative"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=request["tokens"], detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    counted = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS.values()}
    llm.llm_engine.engine_core.shutdown()
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        **{key: counted.get(name, 0) for key, name in COUNTERS.items()},
    }


if __name__ == "__main__":
    answer_each("runs", run)

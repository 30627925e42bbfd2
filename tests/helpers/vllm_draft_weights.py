"""Loads drafts into vLLM's classes on a CPU, where vLLM does not run them. Runs in the environment of vLLM, as a
script; see `oracles.ask`.

The request: `runs` as of vllm_drafts.py; and `results`, the file for what became of each run: the `model` that has all
weights, or the error. vLLM refuses weights without a parameter, and parameters without a weight. Its second model
runner, which has these drafts, needs Triton, but not to load weights.
"""

import json
import os
import sys
from pathlib import Path

import torch
import vllm.config.vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

MOST_LENGTH = 64


def load(case: dict) -> dict:
    """The class of a draft that has all weights."""
    arguments = EngineArgs(
        case["target"],
        dtype=case["dtype"],
        enforce_eager=True,
        max_model_len=MOST_LENGTH,
        skip_tokenizer_init=True,
        speculative_config=case["speculative"],
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            rendezvous = f"file://{case['speculative']['model']}.rendezvous"
            init_distributed_environment(1, 0, rendezvous, 0, "gloo")
            initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    return {"model": type(model).__name__}


def main() -> None:
    request = json.load(sys.stdin)
    vllm.config.vllm.HAS_TRITON = True
    torch.accelerator.empty_cache = lambda: None
    results = []
    for case in request["runs"]:
        try:
            results.append(load(case))
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    Path(request["results"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)

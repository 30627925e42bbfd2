"""Compares decoding on this machine's CPU with transformers' generate on the same weights.

    python benchmarks/decode.py HF_FOLDER CHECKPOINT [--pairs N] [--new-tokens N]

HF_FOLDER is a checkpoint in safetensors, which may have random weights (`AutoModelForCausalLM.from_config(...)
.save_pretrained`). CHECKPOINT is its conversion by `tpuconv convert`. The two are timed in pairs, in bfloat16 and
float32, with batch 1. For transformers the time of a token is the time of a long text minus that of one token. Prints
medians, the ratio within pairs, and the share of the memory bandwidth, which is measured in the same run.
"""

import argparse
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from tpuconv.models.generate import Generator
from tpuconv.restore import load
from tpuconv.verify.benchmark import Roofline, machine

PROMPT = 32


def ours(checkpoint: Path, dtype: str, ids: np.ndarray, new: int):
    """Returns a function that measures the seconds of a token, and the bytes that a step must read."""
    model = load(checkpoint, dtype)
    generator, prompts = Generator(model), ids.tolist()

    def step() -> float:
        times = []
        for _ in generator(prompts, new):
            times.append(time.perf_counter())
        return (times[-1] - times[0]) / (new - 1)

    step()  # compiles
    return step, Roofline(model).step_bytes(1, 0)


def theirs(folder: Path, dtype: str, ids: np.ndarray, new: int):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    prompt = torch.tensor(ids)

    def seconds(count: int) -> float:
        began = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        return time.perf_counter() - began

    def step() -> float:
        return (seconds(new) - seconds(1)) / (new - 1)

    seconds(2)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=17)
    args = parser.parse_args()
    ids = np.random.default_rng(0).integers(0, 1000, (1, PROMPT))
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    print(f"commit {commit.stdout.strip()}, {args.pairs} pairs, prompt {PROMPT}, {args.new_tokens} new tokens\n")
    print("| dtype | ours ms | transformers ms | ours / transformers | of the bandwidth | GB/s |")
    print("|---|---|---|---|---|---|")
    for dtype in ("bfloat16", "float32"):
        peer = theirs(args.folder, dtype, ids, args.new_tokens)
        mine, nbytes = ours(args.checkpoint, dtype, ids, args.new_tokens)
        pairs, bandwidths = [], []
        for _ in range(args.pairs):
            pairs.append((mine(), peer()))
            bandwidths.append(machine().limits.bandwidth)
        own, other = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = sorted(a / b for a, b in pairs)
        bandwidth = statistics.median(bandwidths)
        print(
            f"| {dtype} | {1e3 * own:.0f} | {1e3 * other:.0f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
            f"| {nbytes / own / bandwidth:.2f} | {bandwidth / 1e9:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

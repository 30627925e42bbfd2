"""Compares int8 and FP8 checkpoints for servers with those that llm-compressor writes without calibration data.

    python benchmarks/peers.py --python PATH [--folder DIR] [--pairs N] [--layers N]

PATH is the Python of an environment with llmcompressor, which needs other versions of transformers than we do, and a
build of torch for the CPU. Makes a checkpoint of the shape of Qwen3-1.7B (3.4 GB in bfloat16) with normal weights. In
each round, with an empty page cache (as root), for W8A8 in int8 and then for FP8 with dynamic activations:

    tpuconv     convert --target huggingface --quantize int8_default, or fp8_default
    model-free  llm-compressor's model_free_ptq: a shard at a time, without transformers
    oneshot     llm-compressor's oneshot with a QuantizationModifier: the complete model of transformers
    import      Python and the modules of llm-compressor, which both of these need

Prints wall time and processor time, their ratios to tpuconv in the same round, and peak memory. Private memory includes
pages of mapped files that no other process maps, which the system could free: tpuconv has none, the peers map the
source. Then prints how many tensors of the first round are the same, bit for bit, and how far the others differ.
oneshot adds a zero point of 0, so that a weight of -0.0 becomes 0.0 in FP8.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from convert import CONFIG, Run, empty_page_cache, make_checkpoint, measure, spread

from tpuconv.sources.headers import DTYPES, read_header

SCHEMES = {"int8": ("int8_default", "W8A8"), "fp8": ("fp8_default", "FP8_DYNAMIC")}
"""Our config, and llm-compressor's name of the same scheme."""

# Without modules it matches names: all but norms are linear layers to it.
MODEL_FREE = """
import sys
from llmcompressor import model_free_ptq
model_free_ptq(*sys.argv[1:3], scheme=sys.argv[3], ignore=["lm_head", "model.embed_tokens"], device="cpu")
"""
ONESHOT = """
import sys
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
recipe = QuantizationModifier(targets="Linear", scheme=sys.argv[3], ignore=["lm_head"])
oneshot(model=sys.argv[1], recipe=recipe, output_dir=sys.argv[2])
"""
IMPORT = "from llmcompressor import model_free_ptq, oneshot"
VERSIONS = """
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in ("llmcompressor", "compressed-tensors", "transformers", "torch")))
"""


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, mapped."""
    return {
        info.name: np.memmap(path, DTYPES[info.dtype], "r", info.offset, info.shape)
        for path in folder.glob("*.safetensors")
        for info in read_header(path)[2]
    }


def compare(what: str, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Prints a row for quantized values, for scales, and for all other tensors."""
    for name in sorted(ours.keys() ^ theirs.keys()):
        print(f"{what}: only {'tpuconv' if name in ours else 'the peer'} writes {name}", file=sys.stderr)
    kinds: dict[str, list[str]] = {"values": [], "scales": [], "others": []}
    for name in sorted(ours.keys() & theirs.keys()):
        kind = "scales" if name.endswith("_scale") else "values" if f"{name}_scale" in ours else "others"
        kinds[kind].append(name)
    for kind, names in kinds.items():
        equal = differ = signs = 0
        largest, dtypes = 0.0, set[str]()
        for name in names:
            a, b = ours[name], theirs[name]
            dtypes.add(f"{a.dtype}" if a.dtype == b.dtype else f"{a.dtype} and {b.dtype}")
            if a.shape != b.shape:
                raise SystemExit(f"{what}: {name} has the shapes {a.shape} and {b.shape}")
            if a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)):
                equal += 1
                continue
            a, b = a.astype(np.float32), b.astype(np.float32)
            differ += int(np.count_nonzero(a != b))
            signs += int(np.count_nonzero((a == b) & (np.signbit(a) != np.signbit(b))))
            largest = max(largest, float(np.abs(a - b).max()))
        types = ", ".join(sorted(dtypes))
        print(f"| {what} | {kind} | {types} | {equal} of {len(names)} | {differ} | {largest:g} | {signs} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python of an environment with llmcompressor")
    parser.add_argument("--folder", type=Path, help="where to work; three times the checkpoint must fit")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28, help="fewer make a trial")
    args = parser.parse_args()
    # Both compute on the CPU. Nobody reads bars of progress, which would fill the pipe of errors.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    versions = subprocess.run([args.python, "-c", VERSIONS], capture_output=True, text=True, check=False)
    if versions.returncode:
        raise SystemExit(f"{args.python} has no llmcompressor:\n{versions.stderr}")
    work = Path(tempfile.mkdtemp(dir=args.folder))
    source, cold = work / "hf", True
    runs: dict[str, dict[str, list[Run]]] = {scheme: {} for scheme in SCHEMES}
    try:
        total = make_checkpoint(source, CONFIG | {"num_hidden_layers": args.layers})
        print(versions.stdout)
        print("| what | tensors | dtype | equal | elements differ | largest difference | zeros of the other sign |")
        print("|---|---|---|---|---|---|---|")
        for index in range(args.pairs):
            for scheme, (config, preset) in SCHEMES.items():
                own = [sys.executable, "-m", "tpuconv", "convert", str(source), str(work / "tpuconv")]
                commands = {
                    "tpuconv": [*own, "--target", "huggingface", "--quantize", config],
                    "model-free": [args.python, "-c", MODEL_FREE, str(source), str(work / "model-free"), preset],
                    "oneshot": [args.python, "-c", ONESHOT, str(source), str(work / "oneshot"), preset],
                    "import": [args.python, "-c", IMPORT],
                }
                for name, command in commands.items():
                    cold = empty_page_cache() and cold
                    run = measure(command)
                    runs[scheme].setdefault(name, []).append(run)
                    print(f"  {scheme}, {name}: {run.wall:.2f} s", file=sys.stderr)
                for peer in ("model-free", "oneshot"):
                    if index == 0:
                        compare(f"{scheme}, {peer}", tensors(work / "tpuconv"), tensors(work / peer))
                    shutil.rmtree(work / peer)
                shutil.rmtree(work / "tpuconv")
    finally:
        shutil.rmtree(work)
    report(runs, total, args.pairs, cold)


def report(runs: dict[str, dict[str, list[Run]]], total: int, pairs: int, cold: bool) -> None:
    print(f"\n{total / 1e9:.2f} GB, {pairs} rounds, {'cold' if cold else 'warm'}, {os.cpu_count()} processors\n")
    print("| what | wall s | wall / tpuconv | cpu s | cpu / tpuconv | private MB | resident MB |")
    print("|---|---|---|---|---|---|---|")
    for scheme, ways in runs.items():
        for name, own in ways.items():
            cells = []
            for key in ("wall", "cpu"):
                base = ways["tpuconv"]
                cells.append(spread([getattr(run, key) for run in own]))
                cells.append(spread([getattr(a, key) / getattr(b, key) for a, b in zip(own, base, strict=True)]))
            cells += [f"{max(getattr(run, key) for run in own) / 1e6:.0f}" for key in ("private", "resident")]
            print(f"| {scheme}, {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

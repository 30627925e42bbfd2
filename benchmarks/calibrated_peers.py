"""Compares calibrated quantization in int4 with llm-compressor's, on a released model: time, memory, divergence.

    pip install gguf
    python benchmarks/calibrated_peers.py --python PATH [--folder DIR] [--only NAME ...]

PATH is the Python of an environment with llmcompressor, as for `peers.py`. The model and the texts are those of
`released.py`: SmolLM2-135M-Instruct, 64 samples of 512 tokens to calibrate on, the same token ids for all. Every
product of the layers is quantized to int4 in groups of 32 inputs, symmetric; what else a method can choose is left to
it. What the peer writes is converted by `tpuconv convert`, and compared with the source in float32, as ours is.

DIR (default: a temporary folder) keeps what was made; a second run does only what is not there.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from convert import Run, measure
from peers import VERSIONS
from released import TEXT, prepare, tpuconv

from tpuconv.quantize.calibrate.data import from_text

SAMPLES, LENGTH = 64, 512
OURS = r"""
qwix: {rules: [{module_path: 'layers/\d+/(attn|mlp)/.*', weight_qtype: int4, tile_size: 32, tile_axes: all}]}
"""
CALIBRATION = "calibration: {method: %s}\n"
THEIRS = """
import sys
import numpy as np
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
source, out, ids = sys.argv[1:]
ids = np.load(ids).tolist()
data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
what = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
recipe = RECIPE
oneshot(model=source, dataset=data, recipe=recipe, output_dir=out, num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]))
"""
PEERS = {
    "nearest": "QuantizationModifier(**what)",
    "gptq": "GPTQModifier(**what)",
}
"""The peer's recipe by the name of a method. Its AWQ needs an accelerator: it pins memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python of an environment with llmcompressor")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(PEERS), choices=list(PEERS))
    args = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    os.environ["LLM_COMPRESSOR_LOG_LEVEL"] = "ERROR"  # nobody reads what it says: it would fill the pipe
    print(subprocess.run([args.python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout)
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        prepare(folder)
        ids = from_text(folder / "source", folder / "calibration.txt", SAMPLES, LENGTH).ids()
        np.save(folder / "ids.npy", ids)
        print("| what | wall s | cpu s | private MB | mean KL | top-1 | perplexity |")
        print("|---|---|---|---|---|---|---|")
        for method in args.only:
            theirs = [args.python, "-c", THEIRS.replace("RECIPE", PEERS[method])]
            written = folder / f"theirs-{method}"
            run = run_once(written, [*theirs, folder / "source", written, folder / "ids.npy"])
            if not (folder / f"read-{method}").exists():
                tpuconv(folder, "convert", written.name, f"read-{method}")
            print_row(folder, f"{method}, llm-compressor", f"read-{method}", run)
            config, written = folder / f"{method}.yaml", folder / f"ours-{method}"
            config.write_text(OURS)
            ours = [sys.executable, "-m", "tpuconv", "quantize", folder / "plain", written, "--config", config]
            if method != "nearest":
                config.write_text(OURS + CALIBRATION % method)
                ours += ["--calibration", folder / "calibration.txt", "--samples", SAMPLES, "--length", LENGTH]
            run = run_once(written, ours)
            print_row(folder, f"{method}, tpuconv", written.name, run)


def run_once(out: Path, command: list[object]) -> Run | None:
    """Runs a command that makes `out`, unless that is there."""
    return None if out.exists() else measure([str(word) for word in command])


def print_row(folder: Path, what: str, ckpt: str, run: Run | None) -> None:
    """Compares a checkpoint of ours with the source, and prints what it took to make."""
    found = tpuconv(folder, "compare", "plain", ckpt, *TEXT)
    took = f"{run.wall:.0f} | {run.cpu:.0f} | {run.private / 1e6:.0f}" if run else "| |"
    print(
        f"| {what} | {took} | {found['mean_kl']:.4f} | {100 * found['top1']:.2f}% "
        f"| {found['perplexity']['checkpoint']:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

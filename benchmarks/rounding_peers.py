"""Compares int4 in groups of 32 with llama.cpp's quantizer and with AutoRound, on a released model.

    pip install gguf
    python benchmarks/rounding_peers.py [--llama-cpp BUILD --convert FILE [--types NAME ...]] [--python PATH]
        [--iters N] [--ours NAME ...] [--folder DIR]

BUILD has llama.cpp's `bin/llama-quantize` and `bin/llama-imatrix`, FILE is its `convert_hf_to_gguf.py`; PATH is the
Python of an environment with auto-round and what that script imports. The model and the texts are those of
`released.py`. All rows have 4 bits and a scale of 16 for each 32 weights of a layer, and the embedding as it was; other
types of llama.cpp have 5 or 8 bits instead.
llama.cpp's importance matrix is made of the text that the others calibrate on; AutoRound gets the same 64 samples of
512 tokens. What a peer writes is read in float32, converted by `tpuconv convert`, and compared with the source.

DIR (default: a temporary folder) keeps what was made; a second run does only what is not there.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from calibrated_peers import LENGTH, SAMPLES, print_row, run_once
from convert import Run
from released import CONFIGS, prepare, read_gguf, tpuconv

from tpuconv.quantize.calibrate.data import from_text

AUTO_ROUND = """
import sys
import numpy as np
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer
source, out, ids, iters = sys.argv[1:]
ids = torch.tensor(np.load(ids).astype(np.int64))
data = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
options = {"lr": 5e-3} if iters == "50" else {}  # what its recipe for 50 iterations has
rounding = AutoRound(model, AutoTokenizer.from_pretrained(source), scheme="W4A16", group_size=32, sym=True,
                     iters=int(iters), nsamples=len(ids), seqlen=ids.shape[1], dataset=data, device_map="cpu",
                     **options)
rounding.quantize_and_save(out, format="auto_gptq")
"""
GGUF_TYPES = {
    "Q4_0": "16 values alike",
    "IQ4_NL": "16 values of a table",
    "Q5_0": "32 values alike",
    "Q5_1": "32 values alike, with a minimum",
    "Q8_0": "256 values alike",
}
UNWEIGHTED = ("Q8_0",)
"""Types that llama.cpp rounds to nearest with an importance matrix too. Q4_1 is left out: the model comes from it."""
OURS = ("gptq-mse", "gptq-propagate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--convert", type=Path)
    parser.add_argument("--types", nargs="*", default=["Q4_0", "IQ4_NL"], choices=list(GGUF_TYPES))
    parser.add_argument("--ours", nargs="*", default=list(OURS), choices=OURS)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--iters", type=int, help="iterations of AutoRound for each block; its default is 200")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        prepare(folder)
        print("| what | wall s | cpu s | private MB | mean KL | top-1 | perplexity |")
        print("|---|---|---|---|---|---|---|")
        if args.llama_cpp:
            compare_llama_cpp(folder, args.llama_cpp / "bin", args.python, args.convert, args.types)
        if args.iters:
            ids = from_text(folder / "source", folder / "calibration.txt", SAMPLES, LENGTH).ids()
            np.save(folder / "ids.npy", ids)
            out = folder / f"auto-round-{args.iters}"
            run = run_once(out, [args.python, "-c", AUTO_ROUND, folder / "source", out, folder / "ids.npy", args.iters])
            (written,) = (path.parent for path in out.rglob("config.json"))
            compare(folder, f"AutoRound, {args.iters} iterations", written, run)
        for name in args.ours:
            config, out = folder / f"{name}.yaml", folder / f"quantized-{name}"
            config.write_text(CONFIGS[name])
            calibrated = ["--calibration", folder / "calibration.txt", "--samples", SAMPLES, "--length", LENGTH]
            ours = [sys.executable, "-m", "tpuconv", "quantize", folder / "plain", out, "--config", config]
            print_row(folder, f"tpuconv, `{name}` of `released.py`", out.name, run_once(out, [*ours, *calibrated]))


def compare_llama_cpp(folder: Path, programs: Path, python: str, convert: Path, types: list[str]) -> None:
    """Prints a row of each type, with and without an importance matrix."""
    float32, matrix = folder / "float32.gguf", folder / "matrix.gguf"
    run_once(float32, [python, convert, folder / "source", "--outtype", "f32", "--outfile", float32])
    measure = ["-f", folder / "calibration.txt", "-c", LENGTH, "--chunks", SAMPLES, "-o", matrix]
    run_once(matrix, [programs / "llama-imatrix", "-m", float32, *measure])
    for kind in types:
        for weighted in (False, True)[: 1 if kind in UNWEIGHTED else 2]:
            name = f"{kind}-weighted" if weighted else kind
            file, read = folder / f"{name}.gguf", folder / f"values-{name}"
            options = ["--imatrix", matrix] if weighted else []
            plain = ["--pure", "--token-embedding-type", "f32"]
            run = run_once(file, [programs / "llama-quantize", *plain, *options, float32, file, kind])
            if not read.exists():
                write_values(folder / "source", file, read)
            title = f"llama.cpp {kind}, {GGUF_TYPES[kind]}" + (", importance matrix" if weighted else "")
            compare(folder, title, read, run)


def write_values(source: Path, file: Path, out: Path) -> None:
    """Writes the values of a GGUF file as a checkpoint of transformers in float32."""
    from safetensors.numpy import save_file

    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: np.ascontiguousarray(x) for name, x in read_gguf(file).items()}, out / "model.safetensors")


def compare(folder: Path, title: str, written: Path, run: Run | None) -> None:
    """Converts what a peer wrote, and prints its row."""
    read = f"read-{written.name}"
    if not (folder / read).exists():
        tpuconv(folder, "convert", str(written), read)
    print_row(folder, title, read, run)


if __name__ == "__main__":
    main()

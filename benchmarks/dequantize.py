"""Compares the dequantization of block FP8 with a copy of the same bytes and with the speed of the disk.

    python benchmarks/dequantize.py [--folder DIR] [--experts N] [--pairs N]
    python benchmarks/dequantize.py --checkpoint DIR --layers 3-3 [--folder DIR] [--pairs N]

First times one thread on one matrix of an expert of DeepSeek R1, in memory, with random quantized values: decoding to
bfloat16, transposing into chunks, and a copy (`np.copyto`) of as many bytes as these read and write. Then converts one
layer of R1 with N experts, alternating with direct writes of as many bytes. The source is a sparse file, which is read
as zeros without disk I/O; everything but reading is as in a real conversion. Ratios are those of pairs.

With --checkpoint, converts some layers of that checkpoint instead, and extrapolates the time to all layers by the bytes
written. It may be a sparse file too.
"""

import argparse
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.convert.run.strided import copy_strided
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.tensors import decode_names
from tpuconv.sources.headers import DTYPES
from tpuconv.sources.reader import SafetensorsReader
from tpuconv.sources.source import open_source

QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "vocab_size": 1024,
    "quantization_config": QUANTIZATION,
}
EXPERT = (2048, 7168)
CHUNK = (896, 256)


def write_holes(folder: Path, config: dict, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Path:
    """Writes a checkpoint whose values are holes of a sparse file. Returns the folder."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder


def encoded(name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of the stored tensors of one tensor of R1."""
    if not name.endswith("_proj.weight"):
        return {name: ("F32" if name.endswith("bias") else "BF16", shape)}
    return {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("F32", tuple(-(-n // 128) for n in shape))}


def layer(folder: Path, experts: int) -> Path:
    from tpuconv.models.registry import find_family

    config = CONFIG | {"n_routed_experts": experts}
    family = find_family(config)
    bindings = family.table.bind(family.config.from_hf(config))
    shapes = {name: shape for binding in bindings for name, shape in binding.src_shapes().items()}
    return write_holes(
        folder, config, {n: x for name, shape in shapes.items() for n, x in encoded(name, shape).items()}
    )


def median(step: Callable[[], None], repeats: int = 15) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def one_matrix(folder: Path) -> None:
    rng = np.random.default_rng(0)
    codes = (rng.normal(size=EXPERT) * 110).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1e-4, 2e-4, (16, 56)).astype(np.float32)
    write_holes(folder, CONFIG, encoded("w_proj.weight", EXPERT))
    source = open_source(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        for info, values in zip(source.tensors.values(), (codes, scales), strict=True):
            file.seek(info.offset)
            file.write(values.tobytes())
    (tensor,) = decode_names(source.tensors, QUANTIZATION)[0].values()
    elements = prod(EXPERT)
    raw, out = np.zeros(elements, np.uint8), np.zeros(elements, ml_dtypes.bfloat16)
    view = out.view(np.uint16).reshape(EXPERT).T
    chunks = [np.zeros(CHUNK, np.uint16) for _ in range(elements // prod(CHUNK))]
    boxes = [(slice(i, i + CHUNK[0]), slice(j, j + CHUNK[1])) for i in range(0, 7168, 896) for j in range(0, 2048, 256)]

    def transpose() -> None:
        copy_strided((chunk, view[box]) for box, chunk in zip(boxes, chunks, strict=True))

    copied, copy = np.zeros((2, elements * 3 // 2), np.uint8)
    with closing(Memory(source, tensor, raw)) as reader:
        steps = {
            "decode": lambda: tensor.read(reader, 0, raw, out),
            "transpose, in chunks": transpose,
            "copy of as many bytes": lambda: np.copyto(copy, copied),
        }
        seconds = {name: median(step) for name, step in steps.items()}
    both = seconds["decode"] + seconds["transpose, in chunks"]
    for name, each in {**seconds, "decode and transpose": both}.items():
        ratio = seconds["copy of as many bytes"] / each
        print(f"| {name} | {elements / each / 1e9:.2f} | {ratio:.2f} |")


class Memory(SafetensorsReader):
    """A reader whose values are in memory; scales are read from the file."""

    def __init__(self, source, tensor: Tensor, raw: np.ndarray):  # type: ignore[no-untyped-def]
        super().__init__(source.folder, source.shards, hashes=False)
        self.values = tensor.values.name
        super().read(tensor.values, 0, raw.data)

    def read(self, info, start: int, out: memoryview) -> None:  # type: ignore[no-untyped-def]
        if info.name != self.values:
            super().read(info, start, out)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def direct_writes(path: Path, nbytes: int) -> float:
    """Returns the seconds to write `nbytes` zeros with direct I/O and to flush them."""
    block = mmap.mmap(-1, 32 << 20)
    began = time.monotonic()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    for _ in range(nbytes // len(block)):
        os.write(fd, block)
    os.fsync(fd)
    os.close(fd)
    seconds = time.monotonic() - began
    path.unlink()
    return seconds


def convert(*args: str) -> dict[str, Any]:
    """Returns the JSON of `tpuconv convert`."""
    command = [sys.executable, "-m", "tpuconv", "convert", *args, "--json"]
    facts: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return facts


def pairs(source: Path, part: list[str], folder: Path, count: int) -> None:
    """Times the conversion of a checkpoint (or of the layers that the options `part` select) in pairs with the disk."""
    whole, plan = convert(str(source), "--dry-run"), convert(str(source), *part, "--dry-run")
    times = whole["output_bytes"] / plan["output_bytes"]
    print(
        "\n| GB written | wall s | cpu s | peak MB (planned) | disk alone s | of the disk's rate | all layers, min |\n"
        "|---|---|---|---|---|---|---|"
    )
    for _ in range(count):
        began, before = time.monotonic(), cpu_seconds()
        done = convert(str(source), str(folder / "out"), *part)
        wall, cpu = time.monotonic() - began, cpu_seconds() - before
        shutil.rmtree(folder / "out")
        disk = direct_writes(folder / "zeros", done["output_bytes"])
        memory = f"{done['peak_memory_bytes'] / 1e6:.0f} ({plan['peak_memory_bytes'] / 1e6:.0f})"
        print(
            f"| {done['output_bytes'] / 1e9:.1f} | {wall:.1f} | {cpu:.1f} | {memory} | {disk:.1f} "
            f"| {disk / wall:.2f} | {wall * times / 60:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; the temporary folder by default")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, help="instead of one layer with --experts")
    parser.add_argument("--layers", help="of --checkpoint, first and last")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors")
        if args.checkpoint:
            pairs(args.checkpoint, ["--layers", args.layers] if args.layers else [], folder, args.pairs)
        else:
            print("\n| one thread | G elements/s | of the copy's rate |\n|---|---|---|")
            one_matrix(folder / "matrix")
            pairs(layer(folder / "layer", args.experts), [], folder, args.pairs)


if __name__ == "__main__":
    main()

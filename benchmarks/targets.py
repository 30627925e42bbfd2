"""Compares conversions for other programs, and `tpuconv.load`, with a copy and with a plain read of the same bytes.

    python benchmarks/targets.py [--folder DIR] [--pairs N] [--layers N] [--wide] [--only NAME ...]

Makes a checkpoint of the shape of Qwen3-1.7B (3.4 GB in bfloat16), or one of more layers, or as wide as Qwen3-8B. In
each round, with an empty page cache (as root):

    copy             cp -r, then sync
    convert          to our own tree
    adapter          convert --adapter, of rank 16 for every projection
    maxtext          convert --target maxtext --scan-layers
    pathways         the same with --pathways
    tunix, nnx       convert --target of the same name
    huggingface      convert --target huggingface
    huggingface int8 convert --target huggingface --quantize int8_weight_only
    int8, int4       convert --quantize int8_weight_only, and int4_weight_only, whose codes are compressed
    read             every byte of our checkpoint, file after file, past the page cache
    read and keep    the same into memory that stays, several files at a time: what a loader cannot do without
    import           Python, jax and the modules that `load` needs
    load             tpuconv.load of it
    load by Orbax    the same with Orbax reading the arrays
    load int8, int4  tpuconv.load of what `convert --quantize` wrote

Prints wall time, its ratio to the copy or to the read of the same round, processor time and private memory.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from against import READ
from convert import CONFIG, Run, empty_page_cache, make_checkpoint, measure, spread
from safetensors.numpy import save_file

QUANTIZED = ("int8", "int4")
RANK = 16
WIDE = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "tie_word_embeddings": False}

KEEP = """
import mmap, os, sys
from concurrent.futures import ThreadPoolExecutor
paths = [os.path.join(root, name) for root, _, names in os.walk(sys.argv[1]) for name in names]
sizes = [-(-os.path.getsize(path) // 4096) * 4096 for path in paths]
memory = mmap.mmap(-1, sum(sizes))
memory.madvise(mmap.MADV_HUGEPAGE)
def read(number):
    own = memoryview(memory)[sum(sizes[:number]) : sum(sizes[: number + 1])]
    fd, at = os.open(paths[number], os.O_RDONLY | os.O_DIRECT), 0
    while count := os.readv(fd, [own[at : at + (4 << 20)]]) if at < len(own) else 0:
        at += count
        if count % 4096:
            break
    os.close(fd)
with ThreadPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(read, range(len(paths))))
"""
IMPORT = "import jax, tpuconv.restore; jax.devices()"
LOAD = """
import sys, jax, tpuconv
from flax import nnx
from tpuconv import restore
if sys.argv[2:]:
    restore._read = restore._restored
jax.block_until_ready(jax.tree.leaves(nnx.state(tpuconv.load(sys.argv[1]))))
"""


def make_adapter(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a LoRA adapter for every projection of the layers, in float32."""
    heads, kv, head = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    width, inner = config["hidden_size"], config["intermediate_size"]
    sizes = {
        **{"self_attn.q_proj": (width, heads * head), "self_attn.o_proj": (heads * head, width)},
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (width, kv * head)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (width, inner)),
        "mlp.down_proj": (inner, width),
    }
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{prefix}A.weight"] = rng.standard_normal((RANK, inputs), np.float32) * 0.02
            tensors[f"{prefix}B.weight"] = rng.standard_normal((outputs, RANK), np.float32) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in sizes]
    facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; four times the checkpoint must fit")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--wide", action="store_true", help="the width and the separate head of Qwen3-8B")
    parser.add_argument("--only", nargs="*", help="rows, besides those that others are compared with")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    source, adapter, ckpt, out = work / "hf", work / "adapter", work / "ckpt", work / "out"
    convert = [sys.executable, "-m", "tpuconv", "convert", str(source)]
    huggingface, maxtext = ["--target", "huggingface"], ["--target", "maxtext", "--scan-layers"]
    writing = {
        "copy": ["sh", "-c", f"cp -r {source} {out} && sync"],
        "convert": [*convert, str(out)],
        "adapter": [*convert, str(out), "--adapter", str(adapter)],
        "maxtext": [*convert, str(out), *maxtext],
        "pathways": [*convert, str(out), *maxtext, "--pathways"],
        "tunix": [*convert, str(out), "--target", "tunix"],
        "nnx": [*convert, str(out), "--target", "nnx"],
        "huggingface": [*convert, str(out), *huggingface],
        "huggingface int8": [*convert, str(out), *huggingface, "--quantize", "int8_weight_only"],
        **{bits: [*convert, str(out), "--quantize", f"{bits}_weight_only"] for bits in QUANTIZED},
    }
    python = [sys.executable, "-c"]
    reading = {
        "read": [*python, READ, str(ckpt)],
        "read and keep": [*python, KEEP, str(ckpt)],
        "import": [*python, IMPORT],
        "load": [*python, LOAD, str(ckpt)],
        "load by Orbax": [*python, LOAD, str(ckpt), "orbax"],
        **{f"load {bits}": [*python, LOAD, str(work / bits)] for bits in QUANTIZED},
    }
    if args.only:
        writing = {name: command for name, command in writing.items() if name in ("copy", *args.only)}
        reading = {name: command for name, command in reading.items() if name in ("read", *args.only)}
    runs: dict[str, list[Run]] = {name: [] for name in (*writing, *reading)}
    config = CONFIG | {"num_hidden_layers": args.layers} | (WIDE if args.wide else {})
    try:
        total = make_checkpoint(source, config)
        make_adapter(adapter, config)
        measure([*convert, str(ckpt)])
        for bits in QUANTIZED:
            measure([*convert, str(work / bits), "--quantize", f"{bits}_weight_only"])
        for _ in range(args.pairs):
            for name, command in (writing | reading).items():
                shutil.rmtree(out, ignore_errors=True)
                empty_page_cache()
                runs[name].append(measure(command))
                print(f"  {name}: {runs[name][-1].wall:.2f} s", file=sys.stderr)
    finally:
        shutil.rmtree(work)
    print(f"{total / 1e9:.2f} GB, {args.pairs} rounds\n")
    print("| what | wall s | wall, to the copy or the read | cpu s | private MB |\n|---|---|---|---|---|")
    for name, own in runs.items():
        base = runs["copy" if name in writing else "read"]
        ratio = spread([a.wall / b.wall for a, b in zip(own, base, strict=True)])
        seconds, cpu = (spread([getattr(run, key) for run in own]) for key in ("wall", "cpu"))
        print(f"| {name} | {seconds} | {ratio} | {cpu} | {max(run.private for run in own) / 1e6:.0f} |")


if __name__ == "__main__":
    main()

"""Compares `tpuconv convert` with a copy of the same bytes, and with a script that a user might write.

    python benchmarks/convert.py [--folder DIR] [--pairs N] [--naive N]

Makes a checkpoint of the shape of Qwen3-1.7B (3.4 GB in bfloat16). Then runs, alternating, with an empty page cache (as
root; otherwise with a warm one, which is reported):

    copy      cp -r, then sync
    convert   tpuconv convert, with checksums
    naive     transformers, a transpose of each tensor, orbax.checkpoint.StandardCheckpointer

Prints wall time, its ratio to the copy of the same pair, processor time, and peak memory, sampled from
/proc/PID/smaps_rollup. Private memory is not shared with other processes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from here import here

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SHARD_BYTES = 2 * 10**9

# The script of a user without a converter: loads all weights, then saves them.
NAIVE = """
import sys, numpy as np, torch, ml_dtypes, orbax.checkpoint as ocp
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
tree = {}
for name, tensor in model.named_parameters():
    array = tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    tree[name] = np.ascontiguousarray(array.T) if array.ndim == 2 else array
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(sys.argv[2], tree)
"""


@dataclass(frozen=True)
class Run:
    """Seconds, and peak memory in bytes."""

    wall: float
    user: float
    system: float
    private: int
    resident: int

    @property
    def cpu(self) -> float:
        return self.user + self.system


def make_checkpoint(folder: Path, config: Mapping[str, Any], parts: Sequence[str] = ()) -> int:
    """Writes weights of N(0, 0.02) in bfloat16, in the shards of a real checkpoint, of a multimodal model with `parts`
    beside the text model. Returns the number of bytes."""
    from tpuconv.models.registry import find_family

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    family = find_family(config)
    model = family.read_config(config, parts=parts)
    bindings = family.table_without_release(parts=model.parts).bind(model)
    shapes = {name: shape for binding in bindings for name, shape in binding.src_shapes().items()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(2 * int(np.prod(s)) for s in shards[-1].values()) + 2 * int(np.prod(shape)) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    rng, weight_map, total = np.random.default_rng(0), {}, 0
    # Drawn once: each tensor begins somewhere in these.
    drawn = (rng.standard_normal(1 << 24, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    for i, tensors in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for name, shape in tensors.items():
            nbytes = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
            weight_map[name], at = file, at + nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for shape in tensors.values():
                at_draw, left = int(rng.integers(drawn.size)), int(np.prod(shape))
                while left:
                    part = drawn[at_draw : at_draw + left]
                    out.write(part.view(np.uint8).data)
                    at_draw, left = 0, left - part.size
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def empty_page_cache() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def measure(command: list[str]) -> Run:
    """Runs a command, and flushes its writes to the disk."""
    peaks, ended = {"private": 0, "resident": 0}, threading.Event()
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def sample() -> None:
        while not ended.wait(0.05):
            try:
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
            except OSError:
                return
            facts = {key: int(value.split()[0]) * 1024 for key, value in (line.split(":", 1) for line in lines)}
            private = facts["Private_Clean"] + facts["Private_Dirty"]
            peaks["private"] = max(peaks["private"], private)
            peaks["resident"] = max(peaks["resident"], facts["Rss"])

    sampler = threading.Thread(target=sample)
    sampler.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    ended.set()
    sampler.join()
    assert process.stderr is not None
    error = process.stderr.read().decode()
    if process.returncode:
        raise SystemExit(f"{command[0]} failed:\n{error}")
    os.sync()
    return Run(time.monotonic() - began, usage.ru_utime, usage.ru_stime, peaks["private"], peaks["resident"])


def spread(values: list[float], digits: int = 2) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; three times the checkpoint must fit")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--naive", type=int, default=2, help="runs of the naive script")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        total = make_checkpoint(work / "hf", CONFIG)
        tpuconv = [sys.executable, "-m", "tpuconv", "convert", str(work / "hf"), str(work / "out")]
        commands = {
            "copy": ["cp", "-r", str(work / "hf"), str(work / "out")],
            "convert": tpuconv,
            "naive": [sys.executable, "-c", NAIVE, str(work / "hf"), str(work / "out")],
        }
        rounds = ["copy", "convert"] * args.pairs + ["naive"] * args.naive
        runs: dict[str, list[Run]] = {name: [] for name in commands}
        cold = True
        for name in rounds:
            cold = empty_page_cache() and cold
            runs[name].append(measure(commands[name]))
            shutil.rmtree(work / "out")
            print(f"  {name}: {runs[name][-1].wall:.2f} s", file=sys.stderr)
    finally:
        shutil.rmtree(work)
    report(runs, total, cold)


def report(runs: dict[str, list[Run]], total: int, cold: bool) -> None:
    print(f"{total / 1e9:.2f} GB, {'cold' if cold else 'warm'}; {here()}")
    print()
    print("| what | wall s | wall / copy | cpu s | cpu / naive | private MB | resident MB |")
    print("|---|---|---|---|---|---|---|")
    copies = [run.wall for run in runs["copy"]]
    naive = statistics.median(run.cpu for run in runs["naive"]) if runs["naive"] else None
    for name, own in runs.items():
        if not own:
            continue
        # Paired where there are pairs: the machine's speed drifts.
        base = copies if len(copies) == len(own) else [statistics.median(copies)] * len(own)
        ratios = [run.wall / copy for run, copy in zip(own, base, strict=True)]
        cpus = [run.cpu for run in own]
        against = f"{statistics.median(cpus) / naive:.2f}" if naive else ""
        private, resident = (max(getattr(run, x) for run in own) / 1e6 for x in ("private", "resident"))
        walls = spread([run.wall for run in own])
        print(f"| {name} | {walls} | {spread(ratios)} | {spread(cpus)} | {against} | {private:.0f} | {resident:.0f} |")


if __name__ == "__main__":
    main()

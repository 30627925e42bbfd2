"""Compares `tpuconv quantize` with a copy of the checkpoint's bytes, and with Qwix.

    python benchmarks/quantize.py [--gigabytes 2] [--peer]

Converts a random checkpoint in bfloat16 with the shape of a Qwen3 model. Then times `cp -r` with a sync, and `tpuconv
quantize` to int8, alternating, each with an empty page cache. Qwix's jitted `qarray.quantize` of complete tensors in
memory is compared with our encoder on the same tensors, by processor time. With --peer a torchao script is timed too:
it loads the same weights from safetensors, quantizes and saves them. Needs root to empty the page cache, and disk space
for three times the checkpoint, four times with --peer.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
CONFIG = "int8_weight_only"
WIDTH, MLP_WIDTH, LAYER_BYTES = 4096, 14336, 2 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)

PEER = """
import sys

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
quantize_(model, Int8WeightOnlyConfig())
torch.save(model.state_dict(), sys.argv[2])
"""
"""Quantizes every linear layer with a scale for each row, without calibration, as CONFIG does."""


def make(folder: Path, gigabytes: float) -> None:
    from helpers.checkpoints import source_shapes, write_safetensors

    layers = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(WIDTH * MLP_WIDTH, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    tensors = {name: noise[: int(np.prod(shape))].reshape(shape) for name, shape in source_shapes(config).items()}
    write_safetensors(folder / "model.safetensors", tensors)


def cold(command: list[str]) -> dict[str, float]:
    """Runs a command with an empty page cache. Returns wall and processor seconds, with its writes flushed, and peak
    private memory."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    before, began = os.times(), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    peak = 0
    while process.poll() is None:
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            private = sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty"))
            peak = max(peak, private * 1024)
        except (OSError, ProcessLookupError):
            pass
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    subprocess.run(["sync"], check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": time.monotonic() - began, "cpu": cpu, "private": peak}


def cpu_of_encoders(elements: int) -> tuple[float, float]:
    """Returns the processor seconds of our encoder and of Qwix for `elements` elements, extrapolated from an MLP's
    matrix."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    from tpuconv.private import qarray

    how = qarray.HowToQuantize(qtype="int8", channelwise_axes=[1])
    x = (jax.random.normal(jax.random.key(0), (WIDTH, MLP_WIDTH)) * 0.02).astype(jnp.bfloat16)
    quantize = jax.jit(lambda x: qarray.quantize(x, how))
    jax.block_until_ready(quantize(x))
    from tpuconv.quantize.encode import BF16, QwixEncoder
    from tpuconv.quantize.rules import ParamQuant

    encoder = QwixEncoder("w", ParamQuant(x.shape, (WIDTH, 1), 0, how), BF16, BF16)
    values = np.asarray(x)
    encoder(values)
    ours, theirs = [], []
    for _ in range(3):
        began = time.process_time()
        encoder(values)
        ours.append(time.process_time() - began)
        began = time.process_time()
        jax.block_until_ready(quantize(x))
        theirs.append(time.process_time() - began)
    return min(ours) * elements / x.size, min(theirs) * elements / x.size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="beside torchao, which must be installed")
    parser.add_argument("--folder", type=Path, default=None, help="where there is room")
    args = parser.parse_args()
    if args.peer and importlib.util.find_spec("torchao") is None:
        raise SystemExit("--peer needs torchao: pip install torchao, in an environment of its own")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make(folder / "hf", args.gigabytes)
        tpuconv = [sys.executable, "-m", "tpuconv"]
        subprocess.run([*tpuconv, "convert", str(folder / "hf"), str(folder / "ckpt")], check=True)
        if not args.peer:
            shutil.rmtree(folder / "hf")
        nbytes = json.loads((folder / "ckpt/tpuconv.json").read_text())["bytes"]
        ratios, ours, peers = [], [], []
        for _ in range(args.runs):
            copied = cold(["cp", "-r", str(folder / "ckpt"), str(folder / "copy")])
            shutil.rmtree(folder / "copy")
            own = cold([*tpuconv, "quantize", str(folder / "ckpt"), str(folder / "out"), "--config", CONFIG, "--json"])
            shutil.rmtree(folder / "out")
            ratios.append(own["wall"] / copied["wall"])
            ours.append(own)
            print(
                f"cp {copied['wall']:.1f} s, quantize {own['wall']:.1f} s, {own['cpu']:.1f} s of processor", flush=True
            )
            if args.peer:
                peer = cold([sys.executable, "-c", PEER, str(folder / "hf"), str(folder / "peer.pt")])
                (folder / "peer.pt").unlink()
                peers.append(peer)
                print(f"torchao {peer['wall']:.1f} s, {peer['cpu']:.1f} s of processor", flush=True)
    encoder, theirs = cpu_of_encoders(nbytes // 2)
    print(f"{nbytes / 1e9:.2f} GB to int8: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of cp")
    print(f"processor time of the command {min(own['cpu'] for own in ours):.1f} s")
    print(f"of the encoder {encoder:.1f} s, of jitted Qwix {theirs:.1f} s: {theirs / encoder:.1f} times as much")
    print(f"peak private memory {max(own['private'] for own in ours) / 1e6:.0f} MB")
    if peers:
        relative = [own["wall"] / peer["wall"] for own, peer in zip(ours, peers, strict=True)]
        print(
            f"{statistics.median(relative):.2f} ({min(relative):.2f}-{max(relative):.2f}) of the wall time of torchao"
        )
        print(f"torchao: processor time {min(peer['cpu'] for peer in peers):.1f} s")
        print(f"torchao: peak private memory {max(peer['private'] for peer in peers) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

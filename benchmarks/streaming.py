"""Converts a source in a bucket, and compares the time with that of downloading it.

    python benchmarks/streaming.py [--rate BYTES_A_SECOND] [--layers N] [--pairs N] [--quota BYTES]

Makes a checkpoint of the structure of DeepSeek-R1, scaled: FP8 in blocks, experts, latent attention, layer
by layer over files, as in releases. A server on the loopback interface speaks the protocol of Google Cloud
Storage, and sends no more than RATE in all; it runs in a process of its own. Then, alternating:

    download  every shard, over 4 connections, thrown away
    convert   tpuconv convert gs://bkt/src OUT --encoding keep

OUT lies on the disk: a server of the output would share its processors with the one of the source.
Prints wall times, the ratio of each pair, how often each byte of the source was sent, and the most that the workspace
held, beside what was planned. With --quota (as root) the workspace is a disk in memory of that size.
"""

import argparse
import json
import math
import mmap
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 16_384, "hidden_size": 2048,
    "intermediate_size": 4096, "moe_intermediate_size": 512, "first_k_dense_replace": 1, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000, "hidden_act": "silu", "attention_bias": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                            "activation_scheme": "dynamic"},
}  # fmt: skip
SEND_BYTES = 1 << 20
CONNECTIONS = 4


def make_source(folder: Path, layers: int, shards: int) -> int:
    """Writes the checkpoint; returns the bytes of its shards."""
    from helpers.checkpoints import INDEX, source_shapes, write_safetensors

    config = CONFIG | {"num_hidden_layers": layers}
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 120, 1 << 24, np.uint8)  # finite in FP8, and in bfloat16 too
    tensors: dict[str, np.ndarray] = {}
    for name, shape in source_shapes(config).items():
        is_encoded = name.endswith("_proj.weight") or "_a_proj" in name or "_b_proj" in name
        if is_encoded:
            values = noise[: prod(shape)] if prod(shape) <= noise.size else np.resize(noise, prod(shape))
            tensors[name] = values.view(ml_dtypes.float8_e4m3fn).reshape(shape)
            blocks = tuple(-(-n // 128) for n in shape)
            tensors[f"{name}_scale_inv"] = rng.uniform(0.5, 2, blocks).astype(np.float32)
        else:
            dtype = np.dtype(np.float32 if "correction_bias" in name else ml_dtypes.bfloat16)
            tensors[name] = rng.standard_normal(shape, np.float32).astype(dtype)
    order = sorted(tensors, key=_layer)  # stable: in the order of the table within a layer
    total = sum(x.nbytes for x in tensors.values())
    inside: list[list[str]] = [[]]
    size = 0
    for name in order:
        if inside[-1] and size + tensors[name].nbytes > total / shards:
            inside.append([])
            size = 0
        inside[-1].append(name)
        size += tensors[name].nbytes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for i, members in enumerate(inside):
        file = f"model-{i + 1:05d}-of-{len(inside):05d}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in members})
        weight_map |= dict.fromkeys(members, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _layer(name: str) -> int:
    """The number of a tensor's layer; the embedding comes before, the rest after them."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1 if "embed" in name else 1 << 20


def serve(folder: Path, rate: float, pipe: Any, answer_rate: float = math.inf) -> None:
    """The server, which sends no more than `rate` bytes a second in all, and `answer_rate` of an answer. It says its
    address; then, whenever it is asked, how many bytes of shards it has sent since, and the most answers at a time."""
    from helpers import fake_gcs

    lock, state = threading.Lock(), {"free_at": 0.0, "sent": 0, "answers": 0, "most": 0}

    class Slow(fake_gcs.Handler):
        def reply(self, status: int, body: Any = b"", headers: Any = (), kind: str = "application/json") -> None:
            if self.command != "GET" or len(body) < SEND_BYTES // 4:
                super().reply(status, body, headers, kind)
                return
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "Content-Type": kind, **dict(headers)}.items():
                self.send_header(name, value)
            self.end_headers()
            with lock:
                state["answers"] += 1
                state["most"] = max(state["most"], state["answers"])
            mine = time.monotonic()
            try:
                for start in range(0, len(body), SEND_BYTES):
                    block = body[start : start + SEND_BYTES]
                    with lock:
                        begin = max(time.monotonic(), state["free_at"])
                        state["free_at"] = begin + len(block) / rate
                        state["sent"] += len(block)
                    mine = max(mine, begin) + len(block) / answer_rate
                    time.sleep(max(0.0, begin - time.monotonic(), mine - time.monotonic()))
                    self.wfile.write(block)
            finally:
                with lock:
                    state["answers"] -= 1

        def perform(self, query: Any, key: str, *rest: Any) -> None:
            if self.command == "GET":  # without the lock of all objects: bodies take long
                objects.lock.release()
                try:
                    super().perform(query, key, *rest)
                finally:
                    objects.lock.acquire()
                return
            super().perform(query, key, *rest)

    fake_gcs.Handler = Slow  # type: ignore[misc]
    with fake_gcs.fake_gcs() as (url, objects):
        for number, path in enumerate(sorted(folder.iterdir()), 1):
            with path.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            objects.contents[f"bkt/src/{path.name}"] = number, time.time(), data  # type: ignore[assignment]
        pipe.send(url)
        while pipe.recv():
            pipe.send((state["sent"], state["most"]))
            state["sent"] = state["most"] = 0


def download(folder: Path) -> None:
    """Fetches every shard and throws it away."""
    from tpuconv import buckets
    from tpuconv.location import BucketPath

    def fetch(name: str) -> None:
        for _ in buckets.stream(BucketPath("gs", "bkt", f"src/{name}"), SEND_BYTES):
            pass

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(fetch, sorted(path.name for path in folder.glob("*.safetensors"))))


def convert(out: Path, workspace: Path) -> int:
    """Converts; returns the most that the workspace held, looked at 50 times a second."""
    command = [sys.executable, "-m", "tpuconv", "convert", "gs://bkt/src", str(out), "--encoding", "keep"]
    most = 0
    with subprocess.Popen([*command, "--workspace", str(workspace)], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            held = 0
            with suppress(FileNotFoundError):  # of a segment or a folder that was dropped meanwhile
                for path in workspace.rglob("*"):
                    held += path.stat().st_blocks * 512
            most = max(most, held)
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"tpuconv convert ended with {process.returncode}")
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200e6)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--quota", type=int)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        source, workspace = Path(name) / "src", Path(name) / "workspace"
        total = make_source(source, args.layers, args.shards)
        workspace.mkdir()
        if args.quota:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={args.quota}", "tmpfs", workspace], check=True)
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(source, args.rate, theirs), daemon=True
        )
        server.start()
        try:
            from helpers.fake_gcs import environment

            os.environ |= environment(ours.recv())
            measure(args, source, workspace, total, ours)
        finally:
            server.kill()
            if args.quota:
                subprocess.run(["umount", "-l", workspace], check=True)


def measure(args: argparse.Namespace, source: Path, workspace: Path, total: int, pipe: Any) -> None:
    """Runs the pairs and prints what they took."""

    def sent() -> int:
        pipe.send(True)
        return int(pipe.recv()[0])

    from tpuconv import api

    plan = api.plan("gs://bkt/src", encoding="keep")
    quota = f", a disk of {args.quota / 1e6:.0f} MB" if args.quota else ""
    room = f"{plan.workspace_bytes / 1e6:.0f} MB of workspace{quota}"
    print(f"{platform.machine()}, {os.cpu_count()} processors; source {total / 1e9:.2f} GB in {args.shards} shards, "
          f"{args.rate / 1e6:.0f} MB/s; planned {room}", flush=True)  # fmt: skip
    for _ in range(args.pairs):
        sent()
        began = time.monotonic()
        download(source)
        alone = time.monotonic() - began
        sent()
        began = time.monotonic()
        most = convert(source.parent / "out", workspace)
        took = time.monotonic() - began
        shutil.rmtree(source.parent / "out")
        os.sync()
        print(f"download {alone:.2f} s, convert {took:.2f} s, ratio {took / alone:.3f}; the source was sent "
              f"{sent() / total:.3f} times; workspace {most / 1e6:.0f} MB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

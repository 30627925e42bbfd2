"""Measures what rounded KV caches cost: scales of each vector, and static scales that calibration finds, on the trained
example.

    python benchmarks/kv_cache.py [--bytes 16384]

Weights are in int8, and each row is compared with the same weights without a rounded cache. Prompts and KL are as in
benchmarks/recipes.py. Prints the rows of docs/calibration.md.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tpuconv.verify.logits import compare_logits, model_logits, tokenize

EXAMPLES = Path(__file__).parent.parent / "examples"
PIECE = 512
RULES = r"""
qwix: {rules: [{module_path: 'layers/\d+/(attn|mlp)/.*', weight_qtype: int8}]}
gates: none
calibration: {method: nearest, kv_cache: %s}
"""
WAYS = {
    "int8, a scale for each vector": (None, "int8"),
    "FP8, a scale for each vector": (None, "float8_e4m3fn"),
    "`kv_cache: fp8`": ("fp8", "float8_e4m3fn"),
    "`kv_cache: fp8_per_head`": ("fp8_per_head", "float8_e4m3fn"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=16384)
    text = (EXAMPLES / "sample.txt").read_text()[: parser.parse_args().bytes]
    prompts = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tpuconv = [sys.executable, "-m", "tpuconv"]
        run = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run([*tpuconv, "convert", str(EXAMPLES / "tiny-qwen3"), str(folder / "plain")], **run)
        plain = folder / "none"
        subprocess.run(
            [*tpuconv, "quantize", str(folder / "plain"), str(plain), "--config", "int8_weight_only"],
            **run,
        )
        ids = tokenize(folder / "plain", prompts, 0)
        for kv_cache in ("fp8", "fp8_per_head"):
            config = folder / f"{kv_cache}.yaml"
            config.write_text(RULES % kv_cache)
            out = folder / kv_cache
            subprocess.run([*tpuconv, "quantize", str(folder / "plain"), str(out), "--config", str(config)], **run)
        print("| cache | mean KL | p99.9 KL | top-1 |\n|---|---|---|---|")
        for way, (kv_cache, dtype) in WAYS.items():
            ckpt = plain if kv_cache is None else folder / kv_cache
            reference = model_logits(ckpt, ids, "bfloat16")
            logits = model_logits(ckpt, ids, "bfloat16", cache_dtype=dtype)
            found = compare_logits(ids, reference, logits, "bfloat16", {})
            print(f"| {way} | {found.mean_kl:.2g} | {found.p999_kl:.2g} | {100 * found.top1:.2f}% |", flush=True)


if __name__ == "__main__":
    main()

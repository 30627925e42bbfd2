"""Measures what rounded KV caches cost: scales of each vector, and static scales that calibration finds, on the trained
example.

    python benchmarks/kv_cache.py [--bytes 16384]

Weights are in int8, and each row is compared with the same weights without a rounded cache. Prompts and KL are as in
benchmarks/recipes.py. Prints the rows of docs/calibration.md.
"""

import argparse
import tempfile
from pathlib import Path

from example import MODEL, VOCABULARY, prompts

from tpuconv import api
from tpuconv.verify.logits import compare_logits, model_logits, tokenize

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
    texts = prompts(parser.parse_args().bytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        api.convert(MODEL, folder / "plain")
        plain = folder / "none"
        api.quantize(folder / "plain", plain, config="int8_weight_only")
        ids = tokenize(folder / "plain", texts, VOCABULARY)
        for kv_cache in ("fp8", "fp8_per_head"):
            config = folder / f"{kv_cache}.yaml"
            config.write_text(RULES % kv_cache)
            api.quantize(folder / "plain", folder / kv_cache, config=config)
        print("| cache | mean KL | p99.9 KL | top-1 |\n|---|---|---|---|")
        for way, (kv_cache, dtype) in WAYS.items():
            ckpt = plain if kv_cache is None else folder / kv_cache
            reference = model_logits(ckpt, ids, "bfloat16")
            logits = model_logits(ckpt, ids, "bfloat16", cache_dtype=dtype)
            found = compare_logits(ids, reference, logits, "bfloat16", {})
            print(f"| {way} | {found.mean_kl:.2g} | {found.p999_kl:.2g} | {100 * found.top1:.2f}% |", flush=True)


if __name__ == "__main__":
    main()

"""Measures `auto:BITS` on the trained example, and the importances behind it.

    python benchmarks/auto_bits.py [--bytes 16384]

Prints the tables of benchmarks/README.md. The first has the cost of each kind of projections in int4, alone, for a
weight: the importances of `tpuconv/quantize/recipe/roles.py` are rounded from it. The second compares `auto:BITS` of
`convert` and of `quantize` with int4 of everything. The prompts are pieces of examples/sample.txt, and divergences are
KL in nats per predicted token from the unquantized model. Fails if `auto:4.5` is no better than int4 of everything.
"""

import argparse
import tempfile
from math import prod
from pathlib import Path

from example import MODEL, VOCABULARY, prompts

from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.quantize.report import report
from tpuconv.verify.logits import compare_logits, model_logits, tokenize

ROLES = {
    "attn/(q|k|v)": "inputs of attention",
    "attn/o": "outputs of attention",
    "mlp/down": "down",
    "mlp/(gate|up)": "gate and up",
}
RULE = "{module_path: 'layers/%s', weight_qtype: int4, tile_size: 32, tile_axes: all%s}"
MSE = ", weight_calibration_method: mse"
CONFIG = "qwix: {rules: [%s]}"
BITS = (4.5, 5.0, 6.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=16384)
    texts = prompts(parser.parse_args().bytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = folder / "plain"
        api.convert(MODEL, plain)
        ids = tokenize(plain, texts, VOCABULARY)
        reference = {dtype: model_logits(plain, ids, dtype) for dtype in ("float32", "bfloat16")}

        def divergence(out: Path, dtype: str) -> float:
            return compare_logits(ids, reference[dtype], model_logits(out, ids, dtype), dtype, {}).mean_kl

        def quantized(rule: str) -> Path:
            config = folder / "config.yaml"
            config.write_text(CONFIG % rule)
            return Path(str(api.quantize(plain, folder / "out", config=config, overwrite=True).out))

        print("| projections | layers | KL, nats a token | KL for 1e9 weights |")
        print("|---|---|---|---|")
        for role, title in ROLES.items():
            for layers in (r"\d+", "0", "[1-4]"):
                out = quantized(RULE % (f"{layers}/{role}", MSE))
                facts = read_manifest(out)
                assert facts.quantization is not None
                names = facts.quantization["parameters"]
                weights = sum(prod(read_manifest(plain).arrays[each].shape) for each in names)
                cost = divergence(out, "float32")
                shown = {r"\d+": "all", "0": "the first", "[1-4]": "the others"}[layers]
                print(f"| {title} | {shown} | {cost:.5f} | {1e9 * cost / weights:.2f} |")
        print()
        print("| quantization | bits per quantized weight | bytes | mean KL |")
        print("|---|---|---|---|")

        def row(title: str, out: Path) -> float:
            cost, facts = divergence(out, "bfloat16"), report(read_manifest(out).raw)
            bits = sum(each.bits * each.count for each in facts.rows) / sum(each.count for each in facts.rows)
            print(f"| {title} | {bits:.3f} | {facts.bytes:,} | {cost:.2g} |", flush=True)
            return cost

        everything = row("int4 of everything", quantized(RULE % (r"\d+/(attn|mlp)/.*", "")))
        for bits in BITS:
            config = f"auto:{bits:g}"
            out = folder / "out"
            api.convert(MODEL, out, quantize=config, overwrite=True)
            found = [row(f"`convert --quantize {config}`", out)]
            api.quantize(plain, out, config=config, overwrite=True)
            found.append(row(f"`quantize --config {config}`", out))
            if max(found) >= everything:
                raise SystemExit(f"{config} is no better than int4 of everything")


if __name__ == "__main__":
    main()

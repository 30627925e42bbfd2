"""Measures calibrated quantization on the trained example, compared with rounding to nearest.

    python benchmarks/calibration.py [--bytes 16384] [--only NAME ...]

Prints the table of benchmarks/README.md. Divergences are KL in nats per predicted token, on pieces of
examples/sample.txt; the reference is the unquantized model in bfloat16. The samples to calibrate on have nothing of
this text: the model draws them, or they are the default text of the package.
"""

import argparse
import tempfile
from pathlib import Path

from example import MODEL, PIECE, VOCABULARY, prompts

from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.quantize.report import report
from tpuconv.verify.logits import compare_logits, model_logits, tokenize

INT4 = "{module_path: 'layers/\\d+/(attn|mlp)/.*', weight_qtype: int4, tile_size: 32%s}"
INT8 = "{module_path: 'layers/\\d+/(attn|mlp)/.*', weight_qtype: int8, act_qtype: int8}"
STATIC = "act_static_scale: true, act_batch_axes: [0, 1]}"
FP8 = INT8.replace("int8", "float8_e4m3fn")
ALL = INT4 % ", tile_axes: all"
MSE = INT4 % ", tile_axes: all, weight_calibration_method: mse"

RUNS = {
    "int4, nearest": (INT4 % "", None, None),
    "int4, nearest, `tile_axes: all`": (ALL, None, None),
    "int4, GPTQ": (INT4 % "", "{method: gptq}", "self"),
    "int4, GPTQ, inputs in their order": (INT4 % "", "{method: gptq, act_order: false}", "self"),
    "int4, GPTQ, default text": (INT4 % "", "{method: gptq}", None),
    "int4, GPTQ, `tile_axes: all`": (ALL, "{method: gptq}", "self"),
    "int4, nearest, `tile_axes: all`, scales by `mse`": (MSE, None, None),
    "int4, GPTQ, `tile_axes: all`, scales by `mse`": (MSE, "{method: gptq}", "self"),
    "int4, AWQ": (INT4 % "", "{method: awq}", "self"),
    "int8 and int8 activations, nearest": (INT8, None, None),
    "int8 and int8 activations, SmoothQuant": (INT8, "{method: smooth_quant}", "self"),
    "int8 and int8 activations, static scales": (INT8[:-1] + f", {STATIC}", "{method: nearest}", "self"),
    **{
        f"the same, `absmax,{factor}`": (
            INT8[:-1] + f", act_calibration_method: 'absmax,{factor}', {STATIC}",
            "{method: nearest}",
            "self",
        )
        for factor in (1.5, 2, 3)
    },
    "the same with `absmax,2`, SmoothQuant": (
        INT8[:-1] + f", act_calibration_method: 'absmax,2', {STATIC}",
        "{method: smooth_quant}",
        "self",
    ),
    "FP8 and FP8 activations, nearest": (FP8, None, None),
    "FP8 and FP8 activations, static scales, `absmax,2`": (
        FP8[:-1] + f", act_calibration_method: 'absmax,2', {STATIC}",
        "{method: nearest}",
        "self",
    ),
}
"""By the name of a row: its rule, its calibration and the text for it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=16384)
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    options = parser.parse_args()
    texts = prompts(options.bytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        api.convert(MODEL, folder / "plain")
        ids = tokenize(folder / "plain", texts, VOCABULARY)
        reference = model_logits(folder / "plain", ids, "bfloat16")
        print("| quantization | bits a weight | mean KL | p99.9 KL | top-1 | perplexity |")
        print("|---|---|---|---|---|---|")
        for number, row in enumerate(options.only):
            rule, method, calibration = RUNS[row]
            config = folder / f"{number}.yaml"
            config.write_text(f"qwix: {{rules: [{rule}]}}\n" + (f"calibration: {method}\n" if method else ""))
            out = folder / str(number)
            chosen = {"calibration": calibration, "samples": 32, "length": PIECE} if method else {}
            api.quantize(folder / "plain", out, config=config, **chosen)
            found = compare_logits(ids, reference, model_logits(out, ids, "bfloat16"), "bfloat16", {})
            print(
                f"| {row} | {report(read_manifest(out).raw).weight_bits:.2f} | {found.mean_kl:.2g} "
                f"| {found.p999_kl:.2g} | {100 * found.top1:.2f}% | {found.perplexity:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Measures 4-bit experts for TPU7x, rounded by a server when it starts and by `tpu_v7`, on the trained example.

    python benchmarks/tpu_v7.py [--bytes 16384]

The example has no experts, so that its MLPs take their place. A scale is for a complete row of 160 or 480 inputs, as in
a server, whose groups of 512 are padded or cut to the row. All else is in FP8 with a scale for each output.
`float4_e2m1fn` with absmax is the arithmetic of `quantize_tensor` in tpu-inference 0.32.0. Prompts, reference and KL
are as in benchmarks/recipes.py. Prints the rows of docs/quantization.md.
"""

import argparse
import tempfile
from pathlib import Path

from example import MODEL, VOCABULARY, prompts

from tpuconv import api
from tpuconv.quantize.config import find_config
from tpuconv.verify.logits import compare_logits, model_logits, tokenize

RULES = r"""
qwix:
  rules:
    - {module_path: 'layers/\d+/mlp/.*', weight_qtype: %s, weight_calibration_method: %s}
    - {module_path: 'layers/\d+/attn/.*', weight_qtype: float8_e4m3fn}
gates: none
"""
GPTQ = "calibration: {method: gptq}\n"
WAYS = {
    "server at start: E2M1, nearest": RULES % ("float4_e2m1fn", "absmax"),
    "E2M1, mse": RULES % ("float4_e2m1fn", "mse"),
    "E2M1, mse and GPTQ": RULES % ("float4_e2m1fn", "mse") + GPTQ,
    "int4, nearest": RULES % ("int4", "absmax"),
    "tpu_v7: int4, mse": RULES % ("int4", "mse"),
    "tpu_v7 with GPTQ": RULES % ("int4", "mse") + GPTQ,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=16384)
    texts = prompts(parser.parse_args().bytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        api.convert(MODEL, folder / "plain")
        ids = tokenize(folder / "plain", texts, VOCABULARY)
        reference = model_logits(folder / "plain", ids, "bfloat16")
        print("| experts | mean KL | p99.9 KL | top-1 |\n|---|---|---|---|")
        for number, (way, rules) in enumerate(WAYS.items()):
            config, out = folder / f"way{number}.yaml", folder / f"way{number}"
            config.write_text(rules)
            api.quantize(folder / "plain", out, config=config)
            logits = model_logits(out, ids, "bfloat16")
            found = compare_logits(ids, reference, logits, "bfloat16", find_config(str(config)).gates)
            print(f"| {way} | {found.mean_kl:.2g} | {found.p999_kl:.2g} | {100 * found.top1:.2f}% |", flush=True)


if __name__ == "__main__":
    main()

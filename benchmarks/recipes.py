"""Measures each quantization config on the trained example, compared with the unquantized model.

    python benchmarks/recipes.py [--bytes 16384]

Prints the table of docs/quantization.md. The prompts are pieces of examples/sample.txt. Divergences are KL in nats per
predicted token; the reference is the unquantized model in the same dtype. Two configs are searched with
`--target-bits`, with its default prompts, which have nothing of this text. Fails if a config fails its gates.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from example import MODEL, VOCABULARY, prompts

from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.quantize.config import config_names, find_config
from tpuconv.quantize.report import report
from tpuconv.verify.logits import compare_logits, model_logits, tokenize

TARGETS = ("6.2", "5")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=16384)
    texts = prompts(parser.parse_args().bytes)
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tpuconv = [sys.executable, "-m", "tpuconv"]
        run = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run([*tpuconv, "convert", str(MODEL), str(folder / "plain")], **run)
        ids = tokenize(folder / "plain", texts, VOCABULARY)
        reference = model_logits(folder / "plain", ids, "bfloat16")
        plain = compare_logits(ids, reference, reference, "bfloat16", {})
        nbytes = read_manifest(folder / "plain").raw["bytes"]
        print("| config | bits a weight | bytes | mean KL | p99.9 KL | top-1 | perplexity |")
        print("|---|---|---|---|---|---|---|")
        print(f"| none | 16 | {nbytes:,} | 0 | 0 | 100% | {plain.perplexity:.4f} |")
        recipes = {str(folder / f"--target-bits {target}.yaml"): target for target in TARGETS}
        for path, target in recipes.items():
            command = [*tpuconv, "quantize", str(folder / "plain"), "--target-bits", target, "--out-config", path]
            subprocess.run(command, **run)
        for config in (*config_names(), *recipes):
            if config in ("mxfp4_weight_only", "tpu_v7"):  # for experts, of which the example has none
                continue
            rules = find_config(config)
            out = folder / rules.name
            subprocess.run([*tpuconv, "quantize", str(folder / "plain"), str(out), "--config", config], **run)
            size = report(read_manifest(out).raw)
            logits = model_logits(out, ids, "bfloat16")
            statistics = compare_logits(ids, reference, logits, "bfloat16", rules.gates or {})
            failed += [f"{rules.name}: {failure}" for failure in statistics.failures()]
            print(
                f"| `{rules.name}` | {size.weight_bits:.2f} | {size.bytes:,} "
                f"| {statistics.mean_kl:.2g} | {statistics.p999_kl:.2g} "
                f"| {100 * statistics.top1:.2f}% | {statistics.perplexity:.4f} |",
                flush=True,
            )
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()

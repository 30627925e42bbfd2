"""Measures KL over bits of what tpuconv makes of a released model: the points of `kl_over_bits.json` that are ours.

    pip install gguf
    python benchmarks/kl_points.py [--folder DIR] [--only NAME ...]

The model and the texts are those of `released.py`. Prints an entry of the file for each point, without its date, commit
and place. Bits are those of the quantized weights with their scales: the embedding stays as it is and does not count.
`rounding_peers.py` measures what other programs make of the same model.

DIR (default: a temporary folder) keeps what was made; a second run does only what is not there.
"""

import argparse
import json
import tempfile
from pathlib import Path

from released import MSE_RULE, RULE, SAMPLES, TEXT, prepare, tpuconv

from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.quantize.report import report

NO_GATE = ("--gate", "mean_kl=100")
"""A gate that holds, since without one `compare` measures what another rounding changes."""
GPTQ = "\ncalibration: {method: gptq, propagate: 0.5}"
UNIFORM = ("int3", "int4", "int5", "int6", "int8")
CONFIGS = {
    "int4-absmax": RULE,
    **{qtype: MSE_RULE.replace("int4", qtype) for qtype in UNIFORM},
    **{f"{qtype}-gptq": MSE_RULE.replace("int4", qtype) + GPTQ for qtype in UNIFORM},
}
"""Configs of groups of 32, by their names."""
POINTS = {
    "int4, scales by absmax": ("nearest", "int4-absmax"),
    **{qtype: ("nearest", qtype) for qtype in UNIFORM},
    "int8_weight_only": ("nearest", "int8_weight_only"),
    **{f"auto:{bits}": ("nearest", f"auto:{bits}") for bits in (4.5, 5, 6, 7)},
    **{f"{qtype}, GPTQ": ("calibrated", f"{qtype}-gptq") for qtype in UNIFORM},
    **{f"auto:{bits}, GPTQ": ("calibrated", f"auto:{bits}") for bits in (4.5, 5, 6)},
}
"""The series and the config of each point, by its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(POINTS), choices=list(POINTS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        prepare(folder)
        for point in args.only:
            series, config = POINTS[point]
            out = f"{series}-{config.replace(':', '-')}"
            if config in CONFIGS:
                (folder / f"{config}.yaml").write_text(CONFIGS[config])
                config = f"{config}.yaml"
            if not (folder / out).exists() and series == "nearest":
                tpuconv(folder, "convert", "source", out, "--quantize", config)
            elif not (folder / out).exists():
                tpuconv(folder, "quantize", "plain", out, "--config", config, *SAMPLES)
            found = tpuconv(folder, "compare", "plain", out, *TEXT, *NO_GATE)
            rows = report(read_manifest(folder / out).raw).rows
            entry = {
                "series": series,
                "name": point,
                "bits": round(sum(row.bits * row.count for row in rows) / sum(row.count for row in rows), 2),
                "mean_kl": round(found["mean_kl"], 5),
                "top1": round(found["top1"], 4),
                "perplexity": round(found["perplexity"]["checkpoint"], 2),
            }
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()

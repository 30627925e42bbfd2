"""Estimates the prefill of Llama 3.3 70B with the TPU compiler, without a TPU. Prints a row of benchmarks/README.md.

    python benchmarks/prefill.py

Two depths are compiled, and the step of the complete model is extrapolated. This takes two minutes.
"""

import json
import os
import subprocess
import sys

from topology import CONFIGS, cut

from tpuconv.quantize.config import find_config
from tpuconv.verify.topology.chips import Slice
from tpuconv.verify.topology.request import ENVIRONMENT, CompileRequest

MODEL, TOPOLOGY, BATCH, CONTEXT, QUANTIZATION = "llama-3.3-70b", "v5e:4x4", 8, 2048, "int8_weight_only"
DEPTHS = 1, 3
"""The two depths that are compiled."""


def compiled(layers: int) -> dict:
    """Returns the facts of the prefill of the first layers. Run in its own process."""
    from tpuconv.verify.topology.compile import compile_for

    config = cut(json.loads((CONFIGS / f"{MODEL}.json").read_text()), layers)
    quantize = find_config(QUANTIZATION).to_json()
    request = CompileRequest(config, BATCH, CONTEXT, quantize=quantize, programs=("prefill",))
    (program,) = compile_for(request, Slice(TOPOLOGY))["programs"]
    return {key: program[key] for key in ("tokens", "floor", "estimate", "communication")}


def main() -> None:
    facts = []
    for layers in DEPTHS:
        command = [sys.executable, __file__, str(layers)]
        done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        facts.append(json.loads(done.stdout.splitlines()[-1]))
    (less, more), (few, many) = DEPTHS, facts
    depth = json.loads((CONFIGS / f"{MODEL}.json").read_text())["num_hidden_layers"]
    whole = {key: many[key] + (many[key] - few[key]) / (more - less) * (depth - more) for key in many}
    cells = [f"{MODEL} {QUANTIZATION} {TOPOLOGY}", f"{BATCH} x {many['tokens']}, {CONTEXT}"]
    cells += [f"{1e3 * whole[key]:.0f}" for key in ("floor", "communication", "estimate")]
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(compiled(int(sys.argv[1]))))
    else:
        main()

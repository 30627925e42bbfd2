"""Searches for the smallest slice of each kind of TPU that a model fits. Prints the second section of docs/topology.md.

    python benchmarks/topology.py
    python benchmarks/topology.py qwen3.5-9b gemma4-31b    # the rows of these models alone

Weights and cache are those of the complete model. Temporaries and code are the compiler's numbers for the model's first
layers, which include each kind of layer: temporaries do not grow with depth, code grows linearly. This takes a minute
for each cell. `tpuconv fit benchmarks/configs/NAME.json --topology v5e` compiles the complete model.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tpuconv.quantize.config import find_config
from tpuconv.verify.topology.chips import CHIPS, GIB, Slice
from tpuconv.verify.topology.request import ENVIRONMENT, CompileRequest

CONFIGS = Path(__file__).parent / "configs"
MODELS = (
    "olmo2-32b",
    "gpt-oss-120b",
    "llama-4-scout",
    "qwen3-235b-a22b",
    "llama-4-maverick",
    "kimi-k2",
    "qwen3.5-9b",
    "gemma4-31b",
)
KINDS = ("v5e", "v6e", "v5p", "tpu7x")
BATCH, CONTEXT, QUANTIZATION = 8, 4096, "int8_weight_only"
DEPTH = 5
"""The number of layers that are compiled, more if a kind of layer comes later: the three dense ones of DeepSeek models,
and two with experts."""


def cut(config: dict, layers: int) -> dict:
    """Returns the config of the model's first layers."""
    config = json.loads(json.dumps(config))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = layers
    for key in ("layer_types", "attn_type_list"):
        if text.get(key):
            text[key] = text[key][:layers]
    return config


def depth_of(config: dict) -> int:
    """The number of layers that are compiled."""
    kinds = config.get("text_config", config).get("layer_types") or [""]
    return max(DEPTH, *(kinds.index(kind) + 1 for kind in kinds))


def question(config: dict) -> CompileRequest:
    return CompileRequest(config, BATCH, CONTEXT, quantize=find_config(QUANTIZATION).to_json())


def sizes(request: CompileRequest, one: Slice) -> tuple[int, int]:
    """Returns the bytes of weights and of cache on one device."""
    from tpuconv.models.registry import find_family
    from tpuconv.notation.sharding import decoding_mesh
    from tpuconv.verify.topology.compile import _bytes_per_device, _Compilation

    family = find_family(request.config)
    parsed = family.config.from_hf(request.config)
    model = _Compilation(request, one, family, parsed, decoding_mesh(parsed.sizes, one.devices))
    return _bytes_per_device(model.params), _bytes_per_device(model.cache)


def cell(name: str, kind: str) -> dict:
    """Returns the smallest slice of a kind, and the memory used on one device. Run in its own process."""
    from tpuconv.verify.topology.compile import compile_for

    config = json.loads((CONFIGS / f"{name}.json").read_text())
    layers, depth = config.get("text_config", config)["num_hidden_layers"], depth_of(config)
    for shape in CHIPS[kind].slices:
        one = Slice(f"{kind}:{shape}")
        try:
            weights, cache = sizes(question(config), one)
        except Exception as e:
            return {"error": f"{one.name}: {str(e)[:200]}"}
        if weights + cache > one.chip.hbm:
            continue
        shallow = compile_for(question(cut(config, depth)), one)
        if shallow["why"]:
            continue
        memory = shallow["memory"]
        peak = weights + cache + memory["temporaries"] + memory["code"] * layers // depth
        if peak <= one.chip.hbm:
            return {"slice": one.name, "peak": peak, "weights": weights, "cache": cache, "mesh": shallow["mesh"]}
    return {}


def print_head() -> None:
    print("## The smallest slice that fits\n")
    print(
        f"Batch {BATCH}, context {CONTEXT}, `{QUANTIZATION}`. Each cell: the slice, and the GiB in use on each device,"
    )
    print("of those in the header. Compiled with the TPU's compiler, without a TPU, by")
    print("[benchmarks/topology.py](../benchmarks/topology.py).\n")
    print("| model | " + " | ".join(f"{kind}, {CHIPS[kind].hbm / GIB:.2f} GiB" for kind in KINDS) + " |")
    print("|---|" + "---|" * len(KINDS))


def print_rows(names: Sequence[str]) -> None:
    for name in names:
        row = []
        for kind in KINDS:
            command = [sys.executable, __file__, "--cell", name, kind]
            done = subprocess.run(
                command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
            )
            found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-200:]}
            text = f"{found['slice'].partition(':')[2]}: {found['peak'] / GIB:.1f}" if "slice" in found else "none"
            row.append(text)
            print(name, kind, found, file=sys.stderr, flush=True)
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        print(json.dumps(cell(*sys.argv[2:])))
    elif sys.argv[1:]:
        print_rows(sys.argv[1:])
    else:
        print_head()
        print_rows(MODELS)

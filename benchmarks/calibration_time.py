"""Measures the parts of GPTQ, or of a pass of distillation, on one layer of a large model, and extrapolates to the
whole model.

    python benchmarks/calibration_time.py [--only NAME ...] [--folder DIR] [--samples N] [--distill]

Makes a checkpoint of one layer with the widths of a released model, weights of N(0, 0.02) and a small vocabulary; of
DeepSeek-R1 with an eighth of its experts. Quantizes it to int4 in groups of 32 with N samples of 512 tokens. The whole
model takes that for its layers, and for 128 samples or for all experts, by what each part depends on; of Qwen3.5-35B,
whose layers have linear attention but for every fourth, one of those. Prints also what
this machine multiplies, since most of the parts are products of matrices.
"""

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from convert import make_checkpoint
from streaming import CONFIG as R1_CONFIG

from tpuconv import api
from tpuconv.api import calibration
from tpuconv.convert.run.calibrated import CalibratedValues
from tpuconv.memory import peak_memory
from tpuconv.quantize.calibrate import stage
from tpuconv.quantize.calibrate.distill import Distillation
from tpuconv.quantize.calibrate.layers import LayerRunner
from tpuconv.quantize.calibrate.rounding import Rounding

LENGTH, SAMPLES, MEMORY = 512, 128, 22 * 10**9
RULES = r"qwix: {rules: [{module_path: 'layers/\d+/.*', weight_qtype: int4, tile_size: 32}]}"
CONFIG = f"{RULES}\ncalibration: {{method: gptq}}\n"
DISTILLED = f"{RULES}\ncalibration: {{method: nearest, distill: 1}}\n"


@dataclass(frozen=True)
class Model:
    """A released model: config.json of one layer of it, how many such layers it has, and of how many experts the layer
    here has one."""

    config: Mapping[str, Any]
    layers: int
    experts: int = 1


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 8192,
    "intermediate_size": 28_672, "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
R1 = {
    **{key: value for key, value in R1_CONFIG.items() if key != "quantization_config"},
    **{"vocab_size": 1024, "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048},
    **{"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "n_routed_experts": 32},
}
QWEN = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "vocab_size": 1024,
    "hidden_size": 2048, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
MODELS = {
    "Llama 3.3 70B": Model(LLAMA, 80),
    "DeepSeek-R1": Model(R1, 58, experts=8),
    "Qwen3.5-35B-A3B": Model(QWEN, 40),
}

Parts = Mapping[str, tuple[Any, str]]
PARTS: Parts = {
    "reads the layer": (LayerRunner, "weights"),
    "runs it and keeps its inputs": (LayerRunner, "observe"),
    "adds up Hessians": (stage, "_sums"),
    "factorizes them": (stage, "factorize"),
    "rounds": (Rounding, "adjust"),
    "writes the values": (CalibratedValues, "write"),
    "runs the rounded layer": (LayerRunner, "run"),
}
"""The function of each part."""
BY_TOKENS = ("runs it and keeps its inputs", "adds up Hessians", "runs the rounded layer")
"""Parts that depend on the tokens, and not on how many experts there are."""
PARTS_OF_STEPS: Parts = {
    "reads its other arrays": (Distillation, "_weights"),
    "reads its quantized values": (Distillation, "_coded"),
    "runs it": (LayerRunner, "run"),
    "goes back": (LayerRunner, "pulled"),
    "moves its scales": (Distillation, "_move"),
}
"""The function of each part of distillation, whose steps have some of the samples each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--folder", type=Path, help="where to work; 10 GB must fit")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--distill", action="store_true", help="measure a pass of distillation instead of GPTQ")
    args = parser.parse_args()
    times: Counter[str] = Counter()
    parts: Parts = PARTS_OF_STEPS if args.distill else PARTS
    for part, (owner, name) in parts.items():
        setattr(owner, name, timed(getattr(owner, name), part, times))
    rng = np.random.default_rng(0)
    calibration._drawn = lambda _, __, samples, length: rng.integers(0, 1024, (samples, length), np.int32)
    print(f"products of float32 matrices: {products_per_second() / 1e9:.0f} GFLOP/s\n")
    for name in args.only:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure(name, MODELS[name], Path(folder), args.samples, times, parts)


def timed(function: Callable[..., Any], part: str, times: Counter[str]) -> Callable[..., Any]:
    """The function, which adds its seconds to a part, and takes them from the part that calls it."""

    def run(*args: Any, **options: Any) -> Any:
        began, inside = time.monotonic(), sum(times.values())
        out = function(*args, **options)
        times[part] += time.monotonic() - began - (sum(times.values()) - inside)
        return out

    return run


def products_per_second() -> float:
    """Additions and multiplications of a large product."""
    x = np.ones((4096, 4096), np.float32)
    x @ x
    began = time.monotonic()
    x @ x
    return 2 * 4096**3 / (time.monotonic() - began)


def measure(name: str, model: Model, folder: Path, samples: int, times: Counter[str], parts: Parts) -> None:
    """Prints the table of a model."""
    make_checkpoint(folder / "hf", model.config)
    api.convert(folder / "hf", folder / "ckpt")
    shutil.rmtree(folder / "hf")
    (folder / "mine.yaml").write_text(CONFIG if parts is PARTS else DISTILLED)
    times.clear()
    options = {
        "config": folder / "mine.yaml",
        "calibration": "self",
        "samples": samples,
        "length": LENGTH,
        "max_memory": MEMORY,
    }
    began = time.monotonic()
    api.quantize(folder / "ckpt", folder / "out", **options)
    print(f"{name}: {time.monotonic() - began:.1f} s, peak memory {peak_memory() / 1e9:.1f} GB\n")
    print(f"| part | s of a layer, {samples} samples | h of {model.layers} layers, {SAMPLES} samples |\n|---|---|---|")
    whole = 0.0
    for part in parts:
        more = SAMPLES / samples if part in BY_TOKENS or parts is PARTS_OF_STEPS else model.experts
        hours = times[part] * more * model.layers / 3600
        whole += hours
        print(f"| {part} | {times[part]:.1f} | {hours:.1f} |")
    print(f"| all | {sum(times.values()):.1f} | {whole:.1f} |\n", flush=True)


if __name__ == "__main__":
    main()

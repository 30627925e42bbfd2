"""Servers that load what `--target huggingface` writes: the models and forms that they are given, and what each does.

A table of outcomes, since what a program refuses is as much a fact of its version as what it loads: a test fails when
one changes, for better or worse.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helpers.families import Case
from helpers.released import LLAMA31

BASE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
"""Heads of 64, and sizes that blocks and groups of 128 divide."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_experts": 4}


def _case(name: str, family: str, **config: object) -> tuple[str, Case]:
    return name, Case(f"{name}-served", family, family, BASE | config)


IDS = [int(n) for n in np.random.default_rng(0).integers(3, 250, 48)]
"""The text."""
MODELS: Mapping[str, Case] = dict(
    (
        _case("llama", "llama", rope_parameters=LLAMA31),
        _case("llama, tied", "llama", tie_word_embeddings=True),
        _case("qwen2", "qwen2"),
        _case("qwen3", "qwen3"),
        _case("olmo2", "olmo2"),
        _case("phi3", "phi3"),
        _case("gemma3, tied", "gemma3_text", tie_word_embeddings=True, query_pre_attn_scalar=64),
        _case("qwen3_moe", "qwen3_moe", **EXPERTS),
        _case("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=256),
        _case("gpt_oss", "gpt_oss", num_local_experts=4, num_experts_per_tok=2, intermediate_size=256),
    )
)
EMBEDDING_FACTORS = {"gemma3, tied": 0.03}
"""Its norms are of 1 + w: with larger embeddings, which are its head too, every token would predict itself."""
TRAINED = "the example, tied"
"""The model in examples/, beside those with random weights."""
WITH_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")

_INT8 = "weight_qtype: int8, act_qtype: int8"
_ALL = r"layers/\d+/(attn|mlp|moe)/(?!(.*/)?router).*"


@dataclass(frozen=True)
class Form:
    """How the weights of an output are stored.

    Attributes:
        config: the name of a config of the package, or the rules of one; empty for plain weights.
        scheme: as of `--scheme`.
        dtype: in which a server computes: kernels for int4 on a CPU, and those of AMX, have no float32.
        most: the number of weights along an axis that share a scale: models with smaller axes do not have the form.
    """

    config: str = ""
    scheme: str | None = None
    dtype: str = "float32"
    most: int = 1


GPTQ = "int4_gptq"
DISTILLED = (
    f"{{module_path: '{_ALL}', weight_qtype: int4, tile_size: 32, tile_axes: all, weight_calibration_method: mse}}"
)
CALIBRATIONS = {GPTQ: "", DISTILLED: "calibration: {method: gptq, propagate: 0.5, distill: 2}\n"}
"""Configs whose values are chosen on text, and what rules that are given need beside."""
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
"""Whether the processor has the instructions for matrices with which vLLM has kernels of its own."""
_OF_INT8 = "bfloat16" if HAS_AMX else "float32"
FORMS: Mapping[str, Form] = {
    "plain": Form(),
    "int8": Form("int8_default", dtype=_OF_INT8),
    "int8 with head": Form(f"{{module_path: '{_ALL}', {_INT8}}}, {{module_path: lm_head, {_INT8}}}", dtype=_OF_INT8),
    "int8 attention": Form(rf"{{module_path: 'layers/\d+/attn/.*', {_INT8}}}", dtype=_OF_INT8),
    "int8 weights": Form("int8_weight_only"),
    "fp8": Form("fp8_default"),
    "fp8 weights": Form("fp8_weight_only"),
    "fp8 blocks": Form("fp8_block", dtype="bfloat16", most=128),
    "fp8 blocks, fp8": Form("fp8_block", "fp8", "bfloat16", most=128),
    "int4, 32": Form("int4_weight_only", dtype="bfloat16", most=32),
    "int4, 128": Form("int4_128", dtype="bfloat16", most=128),
    "int4 zero points": Form(
        f"{{module_path: '{_ALL}', weight_qtype: int4, tile_size: 32, weight_calibration_method: minmax}}",
        dtype="bfloat16",
        most=32,
    ),
    "int4, GPTQ": Form(GPTQ, dtype="bfloat16", most=32),
    "int4, distilled": Form(DISTILLED, dtype="bfloat16", most=32),
    "awq": Form("int4_weight_only", "awq", "bfloat16", most=32),
    "mxfp4 experts": Form("mxfp4_weight_only", dtype="bfloat16", most=32),
}


@dataclass(frozen=True)
class Outcome:
    """What a program does with a form. It computes what we do, or what the form is worth, if there is no error.

    Attributes:
        error: a part of its error.
        loads: whether an error comes after all weights were loaded.
        is_exact: whether all its log-probabilities are ours, within 2e-5 of the largest.
        most: the KL divergence from ours that it may have, in multiples of what quantization costs.
        rounding: the KL divergence that it may have in any case.
    """

    error: str = ""
    loads: bool = False
    is_exact: bool = False
    most: float = 1.0
    rounding: float = 0.0


EXACT, LOADS = Outcome(is_exact=True), Outcome()
BUT_FLIPS = Outcome(most=0.5)
"""Ours but for activations that rounding errors of float32 bring to the next FP8 value: from there on the tokens of a
text differ. Another way of rounding would cost as much as quantization."""
ROUNDS_ACTIVATIONS = Outcome(most=2.0)
"""Activations are rounded in another way, or in our reference not at all: it costs as much again."""
CHOOSES_EXPERTS = Outcome(most=8.0)
"""The same where a router follows: a token that gets another expert moves by much."""
WITH_TPU_KERNEL = Outcome("Unsupported TPU device kind: cpu", loads=True)
"""Its product is a kernel for TPUs."""
IN_BFLOAT16 = Outcome(rounding=5e-4)


def refused(error: str, *forms: str) -> dict[str, Outcome]:
    """The outcome of several forms that are refused with the same error."""
    return dict.fromkeys(forms, Outcome(error))


_BLOCKS = ("fp8 blocks", "fp8 blocks, fp8")
_INT4 = ("int4, 32", "int4, 128", "int4 zero points", "int4, GPTQ", "int4, distilled", "awq")
VLLM: Mapping[str, Outcome] = {
    "plain": EXACT,
    "fp8": BUT_FLIPS,
    **dict.fromkeys(("int8", "int8 with head", "int8 attention"), ROUNDS_ACTIVATIONS),
    **dict.fromkeys(_INT4, LOADS),
    **refused("Unsupported quant type uint8b128", "int8 weights"),
    **refused("Failed to find a kernel that can implement the ScaledMM linear layer", "fp8 weights"),
    **(dict.fromkeys(_BLOCKS, LOADS) if HAS_AMX else refused("requires AMX", *_BLOCKS)),
}
"""By form, what vLLM's build for CPUs does on a processor with AVX-512."""
VLLM_EXPERTS: Mapping[str, Outcome] = {
    **VLLM,
    "int8 attention": CHOOSES_EXPERTS,
    **refused("No Int8 MoE backend", "int8", "int8 with head"),
    **refused("Unsupported FP8 MoE backend: NONE", "fp8"),
    **refused("No WNA16 MoE backend", *_INT4),
    **(dict.fromkeys(("int4, 128", "awq"), LOADS) if HAS_AMX else {}),
    **(dict.fromkeys(("int8", "int8 with head"), CHOOSES_EXPERTS) if HAS_AMX else {}),
    **refused("gptq_marlin_repack", "mxfp4 experts"),
}
"""The same of models with experts."""
VLLM_GPT_OSS: Mapping[str, Outcome] = VLLM_EXPERTS | refused("No MXFP4 MoE backend", "mxfp4 experts")
"""The same of gpt-oss, whose experts are in MXFP4 in a form of their own."""
_JAX_QWEN3: Mapping[str, Outcome] = {
    "plain": EXACT,
    "fp8": BUT_FLIPS,
    **dict.fromkeys(_BLOCKS, ROUNDS_ACTIVATIONS),
    **refused(
        "is not yet supported in the JAX path",
        *("int8", "int8 with head", "int8 attention", "int8 weights", "fp8 weights", "int4 zero points"),
    ),
    **dict.fromkeys(("int4, 32", "int4, GPTQ", "int4, distilled"), WITH_TPU_KERNEL),
    **refused("wNa16 with group_size 128 is not supported on a layer whose input dim is sharded", "int4, 128"),
    **refused("auto_awq quantization method not supported", "awq"),
}
_JAX_LLAMA: Mapping[str, Outcome] = {
    "plain": EXACT,
    **refused("module 'numpy' has no attribute 'float8_e4m3fn'", "fp8", *_BLOCKS),
    **refused("is not a valid param path", "int8", "int4, 32", "int4, GPTQ"),
}
JAX_MODELS: Mapping[str, Mapping[str, Outcome]] = {"qwen3": _JAX_QWEN3, "llama": _JAX_LLAMA}
"""By model and form, what the JAX models of tpu-inference do on a CPU."""
_TORCH: Mapping[str, Outcome] = {
    "plain": IN_BFLOAT16,
    "awq": LOADS,
    **dict.fromkeys(("int8", "int8 attention", "fp8", *_BLOCKS), ROUNDS_ACTIVATIONS),
    **refused("no module or parameter named 'lm_head.weight_scale'", "int8 with head"),
    **refused("'NoneType' object has no attribute 'num_bits'", *("int8 weights", "fp8 weights"), *_INT4[:-1]),
}
TORCH_MODELS: Mapping[str, Mapping[str, Outcome]] = {
    "qwen3": _TORCH,
    "gemma3, tied": _TORCH,
    "qwen3_moe": {
        **_TORCH,
        **dict.fromkeys(("plain", "int8 attention", "fp8", *_BLOCKS, "awq"), WITH_TPU_KERNEL),
        **refused("Unsupported FusedMoe scheme", "int8", "int8 with head"),
        **refused("The size of tensor a (16) must match the size of tensor b (64)", "mxfp4 experts"),
    },
}
"""The same of vLLM's models in torch, run by jax, in bfloat16."""


def forms_of(name: str) -> list[str]:
    """The forms that a model has."""
    if name == "gpt_oss":  # whose experts have no other form
        return ["plain", "int8 attention", "mxfp4 experts"]
    case = MODELS.get(name)
    leaves_out = set() if name in WITH_EXPERTS else {"mxfp4 experts"}
    if name not in (TRAINED, "qwen3"):  # distillation takes long, and its scales are stored as GPTQ's
        leaves_out.add("int4, distilled")
    if case is None or case.config["tie_word_embeddings"]:
        leaves_out.add("int8 with head")
    return [form for form, how in FORMS.items() if form not in leaves_out and (case is not None or how.most <= 32)]

"""Phi, and Persimmon, which has its layers."""

from collections.abc import Iterator, Mapping
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import NEOX_ATTENTION, NEOX_ATTENTION_BIAS, NEOX_MLP, norm_rows, qkv_rows
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import check_rope_keys
from tpuconv.models.common.rows import (
    ATTENTION,
    NUMBERED_EXPERT_MLPS,
    PRE_NORM_BIASES,
    PRE_NORMS,
    QKV_BIAS,
    when,
)
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.common.wrapper import BRINGS, HEARS, SEES, WrapperConfig
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.parts import Attn, Experts, Mlp, Norms
from tpuconv.models.towers.fuyu.family import FUYU_VISION
from tpuconv.models.towers.phi4.released import (
    OF_ENCODERS,
    PHI4_AUDIO,
    PHI4_VISION,
    RELEASED_FORMS,
    in_keys_of_transformers,
)
from tpuconv.notation.table import Map, MappingTable, under

PHI_EPS = {"rms_norm_eps": "layer_norm_eps"}
"""The key of the epsilon."""

HEAD_LAYER_NORMS = when(
    "qk_layernorm",
    Map("self_attn.q_layernorm.weight", "attn.q_norm.scale", "H"),
    Map("self_attn.q_layernorm.bias", "attn.q_norm.bias", "H"),
    Map("self_attn.k_layernorm.weight", "attn.k_norm.scale", "H"),
    Map("self_attn.k_layernorm.bias", "attn.k_norm.bias", "H"),
)


class HeadWithBias(PartialRopeConfig):
    """The logits have a bias, if they have a matrix."""

    @property
    def has_head_bias(self) -> bool:
        return self.has_lm_head


PHI = decoder(
    "phi",
    "Phi-1, Phi-1.5, Phi-2",
    "PhiForCausalLM",
    Norms("parallel", "layer"),
    Attn(True, norms="each head", normed="qk_layernorm"),
    Mlp("plain", "gelu_tanh", bias=True),
    config=HeadWithBias,
    defaults={"partial_rotary_factor": 0.5},
    hf_names=PHI_EPS,
    only={"hidden_act": ("gelu_new",), "tie_word_embeddings": (False,)},
    table=MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            *under(
                "model.layers.{L}",
                "layers.{L}",
                Map("input_layernorm.weight", "norm.scale", "D"),
                Map("input_layernorm.bias", "norm.bias", "D"),
                *ATTENTION[:3],
                *QKV_BIAS,
                Map("self_attn.dense.weight", "attn.o.kernel", "D (N H) -> N H D"),
                Map("self_attn.dense.bias", "attn.o.bias", "D"),
                *HEAD_LAYER_NORMS,
                *under(
                    "mlp",
                    "mlp",
                    Map("fc1.weight", "up.kernel", "F D -> D F"),
                    Map("fc1.bias", "up.bias", "F"),
                    Map("fc2.weight", "down.kernel", "D F -> F D"),
                    Map("fc2.bias", "down.bias", "D"),
                ),
            ),
            Map("model.final_layernorm.weight", "norm.scale", "D"),
            Map("model.final_layernorm.bias", "norm.bias", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
            Map("lm_head.bias", "lm_head.bias", "V", when="has_head_bias"),
        ),
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    ),
)

PERSIMMON = decoder(
    "persimmon",
    "Persimmon 8B",
    "PersimmonForCausalLM",
    Norms(kind="layer"),
    Attn(True, norms="each head", normed="qk_layernorm"),
    Mlp("plain", "relu2", bias=True),
    config=PartialRopeConfig,
    defaults={"num_key_value_heads": None, "partial_rotary_factor": 0.5},
    hf_names=PHI_EPS,
    left_out=frozenset({"num_key_value_heads"}),
    derived=PartialRopeConfig.derived | {"num_key_value_heads"},
    only={"hidden_act": ("relu2",)},
    table=MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            *under(
                "model.layers.{L}",
                "layers.{L}",
                *PRE_NORMS,
                *PRE_NORM_BIASES,
                *under("self_attn", "attn", *NEOX_ATTENTION, *NEOX_ATTENTION_BIAS),
                *HEAD_LAYER_NORMS,
                *under("mlp", "mlp", *NEOX_MLP),
            ),
            *norm_rows("model.final_layernorm", "norm"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    ),
)

OF_PATCHES = frozenset({"patch_size", "num_channels"})
"""Keys of the image projector."""

FUYU = wrapper(
    "fuyu",
    "Fuyu 8B",
    "FuyuForCausalLM",
    text=PERSIMMON,
    prefix="language_model.model.",
    outside={"vision_embed_tokens": BRINGS},
    flat=True,
    left_out=PERSIMMON.config.left_out | OF_PATCHES,
    outside_keys=OF_PATCHES,
    modalities=(FUYU_VISION,),
)

LONGROPE = ("longrope", "su", "yarn")
"""The names that files of Phi-3 have for LongRoPE."""


@family_config
class Phi3Config(OneWindow, PartialRopeConfig):
    """The sliding window, if any, applies to all layers."""

    original_max_position_embeddings: int = 4096
    partial_rotary_factor: float = 1.0
    sliding_window: int | None

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`, with this family's names for LongRoPE. The original context is beside the
        rotary parameters; one inside has no effect."""
        check_rope_keys(raw)
        raw = dict(raw)
        for key in ("rope_scaling", "rope_parameters"):
            values = dict(raw.get(key) or {})
            kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
            if kind in LONGROPE:
                original = raw.get("original_max_position_embeddings", cls.original_max_position_embeddings)
                values |= {"rope_type": "longrope", "original_max_position_embeddings": original}
                raw[key] = {name: value for name, value in values.items() if name != "type"}
            elif kind != "default":
                raise UnsupportedConfig(f"{key}={short(raw[key], 300)} is not implemented for phi3, only longrope")
        return super().read_ropes(raw, context)


PHI3 = decoder(
    "phi3",
    "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    "Phi3ForCausalLM",
    Norms(),
    Attn(
        rows=(
            *qkv_rows("self_attn.qkv_proj"),
            Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
        )
    ),
    Mlp("fused"),
    config=Phi3Config,
    defaults={"original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
)

ADAPTS = "an adapter of the text model for images or sounds; the release has it in a folder too, which can be merged"


class ReleasedPhi4(WrapperConfig):
    """The release with code of its own describes its encoders with other keys."""

    @classmethod
    def around_text(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return in_keys_of_transformers(raw)


PHI4_MULTIMODAL = wrapper(
    "phi4_multimodal",
    "Phi-4-multimodal",
    "Phi4MultimodalForCausalLM",
    text=PHI3,
    reads=ReleasedPhi4,
    prefix="model.",
    outside={"embed_tokens_extend.image_embed": SEES, "embed_tokens_extend.audio_embed": HEARS},
    tensors={"layers.{L}.*.lora_A.*": ADAPTS, "layers.{L}.*.lora_B.*": ADAPTS},
    types={"Phi4MMForCausalLM": "phi4mm"},
    flat=True,
    left_out=PHI3.config.left_out | OF_ENCODERS,
    forms=RELEASED_FORMS,
    modalities=(PHI4_VISION, PHI4_AUDIO),
)

FACTORS = ("short_mscale", "long_mscale")


@family_config
class PhiMoeConfig(OneWindow, DecoderConfig):
    """`intermediate_size` is the width of one expert. `router_jitter_noise` limits which other
    experts count in the probability of a chosen one."""

    sliding_window: int | None
    num_local_experts: int
    num_experts_per_tok: int
    router_jitter_noise: float = 0.01
    lm_head_bias: bool

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`. Cosine and sine have the factor `short_mscale`, equal to `long_mscale`."""
        check_rope_keys(raw)
        raw = dict(raw)
        for key in ("rope_scaling", "rope_parameters"):
            given = raw.get(key) or {}
            if FACTORS[0] not in given and FACTORS[1] not in given:
                continue
            small, large = (given.get(name) for name in FACTORS)
            if small != large:
                raise UnsupportedConfig(
                    f"{key} with short_mscale={short(small)} and long_mscale={short(large)} is not implemented for "
                    f"{cls.model_type}: they must be equal"
                )
            raw[key] = {k: v for k, v in given.items() if k not in FACTORS} | {"attention_factor": small}
        return super().read_ropes(raw, context)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_local_experts < 2:
            yield f"num_local_experts={self.num_local_experts} is less than 2"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "E": self.num_local_experts, "M": self.intermediate_size}

    @property
    def has_head_bias(self) -> bool:
        return self.lm_head_bias and self.has_lm_head


PHIMOE = decoder(
    "phimoe",
    "Phi-3.5-MoE, Phi-mini-MoE",
    "PhimoeForCausalLM",
    "PhiMoEForCausalLM",
    Norms(kind="layer"),
    Attn("attention_bias"),
    Experts(
        below="block_sparse_moe",
        module="modules.phi:MoE",
        rows=(Map("gate.weight", "router.kernel", "E D -> D E"), *NUMBERED_EXPERT_MLPS),
    ),
    config=PhiMoeConfig,
    only={"num_experts_per_tok": (2,)},
    others=(Map("lm_head.bias", "lm_head.bias", "V", when="has_head_bias"),),
)

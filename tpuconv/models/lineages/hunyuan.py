"""Hunyuan: queries and keys are normalized after they got rotary positions."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import SECTIONS, MropeOfDimensions, mrope_sections, without_mrope
from tpuconv.models.common.rope import LARGEST_ROPE_VALUE, PARAMETER_KEYS, Rope, check_rope_keys
from tpuconv.models.common.rows import BIASED_ATTENTION, EXPERT_MLPS, SHARED
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.parts import Attn, Experts, Mlp, Norms
from tpuconv.models.towers.packed_vit.family import HUNYUAN_VISION
from tpuconv.notation.table import Map, under


@family_config
class HunyuanConfig(DecoderConfig):
    """Rotary positions may be of the type `dynamic` with `alpha`."""

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`. The type `dynamic` with `alpha` means plain rotary positions with theta times
        alpha^(H / (H - 2)); other parameters have no effect then."""
        check_rope_keys(raw)
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        alpha = given.get("alpha")
        if not alpha or given.get("rope_type", given.get("type")) != "dynamic":
            return super().read_ropes(raw, context)
        if type(alpha) not in (int, float) or not 0 < alpha <= LARGEST_ROPE_VALUE:
            raise ConfigError(f"config.json: alpha={short(alpha)} of the rotary positions is not a positive number")
        thetas = {key: value for key, value in [("rope_theta", given.get("rope_theta"))] if value is not None}
        plain = super().read_ropes({"rope_theta": raw.get("rope_theta"), "rope_parameters": thetas}, context)["rope"]
        width, heads = raw.get("hidden_size", cls.hidden_size), raw.get("num_attention_heads", cls.num_attention_heads)
        head = raw.get("head_dim") or width // heads
        if head <= 2:
            raise ConfigError(f"config.json: alpha of the rotary positions needs a head_dim of more than {head}")
        return {"rope": Rope(theta=plain.theta * alpha ** (head / (head - 2)))}


TURNED_FIRST = Attn(
    "attention_bias",
    norms="each head, after rotation",
    rows=(
        *BIASED_ATTENTION,
        Map("self_attn.query_layernorm.weight", "attn.q_norm.scale", "H"),
        Map("self_attn.key_layernorm.weight", "attn.k_norm.scale", "H"),
    ),
)

HUNYUAN_V1_DENSE = decoder(
    "hunyuan_v1_dense",
    "Hunyuan 0.5B to 7B",
    "HunYuanDenseV1ForCausalLM",
    Norms(),
    TURNED_FIRST,
    Mlp(),
    config=HunyuanConfig,
)

BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
"""Keys that may be lists with a number for each layer. They are read if all numbers are equal."""


@family_config
class HunyuanMoeConfig(HunyuanConfig):
    """`intermediate_size` is the width of one expert, and of the shared one."""

    hf_names: ClassVar[Mapping[str, str]] = {"num_experts_per_tok": "moe_topk"}

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int | None = None
    num_shared_expert: int | None = None
    has_shared_experts: ClassVar[bool] = True

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        same = {}
        for key in BY_LAYER:
            if isinstance(values := raw.get(key), list) and values:
                if any(value != values[0] for value in values):
                    raise UnsupportedConfig(f"{key}={short(values)} differs by layer, which is not implemented")
                same[key] = values[0]
        return super().in_our_keys({**raw, **same})

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_experts_per_tok > self.num_experts:
            yield f"moe_topk={self.num_experts_per_tok} is more than num_experts={self.num_experts}"
        if (width := self.moe_intermediate_size) not in (None, self.intermediate_size):
            yield f"moe_intermediate_size={width} is not intermediate_size={self.intermediate_size}"
        if self.num_shared_expert not in (None, 1):
            yield f"num_shared_expert={self.num_shared_expert} is not 1"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "E": self.num_experts, "M": self.intermediate_size, "W": self.intermediate_size}


HUNYUAN_V1_MOE = HUNYUAN_V1_DENSE.but(
    "hunyuan_v1_moe",
    "Hunyuan-A13B",
    "HunYuanMoEV1ForCausalLM",
    Experts(
        module="common.moe:RoutedExperts",
        router="modules.hunyuan:Router",
        rows=(
            Map("gate.wg.weight", "router.kernel", "E D -> D E"),
            *EXPERT_MLPS,
            *under("shared_mlp", "shared", *SHARED),
        ),
    ),
    config=HunyuanMoeConfig,
)

TOKEN_KEYS = frozenset({"im_start_id", "im_end_id", "im_newline_id", "pad_id"})
"""Keys of tokens, without effect on logits."""


OLDER_SECTIONS = "xdrope_section"
"""The name of the sections in releases."""


class XdropeConfig(HunyuanConfig):
    """Reads rotary positions of releases of Hunyuan-VL."""

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As Hunyuan's. Releases name the sections and the type of several positions for a token `xdrope`.

        Raises:
            ConfigError: the two names of the sections have different values.
        """
        check_rope_keys(raw)
        out = dict(raw)
        for key in PARAMETER_KEYS:
            if given := raw.get(key):
                values = {k: "dynamic" if value == "xdrope" else value for k, value in given.items()}
                older = values.pop(OLDER_SECTIONS, None)
                if older is not None and (newer := values.setdefault(SECTIONS, older)) != older:
                    raise ConfigError(
                        f"config.json: {OLDER_SECTIONS}={short(older)} in {key}, and {SECTIONS}={short(newer)}",
                        hint="give one of the two",
                    )
                out[key] = values
        read = super().read_ropes(without_mrope(out), context)
        sections = mrope_sections(out)
        return {**read, "mrope": MropeOfDimensions(sections) if sections else None}


HUNYUAN_VL = wrapper(
    "hunyuan_vl",
    "HunyuanOCR",
    "HunYuanVLForConditionalGeneration",
    replace(TURNED_FIRST, module="modules.hunyuan:AttentionByDimension"),
    text=HUNYUAN_V1_DENSE,
    mixins=(XdropeConfig,),
    prefix="model.",
    flat=True,
    tied=True,
    outside_keys=TOKEN_KEYS,
    left_out=TOKEN_KEYS,
    defaults={"tie_word_embeddings": False},
    modalities=(HUNYUAN_VISION,),
)

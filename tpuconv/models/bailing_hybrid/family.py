"""Ling 3 (Bailing, hybrid): config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.rows import EXPERT_MLPS, MLP, MTP_FINAL, MTP_IGNORE, PRE_NORMS, SHARED_EXPERT_ROWS, when
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.kimi_linear import family as kimi_linear
from tpuconv.models.kimi_linear.family import KDA_CONVOLUTIONS, KDA_INPUTS
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, MappingTable, under


@family_config
class Config(deepseek_v3.Config, StateConfig):
    """The keys of config.json. The last of every `layer_group_size` layers has latent attention. The head dimension of
    linear attention is `linear_head_dim`; releases call it `head_dim`."""

    model_type: ClassVar[str] = "bailing_hybrid"
    only: ClassVar = {**deepseek_v3.Config.only, "rope_interleave": (True,), "attention_bias": (False,)}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 6000000.0}
    aliases: ClassVar = {
        **kimi_linear.Config.aliases,
        "num_mtp_layers": "num_nextn_predict_layers",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"head_dim"})

    n_routed_experts: int = 512
    q_lora_rank: int | None = None
    mlp_layer_types: tuple[str, ...] | None
    layer_group_size: int
    linear_head_dim: int = 128
    linear_num_heads: int | None = None
    linear_conv_kernel_dim: int = 4
    kda_safe_gate: bool
    kda_lower_bound: float
    head_dim: int | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `StateConfig.in_our_keys`. In files without `linear_head_dim`, `head_dim` is that of linear attention.
        transformers writes a `rope_theta` that has no effect beside that of `rope_parameters`."""
        out = super().in_our_keys(raw)
        if "rope_theta" in (raw.get("rope_parameters") or {}):
            out.pop("rope_theta", None)
        if raw.get("head_dim") is not None:
            out.setdefault("linear_head_dim", raw["head_dim"])
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.q_lora_rank is not None:
            yield f"q_lora_rank={self.q_lora_rank}, but queries of {self.model_type} have no latent vector"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        layers = range(1, self.num_hidden_layers + 1)
        return tuple("linear_attention" if i % self.layer_group_size else "full_attention" for i in layers)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "groups": self.linear_num_heads or self.num_attention_heads,
            "key_dim": self.linear_head_dim,
            "value_dim": self.linear_head_dim,
            "taps": self.linear_conv_kernel_dim,
        }


def latent_rows(*left_out: str) -> tuple[Map, ...]:
    """Returns the rows of DeepSeek V3's attention under this family's names, without the rows of these conditions."""
    rows = [row for row in deepseek_v3.ATTENTION_ROWS[1:-1] if row.when not in left_out]
    names = [row.hf_names[0].replace("self_attn.o_proj", "attention.dense") for row in rows]
    return tuple(
        replace(row, hf=name.replace("self_attn.", "attention.")) for row, name in zip(rows, names, strict=True)
    )


LING_DELTA_ROWS = (
    *KDA_INPUTS,
    Map("f_proj.weight", "f.kernel", "(groups key_dim) D -> D groups key_dim"),
    Map("g_proj.weight", "g.kernel", "(groups value_dim) D -> D groups value_dim"),
    *KDA_CONVOLUTIONS,
    Map("A_log", "a_log", "groups"),
    Map("dt_bias", "dt_bias", "(groups key_dim) -> groups key_dim"),
    Map("o_norm.weight", "norm.scale", "value_dim"),
    Map("dense.weight", "o.kernel", "D (groups value_dim) -> groups value_dim D"),
)

LING_FULL_ROWS = (
    *latent_rows("has_query_latent", "has_query_latent and attention_bias"),
    Map("attention.g_proj.weight", "attn.gate.kernel", "N D -> D N"),
)

LING_EXPERT_ROWS = (
    Map("gate.weight", "router.kernel", "E D -> D E"),
    Map("gate.expert_bias", "router.correction", "E", buffer=True),
    *EXPERT_MLPS,
    *when("has_shared_experts", *SHARED_EXPERT_ROWS),
)


LING_ONLY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("moe_router_enable_expert_bias", "moe_router_enable_routed_scaling"), (True,)),
    **dict.fromkeys(("moe_router_enable_shared_expert", "norm_topk_prob", "use_qk_norm", "use_rmsnorm"), (True,)),
    **dict.fromkeys(("norm_head", "norm_softmax", "use_bias", "use_sliding_window"), (False,)),
    "router_dtype": ("fp32",),
    "score_function": ("sigmoid",),
}
"""The values of keys of the Ling series before version 3 that are implemented."""


class SharedOfOneWidth:
    """The width of the shared experts follows from other keys.

    Class attribute: with `shared_together`, `moe_shared_expert_intermediate_size` is the width of all of them.
    """

    shared_together: ClassVar[bool] = False

    moe_intermediate_size: int
    n_shared_experts: int | None
    moe_shared_expert_intermediate_size: int | None

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        count = (self.n_shared_experts or 0) if self.shared_together else 1
        if (width := self.moe_shared_expert_intermediate_size) not in (None, count * self.moe_intermediate_size):
            times = f" times num_shared_experts={count}" if self.shared_together else ""
            yield f"moe_shared_expert_intermediate_size={width} is not moe_intermediate_size{times}"


def ling_table(*rows: Map, further: tuple[Map, ...] = (), ignore: Mapping[str, str] | None = None) -> MappingTable:
    """Returns the table of a model of the Ling series.

    Args:
        rows: of the attention of all layers.
        further: of the attention of a layer for multi-token prediction, below this layer.
        ignore: as of `MappingTable`, besides what all of them ignore.
    """
    beside = under("mlp", "moe", *LING_EXPERT_ROWS)
    return MappingTable(
        (
            Map("model.word_embeddings.weight", "embed.embedding", "V D"),
            *under("model.layers.{L}", "layers.{L}", *PRE_NORMS),
            *rows,
            *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
            *under("model.layers.{J}", "layers.{J}", *beside),
            *(under("model.layers.{U}", "mtp.{U}", *PRE_NORMS, *further, *beside, *MTP_FINAL) if further else ()),
            Map("model.norm.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        ignore={**(MTP_IGNORE if further else {}), **(ignore or {})},
        copies={"lm_head.weight": "model.word_embeddings.weight"},
    )


TABLE = ling_table(
    *under("model.layers.{attention_layers}", "layers.{attention_layers}", *LING_FULL_ROWS),
    *under("model.layers.{state_layers}.attention", "layers.{state_layers}.attn", *LING_DELTA_ROWS),
    further=LING_FULL_ROWS,
)

FAMILY = family(Config, TABLE, "Ling 3", "BailingHybridForCausalLM", "BailingMoeV3ForCausalLM")

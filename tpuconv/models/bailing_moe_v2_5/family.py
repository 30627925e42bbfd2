"""Ling and Ring 2.5 and 2.6 (Bailing): config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.bailing_hybrid.family import LING_ONLY, SharedOfOneWidth, latent_rows, ling_table
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@dataclass(frozen=True, kw_only=True)
class LightningConfig(PartialRopeConfig, StateConfig):
    """A decoder in which the last of every `layer_group_size` layers has softmax attention, and so have the layers
    behind the last whole group. The others have lightning attention with as many heads for keys as for queries, whose
    output is normalized in `group_norm_size` parts."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **StateConfig.only,
        **LING_ONLY,
        **dict.fromkeys(("attention_bias", "linear_silu", "use_linear_silu"), (False,)),
        "linear_rope": (True,),
    }
    least: ClassVar[Mapping[str, int]] = {"num_kv_heads_for_linear_attn": 0}

    layer_types: tuple[str, ...] | None = None
    layer_group_size: int
    group_norm_size: int
    num_kv_heads_for_linear_attn: int | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        heads, head = self.num_attention_heads, self.linear_head
        if self.num_kv_heads_for_linear_attn not in (None, 0, heads):
            yield f"num_kv_heads_for_linear_attn={self.num_kv_heads_for_linear_attn} is not num_attention_heads={heads}"
        if heads * head % self.group_norm_size:
            yield f"{heads} heads of {head} cannot be divided into group_norm_size={self.group_norm_size} groups"
        if self.num_hidden_layers == 1 and self.layers_of("linear_attention"):
            yield "num_hidden_layers=1: the decays of linear attention divide by the number of the last layer, 0"

    @property
    def linear_head(self) -> int:
        """The dimension of a head of linear attention."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        size, layers = self.layer_group_size, self.num_hidden_layers
        whole = layers // size * size
        return tuple("linear_attention" if (i + 1) % size and i < whole else "full_attention" for i in range(layers))

    @property
    def linear_sizes(self) -> dict[str, int]:
        """The sizes of linear attention."""
        return {"groups": self.num_attention_heads, "key_dim": self.linear_head, "value_dim": self.linear_head}

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, **self.linear_sizes}

    @property
    def unscannable(self) -> str:
        return (
            "each layer with linear attention has decays of its own"
            if self.layer_sets["state_layers"]
            else super().unscannable
        )


@family_config
class Config(SharedOfOneWidth, deepseek_v3.Config, LightningConfig):
    """The keys of config.json, whose defaults are the defaults of the release's code. Softmax attention is latent;
    `head_dim` is the head dimension of linear attention."""

    model_type: ClassVar[str] = "bailing_moe_v2_5"
    only: ClassVar = {
        **deepseek_v3.Config.only,
        **LightningConfig.only,
        **dict.fromkeys(("use_mla_nope", "use_nGPT", "value_norm", "up_proj_norm", "scale_router_input"), (False,)),
        "full_attention_type": ("mla",),
        "rope_interleave": (True,),
        "rope_traditional": (False,),
    }
    least: ClassVar = {
        **deepseek_v3.Config.least,
        **LightningConfig.least,
        "num_experts_per_tok": 2,  # the weight of a single expert is not normalized
    }
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 600000.0}
    aliases: ClassVar = {
        "num_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"max_window_layers", "num_key_value_heads"})

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 32768
    first_k_dense_replace: int = 1
    moe_intermediate_size: int = 512
    moe_shared_expert_intermediate_size: int | None = None
    n_routed_experts: int = 256
    n_shared_experts: int | None = 1
    num_nextn_predict_layers: int = 0
    routed_scaling_factor: float = 1.0
    q_lora_rank: int | None = None
    head_dim: int | None = 128
    partial_rotary_factor: float = 0.5
    rotary_dim: int | None = None
    layer_group_size: int = 5
    group_norm_size: int = 4

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        heads, head = self.num_attention_heads, self.linear_head
        rotary = int(head * self.partial_rotary_factor)
        if not self.head_dim and self.hidden_size % heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}, without a head_dim"
        if rotary != self.qk_rope_head_dim:
            yield f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={head} is not qk_rope_head_dim"
        if self.rotary_dim not in (None, rotary):
            yield f"rotary_dim={self.rotary_dim} is not qk_rope_head_dim={self.qk_rope_head_dim}"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, **self.linear_sizes}


LING_LINEAR_ROWS = (
    Map(
        "query_key_value.weight",
        ("q.kernel", "k.kernel", "v.kernel"),
        "((groups key_dim) + (groups key_dim) + (groups value_dim)) D "
        "-> D groups key_dim, D groups key_dim, D groups value_dim",
    ),
    Map("query_layernorm.weight", "q_norm.scale", "key_dim"),
    Map("key_layernorm.weight", "k_norm.scale", "key_dim"),
    Map("g_norm.weight", "norm.scale", "(groups value_dim) -> groups value_dim"),
    Map("g_proj.weight", "gate.kernel", "(groups value_dim) D -> D groups value_dim"),
    Map("dense.weight", "o.kernel", "D (groups value_dim) -> groups value_dim D"),
)

LING_LATENT_ROWS = latent_rows("attention_bias", "has_query_latent and attention_bias")

LING_LIGHTNING_ROWS = under("model.layers.{state_layers}.attention", "layers.{state_layers}.attn", *LING_LINEAR_ROWS)
DECAYS_IGNORE = {"model.layers.{state_layers}.attention.slope": "computed from config.json"}

TABLE = ling_table(
    *under("model.layers.{attention_layers}", "layers.{attention_layers}", *LING_LATENT_ROWS),
    *LING_LIGHTNING_ROWS,
    further=LING_LATENT_ROWS,
    ignore=DECAYS_IGNORE,
)

FAMILY = family(Config, TABLE, "Ling and Ring 2.5, 2.6", "BailingMoeV2_5ForCausalLM")

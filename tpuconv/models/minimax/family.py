"""MiniMax-Text-01 and MiniMax-M1, as released and in transformers' format: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.kinds import numbered_kinds
from tpuconv.models.common.rows import ATTENTION, NUMBERED_EXPERT_MLPS, PRE_NORMS, decoder_table
from tpuconv.models.minimax_m2 import family as minimax_m2
from tpuconv.models.registry import family

MINIMAX_RELEASES = {"MiniMaxText01ForCausalLM": "minimax_text_01", "MiniMaxM1ForCausalLM": "minimax_m1"}
"""The architectures of the releases, and their `model_type`."""
DECAY_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""The tensors of lightning attention that transformers stores beside the weights."""


@family_config
class Config(minimax_m2.Config, StateConfig):
    """The keys of config.json. Without `layer_types` every second layer has lightning attention. transformers 5.23
    does not read `rotary_dim`, which the models' own code reads as in MiniMax-M2."""

    model_type: ClassVar[str] = "minimax"
    only: ClassVar = {
        # Of the release. transformers does not read them, and computes this.
        "postnorm": (True,),
        "shared_intermediate_size": (0, [0]),
    }

    head_dim: int | None  # type: ignore[assignment]
    sliding_window: int | None
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0
    block_size: int
    """The number of tokens for which transformers computes lightning attention at once: without effect."""

    @classmethod
    def of_type(cls, model_type: str | None) -> type[DecoderConfig]:
        return ReleasedConfig if cls is Config and model_type in MINIMAX_RELEASES.values() else cls

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.rotary_dim not in (None, self.rope_dim):
            yield f"rotary_dim={self.rotary_dim} is not {self.rope_dim}, which follows from other keys"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        return tuple("linear_attention" if i % 2 else "full_attention" for i in range(self.num_hidden_layers))

    @property
    def axes(self) -> dict[str, Any]:
        sizes = super().axes
        return {**sizes, "n": sizes["N"], "k": sizes["H"], "w": sizes["H"]}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(None if kind == self.state_kind else self.sliding_window for kind in self.kinds)

    @property
    def unscannable(self) -> str:
        return "each layer with lightning attention has decays of its own" if self.axes["l"] else super().unscannable


@family_config
class ReleasedConfig(Config):
    """The keys of config.json in the releases, whose code is their own: by default all layers have attention, and
    residuals are not normalized."""

    model_type: ClassVar[str] = "minimax_text_01"
    aliases: ClassVar = {
        f"layernorm_{part}_{side}": f"{ours}_{side}_factor"
        for part, ours in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
        for side in ("alpha", "beta")
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"attn_type_list", "shared_moe_mode"})

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out, key = super().in_our_keys(raw), "attn_type_list"
        if raw.get(key) is not None:
            out["layer_types"] = numbered_kinds(key, raw[key], ("linear_attention", "full_attention"))
        return {"postnorm": False, **out}

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layer_types or ("full_attention",) * self.num_hidden_layers


LIGHTNING_ROWS = (
    Map("qkv_proj.weight", ("q.kernel", "k.kernel", "v.kernel"), "(n (k + k + w)) D -> D n k, D n k, D n w"),
    Map("norm.weight", "norm.scale", "(n w) -> n w"),
    Map("output_gate.weight", "gate.kernel", "(n w) D -> D n w"),
    Map("out_proj.weight", "o.kernel", "D (n w) -> n w D"),
)

TABLE = decoder_table(
    *PRE_NORMS,
    *under("block_sparse_moe", "moe", Map("gate.weight", "router.kernel", "E D -> D E"), *NUMBERED_EXPERT_MLPS),
    others=(
        *under("model.layers.{f}", "layers.{f}", *ATTENTION),
        *under("model.layers.{l}.self_attn", "layers.{l}.attn", *LIGHTNING_ROWS),
    ),
    ignore={f"model.layers.{{l}}.self_attn.{name}": "computed from config.json" for name in DECAY_BUFFERS},
)

FAMILY = family(
    Config,
    TABLE,
    "MiniMax-Text-01, MiniMax-M1",
    "MiniMaxForCausalLM",
    types={"MiniMaxText01ForCausalLM": "minimax_text_01", "MiniMaxM1ForCausalLM": "minimax_m1"},
)

"""MiniMax-Text-01, M1 and M2."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.kinds import numbered_kinds
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import ATTENTION, CORRECTION_BESIDE, NUMBERED_EXPERT_MLPS, PRE_NORMS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Experts, Norms
from tpuconv.notation.table import Map, under


@family_config
class M2Config(ChosenExperts, PartialRopeConfig):
    """`intermediate_size` is the width of one expert. `rotary_dim`, the number of dimensions
    of a head with rotary positions, is the older form of `partial_rotary_factor`."""

    experts_key: ClassVar[str] = "num_local_experts"

    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    partial_rotary_factor: float = 1.0
    rotary_dim: int | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out, rotary, head = super().in_our_keys(raw), raw.get("rotary_dim"), raw.get("head_dim", cls.head_dim)
        if type(rotary) is int and type(head) is int and head > 0:
            out.setdefault("partial_rotary_factor", rotary / head)
        return out


MINIMAX_M2 = decoder(
    "minimax_m2",
    "MiniMax-M2",
    "MiniMaxM2ForCausalLM",
    Norms(),
    Attn(norms="all heads"),
    Experts(
        below="block_sparse_moe",
        module="common.moe:RoutedExperts",
        router="modules.minimax:Router",
        rows=(*CORRECTION_BESIDE, *NUMBERED_EXPERT_MLPS),
    ),
    config=M2Config,
    only={"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "scoring_func": ("sigmoid",)},
)

DECAY_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""The tensors of lightning attention that transformers stores beside the weights."""


@family_config
class MiniMaxConfig(M2Config, StateConfig):
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
    full_attn_alpha_factor: float
    full_attn_beta_factor: float
    linear_attn_alpha_factor: float
    linear_attn_beta_factor: float
    mlp_alpha_factor: float
    mlp_beta_factor: float
    block_size: int
    """The number of tokens for which transformers computes lightning attention at once: without effect."""

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
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {**sizes, "groups": sizes["N"], "key_dim": sizes["H"], "value_dim": sizes["H"]}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(None if kind == self.state_kind else self.sliding_window for kind in self.kinds)

    @property
    def unscannable(self) -> str:
        return (
            "each layer with lightning attention has decays of its own"
            if self.layer_sets["state_layers"]
            else super().unscannable
        )


@family_config
class ReleasedConfig(MiniMaxConfig):
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
    Map(
        "qkv_proj.weight",
        ("q.kernel", "k.kernel", "v.kernel"),
        "(groups (key_dim + key_dim + value_dim)) D -> D groups key_dim, D groups key_dim, D groups value_dim",
    ),
    Map("norm.weight", "norm.scale", "(groups value_dim) -> groups value_dim"),
    Map("output_gate.weight", "gate.kernel", "(groups value_dim) D -> D groups value_dim"),
    Map("out_proj.weight", "o.kernel", "D (groups value_dim) -> groups value_dim D"),
)

MINIMAX = decoder(
    "minimax",
    "MiniMax-Text-01, MiniMax-M1",
    "MiniMaxForCausalLM",
    Norms(module="modules.minimax:WeightedBlock"),
    Attn(),
    Experts(module="modules.experts:NormalizedExperts"),
    base="common.lightning:LightningDecoder",
    types={"MiniMaxText01ForCausalLM": "minimax_text_01", "MiniMaxM1ForCausalLM": "minimax_m1"},
    variants=dict.fromkeys(("minimax_text_01", "minimax_m1"), ReleasedConfig),
    config=MiniMaxConfig,
    table=decoder_table(
        *PRE_NORMS,
        *under("block_sparse_moe", "moe", Map("gate.weight", "router.kernel", "E D -> D E"), *NUMBERED_EXPERT_MLPS),
        others=(
            *under("model.layers.{attention_layers}", "layers.{attention_layers}", *ATTENTION),
            *under("model.layers.{state_layers}.self_attn", "layers.{state_layers}.attn", *LIGHTNING_ROWS),
        ),
        ignore={
            f"model.layers.{{state_layers}}.self_attn.{name}": "computed from config.json" for name in DECAY_BUFFERS
        },
    ),
)

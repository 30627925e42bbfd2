"""MiniMax-Text-01: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.jsonfile import short
from tpuconv.mapping.table import Map, under
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, NUMBERED_EXPERT_MLPS, PRE_NORMS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.registry import Family

TEXT01_ROPE = Rope(theta=1e6)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(ChosenExperts, StateConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert. Without `layer_types` every second layer
    has linear attention. What a layer gets and what a part of it returns are multiplied by factors before they are
    added."""

    model_type: ClassVar[str] = "minimax"
    experts_key: ClassVar[str] = "num_local_experts"
    only: ClassVar = {"postnorm": (True,), "shared_intermediate_size": (0,)}
    left_out: ClassVar[frozenset[str]] = frozenset({"block_size", "rotary_dim"})
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": TEXT01_ROPE.theta}

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = TEXT01_ROPE
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    full_attn_alpha_factor: float = 1
    full_attn_beta_factor: float = 1
    linear_attn_alpha_factor: float = 1
    linear_attn_beta_factor: float = 1
    mlp_alpha_factor: float = 1
    mlp_beta_factor: float = 1

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        """As `DecoderConfig.disagreements`: transformers gives all of a head rotary positions."""
        if raw.get("rotary_dim") not in (None, self.rope_dim):
            yield f"rotary_dim={short(raw['rotary_dim'])} is not {self.rope_dim}, all of a head"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        layers = range(self.num_hidden_layers)
        return tuple("linear_attention" if i % 2 else "full_attention" for i in layers)

    @property
    def axes(self) -> dict[str, Any]:
        sizes = super().axes
        return {**sizes, "n": sizes["N"], "r": 1, "k": sizes["H"], "w": sizes["H"]}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        return tuple((kind, i if kind == self.state_kind else -1) for i, kind in enumerate(self.kinds))

    @property
    def unscannable(self) -> str:
        return super().unscannable and "its layers with linear attention have decays of their own"

    def decays_of(self, layer: int) -> tuple[float, ...]:
        """Returns the logarithms of the decay of each head's state in a layer (arXiv:2501.08313, section 2.2.3), as
        transformers has them."""
        heads = self.num_attention_heads
        factor = 1 - layer / (self.num_hidden_layers - 1 + 1e-5) + 1e-5
        return tuple(-factor * 2 ** (-8 * (head + 1) / heads) for head in range(heads))


DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")

TABLE = decoder_table(
    *PRE_NORMS,
    others=(
        *under("model.layers.{f}", "layers.{f}", *ATTENTION),
        *under(
            "model.layers.{l}.self_attn",
            "layers.{l}.attn",
            Map(
                "qkv_proj.weight",
                ("q.kernel", "k.kernel", "v.kernel"),
                "(n (k + k + w)) D -> D n k, D n k, D n w",
            ),
            Map("output_gate.weight", "gate.kernel", "(n w) D -> D n w"),
            Map("norm.weight", "norm.scale", "(n w) -> n w"),
            Map("out_proj.weight", "o.kernel", "D (n w) -> n w D"),
        ),
        *under(
            "model.layers.{L}.block_sparse_moe",
            "layers.{L}.moe",
            Map("gate.weight", "router.kernel", "E D -> D E"),
            *NUMBERED_EXPERT_MLPS,
        ),
    ),
    ignore={f"model.layers.{{l}}.self_attn.{name}": "computed from config.json" for name in DECAYS},
)

FAMILY = Family(
    name="minimax",
    summary="MiniMax-Text-01",
    config=Config,
    table=TABLE,
    model="tpuconv.models.minimax.modules:Model",
    architectures={"MiniMaxForCausalLM": "minimax"},
)

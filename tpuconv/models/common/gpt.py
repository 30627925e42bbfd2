"""Keys of config.json and rows of tables of the families with the names of GPT-2."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, QKV_BIAS, when
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    positions=Word("learned positions", as_="V"),
)

GPT_KEYS: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
}
"""The keys of config.json, by fields."""
GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")
"""The names of one function."""


@dataclass(frozen=True, kw_only=True)
class UnrotatedConfig(DecoderConfig):
    """A decoder without rotary positions. Without `intermediate_size` an MLP is four times as wide as the model. The
    defaults come from GPT-2."""

    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | {"head_dim"}

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None  # type: ignore[assignment]  # others' is never absent
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope: Rope = PLAIN_ROPE

    def contradictions_of_heads(self) -> Iterator[str]:
        heads, key = self.num_attention_heads, self._key("num_attention_heads")
        if self.hidden_size % heads:
            yield f"{self._key('hidden_size')}={self.hidden_size} is not a multiple of {key}={heads}"
        if self.num_key_value_heads not in (None, self.key_heads):
            yield f"num_key_value_heads={self.num_key_value_heads}, where {self.model_type} has {self.key_heads}"

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_attention_heads

    @property
    def sizes(self) -> dict[str, int]:
        width = self.intermediate_size or 4 * self.hidden_size
        heads = {"K": self.key_heads, "G": self.num_attention_heads // self.key_heads}
        return {**super().sizes, **heads, "F": width}

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (None,) * self.num_hidden_layers


@dataclass(frozen=True, kw_only=True)
class PositionedConfig(UnrotatedConfig):
    """A decoder with learned positions, which are added to the embeddings of tokens.

    Class attribute: `first_position` is the row of the first position.
    """

    first_position: ClassVar[int] = 0

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "positions": self.max_position_embeddings + self.first_position}

    @property
    def position_limit(self) -> int | None:
        return self.max_position_embeddings


def norm_rows(hf: str, jax: str) -> tuple[Map, ...]:
    """Returns the rows of a layer norm."""
    return Map(f"{hf}.weight", f"{jax}.scale", "D"), Map(f"{hf}.bias", f"{jax}.bias", "D")


GPT_QKV = ("attn.q.kernel", "attn.k.kernel", "attn.v.kernel")
GPT_QKV_BIAS = ("attn.q.bias", "attn.k.bias", "attn.v.bias")
"""The parameters that a fused projection holds."""


def qkv_rows(module: str, bias: str = "") -> tuple[Map, ...]:
    """Returns the rows of a fused projection, [out, in], with all queries first, then all keys, then all values.
    `bias` is the condition of its bias; none without one."""
    kernel = Map(f"{module}.weight", GPT_QKV, "((N + K + K) H) D -> D N H, D K H, D K H")
    if not bias:
        return (kernel,)
    return kernel, *when(bias, Map(f"{module}.bias", GPT_QKV_BIAS, "((N + K + K) H) -> N H, K H, K H"))


GPT2_ATTENTION = (
    Map("attn.c_attn.weight", GPT_QKV, "D ((N + K + K) H) -> D N H, D K H, D K H", input_first=True),
    Map("attn.c_attn.bias", GPT_QKV_BIAS, "((N + K + K) H) -> N H, K H, K H"),
    Map("attn.c_proj.weight", "attn.o.kernel", "(N H) D -> N H D", input_first=True),
    Map("attn.c_proj.bias", "attn.o.bias", "D"),
)
GPT2_MLP = (
    Map("mlp.c_fc.weight", "mlp.up.kernel", "D F", input_first=True),
    Map("mlp.c_fc.bias", "mlp.up.bias", "F"),
    Map("mlp.c_proj.weight", "mlp.down.kernel", "F D", input_first=True),
    Map("mlp.c_proj.bias", "mlp.down.bias", "D"),
)
"""Attention and MLP of GPT-2, whose matrices are [in, out]."""
GPT_NORMS = (*norm_rows("ln_1", "attn_norm"), *norm_rows("ln_2", "mlp_norm"))
GPT_MLP = (
    Map("mlp.c_fc.weight", "mlp.up.kernel", "F D -> D F"),
    Map("mlp.c_fc.bias", "mlp.up.bias", "F"),
    Map("mlp.c_proj.weight", "mlp.down.kernel", "D F -> F D"),
    Map("mlp.c_proj.bias", "mlp.down.bias", "D"),
)
NEOX_ATTENTION = (
    Map("query_key_value.weight", ("q.kernel", "k.kernel", "v.kernel"), "(N (H + H + H)) D -> D N H, D N H, D N H"),
    Map("dense.weight", "o.kernel", "D (N H) -> N H D"),
)
NEOX_ATTENTION_BIAS = (
    Map("query_key_value.bias", ("q.bias", "k.bias", "v.bias"), "(N (H + H + H)) -> N H, N H, N H"),
    Map("dense.bias", "o.bias", "D"),
)
NEOX_MLP = (
    Map("dense_h_to_4h.weight", "up.kernel", "F D -> D F"),
    Map("dense_h_to_4h.bias", "up.bias", "F"),
    Map("dense_4h_to_h.weight", "down.kernel", "D F -> F D"),
    Map("dense_4h_to_h.bias", "down.bias", "D"),
)
"""Attention and MLP with the names of GPT-NeoX."""

FAIRSEQ_ROWS = (
    *norm_rows("self_attn_layer_norm", "attn_norm"),
    *norm_rows("final_layer_norm", "mlp_norm"),
    *ATTENTION[:3],
    Map("self_attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("fc1.weight", "mlp.up.kernel", "F D -> D F"),
    Map("fc2.weight", "mlp.down.kernel", "D F -> F D"),
)
FAIRSEQ_BIASES = (
    *QKV_BIAS,
    Map("self_attn.out_proj.bias", "attn.o.bias", "D"),
    Map("fc1.bias", "mlp.up.bias", "F"),
    Map("fc2.bias", "mlp.down.bias", "D"),
)
"""The rows of a layer in models with the names of fairseq (arXiv:1904.01038)."""
POSITIONS = Map("wpe.weight", "positions.embedding", "positions D")
MASKS = {
    "bias": "the causal mask",
    "causal_mask": "the causal mask",
    "masked_bias": "the score of a masked key",
}
"""Arrays of attention that older releases have."""


def gpt_table(
    rows: tuple[Map, ...],
    others: tuple[Map, ...] = (),
    head: tuple[Map, ...] = (),
    masks: str = "attn.",
    embed: str = "wte.weight",
    norm: str = "ln_f",
) -> MappingTable:
    """Returns the table of a family with the prefix `transformer.`.

    Args:
        rows: of each layer, without prefixes.
        others: rows besides the rows of the layers, the embedding and the last norm.
        head: rows of the head besides its matrix.
        masks: how the names of `MASKS` begin in a layer.
        embed: the name of the embedding.
        norm: the name of the last norm; empty for a model without one.
    """
    front = "transformer."
    outside = (Map(embed, "embed.embedding", "V D"), *others, *(norm_rows(norm, "norm") if norm else ()))
    return MappingTable(
        (
            *(replace(row, hf=tuple(front + name for name in row.hf_names)) for row in outside),
            *under(f"{front}h.{{L}}", "layers.{L}", *rows),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
            *head,
        ),
        ignore={f"{front}h.{{L}}.{masks}{array}": why for array, why in MASKS.items()},
        copies={"lm_head.weight": front + embed},
    )

"""LFM2, dense: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.config import MOST_OF_A_SIZE
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.rows import ATTENTION, when
from tpuconv.models.registry import family


@family_config
class ShortConvConfig(StateConfig):
    """A decoder with short convolutions instead of attention in some layers."""

    aliases: ClassVar = {"tie_embedding": "tie_word_embeddings"}
    state_kind: ClassVar[str] = "conv"
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps"}

    conv_bias: bool
    conv_L_cache: int

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "n": self.hidden_size, "c": self.conv_L_cache}


@family_config
class Config(ShortConvConfig):
    """The keys of config.json. `intermediate_size` is the width of an MLP only if `block_auto_adjust_ff_dim` is
    false."""

    model_type: ClassVar[str] = "lfm2"
    aliases: ClassVar = {**ShortConvConfig.aliases, "block_ff_dim": "intermediate_size"}

    head_dim: int | None = None
    full_attn_idxs: tuple[int, ...] | None
    block_multiple_of: int
    block_ffn_dim_multiplier: float | None
    block_auto_adjust_ff_dim: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None or self.full_attn_idxs is None:
            return super().kinds
        return tuple("full_attention" if i in self.full_attn_idxs else "conv" for i in range(self.num_hidden_layers))

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not 0 < self.mlp_width <= MOST_OF_A_SIZE:
            yield f"intermediate_size={self.intermediate_size} is adjusted to the width {self.mlp_width}"

    @property
    def mlp_width(self) -> int:
        """The width of an MLP."""
        width = self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            width = int(2 * width / 3)
            if self.block_ffn_dim_multiplier is not None:
                width = int(self.block_ffn_dim_multiplier * width)
                width = -(-width // self.block_multiple_of) * self.block_multiple_of
        return width

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "F": self.mlp_width}


CONV_INPUTS = ("b", "c", "x")

LFM2_ATTENTION = (
    *ATTENTION[:3],
    Map("self_attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("self_attn.q_layernorm.weight", "attn.q_norm.scale", "H"),
    Map("self_attn.k_layernorm.weight", "attn.k_norm.scale", "H"),
)

SHORT_CONVOLUTION = (
    Map("in_proj.weight", tuple(f"{x}.kernel" for x in CONV_INPUTS), "(n + n + n) D -> D n, D n, D n"),
    Map("conv.weight", "conv.kernel", "n 1 c -> n c"),
    Map("out_proj.weight", "o.kernel", "D n -> n D"),
    *when(
        "conv_bias",
        Map("in_proj.bias", tuple(f"{x}.bias" for x in CONV_INPUTS), "(n + n + n) -> n, n, n"),
        Map("conv.bias", "conv.bias", "n"),
        Map("out_proj.bias", "o.bias", "D"),
    ),
)

LFM2_MLP = (
    Map("w1.weight", "gate.kernel", "F D -> D F"),
    Map("w3.weight", "up.kernel", "F D -> D F"),
    Map("w2.weight", "down.kernel", "D F -> F D"),
)


def lfm2_table(*mlp_rows: Map, attention: tuple[Map, ...] = LFM2_ATTENTION) -> MappingTable:
    """Returns the table with these rows of MLPs and experts, and of attention."""
    return MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            Map("model.layers.{L}.operator_norm.weight", "layers.{L}.attn_norm.scale", "D"),
            Map("model.layers.{L}.ffn_norm.weight", "layers.{L}.mlp_norm.scale", "D"),
            *under("model.layers.{f}", "layers.{f}", *attention),
            *under("model.layers.{l}.conv", "layers.{l}.attn", *SHORT_CONVOLUTION),
            *mlp_rows,
            Map("model.embedding_norm.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        ignore={"model.layers.{L}.self_attn.rotary_emb.inv_freq": "computed from config.json"},
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    )


TABLE = lfm2_table(*under("model.layers.{L}.feed_forward", "layers.{L}.mlp", *LFM2_MLP))

FAMILY = family(Config, TABLE, "LFM2, dense", "Lfm2ForCausalLM")

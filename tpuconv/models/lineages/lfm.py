"""LFM2 and LFM3: short convolutions in most layers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.config import MOST_OF_A_SIZE
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.rope import PLAIN_ROPE, ROPE_KEYS, Rope
from tpuconv.models.common.rows import ATTENTION, BIASED_ATTENTION, HEAD_NORMS, NUMBERED_EXPERT_MLPS, when
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import read_two_ropes, windows_by_kind
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Experts, Mlp, Norms
from tpuconv.notation.table import Map, MappingTable, under


@family_config
class ShortConvConfig(StateConfig):
    """A decoder with short convolutions instead of attention in some layers."""

    aliases: ClassVar = {"tie_embedding": "tie_word_embeddings"}
    state_kind: ClassVar[str] = "conv"
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps"}

    conv_bias: bool
    conv_L_cache: int

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "channels": self.hidden_size, "taps": self.conv_L_cache}


@family_config
class Lfm2Config(ShortConvConfig):
    """`intermediate_size` is the width of an MLP only if `block_auto_adjust_ff_dim` is
    false."""

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
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "F": self.mlp_width}


CONV_INPUTS = ("b", "c", "x")

LFM2_ATTENTION = (
    *ATTENTION[:3],
    Map("self_attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("self_attn.q_layernorm.weight", "attn.q_norm.scale", "H"),
    Map("self_attn.k_layernorm.weight", "attn.k_norm.scale", "H"),
)

SHORT_CONVOLUTION = (
    Map(
        "in_proj.weight",
        tuple(f"{x}.kernel" for x in CONV_INPUTS),
        "(channels + channels + channels) D -> D channels, D channels, D channels",
    ),
    Map("conv.weight", "conv.kernel", "channels 1 taps -> channels taps"),
    Map("out_proj.weight", "o.kernel", "D channels -> channels D"),
    *when(
        "conv_bias",
        Map(
            "in_proj.bias",
            tuple(f"{x}.bias" for x in CONV_INPUTS),
            "(channels + channels + channels) -> channels, channels, channels",
        ),
        Map("conv.bias", "conv.bias", "channels"),
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
            *under("model.layers.{attention_layers}", "layers.{attention_layers}", *attention),
            *under("model.layers.{state_layers}.conv", "layers.{state_layers}.attn", *SHORT_CONVOLUTION),
            *mlp_rows,
            Map("model.embedding_norm.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    )


WITH_CONVOLUTIONS = Norms(module="modules.lfm:ShortConvBlock")
CONV_DECODER = "modules.lfm:ShortConvDecoder"

LFM2 = decoder(
    "lfm2",
    "LFM2, dense",
    "Lfm2ForCausalLM",
    WITH_CONVOLUTIONS,
    Attn(norms="each head"),
    Mlp(),
    base=CONV_DECODER,
    config=Lfm2Config,
    aliases={**ShortConvConfig.aliases, "block_ff_dim": "intermediate_size"},
    table=lfm2_table(*under("model.layers.{L}.feed_forward", "layers.{L}.mlp", *LFM2_MLP)),
)


@family_config
class Lfm2MoeConfig(ChosenExperts, ShortConvConfig):
    """The first `num_dense_layers` layers have an MLP instead of experts."""

    moe_intermediate_size: int
    num_dense_layers: int
    num_experts: int
    num_experts_per_tok: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        dense, layers = min(self.num_dense_layers, self.num_hidden_layers), self.num_hidden_layers
        return {**super().layer_sets, "I": tuple(range(dense)), "J": tuple(range(dense, layers))}


LFM2_MOE = decoder(
    "lfm2_moe",
    "LFM2, mixture of experts",
    "Lfm2MoeForCausalLM",
    WITH_CONVOLUTIONS,
    Attn(norms="each head"),
    Experts("some", module="common.moe:RoutedExperts", router="modules.lfm:CorrectedRouter"),
    base=CONV_DECODER,
    config=Lfm2MoeConfig,
    least={"num_dense_layers": 0},
    table=lfm2_table(
        *under("model.layers.{I}.feed_forward", "layers.{I}.mlp", *LFM2_MLP),
        *under(
            "model.layers.{J}.feed_forward",
            "layers.{J}.moe",
            Map("gate.weight", "router.kernel", "E D -> D E"),
            Map("expert_bias", "router.correction", "E", when="use_expert_bias", buffer=True),
            *NUMBERED_EXPERT_MLPS,
        ),
    ),
)


@family_config
class Lfm3Config(ShortConvConfig):
    """Layers with a sliding window have rotary positions of their own, `local_rope`. Without
    `layer_types` the third layer of every four sees all tokens, and the first has a window, but for the very first."""

    other_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    derived: ClassVar[frozenset[str]] = ShortConvConfig.derived | {"local_rope"}

    local_rope: Rope = PLAIN_ROPE
    sliding_window: int | None
    use_sandwich_norm: bool
    use_attention_gate: bool

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        return read_two_ropes(cls, raw, context) if any(raw.get(key) for key in ROPE_KEYS) else {}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if "sliding_attention" in self.kinds and self.sliding_window is None:
            yield "layers have 'sliding_attention' with sliding_window=None"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        kinds = ("sliding_attention", "conv", "full_attention", "conv")
        return ("conv", *(kinds[i % 4] for i in range(1, self.num_hidden_layers)))

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            "attention_layers": tuple(i for i, kind in enumerate(self.kinds) if kind != self.state_kind),
        }

    @property
    def windows(self) -> tuple[int | None, ...]:
        return windows_by_kind(self.kinds, self.sliding_window)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        of_kind = {"full_attention": self.rope, "sliding_attention": self.local_rope}
        return tuple(of_kind.get(kind) for kind in self.kinds)


LFM3 = decoder(
    "lfm3",
    "LFM3",
    "Lfm3ForCausalLM",
    Norms(module="modules.lfm:SandwichConvBlock"),
    Attn("attention_bias", norms="each head", rope="halves in float32", module="modules.lfm:GatedHeads"),
    Mlp(),
    base=CONV_DECODER,
    config=Lfm3Config,
    # The rotary positions of layers that see all tokens, of a config.json without any.
    defaults={"rope": Rope("proportional", theta=1e6, partial_rotary_factor=0.5)},
    table=lfm2_table(
        *under("model.layers.{L}.feed_forward", "layers.{L}.mlp", *LFM2_MLP),
        *when(
            "use_sandwich_norm",
            Map("model.layers.{L}.post_operator_norm.weight", "layers.{L}.post_attn_norm.scale", "D"),
            Map("model.layers.{L}.post_ffn_norm.weight", "layers.{L}.post_mlp_norm.scale", "D"),
        ),
        attention=(
            *BIASED_ATTENTION,
            *HEAD_NORMS,
            *when("use_attention_gate", Map("self_attn.gate_proj.weight", "attn.gate.kernel", "N D -> D N")),
        ),
    ),
)

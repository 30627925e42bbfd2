"""Gemma, from the first version to Gemma 4, and RecurrentGemma."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import frexp, ldexp
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import CAUSAL
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.heads import HIDDEN
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import GLOBAL_ROPE, PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, O_BIAS, QKV_BIAS, when
from tpuconv.models.common.windows import ROPES_BY_KIND, PatternConfig, read_older_ropes
from tpuconv.models.common.wrapper import BRINGS, HEARS, SEES
from tpuconv.models.declare import decoder, like, wrapper
from tpuconv.models.embedding_gemma2_text.family import FAMILY as EMBEDDING_GEMMA2_TEXT
from tpuconv.models.gemma3n_text.family import FAMILY as GEMMA3N_TEXT
from tpuconv.models.gemma4_text.family import FAMILY as GEMMA4_TEXT
from tpuconv.models.parts import Attn, Factors, Mlp, Norms
from tpuconv.models.towers.gemma3n.modalities import GEMMA3N_AUDIO, GEMMA3N_VISION
from tpuconv.models.towers.gemma4.family import GEMMA4_AUDIO, GEMMA4_FRAMES, GEMMA4_PATCHES, GEMMA4_VISION
from tpuconv.models.towers.siglip.family import GEMMA3_VISION
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    block_dim=Word("channels of one block of an RG-LRU"),
    block_in=Word("the same, as the input axis of a square matrix"),
)


class RootOfWidth(DecoderConfig):
    """Embeddings have the square root of their width as a factor."""

    @property
    def embedding_factor(self) -> float:
        """The factor of embeddings."""
        return float(self.hidden_size**0.5)


GEMMA = decoder(
    "gemma",
    "Gemma, the first version",
    "GemmaForCausalLM",
    Norms(kind="centered RMS"),
    Attn("attention_bias"),
    Mlp(act="gelu_tanh"),
    Factors(embedding="embedding_factor", rounded=True),
    config=RootOfWidth,
    only={
        **CAUSAL,
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": ("gelu_pytorch_tanh", "gelu", None),
    },
)


@family_config
class Gemma2Config(RootOfWidth, PatternConfig):
    """Every second layer sees all tokens; scores and logits may have soft limits."""

    only: ClassVar = {
        **CAUSAL,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": ("gelu_pytorch_tanh", None),  # without effect
    }
    full_every: ClassVar[int] = 2

    query_pre_attn_scalar: int
    final_logit_softcapping: float | None
    attn_logit_softcapping: float | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for name in ("final_logit_softcapping", "attn_logit_softcapping"):
            if (cap := getattr(self, name)) is not None and cap <= 0:
                yield f"{name}={cap} is not positive"

    @property
    def score_scale(self) -> float:
        """The factor of scores."""
        return float(self.query_pre_attn_scalar**-0.5)


GEMMA2 = GEMMA.but(
    "gemma2",
    "Gemma 2",
    "Gemma2ForCausalLM",
    Norms("sandwich", "centered RMS"),
    Attn("attention_bias", scale="score_scale", cap="attn_logit_softcapping"),
    Factors(embedding="embedding_factor", rounded=True, cap="final_logit_softcapping"),
    config=Gemma2Config,
)

VAULTGEMMA = GEMMA2.but(
    "vaultgemma",
    "VaultGemma 1B",
    "VaultGemmaForCausalLM",
    Norms(kind="centered RMS", names=("input_layernorm", "pre_feedforward_layernorm")),
)


@family_config
class Gemma3Config(Gemma2Config):
    """Layers with a sliding window have rotary positions of their own, `local_rope`, which older files describe by
    `rope_local_base_freq`. With `use_bidirectional_attention` (EmbeddingGemma) tokens see the tokens behind them, and
    `sliding_window` counts both directions."""

    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope"}
    left_out: ClassVar[frozenset[str]] = frozenset({"_sliding_window_pattern"})  # written beside `layer_types`
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND
    only: ClassVar = {
        **{key: values for key, values in Gemma2Config.only.items() if key not in CAUSAL},
        "attn_logit_softcapping": (None,),
    }

    use_bidirectional_attention: bool | None
    rope: Rope = GLOBAL_ROPE
    local_rope: Rope = PLAIN_ROPE
    rope_local_base_freq: float = 1e4
    sliding_window_pattern: int = 6
    attn_logit_softcapping: None

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        return read_older_ropes(cls, raw, context)

    @property
    def full_every(self) -> int:  # type: ignore[override]
        """The last of as many layers sees all tokens."""
        return self.sliding_window_pattern

    @property
    def sees_behind(self) -> bool:  # type: ignore[override]
        """See `DecoderConfig.sees_behind`."""
        return bool(self.use_bidirectional_attention)

    @property
    def windows(self) -> tuple[int | None, ...]:
        windows = super().windows
        return tuple(window and window // 2 + 1 for window in windows) if self.sees_behind else windows


GEMMA3_TEXT = GEMMA2.but(
    "gemma3_text",
    "Gemma 3, the text model on its own",
    "Gemma3ForCausalLM",
    Attn("attention_bias", norms="each head", scale="score_scale"),
    config=Gemma3Config,
)

RNJ1_KINDS = {"full_attention": "full_attention", "chunked_attention": "sliding_attention"}
"""The `layer_types` of Rnj-1.5, and the types of Gemma 3 with the same windows and rotary positions."""


class ChunkedKinds:
    """Layers with "chunked_attention" have chunks of half a `sliding_window`. A family's Config derives from this class
    and from the Config of Gemma 3, in this order."""

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderConfig.in_our_keys`."""
        out: dict[str, Any] = super().in_our_keys(raw)  # type: ignore[misc]
        if isinstance(kinds := out.get("layer_types"), list):
            out["layer_types"] = [RNJ1_KINDS.get(str(kind), kind) for kind in kinds]
        if "chunked_attention" in (ropes := out.get("rope_parameters") or {}):
            out["rope_parameters"] = {RNJ1_KINDS.get(kind, kind): rope for kind, rope in ropes.items()}
        return out

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        """See `DecoderConfig.disagreements`."""
        if unknown := set(raw.get("layer_types") or ()) - set(RNJ1_KINDS):
            yield f"layer_types has the unknown {', '.join(map(repr, sorted(unknown)))}"


RNJ1 = GEMMA3_TEXT.but(
    "rnj1",
    "Rnj-1.5",
    "Rnj1ForCausalLM",
    Attn("attention_bias", norms="each head", scale="score_scale", module="modules.gemma:ChunkedAttention"),
    config=(ChunkedKinds, GEMMA3_TEXT.config),
    only={**Gemma3Config.only, **CAUSAL},
    least={"sliding_window": 2},
)

GEMMA3 = wrapper(
    "gemma3",
    "Gemma 3 4B, 12B, 27B",
    "Gemma3ForConditionalGeneration",
    text=GEMMA3_TEXT,
    prefix="language_model.model.",
    tied=True,
    only={**Gemma3Config.only, **CAUSAL},
    sees_images="all",
    modalities=(GEMMA3_VISION,),
)

TOWERS = {"vision_tower": SEES, "embed_vision": BRINGS, "audio_tower": HEARS, "embed_audio": HEARS}

GEMMA3N = wrapper(
    "gemma3n",
    "Gemma 3n",
    "Gemma3nForConditionalGeneration",
    text=GEMMA3N_TEXT,
    outside=TOWERS,
    tied=True,
    modalities=(GEMMA3N_VISION, GEMMA3N_AUDIO),
)

GEMMA4 = wrapper(
    "gemma4",
    "Gemma 4",
    "Gemma4ForConditionalGeneration",
    text=GEMMA4_TEXT,
    outside=TOWERS,
    tied=True,
    modalities=(GEMMA4_VISION, GEMMA4_AUDIO),
)

EMBEDDING_GEMMA2 = wrapper(
    "embedding_gemma2",
    "EmbeddingGemma 2",
    "EmbeddingGemma2Model",
    text=EMBEDDING_GEMMA2_TEXT,
    outside=TOWERS,
    prefix="language_model.",
    head="language_model.lm_head.",
    tied=True,
    modalities=(GEMMA4_VISION, GEMMA4_AUDIO),
    output=HIDDEN,
)

WITHOUT_TOWERS = {
    **GEMMA4_TEXT.config.only,
    "enable_moe_block": (False,),
    "hidden_size_per_layer_input": (0,),
}

GEMMA4_UNIFIED = wrapper(
    "gemma4_unified",
    "Gemma 4 12B, without towers",
    "Gemma4UnifiedForConditionalGeneration",
    text=GEMMA4_TEXT,
    outside={"vision_embedder": SEES, "embed_vision": BRINGS, "embed_audio": HEARS},
    tied=True,
    only=WITHOUT_TOWERS,
    defaults={"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    modalities=(GEMMA4_PATCHES, GEMMA4_FRAMES),
)

GEMMA4_UNIFIED_TEXT = like(
    GEMMA4_TEXT,
    "gemma4_unified_text",
    "Gemma 4 without towers, the text model on its own",
    "Gemma4UnifiedForCausalLM",
    only=WITHOUT_TOWERS,
    defaults={"hidden_size_per_layer_input": 0},
)


BLOCK_KINDS = {"recurrent": "linear_attention", "attention": "sliding_attention"}
"""The kinds of layers, by the names of `block_types`."""


@family_config
class RecurrentGemmaConfig(RootOfWidth, PartialRopeConfig, StateConfig):
    """The kinds of layers are `block_types`, repeated. An MLP has half the width `intermediate_size`."""

    derived: ClassVar[frozenset[str]] = StateConfig.derived | {"layer_types", "max_position_embeddings"}
    left_out: ClassVar[frozenset[str]] = frozenset(
        {"max_position_embeddings", "w_init_variance_scale", "final_w_init_variance_scale"}
    )
    other_kinds: ClassVar[tuple[str, ...]] = ("sliding_attention",)
    only: ClassVar = {"hidden_activation": ("gelu_pytorch_tanh",)}

    layer_types: tuple[str, ...] | None = None
    max_position_embeddings: int = 1 << 20  # states and windows have no limit
    head_dim: int | None = None
    partial_rotary_factor: float = 0.5
    attention_window_size: int
    block_types: tuple[str, ...]
    conv1d_width: int
    logits_soft_cap: float
    lru_width: int | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.channels % self.num_attention_heads:
            yield f"lru_width={self.channels} is not a multiple of num_attention_heads={self.num_attention_heads}"
        if self.logits_soft_cap <= 0:
            yield f"logits_soft_cap={self.logits_soft_cap} is not positive"

    @property
    def channels(self) -> int:
        """The width of an RG-LRU."""
        return self.lru_width or self.hidden_size

    @property
    def embedding_factor(self) -> float:
        """The factor of embeddings, which is rounded to bfloat16 whatever the dtype of the model."""
        fraction, exponent = frexp(super().embedding_factor)
        return ldexp(round(fraction * 256), exponent - 8)

    @property
    def kinds(self) -> tuple[str, ...]:
        names = self.block_types or ("",)
        return tuple(BLOCK_KINDS.get(name := names[i % len(names)], name) for i in range(self.num_hidden_layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(None if kind == self.state_kind else self.attention_window_size for kind in self.kinds)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(None if kind == self.state_kind else self.rope for kind in self.kinds)

    @property
    def sizes(self) -> dict[str, int]:
        width = self.channels // self.num_attention_heads
        return {
            **super().sizes,
            "F": self.intermediate_size // 2,
            "block_dim": width,
            "block_in": width,
            "taps": self.conv1d_width,
        }


GEMMA_ATTENTION = tuple(
    replace(row, hf=str(row.hf).replace("self_attn.", "temporal_block."))
    for row in (*ATTENTION, *when("attention_bias", *QKV_BIAS), O_BIAS)
)

RECURRENT_UNIT = (
    *(
        row
        for name, place in (("linear_y", "y"), ("linear_x", "x"))
        for row in (
            Map(f"{name}.weight", f"{place}.kernel", "(N block_dim) D -> D N block_dim"),
            Map(f"{name}.bias", f"{place}.bias", "(N block_dim) -> N block_dim"),
        )
    ),
    Map("conv_1d.weight", "conv.kernel", "(N block_dim) 1 taps -> N block_dim taps"),
    Map("conv_1d.bias", "conv.bias", "(N block_dim) -> N block_dim"),
    Map("rg_lru.input_gate_weight", "i.kernel", "N block_in block_dim"),
    Map("rg_lru.input_gate_bias", "i.bias", "N block_dim"),
    Map("rg_lru.recurrent_gate_weight", "a.kernel", "N block_in block_dim"),
    Map("rg_lru.recurrent_gate_bias", "a.bias", "N block_dim"),
    Map("rg_lru.recurrent_param", "rate", "(N block_dim) -> N block_dim"),
    Map("linear_out.weight", "o.kernel", "D (N block_dim) -> N block_dim D"),
    Map("linear_out.bias", "o.bias", "D"),
)

RECURRENT_GEMMA = GEMMA.but(
    "recurrent_gemma",
    "RecurrentGemma 2B, 9B",
    "RecurrentGemmaForCausalLM",
    Norms(kind="centered RMS", module="modules.griffin:RecurrentBlock"),
    Attn("attention_bias", out_bias=True),
    Mlp(act="gelu_tanh", bias=True),
    Factors(embedding="embedding_factor", cap="logits_soft_cap"),
    config=RecurrentGemmaConfig,
    base="modules.griffin:RecurrentDecoder",
    table=MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            Map("model.layers.{L}.temporal_pre_norm.weight", "layers.{L}.attn_norm.scale", "D"),
            Map("model.layers.{L}.channel_pre_norm.weight", "layers.{L}.mlp_norm.scale", "D"),
            *under(
                "model.layers.{attention_layers}",
                "layers.{attention_layers}",
                *GEMMA_ATTENTION,
            ),
            *under("model.layers.{state_layers}.temporal_block", "layers.{state_layers}.attn", *RECURRENT_UNIT),
            *under("model.layers.{L}.mlp_block", "layers.{L}.mlp", *MLP, *MLP_BIAS),
            Map("model.final_norm.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        ignore={
            "model.normalizer": "computed from config.json",
        },
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    ),
)

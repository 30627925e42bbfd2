"""Gemma, from the first version to Gemma 4."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import CAUSAL
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import GLOBAL_ROPE, PLAIN_ROPE, Rope
from tpuconv.models.common.windows import ROPES_BY_KIND, PatternConfig, read_older_ropes
from tpuconv.models.common.wrapper import BRINGS, HEARS, LLAVA, SEES
from tpuconv.models.declare import decoder, like, wrapper
from tpuconv.models.gemma3n_text.family import FAMILY as GEMMA3N_TEXT
from tpuconv.models.gemma4_text.family import FAMILY as GEMMA4_TEXT
from tpuconv.models.parts import Attn, Factors, Mlp, Norms
from tpuconv.models.towers.modalities import GEMMA3_VISION, GEMMA4_PATCHES, GEMMA4_VISION
from tpuconv.models.towers.sound_modalities import GEMMA4_AUDIO, GEMMA4_FRAMES


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
    `rope_local_base_freq`."""

    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope"}
    left_out: ClassVar[frozenset[str]] = frozenset({"_sliding_window_pattern"})  # written beside `layer_types`
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND
    only: ClassVar = {**Gemma2Config.only, "attn_logit_softcapping": (None,)}

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


GEMMA3_TEXT = GEMMA2.but(
    "gemma3_text",
    "Gemma 3, the text model on its own",
    "Gemma3ForCausalLM",
    Attn("attention_bias", norms="each head", scale="score_scale"),
    config=Gemma3Config,
)

GEMMA3 = wrapper(
    "gemma3",
    "Gemma 3 4B, 12B, 27B",
    "Gemma3ForConditionalGeneration",
    text=GEMMA3_TEXT,
    prefix="language_model.model.",
    outside=LLAVA,
    tied=True,
    sees_images="all",
    modalities=(GEMMA3_VISION,),
)

TOWERS = {"vision_tower": SEES, "embed_vision": BRINGS, "audio_tower": HEARS, "embed_audio": HEARS}

GEMMA3N = wrapper(
    "gemma3n", "Gemma 3n, text", "Gemma3nForConditionalGeneration", text=GEMMA3N_TEXT, outside=TOWERS, tied=True
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

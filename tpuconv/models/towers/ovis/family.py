"""The towers of Ovis 2 and 2.5 and their tables of visual words: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.common.key_types import object_of
from tpuconv.models.towers.qwen_vit.family import QwenVitConfig
from tpuconv.models.towers.rows import (
    CLIP_LAYERS,
    DOWN,
    IN_HEADS,
    OUT_OF_HEADS,
    PATCH_MATRIX,
    UP,
    layer_norm,
    rms_norm,
    with_bias,
)
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map, under

OVIS_MODULES = "tpuconv.models.towers.ovis.modules"


@dataclass(frozen=True, kw_only=True)
class OvisVitConfig(ImageConfig):
    """The keys of `vision_config`. M is the width of joined patches, V counts visual words, of which the last stand for
    `visual_indicator_token_ids` and the G before for patches."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tokenize_function": ("softmax",)}

    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    patch_size: int = 14
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    vocab_size: int = 16384
    hidden_stride: int = 1
    num_visual_indicator_tokens: int = 5

    @property
    def joined_side(self) -> int:
        """The number of joined patches along one side of an image."""
        return self.side // self.hidden_stride

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            **super().sizes,
            "M": self.hidden_size * self.hidden_stride**2,
            "V": self.vocab_size,
            "G": self.vocab_size - self.num_visual_indicator_tokens,
        }


@dataclass(frozen=True, kw_only=True)
class WordsConfig(ProjectorConfig):
    """The keys beside it."""

    visual_indicator_token_ids: tuple[int, ...] = (151666, 151667, 151668, 151669, 151670)

    def check(self, tower: Any) -> None:
        super().check(tower)
        if len(self.visual_indicator_token_ids) > tower.num_visual_indicator_tokens or tower.sizes["G"] < 1:
            raise ConfigError(
                f"config.json: {len(self.visual_indicator_token_ids)} visual_indicator_token_ids do not fit "
                f"num_visual_indicator_tokens={tower.num_visual_indicator_tokens} of {tower.vocab_size}"
            )


@dataclass(frozen=True, kw_only=True)
class SquareWordsConfig(WordsConfig):
    """The keys where images have one size."""

    def check(self, tower: Any) -> None:
        super().check(tower)
        if tower.hidden_stride < 1 or tower.side % tower.hidden_stride:  # transformers fails
            raise ConfigError(
                f"config.json: hidden_stride={tower.hidden_stride} does not divide {tower.side}, the patches of a side"
            )


@dataclass(frozen=True, kw_only=True)
class FramedWordsConfig(WordsConfig):
    """The keys of Ovis 2.5: an image and a video have a word before them and one behind."""

    visual_indicator_token_ids: tuple[int, ...] = (151672, 151673, 151674, 151675)


def _matrix(name: str, param: str, layout: str, bias: str, when: str) -> tuple[Map, Map]:
    return Map(f"{name}.weight", f"{param}.kernel", layout), Map(f"{name}.bias", f"{param}.bias", bias, when)


OVIS_VIT = Tower(
    "ovis_vit",
    "Ovis 2",
    OvisVitConfig,
    (
        *with_bias("transformer.embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("transformer.embeddings.position_embedding.weight", "positions", "P D"),
        *rms_norm("transformer.embeddings.rms_norm", "patch_norm"),
        *under(
            "transformer.encoder.layers.{L}",
            "layers.{L}",
            *rms_norm("rms_norm1", "attn_norm"),
            *rms_norm("rms_norm2", "mlp_norm"),
            *(
                row
                for x in "qkv"
                for row in _matrix(f"attention.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H", "qkv_bias")
            ),
            *_matrix("attention.out_proj", "attn.o", OUT_OF_HEADS, "D", "qkv_bias"),
            *_matrix("ffn.gate_proj", "mlp.gate", UP, "F", "mlp_bias"),
            *_matrix("ffn.up_proj", "mlp.up", UP, "F", "mlp_bias"),
            *_matrix("ffn.down_proj", "mlp.down", DOWN, "D", "mlp_bias"),
        ),
        *rms_norm("transformer.rms_norm", "norm"),
        Map("head_linear.weight", "words.kernel", "G M -> M G"),
        *layer_norm("head_norm", "words_norm", "G"),
    ),
    f"{OVIS_MODULES}:OvisVit",
)

_TABLE = (Map(".weight", "table", "V O"),)
VISUAL_WORDS = Projector(SquareWordsConfig, _TABLE, f"{OVIS_MODULES}:VisualWords")
"""The table of visual words."""

FRAMED_WORDS = Projector(FramedWordsConfig, _TABLE, f"{OVIS_MODULES}:VisualWords")
"""The same of Ovis 2.5."""


@dataclass(frozen=True, kw_only=True)
class OvisNavitConfig(QwenVitConfig):
    """The keys of `vit_config` of Ovis 2.5, and `visual_vocab_size` beside it. V and G as in `OvisVitConfig`."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{"fullatt_block_indexes": (None,), "num_patches": (-1,), "preserve_original_pe": (True,)},
        **{"temporal_patch_size": (1,), "use_rope": (True,)},
    }
    aliases: ClassVar[Mapping[str, str]] = {
        **QwenVitConfig.aliases,
        "hidden_stride": "spatial_merge_size",
        "num_channels": "in_channels",
        "visual_vocab_size": "vocab_size",
    }

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    image_size: int = 512
    patch_size: int = 16
    temporal_patch_size: int = 1
    vocab_size: int = 65536
    num_visual_indicator_tokens: int = 4

    @property
    def positions(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            **super().sizes,
            "V": self.vocab_size,
            "G": self.vocab_size - self.num_visual_indicator_tokens,
        }


OVIS_NAVIT = Tower(
    "ovis_navit",
    "Ovis 2.5",
    OvisNavitConfig,
    (
        *under(
            "vit.vision_model",
            "",
            *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
            Map("embeddings.position_embedding.weight", "positions", "P D"),
            *CLIP_LAYERS,
            *layer_norm("post_layernorm", "norm"),
        ),
        Map("head.0.weight", "words.kernel", "G M -> M G"),
        *layer_norm("head.1", "words_norm", "G"),
    ),
    f"{OVIS_MODULES}:OvisNavit",
)

OVIS25_VISION = Modality(
    VISION,
    OVIS_NAVIT,
    FRAMED_WORDS,
    prefix="visual_tokenizer.",
    projector_prefix="vte",
    placeholder=("visual_atom_token_id",),
    placeholder_id=151671,
)


def in_keys_of_ovis25(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json of Ovis 2.5 with `text_config` and `vision_config` in place of the release's keys,
    if it has these.

    Raises:
        ConfigError: a value that has to be an object is none.
    """
    if "text_config" in raw:
        return raw
    released = ("llm_config", "vit_config", "visual_vocab_size")
    words = {key: raw[key] for key in released[2:] if key in raw}
    return {
        **{key: value for key, value in raw.items() if key not in released},
        "text_config": object_of(raw, "llm_config"),
        "vision_config": {**object_of(raw, "vit_config"), **words},
    }


OVIS_VISION = Modality(
    VISION,
    OVIS_VIT,
    VISUAL_WORDS,
    prefix="model.vision_tower.",
    projector_prefix="model.visual_embeddings_table",
    placeholder_id=151665,
)
"""Ovis 2."""

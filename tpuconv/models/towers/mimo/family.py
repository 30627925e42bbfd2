"""The encoders of MiMo V2.5 and V2.6, and how the model sees and hears: configs and tables."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.jsonfile import short
from tpuconv.models.common.beside import AUDIO, VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.qwen_vit.family import (
    EXAONE_VIT,
    QWEN25_VISION_KEYS,
    QwenVitConfig,
)
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, UP, rms_norm, with_bias, without_bias
from tpuconv.notation.table import Map, under

MIMO_MODULES = "tpuconv.models.towers.mimo.modules"
ROWS_FIRST, COLUMNS_FIRST, ALL = 0, 1, -1
"""The values of `vit_window_attn_types`: the order whose neighbours a layer sees."""


@dataclass(frozen=True, kw_only=True)
class MimoVitConfig(QwenVitConfig):
    """The keys of `vision_config`. Most layers see `visual_token_window_size` patches before and behind a patch, in the
    order of rows or of columns. vLLM's `Mimo_VLVisionConfig` has the same defaults."""

    aliases: ClassVar[Mapping[str, str]] = QWEN25_VISION_KEYS
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rms_norm_eps": (1e-6,)}

    depth: int = 28
    hidden_size: int = 1280
    intermediate_size: int = 4608
    num_heads: int = 32
    num_key_value_heads: int | None = 8
    qk_channels: int = 64
    kv_channels: int = 64
    hidden_act: str = "silu"
    patch_size: int = 16
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    vit_window_attn_types: tuple[int, ...] | None = None
    visual_token_window_size: int = 64
    use_sink: bool = False

    def contradictions(self) -> Iterator[str]:
        kinds = self.vit_window_attn_types or ()
        if len(kinds) != self.depth and (kinds or self.use_sink):
            yield f"vit_window_attn_types is of {len(kinds)} layers, and depth={self.depth}"
        if others := set(kinds) - {ROWS_FIRST, COLUMNS_FIRST, ALL}:
            yield f"vit_window_attn_types has {min(others)}, not 0, 1 or -1"
        if self.kv_channels != self.qk_channels or self.qk_channels % 4 or not self.qk_channels:
            yield f"qk_channels={self.qk_channels} and kv_channels={self.kv_channels} are not the same multiple of 4"
        if not self.visual_token_window_size:
            yield "visual_token_window_size=0"
        if self.num_heads % self.key_heads:
            yield f"num_heads={self.num_heads} is no multiple of num_key_value_heads={self.key_heads}"

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_key_value_heads or self.num_heads

    def sees_all(self, layer: int) -> bool:
        """Returns whether the patches of a layer see all of their frame."""
        return layer in self.fullatt_block_indexes

    def by_columns(self, layer: int) -> bool:
        """Returns whether the window of a layer is of patches in the order of columns."""
        return (self.vit_window_attn_types or (ALL,) * self.depth)[layer] == COLUMNS_FIRST

    @property
    def sizes(self) -> dict[str, Any]:
        layers, full = range(self.depth) if self.use_sink else (), set(self.fullatt_block_indexes)
        return {
            **super().sizes,
            "H": self.qk_channels,
            "K": self.key_heads,
            "J": tuple(layer for layer in layers if layer not in full),
        }


MIMO_VIT = Tower(
    "mimo_vit",
    "MiMo V2.5",
    MimoVitConfig,
    (*EXAONE_VIT.rows, Map("blocks.{J}.attn.sinks", "layers.{J}.attn.sinks", "N")),
    f"{MIMO_MODULES}:MimoVit",
)

MIMO_MERGER = Projector(
    ProjectorConfig,
    (
        Map("ln_q.weight", "norm.scale", "D"),
        *without_bias("mlp.0", "up", "W M -> M W"),
        *without_bias("mlp.2", "down", "O W -> W O"),
    ),
    f"{MIMO_MODULES}:MimoMerger",
)
"""A layer norm of each patch, blocks of patches are joined, and two matrices; nothing has a bias."""

MIMO_VISION = Modality(
    VISION,
    MIMO_VIT,
    MIMO_MERGER,
    prefix="visual.",
    projector_prefix="visual.merger.",
    placeholder_id=151655,
)


@dataclass(frozen=True, kw_only=True)
class MimoSoundConfig(TowerConfig):
    """The keys of `audio_config`. A sound is rows of codes, one of each of Y tables of V vectors; `group_size` rows are
    one feature. Defaults are the values of MiMo V2.5."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{"add_post_norm": (True,), "input_full_attention": (True,), "partial_rotary_factor": (1.0,)},
        "projection_layers": (2,),
    }

    audio_channels: int = 20
    group_size: int = 4
    speech_vocab_size: int | str = "1280"
    input_local_dim: int = 1024
    input_local_layers: int = 6
    input_local_attn_heads: int = 16
    input_local_head_dim: int = 64
    input_local_intermediate_size: int = 4096
    rope_theta: float = 640000.0
    hidden_act: ClassVar[str] = "silu"

    def contradictions(self) -> Iterator[str]:
        if not re.fullmatch(r"([0-9]{1,9})(-\1)*", str(self.speech_vocab_size)):
            yield f"speech_vocab_size={short(self.speech_vocab_size)} is not the same number for all tables"
        if self.input_local_attn_heads * self.input_local_head_dim != self.input_local_dim:
            yield (
                f"input_local_attn_heads={self.input_local_attn_heads} times input_local_head_dim="
                f"{self.input_local_head_dim} is not input_local_dim={self.input_local_dim}"
            )
        if self.input_local_head_dim % 2:
            yield f"input_local_head_dim={self.input_local_head_dim} is odd"
        if not self.group_size:
            yield "group_size=0"

    @property
    def code_count(self) -> int:
        """The number of vectors of each table."""
        return int(str(self.speech_vocab_size).partition("-")[0])

    @property
    def sizes(self) -> dict[str, Any]:
        joined = self.group_size * self.input_local_dim
        return {
            "D": self.input_local_dim,
            "N": self.input_local_attn_heads,
            "H": self.input_local_head_dim,
            "F": self.input_local_intermediate_size,
            "L": self.input_local_layers,
            "V": self.code_count,
            "Y": self.audio_channels,
            "M": joined,
            "W": 4 * joined,
        }


MIMO_SOUND = Tower(
    "mimo_sound",
    "MiMo V2.5",
    MimoSoundConfig,
    (
        Map("speech_embeddings.{Y}.weight", "tables", "V D -> Y V D"),
        *under(
            "audio_encoder.input_local_transformer.layers.{L}",
            "layers.{L}",
            *rms_norm("input_layernorm", "attn_norm"),
            *rms_norm("post_attention_layernorm", "mlp_norm"),
            *(row for x in "qkv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
            *without_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS),
            *without_bias("mlp.gate_proj", "mlp.gate", UP),
            *without_bias("mlp.up_proj", "mlp.up", UP),
            *without_bias("mlp.down_proj", "mlp.down", DOWN),
        ),
        *rms_norm("audio_encoder.input_local_transformer.norm", "norm"),
    ),
    f"{MIMO_MODULES}:MimoSound",
)

MIMO_SOUND_MLP = Projector(
    ProjectorConfig,
    (*without_bias("mlp.0", "up", "W M -> M W"), *without_bias("mlp.2", "down", "O W -> W O")),
    f"{MIMO_MODULES}:SoundMLP",
)
"""Two matrices."""

MIMO_AUDIO = Modality(
    AUDIO,
    MIMO_SOUND,
    MIMO_SOUND_MLP,
    prefix="",
    projector_prefix="audio_encoder.projection.",
    replaces=("audio_encoder", "speech_embeddings"),
    placeholder=("audio_token_id",),
    placeholder_id=151669,
    config_key="audio_config",
)

"""The tower of Ovis 2 and its table of visual words: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, PATCH_MATRIX, UP, layer_norm, rms_norm, with_bias
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
        if tower.hidden_stride < 1 or tower.side % tower.hidden_stride:  # transformers fails
            raise ConfigError(
                f"config.json: hidden_stride={tower.hidden_stride} does not divide {tower.side}, the patches of a side"
            )


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

VISUAL_WORDS = Projector(WordsConfig, (Map(".weight", "table", "V O"),), f"{OVIS_MODULES}:VisualWords")
"""The table of visual words."""

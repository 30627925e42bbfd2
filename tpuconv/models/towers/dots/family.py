"""The tower of dots.ocr, and how the model sees: config and table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.beside import VISION, Modality, Tower
from tpuconv.models.common.wrapper import text_apart
from tpuconv.models.towers.qwen_vit.family import JOINED_QKV, OLDER_MERGER, QwenVitConfig
from tpuconv.models.towers.rows import DOWN, OUT_OF_HEADS, PATCH_MATRIX, UP, rms_norm, with_bias, without_bias
from tpuconv.notation.table import under


@dataclass(frozen=True, kw_only=True)
class DotsVitConfig(QwenVitConfig):
    """The tower of dots.ocr, whose width is `embed_dim`; `hidden_size` is the width of the text model. vLLM's
    `DotsVisionConfig` has the same defaults."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{"use_bias": (False,), "post_norm": (True,), "is_causal": (False,), "temporal_patch_size": (1,)},
        "hidden_act": ("silu",),
    }
    aliases: ClassVar[Mapping[str, str]] = {
        **QwenVitConfig.aliases,
        "num_channels": "in_channels",
        "hidden_size": "out_hidden_size",
        "embed_dim": "hidden_size",
    }

    depth: int = 42
    hidden_size: int = 1536
    intermediate_size: int = 4224
    num_heads: int = 12
    hidden_act: str = "silu"
    patch_size: int = 14
    temporal_patch_size: int = 1
    rms_norm_eps: float = 1e-5


DOTS_VIT = Tower(
    "dots_vit",
    "dots.ocr",
    DotsVitConfig,
    (
        *with_bias("patch_embed.patchifier.proj", "patch", PATCH_MATRIX, "D"),
        *rms_norm("patch_embed.patchifier.norm", "patch_norm"),
        *under(
            "blocks.{L}",
            "layers.{L}",
            JOINED_QKV,
            *rms_norm("norm1", "attn_norm"),
            *rms_norm("norm2", "mlp_norm"),
            *without_bias("attn.proj", "attn.o", OUT_OF_HEADS),
            *without_bias("mlp.fc1", "mlp.gate", UP),
            *without_bias("mlp.fc3", "mlp.up", UP),
            *without_bias("mlp.fc2", "mlp.down", DOWN),
        ),
        *rms_norm("post_trunk_norm", "norm"),
    ),
    "tpuconv.models.towers.dots.modules:DotsVit",
)

DOTS_VISION = Modality(
    VISION,
    DOTS_VIT,
    OLDER_MERGER,
    prefix="vision_tower.",
    projector_prefix="vision_tower.merger.",
    placeholder_id=151665,
)


def in_keys_of_dots(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json of dots.ocr with the keys of Qwen2, which stand at its root, in `text_config`."""
    return text_apart(raw, "qwen2")

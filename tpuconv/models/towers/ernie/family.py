"""The tower of ERNIE 4.5 VL, the resampler behind it, and how the model sees: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.towers.qwen_vit.family import QWEN2_VIT, QwenVitConfig
from tpuconv.models.towers.rows import layer_norm, rms_norm, with_bias, without_bias

ERNIE_VIT_MODULES = "tpuconv.models.towers.ernie.modules"


@dataclass(frozen=True, kw_only=True)
class ErnieVitConfig(QwenVitConfig):
    """The tower of ERNIE 4.5 VL, whose patches are of one frame. E is the width of the merged patches of two frames."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"temporal_patch_size": (1,), "temporal_merge_size": (2,)}

    depth: int = 32
    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_heads: int = 16
    hidden_act: str = "quick_gelu"
    patch_size: int = 14
    temporal_patch_size: int = 1
    rms_norm_eps: float = 1e-6

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = super().sizes
        return {**sizes, "E": 2 * sizes["M"]}


ERNIE_VIT = Tower(
    "ernie_vit",
    "ERNIE 4.5 VL",
    ErnieVitConfig,
    (
        *without_bias("patch_embed.proj", "patch", "D C -> C D"),
        *(row for row in QWEN2_VIT.rows if row.hf_names[0].startswith("blocks.")),
        *layer_norm("ln", "norm"),
    ),
    f"{ERNIE_VIT_MODULES}:ErnieVit",
)


@dataclass(frozen=True, kw_only=True)
class ResamplerConfig(ProjectorConfig):
    """The resampler, and the tokens around images and videos, which layers take as of these."""

    image_start_token_id: int = 101304
    image_end_token_id: int = 101305
    video_start_token_id: int = 101306
    video_end_token_id: int = 101307
    text_eps: float

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        return {**super().of_text(text), "text_eps": text.rms_norm_eps}

    @property
    def block_tokens(self) -> tuple[int, ...]:
        return (
            self.image_start_token_id,
            self.image_end_token_id,
            self.video_start_token_id,
            self.video_end_token_id,
        )


RESAMPLER = Projector(
    ResamplerConfig,
    (
        *with_bias("spatial_linear.0", "spatial.up", "W M -> M W", "W"),
        *with_bias("spatial_linear.2", "spatial.down", "M W -> W M", "M"),
        *layer_norm("spatial_linear.3", "spatial.norm", "M"),
        *with_bias("temporal_linear.0", "temporal.up", "W E -> E W", "W"),
        *with_bias("temporal_linear.2", "temporal.down", "M W -> W M", "M"),
        *layer_norm("temporal_linear.3", "temporal.norm", "M"),
        *with_bias("mlp", "matrix", "O M -> M O", "O"),
        *rms_norm("after_norm", "norm", "O"),
    ),
    f"{ERNIE_VIT_MODULES}:Resampler",
)
"""An MLP of s x s patches, one of pairs of frames, and a matrix."""

ERNIE_VISION = Modality(
    VISION,
    ERNIE_VIT,
    RESAMPLER,
    prefix="vision_model.",
    projector_prefix="model.resampler_model.",
    replaces=("vision_model", "vision_tower", "resampler_model"),
    placeholder_id=100295,
)
"""ERNIE 4.5 VL."""

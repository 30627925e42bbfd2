"""The tower of Phi-3-vision and Phi-3.5-vision, whose code is in the releases: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tpuconv.errors import ConfigError
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.common.encoder_keys import check_objects
from tpuconv.models.common.key_types import object_of
from tpuconv.models.common.wrapper import text_apart
from tpuconv.models.towers.clip.family import CLIP, ClipConfig
from tpuconv.models.towers.rows import with_bias
from tpuconv.notation.table import Map

PHI3_MODULES = "tpuconv.models.towers.phi3.modules"
KEYS_OF_IMAGES = ("embd_layer", "img_processor")
"""The keys of config.json that describe the projector and the tower."""
IMPLEMENTED_OF_IMAGES: Mapping[str, Mapping[str, Any]] = {
    "embd_layer": {
        **{"embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp"},
        **{"use_hd_transform": True, "with_learnable_separator": True},
    },
    "img_processor": {
        **{"name": "clip_vision_model", "model_name": "openai/clip-vit-large-patch14-336", "type_feature": "patch"},
    },
}
"""The values that are implemented; the releases have no others."""


@dataclass(frozen=True, kw_only=True)
class Phi3ClipConfig(ClipConfig):
    """CLIP ViT-L/14 for 336 pixels, which the releases name. A `vision_config` may say other sizes."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    image_size: int = 336
    patch_size: int = 14


@dataclass(frozen=True, kw_only=True)
class Phi3ImageEndsConfig(ProjectorConfig):
    """The keys of `img_processor` that the projector reads. M is the width of 2 x 2 patches, A the width between its
    matrices."""

    layer_idx: int = -2
    image_dim_out: int = 1024

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        check_objects(outer, IMPLEMENTED_OF_IMAGES)
        return super().from_hf(object_of(outer, "img_processor"), tower, text)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self.layer_idx,)

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.image_dim_out != tower.hidden_size or tower.side % 2 or not tower.side:
            raise ConfigError(
                f"config.json: image_dim_out={self.image_dim_out} does not fit an encoder of {tower.side} x "
                f"{tower.side} patches and the width {tower.hidden_size}"
            )

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out, "M": 4 * tower.hidden_size}


PHI3_CLIP = Tower("phi3_clip", "Phi-3-vision", Phi3ClipConfig, CLIP.rows, f"{PHI3_MODULES}:Phi3Clip")

PHI3_IMAGE_ENDS = Projector(
    Phi3ImageEndsConfig,
    (
        Map("sub_GN", "row_end", "1 1 1 M -> M"),
        Map("glb_GN", "between", "1 1 M -> M"),
        *with_bias("img_projection.0", "up", "A M -> M A", "A"),
        *with_bias("img_projection.2", "down", "O A -> A O", "O"),
    ),
    f"{PHI3_MODULES}:Phi3ImageEnds",
)
"""Blocks of 2 x 2 patches, vectors at the ends of rows and between tiles and whole image, and two matrices."""

PHI3_VISION = Modality(
    VISION,
    PHI3_CLIP,
    PHI3_IMAGE_ENDS,
    prefix="model.vision_embed_tokens.img_processor.vision_model.",
    projector_prefix="model.vision_embed_tokens.",
    placeholder_id=32044,
)


def in_keys_of_phi3_v(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json of Phi-3-vision with the keys of Phi-3, which stand at its root, in
    `text_config`."""
    return text_apart(raw, "phi3", KEYS_OF_IMAGES)

"""The vision encoders of Step-3, Step3-VL and Step-3.7: configs and tables. M and Z are the channels behind their two
convolutions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.towers.qwen_vit.family import JOINED_QKV, JOINED_QKV_BIAS
from tpuconv.models.towers.rows import DOWN, OUT_OF_HEADS, PATCH_MATRIX, UP, layer_norm, with_bias, without_bias
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map, under

STEP_MODULES = "tpuconv.models.towers.step_vit.modules"


@dataclass(frozen=True, kw_only=True)
class StepVitConfig(ImageConfig):
    """The keys of `vision_config`, by the names of the release or of transformers."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("use_abs_posemb", "use_ln_pre", "use_rope2d"), (True,)),
        **dict.fromkeys(("use_cls_token", "use_ln_post"), (False,)),
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
    }

    hidden_size: int = 1536
    num_hidden_layers: int = 47
    num_attention_heads: int = 16
    image_size: int = 728
    patch_size: int = 14
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    mlp_ratio: int | float = 8960 / 1536
    rope_theta: float = 1e4

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            **super().sizes,
            "F": int(self.hidden_size * self.mlp_ratio),
            "M": 2 * self.hidden_size,
            "Z": 4 * self.hidden_size,
            "r": 3,
            "s": 3,
        }


@dataclass(frozen=True, kw_only=True)
class StepMatrixConfig(ProjectorConfig):
    """The keys of the projector of Step-3.7."""

    projector_bias: bool = False


STEP_VIT = Tower(
    "step_vit",
    "Step-3.7-Flash",
    StepVitConfig,
    (
        *without_bias("conv1", "patch", PATCH_MATRIX),
        Map("positional_embedding", "positions", "P D"),
        *layer_norm("ln_pre", "pre_norm"),
        *under(
            "transformer.resblocks.{L}",
            "layers.{L}",
            *layer_norm("ln_1", "attn_norm"),
            *layer_norm("ln_2", "mlp_norm"),
            replace(JOINED_QKV, hf="attn.in_proj_weight"),
            replace(JOINED_QKV_BIAS, hf="attn.in_proj_bias"),
            *with_bias("attn.out_proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.c_fc", "mlp.up", UP, "F"),
            *with_bias("mlp.c_proj", "mlp.down", DOWN, "D"),
            Map("ls_1.gamma", "attn_scale", "D"),
            Map("ls_2.gamma", "mlp_scale", "D"),
        ),
        *with_bias("vit_downsampler1", "first", "M D r s -> r s D M", "M"),
        *with_bias("vit_downsampler2", "last", "Z M r s -> r s M Z", "Z"),
    ),
    f"{STEP_MODULES}:StepVit",
)

STEP_MATRIX = Projector(
    StepMatrixConfig,
    (
        Map(".weight", "matrix.kernel", "O Z -> Z O"),
        Map(".bias", "matrix.bias", "O", when="projector_bias"),
    ),
    f"{STEP_MODULES}:StepMatrix",
)
"""A matrix."""


STEP_VISION = Modality(
    VISION,
    STEP_VIT,
    STEP_MATRIX,
    prefix="vision_model.",
    projector_prefix="vit_large_projector",
    replaces=("vision_model", "vit_large_projector", "multi_modal_projector"),
    placeholder_id=151679,
)
"""Step-3.7."""

ROBOTICS_VISION = replace(
    STEP_VISION,
    tower=replace(
        STEP_VIT,
        name="released_step_vit",
        summary="Step3-VL-10B, Step-5-Preview",
        encoder=f"{STEP_MODULES}:ReleasedStepVit",
    ),
)
"""Step3-VL-10B and Step-5 Preview."""


@dataclass(frozen=True, kw_only=True)
class Step3VitConfig(ImageConfig):
    """The keys of `vision_config`. The defaults come from vLLM."""

    hidden_size: int = 1792
    intermediate_size: int = 3072
    num_hidden_layers: int = 63
    num_attention_heads: int = 16
    image_size: int = 728
    patch_size: int = 14
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    output_hidden_size: int = 4096

    @property
    def has_class_token(self) -> bool:
        return True


STEP3_VIT = Tower(
    "step3_vit",
    "Step-3",
    Step3VitConfig,
    (
        Map("embeddings.class_embedding", "class_token", "1 D -> D"),
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *under(
            "transformer.layers.{L}",
            "layers.{L}",
            *layer_norm("layer_norm1", "attn_norm"),
            *layer_norm("layer_norm2", "mlp_norm"),
            replace(JOINED_QKV, hf="self_attn.qkv_proj.weight"),
            replace(JOINED_QKV_BIAS, hf="self_attn.qkv_proj.bias"),
            *with_bias("self_attn.out_proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
        ),
    ),
    f"{STEP_MODULES}:Step3Vit",
)


@dataclass(frozen=True, kw_only=True)
class DownsampledConfig(ProjectorConfig):
    """The keys of the projector of Step-3: two convolutions, and a matrix."""

    understand_projector_stride: int = 1
    projector_bias: bool = True

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.understand_projector_stride < 1 or tower.side < 2:
            raise UnsupportedConfig(
                f"understand_projector_stride={self.understand_projector_stride} of {tower.side} x {tower.side} "
                "patches is not implemented",
                hint=TEXT_ALONE,
            )

    def sizes(self, tower: Any) -> dict[str, Any]:
        width = tower.output_hidden_size
        return {"O": self.out, "M": width, "Z": 2 * width, "r": 2, "s": 2, "t": 3, "u": 3}


DOWNSAMPLED = Projector(
    DownsampledConfig,
    (
        *with_bias("vit_downsampler", "first", "M D r s -> r s D M", "M"),
        *with_bias("vit_downsampler2", "last", "Z M t u -> t u M Z", "Z"),
        Map("vit_large_projector.weight", "matrix.kernel", "O Z -> Z O"),
        Map("vit_large_projector.bias", "matrix.bias", "O", when="projector_bias"),
    ),
    f"{STEP_MODULES}:Downsampled",
)
"""Two convolutions and a matrix."""

STEP3_VISION = Modality(
    VISION,
    STEP3_VIT,
    DOWNSAMPLED,
    prefix="vision_model.",
    projector_prefix="",
    replaces=("vision_model", "vit_downsampler", "vit_downsampler2", "vit_large_projector"),
    placeholder_id=128001,
)
"""Step-3."""

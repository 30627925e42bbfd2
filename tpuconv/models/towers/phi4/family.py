"""The encoders of Phi-4-multimodal: configs and tables, with the names of transformers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.qwen_audio.family import halved
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, layer_norm, with_bias
from tpuconv.models.towers.siglip.family import SIGLIP, ImageConfig
from tpuconv.notation.table import Map, under

PHI4_MODULES = "tpuconv.models.towers.phi4.modules"


@dataclass(frozen=True, kw_only=True)
class Phi4ImageConfig(ImageConfig):
    """The keys of `vision_config`: SigLIP, which sees tiles of `crop_size` pixels a side."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ImageConfig.only,
        **{"hd_transform_order": ("sub_glb",), "image_token_compression_cls": ("avg_pool_2d",)},
        **{"projection_cls": ("mlp",), "use_hd_transform": (True,), "with_learnable_separator": (True,)},
    }
    vision_use_head: ClassVar[bool] = True

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    image_size: int = 448
    patch_size: int = 14
    crop_size: int = 448

    def contradictions(self) -> Iterator[str]:
        if self.crop_size != self.image_size:
            yield f"crop_size={self.crop_size} is not image_size={self.image_size}"
        if self.side < 2:
            yield f"image_size={self.image_size} is less than two patches of {self.patch_size}"


@dataclass(frozen=True, kw_only=True)
class Phi4ImageEndsConfig(ProjectorConfig):
    """The keys of `vision_config` that the projector of images reads. A is the width between its matrices."""

    feature_layer: int = -2

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf(outer.get("vision_config") or {}, tower, text)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self.feature_layer,)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out}


PHI4_VIT = Tower("phi4_vit", "Phi-4-multimodal", Phi4ImageConfig, SIGLIP.rows, f"{PHI4_MODULES}:Phi4Vit")

PHI4_IMAGE_ENDS = Projector(
    Phi4ImageEndsConfig,
    (
        Map("sub_img_feature_extensor", "row_end", "1 1 1 D -> D"),
        Map("global_img_feature_extensor", "between", "1 1 D -> D"),
        *with_bias("img_projection_up", "up", "A D -> D A", "A"),
        *with_bias("img_projection_down", "down", "O A -> A O", "O"),
    ),
    f"{PHI4_MODULES}:Phi4ImageEnds",
)
"""The mean of 2 x 2 patches, vectors at the ends of rows and between tiles and whole image, and two matrices."""


@dataclass(frozen=True, kw_only=True)
class Phi4SoundConfig(TowerConfig):
    """The keys of `audio_config`. M counts mel frequencies, G what three convolutions leave of them; C and W are the
    channels of these, E, K and J the ones in a layer, R the distances with a bias. Without a `chunk_size` all frames
    see each other."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{"time_reduction": (8,), "downsample_rate": (1,), "projection_cls": ("mlp",), "batch_norm": (False,)},
        **{"bias_in_glu": (True,), "causal": (True,), "cnn_layer_norm": (True,), "ext_pw_kernel_size": (1,)},
        **{"input_layer": ("nemo_conv",), "relative_attention_bias_args.type": ("t5",)},
        **{"use_conv_downsample": (False,), "use_qformer": (False,)},
    }
    aliases: ClassVar[Mapping[str, str]] = {"activation": "mlp_activation", "conv_glu_type": "gate_activation"}

    input_size: int = 80
    hidden_size: int = 1024
    intermediate_size: int = 1536
    num_blocks: int = 24
    num_attention_heads: int = 16
    mlp_activation: str = "swish"
    gate_activation: str = "swish"
    conv_activation: str = "swish"
    nemo_activation: str = "relu"
    chunk_size: int | None = None
    left_chunk: int = 18
    ext_pw_out_channel: int = 1024
    depthwise_separable_out_channel: int = 1024
    depthwise_multiplier: int = 1
    kernel_size: int = 3
    bias_max_distance: int = 1000
    bias_symmetric: bool = False
    nemo_conv_channels: int = 1024

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        chunk = raw.get("chunk_size", -1)
        return super().from_hf({**raw, "chunk_size": None if type(chunk) is int and chunk < 0 else chunk})

    def contradictions(self) -> Iterator[str]:
        for key in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
            if (value := getattr(self, key)) != self.hidden_size:
                yield f"{key}={value} is not hidden_size={self.hidden_size}"
        for key in ("input_size", "kernel_size", "depthwise_multiplier", "bias_max_distance", "chunk_size"):
            if getattr(self, key) == 0:
                yield f"{key}=0"

    @property
    def sizes(self) -> dict[str, Any]:
        distances = self.bias_max_distance
        return {
            "M": self.input_size,
            "G": halved(self.input_size, 3),
            "C": self.nemo_conv_channels,
            "W": self.nemo_conv_channels,
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": self.intermediate_size,
            "L": self.num_blocks,
            "E": self.ext_pw_out_channel,
            "K": self.ext_pw_out_channel * self.depthwise_multiplier,
            "J": self.depthwise_separable_out_channel,
            "R": distances if self.bias_symmetric else 2 * distances,
            "c": self.kernel_size,
            "p": 3,
            "q": 3,
        }


@dataclass(frozen=True, kw_only=True)
class Phi4SoundEndsConfig(ProjectorConfig):
    """The projectors of sounds, without keys. A is the width between the matrices of each."""

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({}, tower, text)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out}


GATED_ROWS = (
    Map("gate_up_proj.weight", ("up.kernel", "gate.kernel"), "(F + F) D -> D F, D F"),
    Map("gate_up_proj.bias", ("up.bias", "gate.bias"), "(F + F) -> F, F"),
    *with_bias("down_proj", "down", DOWN, "D"),
    *layer_norm("layer_norm", "norm"),
)

PHI4_CONFORMER = Tower(
    "phi4_conformer",
    "Phi-4-multimodal",
    Phi4SoundConfig,
    (
        Map("encoder_embedding.global_mean", "mean", "M"),
        Map("encoder_embedding.global_invstd", "scale", "M"),
        *under(
            "embed",
            "entry",
            *with_bias("conv.0", "first", "C 1 p q -> p q 1 C", "C"),
            *(
                row
                for number, name in enumerate(("second", "third"))
                for row in (
                    *with_bias(f"conv.{3 * number + 2}", f"{name}.by_channel", "C 1 p q -> p q 1 C", "C"),
                    *with_bias(f"conv.{3 * number + 3}", f"{name}.matrix", "W C 1 1 -> C W", "W"),
                )
            ),
            *with_bias("out", "matrix", "D (W G) -> W G D", "D"),
        ),
        Map("relative_attention_bias_layer.bias_values.weight", "distance_bias", "R N"),
        *under(
            "encoders.{L}",
            "layers.{L}",
            *under("feed_forward_in", "mlp_before", *GATED_ROWS),
            *layer_norm("layer_norm_att", "attn.norm"),
            *(row for x in "qkv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
            *with_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS, "D"),
            *under(
                "conv",
                "conv",
                *layer_norm("layer_norm", "norm"),
                Map("glu.ext_pw_conv_1d.weight", ("up.kernel", "gate.kernel"), "(E + E) D 1 -> D E, D E"),
                Map("glu.ext_pw_conv_1d.bias", ("up.bias", "gate.bias"), "(E + E) -> E, E"),
                Map("glu.b1", "up_shift", "1 E 1 -> E"),
                Map("glu.b2", "gate_shift", "1 E 1 -> E"),
                *with_bias("dw_sep_conv_1d.dw_conv", "by_channel", "K 1 c -> c K", "K"),
                *with_bias("dw_sep_conv_1d.pw_conv", "middle", "J K 1 -> K J", "J"),
                *with_bias("ext_pw_conv_1d", "down", "D J 1 -> J D", "D"),
            ),
            *under("feed_forward_out", "mlp_after", *GATED_ROWS),
            *layer_norm("layer_norm", "norm"),
        ),
    ),
    f"{PHI4_MODULES}:Phi4Conformer",
)

PHI4_SOUND_ENDS = Projector(
    Phi4SoundEndsConfig,
    tuple(
        row
        for ours, theirs in (("speech", "speech"), ("beside_images", "vision_speech"))
        for row in (
            *with_bias(f"up_proj_for_{theirs}", f"{ours}.up", "A D -> D A", "A"),
            *with_bias(f"down_proj_for_{theirs}", f"{ours}.down", "O A -> A O", "O"),
        )
    ),
    f"{PHI4_MODULES}:Phi4SoundEnds",
)
"""Two matrices for sounds alone, and two for sounds beside images."""

"""The encoders of Gemma 4: configs and tables. A limited matrix limits its input and its output to ranges that are
tensors too."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tpuconv.models.common.beside import AUDIO, VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.rows import (
    DOWN,
    IN_HEADS,
    IN_KV_HEADS,
    OUT_OF_HEADS,
    UP,
    layer_norm,
    rms_norm,
    with_bias,
    without_bias,
)
from tpuconv.notation.table import Map, under

GEMMA4_MODULES = "tpuconv.models.towers.gemma4"
LIMITS = ("input_min", "input_max", "output_min", "output_max")


def with_limits(name: str, param: str, layout: str) -> tuple[Map, ...]:
    """Returns the rows of a matrix and of the limits of its input and its output."""
    limits = (Map(f"{name}.{x}", f"{param}.{x}", "", when="use_clipped_linears", buffer=True) for x in LIMITS)
    return Map(f"{name}.linear.weight", f"{param}.kernel", layout), *limits


@dataclass(frozen=True, kw_only=True)
class Gemma4VitConfig(TowerConfig):
    """The keys of `vision_config`. W is the width of what the projector reads."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attention_bias": (False, None)}

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False

    def contradictions(self) -> Iterator[str]:
        if self.num_attention_heads % max(1, self.num_key_value_heads):
            yield f"num_attention_heads={self.num_attention_heads} is no multiple of {self.num_key_value_heads}"
        if self.head_dim % 4:
            yield f"head_dim={self.head_dim} is no multiple of 4"

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "K": self.num_key_value_heads,
            "H": self.head_dim,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "C": 3 * self.patch_size**2,
            "A": 2,
            "P": self.position_embedding_size,
            "W": self.hidden_size,
        }


GEMMA4_VIT = Tower(
    "gemma4_vit",
    "Gemma 4",
    Gemma4VitConfig,
    (
        *without_bias("patch_embedder.input_proj", "patch", "D C -> C D"),
        Map("patch_embedder.position_embedding_table", "positions", "A P D"),
        *under(
            "encoder.layers.{L}",
            "layers.{L}",
            *rms_norm("input_layernorm", "attn_norm"),
            *rms_norm("post_attention_layernorm", "post_attn_norm"),
            *rms_norm("pre_feedforward_layernorm", "mlp_norm"),
            *rms_norm("post_feedforward_layernorm", "post_mlp_norm"),
            *with_limits("self_attn.q_proj", "attn.q", IN_HEADS),
            *with_limits("self_attn.k_proj", "attn.k", IN_KV_HEADS),
            *with_limits("self_attn.v_proj", "attn.v", IN_KV_HEADS),
            *with_limits("self_attn.o_proj", "attn.o", OUT_OF_HEADS),
            *rms_norm("self_attn.q_norm", "attn.q_norm", "H"),
            *rms_norm("self_attn.k_norm", "attn.k_norm", "H"),
            *with_limits("mlp.gate_proj", "mlp.gate", UP),
            *with_limits("mlp.up_proj", "mlp.up", UP),
            *with_limits("mlp.down_proj", "mlp.down", DOWN),
        ),
        *(Map(f"std_{x}", f"std_{x}", "D", when="standardize", buffer=True) for x in ("bias", "scale")),
    ),
    f"{GEMMA4_MODULES}.vision:Gemma4Vit",
)


@dataclass(frozen=True, kw_only=True)
class UsmConfig(TowerConfig):
    """The keys of `audio_config`. C and E are the channels of the two convolutions, W is the width of the output.

    Attributes:
        scales_keys: whether keys have a factor.
    """

    scales_keys: ClassVar[bool] = True
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attention_context_right": (0,),
        "attention_invalid_logits_value": (-1e9,),
    }

    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    hidden_act: str = "silu"
    subsampling_conv_channels: tuple[int, ...] = (128, 32)
    conv_kernel_size: int = 5
    residual_weight: float = 0.5
    attention_chunk_size: int = 12
    attention_context_left: int = 13
    attention_logit_cap: float = 50.0
    use_clipped_linears: bool = True
    rms_norm_eps: float = 1e-6
    gradient_clipping: float = 1e10
    output_proj_dims: int = 1536

    def contradictions(self) -> Iterator[str]:
        if len(self.subsampling_conv_channels) != 2:
            yield f"subsampling_conv_channels={list(self.subsampling_conv_channels)} are not 2"
        if self.hidden_size % (2 * max(1, self.num_attention_heads)):
            yield f"hidden_size={self.hidden_size} is no even number for each of {self.num_attention_heads} heads"
        if self.attention_chunk_size != self.attention_context_left - 1:  # else distances are counted in another way
            yield f"attention_chunk_size={self.attention_chunk_size} is not attention_context_left - 1"

    @property
    def tokens_seen(self) -> int:
        """The number of last tokens that a token sees, itself among them."""
        return self.attention_context_left - 1

    @property
    def sizes(self) -> dict[str, Any]:
        first, second = self.subsampling_conv_channels
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": 4 * self.hidden_size,
            "G": 2 * self.hidden_size,
            "L": self.num_hidden_layers,
            "C": first,
            "E": second,
            "M": first // 4 * second,
            "p": 3,
            "q": 3,
            "c": self.conv_kernel_size,
            "A": self.hidden_size,
            "W": self.output_proj_dims,
        }


@dataclass(frozen=True, kw_only=True)
class PatchesConfig(TowerConfig):
    """The keys of `vision_config` of the variant without encoders."""

    patch_size: int = 16
    pooling_kernel_size: int = 3
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    rms_norm_eps: float = 1e-6

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "D": self.mm_embed_dim,
            "C": 3 * (self.patch_size * self.pooling_kernel_size) ** 2,
            "P": self.mm_posemb_size,
            "A": 2,
            "W": self.mm_embed_dim,
        }


PATCHES = Tower(
    "gemma4_patches",
    "Gemma 4 without encoders",
    PatchesConfig,
    (
        *layer_norm("patch_ln1", "patch_norm", "C"),
        *with_bias("patch_dense", "patch", "D C -> C D", "D"),
        *layer_norm("patch_ln2", "norm"),
        Map("pos_embedding", "positions", "P A D"),
        *layer_norm("pos_norm", "position_norm"),
    ),
    f"{GEMMA4_MODULES}.unified:Patches",
)


@dataclass(frozen=True, kw_only=True)
class FramesConfig(TowerConfig):
    """The keys of `audio_config` of the variant without encoders."""

    audio_embed_dim: int = 640
    rms_norm_eps: float = 1e-6

    @property
    def sizes(self) -> dict[str, Any]:
        return {"W": self.audio_embed_dim}


FRAMES = Tower("gemma4_frames", "Gemma 4 without encoders", FramesConfig, (), f"{GEMMA4_MODULES}.unified:Frames")


def _half_mlp(name: str, param: str) -> tuple[Map, ...]:
    return under(
        name,
        param,
        *rms_norm("pre_layer_norm", "norm"),
        *with_limits("ffw_layer_1", "up", UP),
        *with_limits("ffw_layer_2", "down", DOWN),
        *rms_norm("post_layer_norm", "post_norm"),
    )


USM = Tower(
    "usm",
    "Gemma 4 E2B and E4B",
    UsmConfig,
    (
        Map("subsample_conv_projection.layer0.conv.weight", "convs.0.kernel", "C 1 p q -> p q 1 C"),
        Map("subsample_conv_projection.layer0.norm.weight", "conv_norms.0.scale", "C"),
        Map("subsample_conv_projection.layer1.conv.weight", "convs.1.kernel", "E C p q -> p q C E"),
        Map("subsample_conv_projection.layer1.norm.weight", "conv_norms.1.scale", "E"),
        *without_bias("subsample_conv_projection.input_proj_linear", "entry", "D M -> M D"),
        *under(
            "layers.{L}",
            "layers.{L}",
            *_half_mlp("feed_forward1", "mlp_before"),
            *rms_norm("norm_pre_attn", "attn_norm"),
            *rms_norm("norm_post_attn", "post_attn_norm"),
            *(row for x in "qkv" for row in with_limits(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS)),
            *with_limits("self_attn.post", "attn.o", OUT_OF_HEADS),
            *without_bias("self_attn.relative_k_proj", "attn.distance", "(N H) D -> D N H"),
            Map("self_attn.per_dim_scale", "attn.scale", "H"),
            *rms_norm("lconv1d.pre_layer_norm", "conv.norm"),
            *with_limits("lconv1d.linear_start", "conv.up", "G D -> D G"),
            Map("lconv1d.depthwise_conv1d.weight", "conv.kernel", "D 1 c -> c D"),
            *rms_norm("lconv1d.conv_norm", "conv.post_norm"),
            *with_limits("lconv1d.linear_end", "conv.down", "D A -> A D"),
            *_half_mlp("feed_forward2", "mlp_after"),
            *rms_norm("norm_out", "norm"),
        ),
        *with_bias("output_proj", "out", "W D -> D W", "W"),
    ),
    f"{GEMMA4_MODULES}.audio:Usm",
)

NORMED_MATRIX = Projector(
    ProjectorConfig,
    without_bias("embedding_projection", "matrix", "O W -> W O"),
    f"{GEMMA4_MODULES}.limits:NormedMatrix",
)
"""A norm without a scale, and a matrix."""


GEMMA4_VISION = Modality(
    VISION,
    GEMMA4_VIT,
    NORMED_MATRIX,
    prefix="model.vision_tower.",
    projector_prefix="model.embed_vision.",
    placeholder_id=258880,
)

GEMMA4_PATCHES = replace(
    GEMMA4_VISION,
    tower=PATCHES,
    prefix="model.vision_embedder.",
    other_parts={"vision_embedder.": "embed_vision.", "embed_vision.": "embed_vision.multimodal_embedder."},
)
"""Gemma 4 without encoders."""

GEMMA4_AUDIO = Modality(
    AUDIO,
    USM,
    NORMED_MATRIX,
    prefix="model.audio_tower.",
    projector_prefix="model.embed_audio.",
    placeholder=("audio_token_id",),
    placeholder_id=258881,
    config_key="audio_config",
)

GEMMA4_FRAMES = replace(GEMMA4_AUDIO, tower=FRAMES, replaces=("embed_audio",))
"""Gemma 4 without encoders."""

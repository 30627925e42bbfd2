"""The tower of LFM3-VL: config and table. I are the layers with attention, J the layers with a convolution."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.beside import VISION, Modality, Projector, Tower
from tpuconv.models.towers.packed_vit.family import CLIP_KEYS, WideMergerConfig
from tpuconv.models.towers.qwen_vit.family import QwenVitConfig
from tpuconv.models.towers.rows import (
    DOWN,
    IN_KV_HEADS,
    OUT_OF_HEADS,
    UP,
    layer_norm,
    rms_norm,
    with_bias,
    without_bias,
)
from tpuconv.notation.table import Map, under

GATED_MODULES = "tpuconv.models.towers.packed_vit.gated"
GATED_KINDS = ("conv", "full_attention")


@dataclass(frozen=True, kw_only=True)
class GatedVitConfig(QwenVitConfig):
    """The keys of `vision_config` of LFM3-VL. A is the width as an input, c the taps of a convolution."""

    aliases: ClassVar[Mapping[str, str]] = CLIP_KEYS

    depth: int = 14
    hidden_size: int = 1024
    intermediate_size: int = 2560
    num_heads: int = 16
    num_key_value_heads: int = 8
    hidden_act: str = "silu"
    patch_size: int = 16
    rope_theta: float = 1e6
    layer_types: tuple[str, ...] | None = None
    conv_kernel_size: int = 3
    norm_eps: float = 1e-5

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        usual = tuple("conv" if i < 2 or i % 2 else "full_attention" for i in range(self.depth))
        return usual if self.layer_types is None else self.layer_types

    def contradictions(self) -> list[str]:
        wrong = [kind for kind in self.kinds if kind not in GATED_KINDS]
        if wrong or len(self.kinds) != self.depth:
            return [f"layer_types={list(self.kinds)} are no {self.depth} of {', '.join(GATED_KINDS)}"]
        return [] if self.conv_kernel_size % 2 else [f"conv_kernel_size={self.conv_kernel_size} is even"]

    @property
    def sizes(self) -> dict[str, Any]:
        conv = tuple(layer for layer, kind in enumerate(self.kinds) if kind == "conv")
        return {
            **super().sizes,
            "K": self.num_key_value_heads,
            "A": self.hidden_size,
            "c": self.conv_kernel_size**2,
            "r": self.conv_kernel_size,
            "s": self.conv_kernel_size,
            "I": tuple(layer for layer in range(self.depth) if layer not in conv),
            "J": conv,
        }


@dataclass(frozen=True, kw_only=True)
class NormedMergerConfig(WideMergerConfig):
    """The keys of the projector of LFM3-VL."""

    projector_hidden_act: str = "gelu"
    projector_hidden_size: int = 4096
    projector_bias: bool = True


GATED_VIT = Tower(
    "gated_vit",
    "LFM3-VL",
    GatedVitConfig,
    (
        *without_bias("patchifier", "patch", "D C -> C D"),
        *rms_norm("embedding_norm", "norm"),
        *under(
            "layers.{L}",
            "layers.{L}",
            *rms_norm("operator_norm", "attn_norm"),
            *rms_norm("ffn_norm", "mlp_norm"),
            *without_bias("feed_forward.w1", "mlp.gate", UP),
            *without_bias("feed_forward.w3", "mlp.up", UP),
            *without_bias("feed_forward.w2", "mlp.down", DOWN),
        ),
        *under(
            "layers.{I}",
            "layers.{I}",
            *without_bias("self_attn.q_proj", "attn.q", "(N H) D -> D N H"),
            *(row for x in "kv" for row in without_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_KV_HEADS)),
            *(row for x in "qk" for row in rms_norm(f"self_attn.{x}_layernorm", f"attn.{x}_norm", "H")),
            *without_bias("self_attn.out_proj", "attn.o", OUT_OF_HEADS),
        ),
        *under(
            "layers.{J}",
            "layers.{J}",
            Map(
                "conv.in_proj.weight",
                ("attn.before.kernel", "attn.behind.kernel", "attn.x.kernel"),
                "(A + A + A) D -> D A, D A, D A",
            ),
            Map("conv.spatial_conv.weight", "attn.taps", "D 1 r s -> (r s) D"),
            *without_bias("conv.out_proj", "attn.o", "A D -> D A"),
        ),
    ),
    f"{GATED_MODULES}:GatedVit",
)

NORMED_MERGER = Projector(
    NormedMergerConfig,
    (
        *layer_norm("layer_norm", "norm"),
        *with_bias("linear_1", "up", "W M -> M W", "W", "projector_bias"),
        *with_bias("linear_2", "down", "O W -> W O", "O", "projector_bias"),
    ),
    f"{GATED_MODULES}:NormedMerger",
)
"""A norm of each patch, and two matrices of each block."""


LFM3_VISION = Modality(
    VISION,
    GATED_VIT,
    NORMED_MERGER,
    prefix="model.vision_tower.",
    projector_prefix="model.multi_modal_projector.",
    placeholder_id=125030,
)
"""LFM3-VL."""

"""The encoder of Parakeet, and the projector of Nemotron Omni behind it: configs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.common.key_types import object_of
from tpuconv.models.common.rows import when
from tpuconv.models.towers.qwen_audio.family import halved
from tpuconv.models.towers.radio.family import squared_rows
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, UP, layer_norm, with_bias, without_bias
from tpuconv.notation.table import Map, under

PARAKEET_MODULES = "tpuconv.models.towers.parakeet.modules"
FREQUENCIES, WINDOW_SAMPLES = 257, 400
"""Sizes in the releases that have mel filters and a window: 512 samples are transformed, of which a window shows 25
ms."""


@dataclass(frozen=True, kw_only=True)
class ParakeetConfig(TowerConfig):
    """The keys of `audio_config`. M counts mel frequencies, G what three convolutions leave of them, C and W are their
    channels, E those in a layer, Q frequencies before the mel filters, S samples of a window.

    Attributes:
        has_filters: whether the release has the mel filters and the window, which its processor has too.
    """

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{"subsampling_factor": (8,), "subsampling_conv_kernel_size": (3,), "subsampling_conv_stride": (2,)},
    }
    told: ClassVar[Mapping[str, str]] = {"has_filters": r"\.featurizer\."}

    num_mel_bins: int = 80
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    hidden_act: str = "silu"
    attention_bias: bool = True
    convolution_bias: bool = True
    conv_kernel_size: int = 9
    subsampling_conv_channels: int = 256
    scale_input: bool = True
    has_filters: bool = False

    def contradictions(self) -> Iterator[str]:
        if self.num_mel_bins % 8:
            yield f"num_mel_bins={self.num_mel_bins} is no multiple of 8"
        if self.conv_kernel_size % 2 == 0:
            yield f"conv_kernel_size={self.conv_kernel_size} is even"

    @property
    def mlp_bias(self) -> bool:
        """True if MLPs have biases."""
        return self.attention_bias

    @property
    def taps_bias(self) -> bool:
        """True if the convolutions of single channels have biases."""
        return self.convolution_bias

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "M": self.num_mel_bins,
            "G": halved(self.num_mel_bins, 3),
            "C": self.subsampling_conv_channels,
            "W": self.subsampling_conv_channels,
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "E": self.hidden_size,
            "c": self.conv_kernel_size,
            "p": 3,
            "q": 3,
            "Q": FREQUENCIES,
            "S": WINDOW_SAMPLES,
        }


def _half(number: int, param: str) -> tuple[Map, ...]:
    return (
        *layer_norm(f"norm_feed_forward{number}", f"{param}.norm"),
        *with_bias(f"feed_forward{number}.linear1", f"{param}.up", UP, "F", "attention_bias"),
        *with_bias(f"feed_forward{number}.linear2", f"{param}.down", DOWN, "D", "attention_bias"),
    )


def _entry(names: Mapping[str, int]) -> tuple[Map, ...]:
    """Returns the rows of the stages behind the first, by the number of the convolution of each."""
    return tuple(
        row
        for name, number in names.items()
        for row in (
            *with_bias(f"layers.{number}", f"{name}.by_channel", "C 1 p q -> p q 1 C", "C"),
            *with_bias(f"layers.{number + 1}", f"{name}.matrix", "W C 1 1 -> C W", "W"),
        )
    )


PARAKEET = Tower(
    "parakeet",
    "Parakeet",
    ParakeetConfig,
    (
        *under(
            "feature_extractor.featurizer",
            "featurizer",
            *when(
                "has_filters",
                Map("fb", "filters", "1 M Q -> M Q", buffer=True),
                Map("window", "window", "S", buffer=True),
            ),
        ),
        *under(
            "subsampling",
            "entry",
            *with_bias("layers.0", "first", "C 1 p q -> p q 1 C", "C"),
            *_entry({"second": 2, "third": 5}),
            *with_bias("linear", "matrix", "D (W G) -> W G D", "D"),
        ),
        *under(
            "layers.{L}",
            "layers.{L}",
            *_half(1, "mlp_before"),
            *layer_norm("norm_self_att", "attn.norm"),
            *(
                row
                for x in "qkv"
                for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H", "attention_bias")
            ),
            *with_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS, "D", "attention_bias"),
            *without_bias("self_attn.relative_k_proj", "attn.distance", IN_HEADS),
            Map("self_attn.bias_u", "attn.content_bias", "N H"),
            Map("self_attn.bias_v", "attn.distance_bias", "N H"),
            *layer_norm("norm_conv", "conv.norm"),
            Map("conv.pointwise_conv1.weight", ("conv.up.kernel", "conv.gate.kernel"), "(E + E) D 1 -> D E, D E"),
            Map("conv.pointwise_conv1.bias", ("conv.up.bias", "conv.gate.bias"), "(E + E) -> E, E", "convolution_bias"),
            Map("conv.depthwise_conv.weight", "conv.kernel", "E 1 c -> c E"),
            Map("conv.depthwise_conv.bias", "conv.bias", "E", "convolution_bias"),
            *layer_norm("conv.norm", "conv.batch_norm", "E"),
            Map("conv.norm.running_mean", "conv.batch_norm.mean", "E"),
            Map("conv.norm.running_var", "conv.batch_norm.variance", "E"),
            Map("conv.norm.num_batches_tracked", "conv.batch_norm.batches", "", buffer=True),
            *with_bias("conv.pointwise_conv2", "conv.down", "D E 1 -> E D", "D", "convolution_bias"),
            *_half(2, "mlp_after"),
            *layer_norm("norm_out", "norm"),
        ),
    ),
    f"{PARAKEET_MODULES}:Parakeet",
)


@dataclass(frozen=True, kw_only=True)
class SoundSquaredConfig(ProjectorConfig):
    """The keys of `audio_config` that the projector of sounds reads. A is the width between its matrices."""

    projection_hidden_size: int = 4096
    projection_bias: bool = False

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf(object_of(outer, "audio_config"), tower, text)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.projection_hidden_size}


SOUND_SQUARED = Projector(
    SoundSquaredConfig,
    (
        *squared_rows("norm", "linear1", "linear2", "D"),
        *when("projection_bias", Map("linear1.bias", "up.bias", "A"), Map("linear2.bias", "down.bias", "O")),
    ),
    f"{PARAKEET_MODULES}:SoundSquared",
)
"""A norm and two matrices with a squared ReLU between."""

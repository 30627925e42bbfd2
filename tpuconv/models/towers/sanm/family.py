"""The encoder of Fun-ASR and the layers of its projector: configs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.common.key_types import object_of
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, UP, layer_norm, with_bias
from tpuconv.models.towers.whisper.family import VOXTRAL_AUDIO
from tpuconv.notation.table import Map, under

SANM_MODULES = "tpuconv.models.towers.sanm.modules"


@dataclass(frozen=True, kw_only=True)
class SanmConfig(TowerConfig):
    """The keys of `audio_config`. C is the width of the features, I are the layers after the first, J those with a
    norm at their end."""

    num_mel_bins: int = 80
    num_stacked_frames: int = 7
    hidden_size: int = 512
    num_attention_heads: int = 4
    intermediate_size: int = 2048
    num_hidden_layers: int = 70
    num_timestamp_prediction_layers: int = 20
    layer_norm_eps: float = 1e-5
    hidden_act: str = "relu"
    fsmn_kernel_size: int = 11

    def contradictions(self) -> Iterator[str]:
        if self.hidden_size % max(1, self.num_attention_heads):
            yield f"hidden_size={self.hidden_size} is no multiple of {self.num_attention_heads} heads"
        if self.input_width % 2:
            yield f"num_mel_bins={self.num_mel_bins} x num_stacked_frames={self.num_stacked_frames} is odd"

    @property
    def input_width(self) -> int:
        """The width of the features."""
        return self.num_mel_bins * self.num_stacked_frames

    @property
    def normed(self) -> tuple[int, ...]:
        """The layers with a norm at their end: the last one that transcribes, and the last one."""
        last = {self.num_hidden_layers - self.num_timestamp_prediction_layers - 1, self.num_hidden_layers - 1}
        return tuple(sorted(layer for layer in last if layer >= 0))

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "C": self.input_width,
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "I": range(1, self.num_hidden_layers),
            "J": self.normed,
            "c": self.fsmn_kernel_size,
        }


def _reading(layer: str, width: str) -> tuple[Map, ...]:
    """Returns the rows of what reads the input of a layer."""
    layout = IN_HEADS.replace("D", width)
    return under(
        f"layers.{layer}",
        f"layers.{layer}",
        *layer_norm("input_layernorm", "attn_norm", width),
        *(row for x in "qkv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", layout, "(N H) -> N H")),
    )


SANM = Tower(
    "sanm",
    "Fun-ASR-Nano",
    SanmConfig,
    (
        *_reading("0", "C"),
        *_reading("{I}", "D"),
        *under(
            "layers.{L}",
            "layers.{L}",
            *with_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS, "D"),
            Map("self_attn.fsmn.conv.weight", "attn.memory", "(N H) 1 c -> c N H"),
            *layer_norm("post_attention_layernorm", "mlp_norm"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
        ),
        *under("layers.{J}", "layers.{J}", *layer_norm("final_layernorm", "norm")),
    ),
    f"{SANM_MODULES}:Sanm",
)


@dataclass(frozen=True, kw_only=True)
class SanmAdaptorConfig(ProjectorConfig):
    """The keys of `adaptor_config`. X is the width between its two matrices; G, k, M and l are the heads, their width,
    the MLP width and the layers."""

    names: ClassVar[Mapping[str, str]] = {
        "num_attention_heads": "adaptor_heads",
        "intermediate_size": "adaptor_mlp",
        "num_hidden_layers": "adaptor_layers",
        "layer_norm_eps": "adaptor_eps",
        "hidden_act": "adaptor_act",
        "projector_hidden_act": "projector_act",
        "projector_hidden_size": "projector_width",
    }

    adaptor_heads: int = 8
    adaptor_mlp: int = 256
    adaptor_layers: int = 2
    adaptor_eps: float = 1e-5
    adaptor_act: str = "relu"
    projector_act: str = "relu"
    projector_width: int = 2048

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        read = object_of(outer, "adaptor_config")
        known = {cls.names[key]: value for key, value in read.items() if key in cls.names}
        return super().from_hf(known, tower, text)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {
            "O": self.out,
            "X": self.projector_width,
            "G": self.adaptor_heads,
            "k": self.out // max(1, self.adaptor_heads),
            "M": self.adaptor_mlp,
            "l": self.adaptor_layers,
        }


SANM_ADAPTOR = Projector(
    SanmAdaptorConfig,
    (
        *with_bias("linear_1", "up", "X D -> D X", "X"),
        *with_bias("linear_2", "down", "O X -> X O", "O"),
        *under(
            "layers.{l}",
            "layers.{l}",
            *layer_norm("input_layernorm", "attn_norm", "O"),
            *layer_norm("post_attention_layernorm", "mlp_norm", "O"),
            *(
                row
                for x in "qkv"
                for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", "(G k) O -> O G k", "(G k) -> G k")
            ),
            *with_bias("self_attn.o_proj", "attn.o", "O (G k) -> G k O", "O"),
            *with_bias("mlp.fc1", "mlp.up", "M O -> O M", "M"),
            *with_bias("mlp.fc2", "mlp.down", "O M -> M O", "O"),
        ),
    ),
    f"{SANM_MODULES}:SanmAdaptor",
)
"""Two matrices, then layers like those of the encoder."""


FUN_AUDIO = replace(
    VOXTRAL_AUDIO,
    tower=SANM,
    projector=SANM_ADAPTOR,
    prefix="model.audio_tower.",
    projector_prefix="model.multi_modal_projector.",
    placeholder_id=151646,
)

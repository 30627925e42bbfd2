"""Q-Formers as projectors: of Granite Speech, and of Granite Vision 4, where several read an image, each for one layer
of the text model.

Q counts the queries of a window, A is their width, K and I their heads and the width of one, W their MLP width, J their
layers, Z those that read the window, S its width; R counts the patches of a window, V and Y are projectors.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import Projector, ProjectorConfig
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.common.key_types import has_type, hints_of, object_of
from tpuconv.models.towers.llava.family import TilesConfig
from tpuconv.models.towers.llava.modalities import LLAVA_CLIP, LLAVA_SIGLIP
from tpuconv.models.towers.rows import layer_norm, with_bias
from tpuconv.notation.table import Map, under

QFORMER_MODULES = "tpuconv.models.towers.qformer.modules"
FRACTION = re.compile(r"[1-9]\d{0,3}/[1-9]\d{0,3}")


@dataclass(frozen=True, kw_only=True)
class QFormerConfig(ProjectorConfig):
    """The keys of the object of config.json that describes a Q-Former.

    Attributes:
        object_key: the key of that object.
        signed: keys beside it that may be negative.
    """

    names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "query_width",
        "num_hidden_layers": "query_layers",
        "num_attention_heads": "query_heads",
        "intermediate_size": "query_mlp",
        "hidden_act": "query_act",
        "layer_norm_eps": "query_eps",
    }
    object_key: ClassVar[str] = "qformer_config"
    signed: ClassVar[tuple[str, ...]] = ()

    query_width: int = 768
    query_layers: int = 12
    query_heads: int = 12
    query_mlp: int = 3072
    query_act: str = "gelu"
    query_eps: float = 1e-12
    cross_attention_frequency: int = 2
    encoder_hidden_size: int = 1408
    use_qformer_text_input: bool = False

    @classmethod
    def keys_of(cls, outer: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of the object by the names of fields.

        Raises:
            UnsupportedConfig: it describes another projector.
            ConfigError: it is no object.
        """
        read = object_of(outer, cls.object_key)
        if (kind := read.get("model_type", "blip_2_qformer")) != "blip_2_qformer":
            raise UnsupportedConfig(f"a projector of the type {short(kind)} is not implemented", hint=TEXT_ALONE)
        return {cls.names.get(key, key): value for key, value in read.items()}

    def check(self, tower: Any) -> None:
        super().check(tower)
        wrong = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if type(value) is int and value < 1 and name not in self.signed
        ]  # before divisions by them
        if wrong := wrong or list(self.contradictions(tower)):
            raise ConfigError("config.json contradicts itself about a projector", details=wrong)

    def contradictions(self, tower: Any) -> Iterator[str]:
        """Yields what is wrong with the values together."""
        if self.query_width % self.query_heads:
            yield f"hidden_size={self.query_width} of the projector is not a multiple of {self.query_heads} heads"

    @property
    def queries(self) -> int:
        """The number of queries of a window, and of its features."""
        raise NotImplementedError

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {
            "O": self.out,
            "Q": self.queries,
            "A": self.query_width,
            "K": self.query_heads,
            "I": self.query_width // self.query_heads,
            "W": self.query_mlp,
            "J": self.query_layers,
            "Z": range(0, self.query_layers, self.cross_attention_frequency),
            "S": self.encoder_hidden_size,
        }


@dataclass(frozen=True, kw_only=True)
class SpeechQFormerConfig(QFormerConfig):
    """The keys of `projector_config` of Granite Speech, and those beside it."""

    object_key: ClassVar[str] = "projector_config"

    downsample_rate: int = 5
    window_size: int = 15

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        beside = {key: outer[key] for key in ("downsample_rate", "window_size") if key in outer}
        own = {key: value for key, value in cls.keys_of(outer).items() if key not in beside}
        return super().from_hf({**own, **beside}, tower, text)

    def contradictions(self, tower: Any) -> Iterator[str]:
        yield from super().contradictions(tower)
        if self.window_size % self.downsample_rate:
            yield f"window_size={self.window_size} is not a multiple of downsample_rate={self.downsample_rate}"
        if self.encoder_hidden_size != (reads := (len(tower.further_states) + 1) * tower.hidden_dim):
            yield f"encoder_hidden_size={self.encoder_hidden_size}, and the encoder has a width of {reads}"

    @property
    def queries(self) -> int:
        return self.window_size // self.downsample_rate


def _attention(name: str, param: str, reads: str) -> tuple[Map, ...]:
    """Returns the rows of attention to vectors whose width has this letter, and of the norm behind it."""
    letters = {"query": "A", "key": reads, "value": reads}
    heads = "(K I) -> K I"
    return (
        *(
            row
            for x, width in letters.items()
            for row in with_bias(f"{name}.attention.{x}", f"{param}.{x[0]}", f"(K I) {width} -> {width} K I", heads)
        ),
        *with_bias(f"{name}.output.dense", f"{param}.o", "A (K I) -> K I A", "A"),
        *layer_norm(f"{name}.output.LayerNorm", f"{param}.norm", "A"),
    )


def _mlp(ends: str, param: str) -> tuple[Map, ...]:
    return (
        *with_bias(f"intermediate{ends}.dense", f"{param}.up", "W A -> A W", "W"),
        *with_bias(f"output{ends}.dense", f"{param}.down", "A W -> W A", "A"),
        *layer_norm(f"output{ends}.LayerNorm", f"{param}.norm", "A"),
    )


READER_ROWS = (
    *layer_norm("qformer.layernorm", "norm", "A"),
    *under("qformer.encoder.layer.{J}", "layers.{J}", *_attention("attention", "attn", "A"), *_mlp("_query", "mlp")),
    *under("qformer.encoder.layer.{Z}", "layers.{Z}", *_attention("crossattention", "cross", "S")),
    *under(
        "qformer.encoder.layer.{J}",
        "layers.{J}",
        *(replace(row, when="use_qformer_text_input") for row in _mlp("", "text_mlp")),
    ),
)
"""The rows of the layers of a Q-Former, and of the norm before them."""

QFORMER = Projector(
    SpeechQFormerConfig,
    (Map("query", "query", "1 Q A -> Q A"), *READER_ROWS, *with_bias("linear", "matrix", "O A -> A O", "O")),
    f"{QFORMER_MODULES}:QFormer",
)
"""Learned queries that attend to a window of the encoder's output and to each other, and a matrix."""


@dataclass(frozen=True, kw_only=True)
class LayeredQFormersConfig(QFormerConfig, TilesConfig):
    """The keys of the projectors of Granite Vision 4, which transformers gives the width of the tower.

    Attributes:
        downsample_rate: "q/w": w x w patches are a window, which q x q queries read.
        deepstack_layer_map: the hidden states of the tower that a projector reads, and the layers of the text model
            whose inputs get its features.
        spatial_vision_layer: the hidden state that the further projectors read.
        spatial_target_layers: the layers of the text model for these.
        text_layers: the number of these layers.
    """

    signed: ClassVar[tuple[str, ...]] = ("spatial_vision_layer",)
    head_width: ClassVar[int] = 64
    corners: ClassVar[int] = 4
    """The number of the further projectors: the queries of each begin with another patch of 2 x 2."""
    untold: ClassVar[Mapping[str, int]] = {"query_layers": 1, "cross_attention_frequency": 1}
    """Fields whose defaults differ from the ones of the class where config.json does not describe the Q-Former."""

    downsample_rate: str
    deepstack_layer_map: tuple[tuple[int, ...], ...]
    spatial_vision_layer: int = -1
    spatial_target_layers: tuple[int, ...] | None = None
    text_layers: int

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        return {**super().of_text(text), "text_layers": text.num_hidden_layers}

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        rate, width = outer.get("downsample_rate"), tower.hidden_size
        pairs: Any = outer.get("deepstack_layer_map")
        if not (isinstance(rate, str) and FRACTION.fullmatch(rate)):
            raise ConfigError(f'config.json: downsample_rate={short(rate)} is no fraction such as "4/8"')
        if not (has_type(pairs, tuple[tuple[int, ...], ...]) and all(len(pair) == 2 for pair in pairs)):
            raise ConfigError(f"config.json: deepstack_layer_map={short(pairs)} is no list of pairs of layers")
        own = cls.untold if outer.get(cls.object_key) is None else cls.keys_of(outer)
        by_tower = {"query_width": width, "query_heads": width // cls.head_width, "encoder_hidden_size": width}
        beside = {key: outer[key] for key in hints_of(cls) if key in outer and key not in hints_of(QFormerConfig)}
        pairs = tuple(map(tuple, pairs))
        return super().from_hf({**own, **beside, **by_tower, "deepstack_layer_map": pairs}, tower, text)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (*(state for state, _ in self.deepstack_layer_map), self.spatial_vision_layer)

    @property
    def targets(self) -> dict[int, int]:
        """The numbers of the projectors, `deepstack_layer_map` first, by the layers whose inputs get their features.
        Of several for a layer the last one counts, and numbers that no layer has are without effect."""
        spatial = (12, 15, 18, 21) if self.spatial_target_layers is None else self.spatial_target_layers
        layers = (*(layer for _, layer in self.deepstack_layer_map), *spatial)
        return {layer: number for number, layer in enumerate(layers) if 0 <= layer < self.text_layers}

    @property
    def query_side(self) -> int:
        """The queries along a side of a window."""
        return int(self.downsample_rate.partition("/")[0])

    @property
    def window_side(self) -> int:
        """The patches along a side of a window."""
        return int(self.downsample_rate.partition("/")[2])

    @property
    def queries(self) -> int:
        return self.query_side**2

    def contradictions(self, tower: Any) -> Iterator[str]:
        yield from super().contradictions(tower)
        has_corners, side = self.spatial_target_layers != (), tower.side
        if side % self.window_side or (has_corners and 2 * self.query_side * (side // self.window_side) != side):
            yield f"downsample_rate={self.downsample_rate}, and an image has {side} x {side} patches"
        if len(self.spatial_target_layers or ()) > self.corners:
            yield f"spatial_target_layers={short(self.spatial_target_layers)} has more than {self.corners} layers"

    def sizes(self, tower: Any) -> dict[str, Any]:
        counts = {"R": self.window_side**2, "V": len(self.deepstack_layer_map), "Y": self.corners}
        return {**super().sizes(tower), **counts}


_WINDOW_ROWS = (
    *layer_norm("norm", "window_norm", "A"),
    Map("query", "query", "1 Q A -> Q A"),
    Map("image_positions", "positions", "1 R A -> R A"),
    *READER_ROWS,
    *with_bias("out_linear", "matrix", "O A -> A O", "O"),
)

LAYERED_QFORMERS = Projector(
    LayeredQFormersConfig,
    (
        *under("layerwise_projectors.{V}", "layerwise.{V}", *_WINDOW_ROWS),
        *under("spatial_projectors.{Y}", "spatial.{Y}", *_WINDOW_ROWS),
        Map("image_newline", "newline", "O"),
    ),
    f"{QFORMER_MODULES}:LayeredQFormers",
)
"""Q-Formers that read several hidden states, each for one layer of the text model (Granite Vision 4)."""

GRANITE4_WAYS = tuple(
    replace(
        each,
        projector=LAYERED_QFORMERS,
        prefix="model.vision_tower.",
        projector_prefix="model.",
        replaces=("vision_tower", "layerwise_projectors", "spatial_projectors", "image_newline"),
        other_prefixes=("model.vision_tower.vision_model.",),
    )
    for each in (LLAVA_CLIP, LLAVA_SIGLIP)
)
"""Granite Vision 4."""

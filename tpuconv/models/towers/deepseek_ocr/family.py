"""The encoders of DeepSeek-OCR and DeepSeek-OCR 2 and their projectors: configs and tables.

Letters: K heads of keys and values, Y and Z queries for few and for many patches, M channels between the convolutions
behind SAM, J features of CLIP and SAM side by side. SAM's letters are as in `tpuconv.models.towers.sam.family`, where
`BESIDE` has some small ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.jsonfile import short
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.common.encoder_keys import check_objects
from tpuconv.models.common.key_types import object_of
from tpuconv.models.towers.clip.family import ClipConfig
from tpuconv.models.towers.deepseek_ocr.released import CLIP_TYPE, DECODER_TYPE, OF_PROJECTOR
from tpuconv.models.towers.qwen_vit.family import JOINED_QKV, JOINED_QKV_BIAS
from tpuconv.models.towers.rows import (
    DOWN,
    IN_HEADS,
    IN_KV_HEADS,
    OUT_OF_HEADS,
    PATCH_MATRIX,
    UP,
    layer_norm,
    rms_norm,
    with_bias,
    without_bias,
)
from tpuconv.models.towers.sam.family import BESIDE, SAM_ROWS, SamConfig, beside
from tpuconv.notation.table import Map, under

OCR_MODULES = "tpuconv.models.towers.deepseek_ocr.modules"

FEW_QUERIES, MANY_QUERIES = 144, 256
"""The queries of an image of at most as many patches as the former, and of a larger one. No key has them."""


@dataclass(frozen=True, kw_only=True)
class ReducedSamConfig(SamConfig):
    """The keys of `sam_config`."""

    downsample_channels: tuple[int, ...] | None = None

    def contradictions(self) -> Iterator[str]:
        if len(self.channels) != 2:
            yield f"downsample_channels={short(self.channels)} has not the channels of two convolutions"

    @property
    def channels(self) -> tuple[int, ...]:
        """The channels behind each of the convolutions."""
        return (512, 896) if self.downsample_channels is None else self.downsample_channels

    @property
    def sizes_beside(self) -> dict[str, Any]:
        """The size of each letter in a model that has another encoder too."""
        return {**{BESIDE.get(letter, letter): size for letter, size in self.sizes.items()}, "M": self.channels[0]}


@dataclass(frozen=True, kw_only=True)
class QueryDecoderConfig(TowerConfig):
    """The keys of `encoder_config`, and SAM before it."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_sliding_window": (False,)}

    sam: ReducedSamConfig
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        sam = ReducedSamConfig.from_hf(object_of(raw, "sam_config"))
        return super().from_hf({**object_of(raw, "encoder_config"), "sam": sam})

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    def contradictions(self) -> Iterator[str]:
        heads, width = self.num_attention_heads, self.hidden_size
        if heads % self.kv_heads:
            yield f"num_attention_heads={heads} is no multiple of num_key_value_heads={self.kv_heads}"
        if self.head_dim is None and width % heads:
            yield f"hidden_size={width} is no multiple of num_attention_heads={heads}"
        if self.sam.channels[-1] != width:
            yield f"downsample_channels={short(self.sam.channels)} of SAM do not end with hidden_size={width}"

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            **self.sam.sizes_beside,
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "K": self.kv_heads,
            "H": self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "Y": FEW_QUERIES,
            "Z": MANY_QUERIES,
        }


RELEASED_NAMES = {
    "patch_embed.projection": "patch_embed.proj",
    "layers.": "blocks.",
    "neck.conv1": "neck.0",
    "neck.layer_norm1": "neck.1",
    "neck.conv2": "neck.2",
    "neck.layer_norm2": "neck.3",
    "layer_norm": "norm",
}
"""Parts of the names of SAM in transformers, and what releases have in their place."""


def _released(name: str) -> str:
    for part, other in RELEASED_NAMES.items():
        name = name.replace(part, other)
    return name


REDUCED_SAM = (
    *under("sam_model", "sam", *(replace(row, hf=tuple(map(_released, row.hf_names))) for row in beside(SAM_ROWS))),
    Map("sam_model.net_2.weight", "first.kernel", "M E r s -> r s E M"),
    Map("sam_model.net_3.weight", "last.kernel", "D M r s -> r s M D"),
)
"""SAM and two convolutions behind it."""

OCR_DECODER = Tower(
    "ocr_decoder",
    "DeepSeek-OCR 2",
    QueryDecoderConfig,
    (
        *REDUCED_SAM,
        *under(
            "qwen2_model.model.model.layers.{L}",
            "layers.{L}",
            *rms_norm("input_layernorm", "attn_norm"),
            *rms_norm("post_attention_layernorm", "mlp_norm"),
            *with_bias("self_attn.q_proj", "attn.q", IN_HEADS, "(N H) -> N H"),
            *(row for x in "kv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_KV_HEADS, "(K H) -> K H")),
            *without_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS),
            *without_bias("mlp.gate_proj", "mlp.gate", UP),
            *without_bias("mlp.up_proj", "mlp.up", UP),
            *without_bias("mlp.down_proj", "mlp.down", DOWN),
        ),
        *rms_norm("qwen2_model.model.model.norm", "norm"),
        Map("qwen2_model.query_768.weight", "few", "Y D"),
        Map("qwen2_model.query_1024.weight", "many", "Z D"),
    ),
    f"{OCR_MODULES}:OcrDecoder",
)


@dataclass(frozen=True, kw_only=True)
class OneMatrixConfig(ProjectorConfig):
    """A projector of one matrix, which releases describe in an object of their own."""

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        check_objects(outer, OF_PROJECTOR)
        return super().from_hf(outer, tower, text)


SEPARATED_MATRIX = Projector(
    OneMatrixConfig,
    (*with_bias("projector.layers", "matrix", "O D -> D O", "O"), Map("view_seperator", "separator", "O")),
    f"{OCR_MODULES}:SeparatedMatrix",
)
"""A matrix of each query, and the vector behind an image."""


@dataclass(frozen=True, kw_only=True)
class OcrClipConfig(ClipConfig):
    """The keys of CLIP in `encoder_config`, and SAM before it."""

    sam: ReducedSamConfig
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    patch_size: int = 14

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        sam = ReducedSamConfig.from_hf({"downsample_channels": [512, 1024], **object_of(raw, "sam_config")})
        return super().from_hf({**object_of(raw, "encoder_config"), "sam": sam})

    def contradictions(self) -> Iterator[str]:
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            yield f"hidden_size={width} is no multiple of num_attention_heads={heads}"
        if self.sam.channels[-1] != width:
            yield f"downsample_channels={short(self.sam.channels)} of SAM do not end with hidden_size={width}"

    @property
    def sizes(self) -> dict[str, Any]:
        return {**self.sam.sizes_beside, **super().sizes}


OCR_CLIP = Tower(
    "ocr_clip",
    "DeepSeek-OCR",
    OcrClipConfig,
    (
        *REDUCED_SAM,
        *under(
            "vision_model",
            "",
            Map("embeddings.class_embedding", "class_token", "D"),
            *without_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX),
            Map("embeddings.position_embedding.weight", "positions", "P D"),
            *layer_norm("pre_layrnorm", "pre_norm"),
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
    ),
    f"{OCR_MODULES}:OcrClip",
)
"""SAM, whose features CLIP has in place of patches. Nothing computes with CLIP's matrix of patches."""


@dataclass(frozen=True, kw_only=True)
class SideBySideConfig(OneMatrixConfig):
    """The projector of DeepSeek-OCR."""

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "J": tower.hidden_size + tower.sam.channels[-1]}


ENDED_MATRIX = Projector(
    SideBySideConfig,
    (
        *with_bias("projector.layers", "matrix", "O J -> J O", "O"),
        Map("image_newline", "newline", "O"),
        Map("view_seperator", "separator", "O"),
    ),
    f"{OCR_MODULES}:EndedMatrix",
)
"""A matrix of each patch, and the vectors behind a row and behind an image."""


DEEPSEEK_OCR2_VISION = Modality(
    VISION,
    OCR_DECODER,
    SEPARATED_MATRIX,
    prefix="model.",
    projector_prefix="model.",
    replaces=(
        *("sam_model", "qwen2_model", "projector", "view_seperator"),
        *("vision_tower", "multi_modal_projector", "view_separator"),
    ),
    placeholder_id=128815,
    tower_types=(DECODER_TYPE,),
)
"""DeepSeek-OCR 2."""

DEEPSEEK_OCR_VISION = replace(
    DEEPSEEK_OCR2_VISION,
    tower=OCR_CLIP,
    projector=ENDED_MATRIX,
    replaces=("sam_model", "vision_model", "projector", "image_newline", "view_seperator"),
    tower_types=(CLIP_TYPE,),
)
"""DeepSeek-OCR."""

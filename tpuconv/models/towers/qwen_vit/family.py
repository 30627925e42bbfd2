"""The towers of Qwen-VL and GLM-V: configs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, UP, layer_norm, rms_norm, with_bias, without_bias
from tpuconv.notation.table import Map, under

QWEN_VIT_MODULES = "tpuconv.models.towers.qwen_vit.modules"
JOINED = "((N H) + (N H) + (N H))"
JOINED_QKV_BIAS = Map("attn.qkv.bias", ("attn.q.bias", "attn.k.bias", "attn.v.bias"), f"{JOINED} -> N H, N H, N H")
JOINED_QKV = Map(
    "attn.qkv.weight", ("attn.q.kernel", "attn.k.kernel", "attn.v.kernel"), f"{JOINED} D -> D N H, D N H, D N H"
)
PATCH = "D X T p q -> (X T p q) D"

SPLIT_QKV = {
    "qkv.weight": tuple(Map(f"blocks.{{L}}.attn.{x}.weight", f"layers.{{L}}.attn.{x}.kernel", IN_HEADS) for x in "qkv"),
    "qkv.bias": tuple(Map(f"blocks.{{L}}.attn.{x}.bias", f"layers.{{L}}.attn.{x}.bias", "(N H) -> N H") for x in "qkv"),
}
"""The rows of queries, keys and values that are apart, by the joined tensor that they stand for."""


@dataclass(frozen=True, kw_only=True)
class QwenVitConfig(TowerConfig):
    """The keys of `vision_config` that all of them have. M is the width of M patches."""

    aliases: ClassVar[Mapping[str, str]] = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    hidden_act: str
    in_channels: int = 3
    patch_size: int
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    rope_theta: float = 1e4
    eps: ClassVar[float] = 1e-6

    @property
    def deepstack(self) -> tuple[int, ...]:
        """The layers behind which features are made that are added to the outputs of the first layers of the text."""
        return ()

    @property
    def positions(self) -> int:
        """The number of learned positions."""
        return 0

    @property
    def table_side(self) -> int:
        """The number of learned positions along one side of an image."""
        return int(self.positions**0.5)

    @property
    def sizes(self) -> dict[str, Any]:
        merged = self.hidden_size * self.spatial_merge_size**2
        return {
            "D": self.hidden_size,
            "N": self.num_heads,
            "H": self.hidden_size // self.num_heads,
            "F": self.intermediate_size,
            "L": self.depth,
            "X": self.in_channels,
            "T": self.temporal_patch_size,
            "p": self.patch_size,
            "q": self.patch_size,
            "C": self.in_channels * self.temporal_patch_size * self.patch_size**2,
            "P": self.positions,
            "M": merged,
            "W": merged,
            "s": self.spatial_merge_size,
            "r": self.spatial_merge_size,
            "I": len(self.deepstack),
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3VitConfig(QwenVitConfig):
    """The tower of Qwen3-VL."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 16
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    @property
    def deepstack(self) -> tuple[int, ...]:
        return self.deepstack_visual_indexes

    @property
    def positions(self) -> int:
        return self.num_position_embeddings


QWEN25_VISION_KEYS: Mapping[str, str] = {
    **QwenVitConfig.aliases,
    "in_chans": "in_channels",
    "spatial_patch_size": "patch_size",
}
"""Other names of keys since Qwen2.5-VL."""


@dataclass(frozen=True, kw_only=True)
class Qwen25VitConfig(QwenVitConfig):
    """The tower of Qwen2.5-VL, of which most layers see windows."""

    aliases: ClassVar[Mapping[str, str]] = QWEN25_VISION_KEYS

    depth: int = 32
    hidden_size: int = 3584
    intermediate_size: int = 3420
    num_heads: int = 16
    hidden_act: str = "silu"
    patch_size: int = 14
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    @property
    def window_side(self) -> int:
        """The number of patches along one side of a window, which has whole squares of merged ones."""
        return self.window_size // self.spatial_merge_size // self.patch_size * self.spatial_merge_size

    def contradictions(self) -> Iterator[str]:
        if not self.window_side:
            yield f"window_size={self.window_size} is less than the pixels of one feature"


@dataclass(frozen=True, kw_only=True)
class Qwen2VitConfig(QwenVitConfig):
    """The tower of Qwen2-VL, whose width is `embed_dim`."""

    aliases: ClassVar[Mapping[str, str]] = {
        **Qwen25VitConfig.aliases,
        "hidden_size": "out_hidden_size",
        "embed_dim": "hidden_size",
    }

    depth: int = 32
    hidden_size: int = 1280
    num_heads: int = 16
    hidden_act: str = "quick_gelu"
    patch_size: int = 14
    mlp_ratio: int | float = 4
    intermediate_size: int = 0

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "F": int(self.hidden_size * self.mlp_ratio)}


@dataclass(frozen=True, kw_only=True)
class GlmVitConfig(QwenVitConfig):
    """The tower of GLM-4V. The merger has its `intermediate_size`."""

    depth: int = 24
    hidden_size: int = 1536
    num_heads: int = 12
    hidden_act: str = "silu"
    image_size: int = 336
    patch_size: int = 14
    out_hidden_size: int = 4096
    intermediate_size: int = 13696
    rms_norm_eps: float = 1e-5
    swiglu_limit: ClassVar[float | None] = None

    @property
    def positions(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "F": self.out_hidden_size, "W": self.intermediate_size, "A": self.out_hidden_size}


@dataclass(frozen=True, kw_only=True)
class ExaoneVitConfig(Qwen25VitConfig):
    """The tower of EXAONE 4.5, where several heads share K heads of keys and values."""

    num_key_value_heads: int = 8

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "K": self.num_key_value_heads}


@dataclass(frozen=True, kw_only=True)
class GlmOcrVitConfig(QwenVitConfig):
    """The tower of GLM-OCR."""

    depth: int = 24
    hidden_size: int = 1024
    num_heads: int = 16
    hidden_act: str = "silu"
    attention_bias: bool = True
    patch_size: int = 14
    out_hidden_size: int = 1536
    intermediate_size: int = 4096
    rms_norm_eps: float = 1e-5
    swiglu_limit: float | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        out = self.out_hidden_size
        return {**super().sizes, "A": out, "W": out * self.in_channels}


@dataclass(frozen=True, kw_only=True)
class Glm5VitConfig(GlmOcrVitConfig):
    """The tower of GLM-5.3."""

    projection_intermediate_size: int = 10240
    swiglu_limit: float | None = 10.0

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "W": self.projection_intermediate_size}


def _blocks(*rows: Map) -> tuple[Map, ...]:
    return under("blocks.{L}", "layers.{L}", JOINED_QKV, *rows)


def _qwen3_vit(name: str, models: str, mergers: str, norm: str, up: str, down: str) -> Tower:
    rows = (
        *with_bias("patch_embed.proj", "patch", PATCH, "D"),
        Map("pos_embed.weight", "positions", "P D"),
        *_blocks(
            JOINED_QKV_BIAS,
            *layer_norm("norm1", "attn_norm"),
            *layer_norm("norm2", "mlp_norm"),
            *with_bias("attn.proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.linear_fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.linear_fc2", "mlp.down", DOWN, "D"),
        ),
        *under(
            f"{mergers}.{{I}}",
            "deep.{I}",
            *layer_norm(norm, "norm", "M"),
            *with_bias(up, "up", "W M -> M W", "W"),
            *with_bias(down, "down", "O W -> W O", "O"),
        ),
    )
    return Tower(name, models, Qwen3VitConfig, rows, f"{QWEN_VIT_MODULES}:Qwen3Vit")


QWEN3_VIT = _qwen3_vit("qwen3_vit", "Qwen3-VL, Qwen3.5", "deepstack_merger_list", "norm", "linear_fc1", "linear_fc2")
QWEN3_OMNI_VIT = _qwen3_vit("qwen3_omni_vit", "Qwen3-Omni", "merger_list", "ln_q", "mlp.0", "mlp.2")

_GATED_BLOCK = (
    *rms_norm("norm1", "attn_norm"),
    *rms_norm("norm2", "mlp_norm"),
    *with_bias("attn.proj", "attn.o", OUT_OF_HEADS, "D"),
    *with_bias("mlp.gate_proj", "mlp.gate", UP, "F"),
    *with_bias("mlp.up_proj", "mlp.up", UP, "F"),
    *with_bias("mlp.down_proj", "mlp.down", DOWN, "D"),
)

QWEN25_VIT = Tower(
    "qwen25_vit",
    "Qwen2.5-VL",
    Qwen25VitConfig,
    (*without_bias("patch_embed.proj", "patch", PATCH), *_blocks(JOINED_QKV_BIAS, *_GATED_BLOCK)),
    f"{QWEN_VIT_MODULES}:Qwen25Vit",
)

_SHARED_KEYS = "((N H) + (K H) + (K H))"

EXAONE_VIT = Tower(
    "exaone_vit",
    "EXAONE 4.5",
    ExaoneVitConfig,
    (
        *without_bias("patch_embed.proj", "patch", PATCH),
        *under(
            "blocks.{L}",
            "layers.{L}",
            replace(JOINED_QKV, layout=f"{_SHARED_KEYS} D -> D N H, D K H, D K H"),
            replace(JOINED_QKV_BIAS, layout=f"{_SHARED_KEYS} -> N H, K H, K H"),
            *_GATED_BLOCK,
        ),
    ),
    f"{QWEN_VIT_MODULES}:ExaoneVit",
)

QWEN25_OMNI_VIT = replace(
    QWEN25_VIT,
    name="qwen25_omni_vit",
    summary="Qwen2.5-Omni",
    rows=tuple(
        row for each in QWEN25_VIT.rows for row in (SPLIT_QKV.get(each.hf_names[0].rpartition(".attn.")[2], (each,)))
    ),
)
"""The same with queries, keys and values apart on disk."""

QWEN2_VIT = Tower(
    "qwen2_vit",
    "Qwen2-VL",
    Qwen2VitConfig,
    (
        *without_bias("patch_embed.proj", "patch", PATCH),
        *_blocks(
            JOINED_QKV_BIAS,
            *layer_norm("norm1", "attn_norm"),
            *layer_norm("norm2", "mlp_norm"),
            *with_bias("attn.proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
        ),
    ),
    f"{QWEN_VIT_MODULES}:Qwen2Vit",
)

_GLM_ENDS = (
    *rms_norm("post_layernorm", "norm"),
    Map("downsample.weight", "downsample.kernel", "O D s r -> (D s r) O"),
    Map("downsample.bias", "downsample.bias", "O"),
)

GLM_VIT = Tower(
    "glm_vit",
    "GLM-4.1V, GLM-4.5V",
    GlmVitConfig,
    (
        *with_bias("patch_embed.proj", "patch", PATCH, "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *rms_norm("post_conv_layernorm", "patch_norm"),
        *_blocks(
            *rms_norm("norm1", "attn_norm"),
            *rms_norm("norm2", "mlp_norm"),
            *without_bias("attn.proj", "attn.o", OUT_OF_HEADS),
            *without_bias("mlp.gate_proj", "mlp.gate", UP),
            *without_bias("mlp.up_proj", "mlp.up", UP),
            *without_bias("mlp.down_proj", "mlp.down", DOWN),
        ),
        *_GLM_ENDS,
    ),
    f"{QWEN_VIT_MODULES}:GlmVit",
)


def _if_biased(*rows: Map) -> tuple[Map, ...]:
    return tuple(replace(row, when="attention_bias") if row.jax_names[0].endswith("bias") else row for row in rows)


_GLM_OCR_ROWS = (
    *with_bias("patch_embed.proj", "patch", PATCH, "D"),
    *_blocks(
        *_if_biased(JOINED_QKV_BIAS, *_GATED_BLOCK),
        *rms_norm("attn.q_norm", "attn.q_norm", "H"),
        *rms_norm("attn.k_norm", "attn.k_norm", "H"),
    ),
    *_GLM_ENDS,
)

GLM_OCR_VIT = Tower("glm_ocr_vit", "GLM-OCR", GlmOcrVitConfig, _GLM_OCR_ROWS, f"{QWEN_VIT_MODULES}:GlmOcrVit")
GLM5_VIT = Tower("glm5_vit", "GLM-5.3", Glm5VitConfig, _GLM_OCR_ROWS, f"{QWEN_VIT_MODULES}:GlmOcrVit")

MERGER = Projector(
    ProjectorConfig,
    (
        *layer_norm("norm", "norm"),
        *with_bias("linear_fc1", "up", "W M -> M W", "W"),
        *with_bias("linear_fc2", "down", "O W -> W O", "O"),
    ),
    f"{QWEN_VIT_MODULES}:Merger",
)
"""A norm of each patch, then blocks of patches are joined, and two matrices."""

_OLDER_MATRICES = (
    *with_bias("mlp.0", "up", "W M -> M W", "W"),
    *with_bias("mlp.2", "down", "O W -> W O", "O"),
)

OLDER_MERGER = Projector(ProjectorConfig, (*layer_norm("ln_q", "norm"), *_OLDER_MATRICES), f"{QWEN_VIT_MODULES}:Merger")
"""The same with the names of Qwen2-VL."""

RMS_MERGER = Projector(ProjectorConfig, (*rms_norm("ln_q", "norm"), *_OLDER_MATRICES), f"{QWEN_VIT_MODULES}:RmsMerger")
"""The same of Qwen2.5-VL, with an RMS norm."""

GLM_MERGER = Projector(
    ProjectorConfig,
    (
        *without_bias("proj", "matrix", "O A -> A O"),
        *layer_norm("post_projection_norm", "norm", "O"),
        *without_bias("gate_proj", "gate", "W O -> O W"),
        *without_bias("up_proj", "up", "W O -> O W"),
        *without_bias("down_proj", "down", "O W -> W O"),
    ),
    f"{QWEN_VIT_MODULES}:GlmMerger",
)
"""A matrix, a norm and a gated MLP."""


@dataclass(frozen=True, kw_only=True)
class MatrixConfig(ProjectorConfig):
    """A matrix behind a merger, whose width E is the tower's `out_hidden_size`."""

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "E": tower.out_hidden_size}


@dataclass(frozen=True, kw_only=True)
class HyperClovaVitConfig(Qwen25VitConfig):
    """The tower of HyperCLOVA X SEED Think."""

    out_hidden_size: int = 3584


HYPERCLOVA_VIT = replace(
    QWEN25_VIT,
    name="hyperclova_vit",
    summary="HyperCLOVA X SEED Think",
    config=HyperClovaVitConfig,
    rows=(
        *QWEN25_VIT.rows,
        *rms_norm("merger.ln_q", "merger.norm"),
        *with_bias("merger.mlp.0", "merger.up", "W M -> M W", "W"),
        *with_bias("merger.mlp.2", "merger.down", "E W -> W E", "E"),
    ),
    encoder=f"{QWEN_VIT_MODULES}:HyperClovaVit",
)
"""The tower of Qwen2.5-VL with its merger."""

MERGED_MATRIX = Projector(MatrixConfig, with_bias("", "matrix", "O E -> E O", "O"), f"{QWEN_VIT_MODULES}:MergedMatrix")
"""A matrix behind the merger."""

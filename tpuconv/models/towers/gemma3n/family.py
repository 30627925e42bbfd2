"""The projectors of Gemma 3n, which embed some ids of the vocabulary too, and its audio encoder: configs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower
from tpuconv.models.towers.gemma4.family import UsmConfig
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, UP, rms_norm, without_bias
from tpuconv.notation.table import Map, under

GEMMA3N_MODULES = "tpuconv.models.towers.gemma3n"


@dataclass(frozen=True, kw_only=True)
class Gemma3nUsmConfig(UsmConfig):
    """The keys of `audio_config`."""

    scales_keys: ClassVar[bool] = False
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attention_context_right": (0,),
        "sscp_conv_kernel_size": ([[3, 3], [3, 3]],),
        "sscp_conv_stride_size": ([[2, 2], [2, 2]],),
    }
    aliases: ClassVar[Mapping[str, str]] = {
        **{
            f"conf_{key}": key
            for key in (
                *("num_hidden_layers", "num_attention_heads", "conv_kernel_size", "residual_weight"),
                *("attention_chunk_size", "attention_context_left", "attention_context_right", "attention_logit_cap"),
                "reduction_factor",
            )
        },
        "sscp_conv_channel_size": "subsampling_conv_channels",
    }

    hidden_size: int = 1536
    use_clipped_linears: bool = False
    vocab_size: int = 128
    vocab_offset: int = 262272
    input_feat_size: int = 128
    reduction_factor: int = 4
    sscp_conv_group_norm_eps: float = 1e-3

    def contradictions(self) -> Iterator[str]:
        if len(self.subsampling_conv_channels) != 2:
            yield f"sscp_conv_channel_size={list(self.subsampling_conv_channels)} are not 2"
        if self.hidden_size % (2 * max(1, self.num_attention_heads)):
            yield f"hidden_size={self.hidden_size} is no even number for each of {self.num_attention_heads} heads"

    @property
    def words(self) -> range:
        return range(self.vocab_offset, self.vocab_offset + self.vocab_size)

    @property
    def tokens_seen(self) -> int:
        return self.attention_context_left

    @property
    def sizes(self) -> dict[str, Any]:
        quarter = -(-self.input_feat_size // 4)
        return {
            **super().sizes,
            "M": quarter * self.subsampling_conv_channels[1],
            "W": self.hidden_size,
            "V": self.vocab_size,
        }


def _half_mlp(name: str, param: str) -> tuple[Map, ...]:
    return under(
        name,
        param,
        *rms_norm("pre_layer_norm", "norm"),
        *without_bias("ffw_layer_1", "up", UP),
        *without_bias("ffw_layer_2", "down", DOWN),
        *rms_norm("post_layer_norm", "post_norm"),
    )


GEMMA3N_USM = Tower(
    "gemma3n_usm",
    "Gemma 3n",
    Gemma3nUsmConfig,
    (
        *under(
            "subsample_conv_projection",
            "",
            Map("conv_0.conv.weight", "convs.0.kernel", "C 1 p q -> p q 1 C"),
            Map("conv_0.norm.weight", "conv_norms.0.scale", "C"),
            Map("conv_1.conv.weight", "convs.1.kernel", "E C p q -> p q C E"),
            Map("conv_1.norm.weight", "conv_norms.1.scale", "E"),
            *without_bias("input_proj_linear", "entry", "D M -> M D"),
        ),
        *under(
            "conformer.{L}",
            "layers.{L}",
            *_half_mlp("ffw_layer_start", "mlp_before"),
            *under(
                "attention",
                "",
                *rms_norm("pre_attn_norm", "attn_norm"),
                *(row for x in "qkv" for row in without_bias(f"attn.{x}_proj", f"attn.{x}", IN_HEADS)),
                *without_bias("post", "attn.o", OUT_OF_HEADS),
                *without_bias("attn.relative_position_embedding.pos_proj", "attn.distance", IN_HEADS),
                Map("attn.per_dim_scale", "attn.scale", "H"),
                *rms_norm("post_norm", "post_attn_norm"),
            ),
            *under(
                "lconv1d",
                "conv",
                *rms_norm("pre_layer_norm", "norm"),
                *without_bias("linear_start", "up", "G D -> D G"),
                Map("depthwise_conv1d.weight", "kernel", "D 1 c -> c D"),
                *rms_norm("conv_norm", "post_norm"),
                *without_bias("linear_end", "down", "D A -> A D"),
            ),
            *_half_mlp("ffw_layer_end", "mlp_after"),
            *rms_norm("norm", "norm"),
        ),
    ),
    f"{GEMMA3N_MODULES}.audio:Gemma3nUsm",
)


@dataclass(frozen=True, kw_only=True)
class ImageEmbedderConfig(ProjectorConfig):
    """The features of an image that config.json says. V counts the ids of the vocabulary that have embeddings here, W
    is their width."""

    vision_soft_tokens_per_image: int = 256

    def check(self, tower: Any) -> None:
        super().check(tower)
        if (said := self.vision_soft_tokens_per_image) != tower.tokens:
            raise ConfigError(
                f"config.json: vision_soft_tokens_per_image={said}, and the encoder makes {tower.tokens} features"
            )


@dataclass(frozen=True, kw_only=True)
class SoundEmbedderConfig(ProjectorConfig):
    """The features of a sound. Behind its own ones stands the embedding of the last id of the vocabulary."""

    vocabulary: int
    audio_soft_tokens_per_image: int = 188

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        return {**super().of_text(text), "vocabulary": text.vocab_size}

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.vocabulary - 1 not in tower.words:
            raise ConfigError(
                f"config.json: vocab_size={self.vocabulary} of the text model ends outside of the ids of sounds, "
                f"{tower.words.start} to {tower.words.stop - 1}"
            )


EMBEDDER_ROWS = (
    Map("embedding.weight", "embedding", "V W"),
    *rms_norm("hard_embedding_norm", "word_norm", "W"),
    *rms_norm("soft_embedding_norm", "norm", "W"),
    *without_bias("embedding_projection", "matrix", "O W -> W O"),
)

IMAGE_EMBEDDER, SOUND_EMBEDDER = (
    Projector(config, EMBEDDER_ROWS, f"{GEMMA3N_MODULES}.words:WordEmbedder")
    for config in (ImageEmbedderConfig, SoundEmbedderConfig)
)

"""The encoder of wav2vec 2.0 (arXiv:2006.11477), as Omnilingual ASR has it: config and table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpuconv.models.common.beside import AUDIO, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.rows import BIASED_MATRIX, DOWN, IN_HEADS, OUT_OF_HEADS, UP, layer_norm, with_bias
from tpuconv.notation.table import under


@dataclass(frozen=True, kw_only=True)
class Wav2Vec2Config(TowerConfig):
    """The keys of `audio_config`. I are the convolutions of samples, each from C channels to E with c taps, X the last
    E. G channels of D with p taps make a position. W is D."""

    hidden_size: int = 1024
    conv_dim: tuple[int, ...] = (512,) * 7
    conv_kernel: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    conv_stride: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)
    conv_bias: bool = True
    num_attention_heads: int = 16
    num_hidden_layers: int = 24
    num_conv_pos_embeddings: int = 128
    num_conv_pos_embedding_groups: int = 16
    intermediate_size: int = 4096
    layer_norm_eps: float = 1e-5
    hidden_act: str = "gelu"

    def contradictions(self) -> Iterator[str]:
        counts = {name: len(getattr(self, name)) for name in ("conv_dim", "conv_kernel", "conv_stride")}
        if len(set(counts.values())) > 1 or not self.conv_dim:
            yield f"the convolutions are not as many in each list: {counts}"
        elif min(*self.conv_dim, *self.conv_kernel, *self.conv_stride) < 1:
            yield "a convolution has no channels, no taps or no stride"
        if self.num_conv_pos_embeddings % 2:
            yield f"num_conv_pos_embeddings={self.num_conv_pos_embeddings} is odd"
        for name in ("num_attention_heads", "num_conv_pos_embedding_groups"):
            if self.hidden_size % max(1, getattr(self, name)):
                yield f"hidden_size={self.hidden_size} is no multiple of {name}={getattr(self, name)}"

    @property
    def module_sizes(self) -> Mapping[str, Mapping[str, int]]:
        """The sizes of each convolution."""
        channels = zip((1, *self.conv_dim), self.conv_dim, self.conv_kernel, strict=False)
        return {
            f"convs.{i}": {"C": before, "E": behind, "c": taps} for i, (before, behind, taps) in enumerate(channels)
        }

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            **self.module_sizes["convs.0"],
            "I": len(self.conv_dim),
            "X": self.conv_dim[-1],
            "D": self.hidden_size,
            "W": self.hidden_size,
            "G": self.hidden_size // self.num_conv_pos_embedding_groups,
            "p": self.num_conv_pos_embeddings,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
        }


WAV2VEC2 = Tower(
    "wav2vec2",
    "wav2vec 2.0",
    Wav2Vec2Config,
    (
        *under(
            "subsampling",
            "",
            *under(
                "conv_layers.{I}",
                "convs.{I}",
                *with_bias("conv", "conv", "E C c -> c C E", "E", "conv_bias"),
                *layer_norm("layer_norm", "norm", "E"),
            ),
            *layer_norm("layer_norm", "norm_before", "X"),
            *with_bias("projection", "matrix", "D X -> X D", "D"),
        ),
        *with_bias("encode_positions.conv", "positions", "D G p -> p G D", "D"),
        *under(
            "layers.{L}",
            "layers.{L}",
            *layer_norm("layer_norm", "attn_norm"),
            *(row for x in "qkv" for row in with_bias(f"attention.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
            *with_bias("attention.out_proj", "attn.o", OUT_OF_HEADS, "D"),
            *layer_norm("final_layer_norm", "mlp_norm"),
            *with_bias("feed_forward.intermediate_dense", "mlp.up", UP, "F"),
            *with_bias("feed_forward.output_dense", "mlp.down", DOWN, "D"),
        ),
        *layer_norm("layer_norm", "norm"),
    ),
    "tpuconv.models.towers.wav2vec2.modules:Wav2Vec2",
)

WAV_MATRIX = Projector(ProjectorConfig, with_bias("", "matrix", "O W -> W O", "O"), BIASED_MATRIX)

OMNI_AUDIO = Modality(
    AUDIO,
    WAV2VEC2,
    WAV_MATRIX,
    prefix="model.audio_tower.",
    projector_prefix="model.multi_modal_projector",
    placeholder=("audio_token_id",),
    placeholder_id=10289,
    config_key="audio_config",
)

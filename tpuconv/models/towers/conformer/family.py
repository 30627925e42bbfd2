"""The conformer of Granite Speech: config and table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.beside import AUDIO, Modality, Tower, TowerConfig
from tpuconv.models.towers.qformer.family import QFORMER
from tpuconv.models.towers.rows import DOWN, OUT_OF_HEADS, UP, layer_norm, with_bias, without_bias
from tpuconv.notation.table import Map, under


@dataclass(frozen=True, kw_only=True)
class ConformerConfig(TowerConfig):
    """The keys of `encoder_config`. M is the width of frames, E that of convolutions, G counts the characters that half
    of the layers guess, R are the distances with an embedding.

    Attributes:
        cat_hidden_layers: the numbers of further hidden states that the projector reads before the last one.
    """

    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "hidden_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_mel_bins": "input_dim",
    }

    hidden_act: ClassVar[str] = "silu"
    mlp_bias: ClassVar[bool] = True
    convolution_bias: ClassVar[bool] = True
    taps_bias: ClassVar[bool] = False

    input_dim: int = 160
    num_layers: int = 10
    hidden_dim: int = 1024
    feedforward_mult: int = 4
    num_heads: int = 8
    dim_head: int | None = None
    output_dim: int = 42
    context_size: int = 200
    max_pos_emb: int = 512
    conv_kernel_size: int = 15
    conv_expansion_factor: int = 2
    cat_hidden_layers: tuple[int, ...] | None = None

    def contradictions(self) -> Iterator[str]:
        if not 0 < self.context_size <= self.max_pos_emb:
            yield f"context_size={self.context_size} is not between 1 and max_pos_emb={self.max_pos_emb}"
        for number in self.further_states:
            if not 0 <= number < self.num_layers:
                yield f"cat_hidden_layers has {number}, and there are {self.num_layers} layers"

    @property
    def further_states(self) -> tuple[int, ...]:
        """The numbers of hidden states that stand before the last one: 0 is the input of the first layer."""
        return tuple(sorted(set(self.cat_hidden_layers or ())))

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "M": self.input_dim,
            "D": self.hidden_dim,
            "N": self.num_heads,
            "H": self.hidden_dim // self.num_heads if self.dim_head is None else self.dim_head,
            "F": self.hidden_dim * self.feedforward_mult,
            "L": self.num_layers,
            "E": self.hidden_dim * self.conv_expansion_factor,
            "G": self.output_dim,
            "R": 2 * self.max_pos_emb + 1,
            "c": self.conv_kernel_size,
        }


def _half(name: str, param: str) -> tuple[Map, ...]:
    return under(
        name,
        param,
        *layer_norm("pre_norm", "norm"),
        *with_bias("up_proj", "up", UP, "F"),
        *with_bias("down_proj", "down", DOWN, "D"),
    )


CONFORMER = Tower(
    "granite_conformer",
    "Granite Speech",
    ConformerConfig,
    (
        *with_bias("input_linear", "entry", "D M -> M D", "D"),
        *under(
            "layers.{L}",
            "layers.{L}",
            *_half("ff1", "mlp_before"),
            *layer_norm("attn.pre_norm", "attn.norm"),
            *without_bias("attn.to_q", "attn.q", "(N H) D -> D N H"),
            Map("attn.to_kv.weight", ("attn.k.kernel", "attn.v.kernel"), "((N H) + (N H)) D -> D N H, D N H"),
            *with_bias("attn.to_out", "attn.o", OUT_OF_HEADS, "D"),
            Map("attn.rel_pos_emb.weight", "attn.distance", "R H"),
            *layer_norm("conv.norm", "conv.norm"),
            Map("conv.up_conv.weight", ("conv.up.kernel", "conv.gate.kernel"), "(E + E) D 1 -> D E, D E"),
            Map("conv.up_conv.bias", ("conv.up.bias", "conv.gate.bias"), "(E + E) -> E, E"),
            Map("conv.depth_conv.conv.weight", "conv.kernel", "E 1 c -> c E"),
            *layer_norm("conv.batch_norm", "conv.batch_norm", "E"),
            Map("conv.batch_norm.running_mean", "conv.batch_norm.mean", "E"),
            Map("conv.batch_norm.running_var", "conv.batch_norm.variance", "E"),
            Map("conv.batch_norm.num_batches_tracked", "conv.batch_norm.batches", "", buffer=True),
            *with_bias("conv.down_conv", "conv.down", "D E 1 -> E D", "D"),
            *_half("ff2", "mlp_after"),
            *layer_norm("post_norm", "norm"),
        ),
        *with_bias("out", "guess", "G D -> D G", "G"),
        *with_bias("out_mid", "guessed", "D G -> G D", "D"),
    ),
    "tpuconv.models.towers.conformer.modules:Conformer",
)


GRANITE_AUDIO = Modality(
    AUDIO,
    CONFORMER,
    QFORMER,
    prefix="encoder.",
    projector_prefix="projector.",
    placeholder=("audio_token_id", "audio_token_index"),
    placeholder_id=49155,
    config_key="encoder_config",
)
"""Granite Speech."""

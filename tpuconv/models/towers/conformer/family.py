"""The conformer of Granite Speech and its projector, a Q-Former: configs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import TEXT_ALONE, Projector, ProjectorConfig, Tower, TowerConfig
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


@dataclass(frozen=True, kw_only=True)
class QFormerConfig(ProjectorConfig):
    """The keys of `projector_config`, and those beside it. Q counts the queries of a window, A is their width, K and I
    their heads and the width of one, W their MLP width, J their layers, X those that read the window, S its width."""

    names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "query_width",
        "num_hidden_layers": "query_layers",
        "num_attention_heads": "query_heads",
        "intermediate_size": "query_mlp",
        "hidden_act": "query_act",
        "layer_norm_eps": "query_eps",
    }

    query_width: int = 768
    query_layers: int = 12
    query_heads: int = 12
    query_mlp: int = 3072
    query_act: str = "gelu"
    query_eps: float = 1e-12
    cross_attention_frequency: int = 2
    encoder_hidden_size: int = 1408
    use_qformer_text_input: bool = False
    downsample_rate: int = 5
    window_size: int = 15

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        read = outer.get("projector_config") or {}
        if not isinstance(read, Mapping):
            raise ConfigError(f"config.json: projector_config={short(read)} is not an object")
        if (kind := read.get("model_type", "blip_2_qformer")) != "blip_2_qformer":
            raise UnsupportedConfig(f"a projector of the type {short(kind)} is not implemented", hint=TEXT_ALONE)
        beside = {key: outer[key] for key in ("downsample_rate", "window_size") if key in outer}
        own = {cls.names.get(key, key): value for key, value in read.items() if key not in beside}
        return super().from_hf({**own, **beside}, tower, text)

    def check(self, tower: Any) -> None:
        super().check(tower)
        width, reads = self.query_width, (len(tower.further_states) + 1) * tower.hidden_dim
        wrong = [
            f"{name}={value}" for name, value in vars(self).items() if type(value) is int and value < 1
        ]  # before divisions by them
        if not wrong and self.window_size % self.downsample_rate:
            wrong.append(f"window_size={self.window_size} is not a multiple of downsample_rate={self.downsample_rate}")
        if not wrong and width % self.query_heads:
            wrong.append(f"hidden_size={width} of the projector is not a multiple of {self.query_heads} heads")
        if self.encoder_hidden_size != reads:
            wrong.append(f"encoder_hidden_size={self.encoder_hidden_size}, and the encoder has a width of {reads}")
        if wrong:
            raise ConfigError("config.json contradicts itself about a projector", details=wrong)

    @property
    def queries(self) -> int:
        """The number of queries of a window, and of its features."""
        return self.window_size // self.downsample_rate

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {
            "O": self.out,
            "Q": self.queries,
            "A": self.query_width,
            "K": self.query_heads,
            "I": self.query_width // self.query_heads,
            "W": self.query_mlp,
            "J": self.query_layers,
            "X": tuple(range(0, self.query_layers, self.cross_attention_frequency)),
            "S": self.encoder_hidden_size,
        }


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


QFORMER = Projector(
    QFormerConfig,
    (
        Map("query", "query", "1 Q A -> Q A"),
        *layer_norm("qformer.layernorm", "norm", "A"),
        *under(
            "qformer.encoder.layer.{J}", "layers.{J}", *_attention("attention", "attn", "A"), *_mlp("_query", "mlp")
        ),
        *under("qformer.encoder.layer.{X}", "layers.{X}", *_attention("crossattention", "cross", "S")),
        *under(
            "qformer.encoder.layer.{J}",
            "layers.{J}",
            *(replace(row, when="use_qformer_text_input") for row in _mlp("", "text_mlp")),
        ),
        *with_bias("linear", "matrix", "O A -> A O", "O"),
    ),
    "tpuconv.models.towers.conformer.modules:QFormer",
)
"""Learned queries that attend to a window of the encoder's output and to each other, and a matrix."""

"""The parts that decoders are made of, as data. A part says which rows its tensors have and which keys of config.json
it reads; `models/build.py` makes its module. Nothing here needs jax.

A field of the type `Condition` is the name of a key of config.json (or of a property of the Config), or True or False.
A part has at most eight options: what needs a ninth is a class of its own, which `module` names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from tpuconv.models.common.rows import (
    ATTENTION,
    FUSED_MLP,
    HEAD_NORMS,
    MLP,
    MLP_BIAS,
    NORMS_OF_ALL_HEADS,
    O_BIAS,
    PLAIN_MLP,
    PLAIN_MLP_BIAS,
    QKV_BIAS,
    mlp_rows,
    when,
)
from tpuconv.notation.table import Map, under

Condition = str | bool

KEY_TYPES: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias"), bool),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "norm_topk_prob", "scale_embedding", "enable_bias"), bool),
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_local_experts"), int),
    **dict.fromkeys(("shared_expert_intermediate_size", "decoder_sparse_step"), int),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), float),
    "logit_scale": float,
    "clip_qkv": float | None,
    "attn_logit_softcapping": float | None,
    "final_logit_softcapping": float | None,
    "sliding_window": int | None,
    "layer_types": tuple[str, ...] | None,
    "mlp_only_layers": tuple[int, ...] | None,
}
"""The types of keys that parts name."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a decoder.

    Attributes:
        module: its class, where `build.py` has none of this kind: "common.blocks:ClippedAttention" of `tpuconv.models`,
            or a class of another package.
        rows: its rows, where its tensors do not have the names of Llama.
        keys: the keys of config.json that it reads besides those that its options name.
    """

    module: str = ""
    rows: tuple[Map, ...] | None = None
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rows"}
        differing = {name: value for name, value in said.items() if value != getattr(type(self), name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in differing.items())})"

    @property
    def table_rows(self) -> tuple[Map, ...]:
        """The rows of its tensors."""
        return tuple(self.plain_rows()) if self.rows is None else self.rows

    def plain_rows(self) -> Iterator[Map]:
        """Yields its rows with the names of Llama."""
        yield from ()

    def conditions(self) -> tuple[Condition, ...]:
        """Returns the options that may be keys of config.json, in the order in which they become fields."""
        return ()

    def named_keys(self) -> tuple[str, ...]:
        """Returns the keys of config.json that it reads."""
        return (*(key for key in self.conditions() if isinstance(key, str) and key), *self.keys)


PLACES_OF_NORMS = {
    "pre": ("attn_norm", "mlp_norm"),
    "post": ("post_attn_norm", "post_mlp_norm"),
    "sandwich": ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm"),
    "parallel": ("norm",),
}
"""The parameters of the norms of a layer."""
NAMES_OF_NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm",),
}
"""Their names in releases."""
WITH_BIAS, WITHOUT_SCALE = ("layer", "centered layer"), ("plain layer", "plain RMS")
"""Kinds of norms that have a bias, and that have no parameters."""


@dataclass(frozen=True)
class Norms(Part):
    """The norms of a layer, and the last one of the model.

    Attributes:
        at: before attention and MLP ("pre"), behind both ("post"), both ("sandwich"), or one before the two, which
            are added ("parallel").
        kind: a key of `tpuconv.models.build.NORMS`.
        names: their names in releases, where these are not `NAMES_OF_NORMS`.
        between: list each row beside the attention or MLP that its norm is next to.
    """

    at: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    kind: str = "RMS"
    names: tuple[str, ...] = ()
    between: bool = False

    def plain_rows(self) -> Iterator[Map]:
        if self.kind in WITHOUT_SCALE:
            return
        names = self.names or NAMES_OF_NORMS[self.at]
        for name, place in zip(names, PLACES_OF_NORMS[self.at], strict=True):
            yield Map(f"{name}.weight", f"{place}.scale", "D")
        if self.kind in WITH_BIAS:
            for name, place in zip(names, PLACES_OF_NORMS[self.at], strict=True):
                yield Map(f"{name}.bias", f"{place}.bias", "D")


@dataclass(frozen=True)
class Attn(Part):
    """Attention.

    Attributes:
        bias: of queries, keys and values.
        out_bias: of the output; None means as `bias`.
        norms: of queries and keys: of each head alone, or of all heads together.
        normed: where the norms exist.
        rope: the pairs of dimensions that rotary positions turn, (i, i + H/2) or (2i, 2i + 1), and the dtype, if it
            is not the dtype of the model.
        scale: a property or key with the factor of scores; H^-0.5 without.
        cap: a key with the soft limit of scores.
        norm_kind: the kind of the norms, where it differs from the norms of the layer.
    """

    bias: Condition = False
    out_bias: Condition | None = None
    norms: Literal["", "each head", "all heads", "each head, after rotation"] = ""
    normed: Condition = True
    rope: Literal["halves", "pairs", "halves in float32", "pairs in float32"] = "halves"
    scale: str = ""
    cap: str = ""
    norm_kind: str = ""

    def plain_rows(self) -> Iterator[Map]:
        yield from ATTENTION
        yield from rows_if(self.bias, *QKV_BIAS)
        yield from rows_if(self.has_out_bias, O_BIAS)
        if self.norms:
            yield from rows_if(self.normed, *(NORMS_OF_ALL_HEADS if self.norms == "all heads" else HEAD_NORMS))

    def conditions(self) -> tuple[Condition, ...]:
        return (self.bias, self.has_out_bias, self.normed, self.scale, self.cap)

    @property
    def has_out_bias(self) -> Condition:
        """Where the output has a bias."""
        return self.bias if self.out_bias is None else self.out_bias


@dataclass(frozen=True)
class Mlp(Part):
    """The MLP of a layer.

    Attributes:
        kind: with a gate (arXiv:2002.05202), the same with gate and up in one tensor of releases, or plain.
        act: a key of `tpuconv.models.build.ACTS`.
        bias: of all its products.
        width: the letter of its width.
    """

    kind: Literal["gated", "fused", "plain"] = "gated"
    act: str = "silu"
    bias: Condition = False
    width: str = "F"

    def plain_rows(self) -> Iterator[Map]:
        rows, biases = {
            "gated": (MLP, MLP_BIAS),
            "fused": (FUSED_MLP, ()),
            "plain": (PLAIN_MLP, PLAIN_MLP_BIAS),
        }[self.kind]
        yield from under("mlp", "mlp", *rows, *rows_if(self.bias, *biases))

    def conditions(self) -> tuple[Condition, ...]:
        return (self.bias,)


@dataclass(frozen=True)
class Experts(Part):
    """Experts in place of the MLP: `module`, and `rows` without a prefix.

    Attributes:
        layers: which layers have experts: all; or the layers J, where the layers I have an MLP; or either, by the
            config.
        below: the module of releases that has them; empty if the rows say it, on both sides.
        router: the class of the router, where `module` leaves it open.
    """

    layers: Literal["all", "some", "some or all"] = "all"
    below: str = "mlp"
    router: str = ""

    def plain_rows(self) -> Iterator[Map]:
        raise NotImplementedError("experts have no rows of their own")

    @property
    def table_rows(self) -> tuple[Map, ...]:
        return self.placed_rows if self.layers == "all" else ()

    @property
    def placed_rows(self) -> tuple[Map, ...]:
        """The rows below a layer."""
        assert self.rows is not None
        return under(self.below, "moe", *self.rows) if self.below else self.rows

    @property
    def rows_of_layers(self) -> tuple[Map, ...]:
        """The rows with their prefixes, where some layers have an MLP."""
        if self.layers == "all":
            return ()
        assert self.rows is not None
        if self.layers == "some or all":
            return mlp_rows(*self.rows)
        dense = under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP)
        return (*dense, *under("model.layers.{J}", "layers.{J}", *self.placed_rows))


@dataclass(frozen=True)
class Mtp(Part):
    """Layers for multi-token prediction behind the others, which have experts: `rows` are those that join their inputs,
    besides the rows of a layer (`models/common/mtp.py`)."""


@dataclass(frozen=True)
class Factors(Part):
    """Factors of what layers hand on, as properties or keys of the config.

    Attributes:
        embedding: of the embeddings.
        rounded: round it to the dtype of the embeddings first.
        residual: of what attention and MLP add.
        logits, divisor: what logits are multiplied with, or divided by.
        cap: the soft limit of logits.
    """

    embedding: str = ""
    rounded: bool = False
    residual: str = ""
    logits: str = ""
    divisor: str = ""
    cap: str = ""

    def conditions(self) -> tuple[Condition, ...]:
        return (self.embedding, self.residual, self.logits, self.divisor, self.cap)


def rows_if(condition: Condition, *rows: Map) -> tuple[Map, ...]:
    """Returns the rows under a condition; all or none, if it is no key."""
    if isinstance(condition, str):
        return when(condition, *rows)
    return rows if condition else ()

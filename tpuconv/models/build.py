"""Builds the model of a family from its parts: one class for each part, made of the modules of `models/common/`."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpuconv.models.common import blocks, mtp
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import (
    CenteredLayerNorm,
    CenteredRMSNorm,
    GroupedRMSNorm,
    HeadLayerNorm,
    LayerNorm,
    PlainLayerNorm,
    PlainRMSNorm,
    RMSNorm,
    ScaledRMSNorm,
    gelu,
    gelu_tanh,
    relu2,
    soft_capped,
    times,
)
from tpuconv.models.declare import DecoderFamily
from tpuconv.models.parts import Attn, Experts, Factors, Mlp, Mtp, Norms
from tpuconv.models.registry import get_family
from tpuconv.notation.sizes import holds

NORMS: Mapping[str, Callable[..., Any]] = {
    "RMS": RMSNorm,
    "scaled RMS": ScaledRMSNorm,
    "grouped RMS": GroupedRMSNorm,
    "centered RMS": CenteredRMSNorm,
    "layer": LayerNorm,
    "layer without bias": partial(LayerNorm, bias=False),
    "centered layer": CenteredLayerNorm,
    "layer of heads": partial(HeadLayerNorm, bias=False),
    "plain RMS": PlainRMSNorm,
    "plain layer": PlainLayerNorm,
}
"""The classes of norms."""


ACTS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": nnx.relu,
    "relu2": relu2,
}
"""The activations of MLPs."""

BLOCKS = {
    "pre": blocks.PreNormBlock,
    "post": blocks.PostNormBlock,
    "sandwich": blocks.SandwichBlock,
    "parallel": blocks.ParallelBlock,
}
"""The classes of layers, by the places of their norms."""


def class_named(module: str) -> Any:
    """Returns the class that a part names: "common.blocks:ClippedAttention" of `tpuconv.models`, or
    "my_package.modules:MyAttention"."""
    name, _, cls = module.partition(":")
    is_ours = find_spec(f"tpuconv.models.{name.partition('.')[0]}") is not None
    return getattr(import_module(f"tpuconv.models.{name}" if is_ours else name), cls)


@cache
def attention_class(part: Attn, norm: Callable[..., Any] = RMSNorm) -> Any:
    """Returns the class of attention; `norm` is the class of its norms."""
    base: Any = class_named(part.module) if part.module else blocks.NormedAttention if part.norms else blocks.Attention
    if not issubclass(base, blocks.Attention):
        return base

    class Attention(base):  # type: ignore[misc]  # one of several classes
        pairs = part.rope.startswith("pairs")
        float32_rope = part.rope.endswith("float32")
        norms_last = part.norms.endswith("rotation")
        norm_type = staticmethod(norm_class(part.norm_kind) if part.norm_kind else norm)

        def __init__(self, config: Any, **options: Any):
            options |= {"bias": holds(part.bias, config), "out_bias": holds(part.has_out_bias, config)}
            if issubclass(base, blocks.NormedAttention):
                options |= {
                    "all_heads": part.norms == "all heads",
                    "normed": bool(part.norms) and holds(part.normed, config),
                }
            super().__init__(config, **options)
            if part.scale:
                self.scale = getattr(config, part.scale)
            if part.cap:
                self.cap = getattr(config, part.cap)

    return Attention


@cache
def mlp_class(part: Mlp) -> Any:
    """Returns the class of the MLP."""
    plain = blocks.PlainMLP if part.kind == "plain" else blocks.GatedMLP
    base: Any = class_named(part.module) if part.module else plain

    class MLP(base):  # type: ignore[misc]  # one of several classes
        def __init__(self, config: Any, **options: Any):
            if holds(part.bias, config):
                options["bias"] = True
            super().__init__(config, part.width, **options)

        if not part.module:
            act = staticmethod(ACTS[part.act])

    return MLP


@cache
def experts_class(part: Experts) -> Any:
    """Returns the class of experts."""
    base = class_named(part.module)
    return type("MoE", (base,), {"router_type": class_named(part.router)}) if part.router else base


@cache
def block_class(norms: Norms, attn: Attn, feed: Mlp, experts: Experts | None, factors: Factors | None) -> Any:
    """Returns the class of a layer."""
    base: Any = class_named(norms.module) if norms.module else BLOCKS[norms.at]
    norm = norm_class(norms.kind)

    class Block(base):  # type: ignore[misc]  # one of several classes
        attention_type = attention_class(attn, norm)
        mlp_type = mlp_class(feed)
        norm_type = staticmethod(norm)
        if experts is not None:
            moe_type = experts_class(experts)
        if factors is not None and factors.residual:

            def __init__(self, config: Any, layer: int, **options: Any):
                super().__init__(config, layer, **options)
                self.factor = getattr(config, factors.residual)

            def joined(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
                return x_BTD + times(y_BTD, self.factor)

    return Block


def norm_class(kind: str) -> Callable[..., Any]:
    """Returns the class of a kind of norms, which may be named as the class of a part."""
    return NORMS[kind] if kind in NORMS else class_named(kind)


@cache
def model_class(name: str) -> Any:
    """Returns the class of the model of a family that is made of parts."""
    family = get_family(name)
    assert isinstance(family, DecoderFamily)
    norms, attn = family.part(Norms) or Norms(), family.part(Attn) or Attn()
    layer = block_class(norms, attn, family.part(Mlp) or Mlp(), family.part(Experts), factors := family.part(Factors))

    base: Any = class_named(family.base) if family.base else Decoder
    further = family.part(Mtp)

    class Model(base):  # type: ignore[misc]  # one of several classes
        """Token ids [B, T] to logits [B, T, V]."""

        block = layer
        norm_type = staticmethod(norm_class(norms.kind))
        if further is not None:
            mtp_type = mtp.mtp_module(layer, class_named(further.module) if further.module else mtp.MTPLayer)

        if factors is not None and factors.embedding:

            def scaled(self, x_BTD: jax.Array) -> jax.Array:
                factor = getattr(self.config, factors.embedding)
                return x_BTD * jnp.float32(factor).astype(x_BTD.dtype) if factors.rounded else times(x_BTD, factor)

        if factors is not None and (factors.logits or factors.divisor or factors.cap):

            def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
                return with_factors(factors, self.config, logits_BTV)

    return Model


def with_factors(factors: Factors, config: Any, logits_BTV: jax.Array) -> jax.Array:
    """Returns logits with their factors."""
    if factors.logits:
        logits_BTV = times(logits_BTV, getattr(config, factors.logits))
    if factors.divisor:
        logits_BTV = (logits_BTV.astype(jnp.float32) / getattr(config, factors.divisor)).astype(logits_BTV.dtype)
    return soft_capped(logits_BTV, getattr(config, factors.cap)) if factors.cap else logits_BTV

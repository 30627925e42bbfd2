"""Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import Attention, PlainMLP
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm
from tpuconv.models.common.mamba2 import Mamba2, MambaState
from tpuconv.models.common.moe import Expert, Rows, routed
from tpuconv.models.common.mtp import JoinedInputs
from tpuconv.models.common.recurrence import HybridDecoder
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3.modules import Router
from tpuconv.models.nemotron_h.family import MTP_KINDS, Config
from tpuconv.notation.letters import with_letters

LEGEND = {"c": "expert_dim"}
"""The words of this module, by the letters of its einsums and arrays."""


class MoE(nnx.Module):
    """The chosen experts, which have no gate, and the shared one, x [B, T, D] to [B, T, D]. The experts may read and
    write a latent vector instead of hidden states."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = with_letters(config.sizes, LEGEND), config.mlp_bias
        latent = {**sizes, "D": sizes["expert_dim"]}
        self.router = Router(config, dtype=dtype, keys=keys)  # type: ignore[arg-type]  # it has the same keys
        self.up = Expert("EDM", latent, dtype=dtype, keys=keys)
        self.down = Expert("EMD", latent, dtype=dtype, keys=keys)
        has_latent = config.has_latent
        self.to_latent = Einsum("BTD,Dc->BTc", sizes, bias=bias, dtype=dtype, keys=keys) if has_latent else None
        self.from_latent = Einsum("BTc,cD->BTD", sizes, bias=bias, dtype=dtype, keys=keys) if has_latent else None
        self.shared = PlainMLP(config, "W", bias=bias, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        def feed(up: Expert, down: Expert, rows: Rows) -> jax.Array:
            return down(self.shared.act(up(rows.x, rows)), rows)

        x_BTc = x_BTD if self.to_latent is None else self.to_latent(x_BTD)
        y_BTc = routed(feed, (self.up, self.down), x_BTc, *self.router(x_BTD))
        return (y_BTc if self.from_latent is None else self.from_latent(y_BTc)) + self.shared(x_BTD)


class Block(nnx.Module):
    """One layer: Mamba-2, attention, an MLP or experts, after a norm, with a residual connection."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.norm = ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        match (*config.kinds, *MTP_KINDS)[layer]:
            case "linear_attention":
                self.attn: Any = Mamba2(config, dtype=dtype, keys=keys)
            case "full_attention":
                self.attn = Attention(config, dtype=dtype, keys=keys)
            case "mlp":
                self.mlp = PlainMLP(config, bias=config.mlp_bias, dtype=dtype, keys=keys)
            case _:
                self.moe = MoE(config.of_layer(layer), dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD = self.norm(x_BTD)
        if hasattr(self, "attn"):
            y_BTD, kv = self.attn(y_BTD, step, window, kv)
        else:
            y_BTD = self.moe(y_BTD) if hasattr(self, "moe") else self.mlp(y_BTD)
        return x_BTD + y_BTD, kv


class MTPModule(JoinedInputs):
    """The module for multi-token prediction: the joined inputs, then a layer of attention and one of experts. See
    `MTPModule` of `models/common`."""

    norm_type = ScaledRMSNorm

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.add_parts(config, dtype=dtype, keys=keys)
        for number in config.layer_sets["U"]:
            setattr(self, str(number), Block(config, config.num_hidden_layers + number, dtype=dtype, keys=keys))

    def __call__(self, next_BTD: jax.Array, x_BTD: jax.Array, step: Step, kv: Any) -> tuple[jax.Array, Any]:
        y_BTD, kv = getattr(self, "0")(self.joined_inputs(next_BTD, x_BTD), step, self.window, kv)
        y_BTD, _ = getattr(self, "1")(y_BTD, step, self.window, None)
        return self.norm(y_BTD), kv


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type: ClassVar[Callable[..., Any] | None] = MTPModule
    norm_type = ScaledRMSNorm
    state_type = MambaState

    def cached_keys(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        has_keys = (*config.kinds, *MTP_KINDS)[layer] == "full_attention"
        return super().cached_keys(config, layer, shape, dtype) if has_keys else None

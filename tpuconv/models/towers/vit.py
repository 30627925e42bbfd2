"""Vision transformers (arXiv:2010.11929): the layers that most towers share, and their rows.

Letters here are a tower's own: B images of one size (1 where images differ in size and are one after the other), P
patches, D width, N heads, H head, F MLP width, L layers, C values of a patch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, apply_rope_to_neighbours
from tpuconv.models.towers.attention import attend

CosSin = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Attention of the patches of one image among each other, x [B, P, D] to [B, P, D].

    Args:
        config: has the sizes.
        bias: whether queries, keys and values have biases, or which of them: "qv".
        out_bias: whether the output has one.
        rotate: turns queries and keys [B, P, N, H] by angles.
        norm: creates the norms of queries and keys; None without.
        scale: of the scores; None is H^-0.5.
        kv: the letter of the heads of keys and values, where several of N share one.
        sees_before: as of `attend`.
    """

    def __init__(
        self,
        config: Any,
        *,
        bias: bool | str = True,
        out_bias: bool = True,
        rotate: Callable[[jax.Array, Any], jax.Array] | None = None,
        norm: Callable[[], Any] | None = None,
        scale: float | None = None,
        kv: str = "N",
        sees_before: bool = False,
        dtype: DTypeLike,
        keys: Keys,
    ):
        def product(name: str) -> Einsum:
            has_bias, heads = bias if isinstance(bias, bool) else name in bias, "N" if name == "q" else kv
            return Einsum(f"BPD,D{heads}H->BP{heads}H", config.sizes, bias=has_bias, dtype=dtype, keys=keys)

        self.q, self.k, self.v = map(product, "qkv")
        self.repeats = config.sizes["N"] // config.sizes[kv]
        self.o = Einsum("BPNH,NHD->BPD", config.sizes, bias=out_bias, dtype=dtype, keys=keys)
        self.q_norm: Any = None if norm is None else norm()
        self.k_norm: Any = None if norm is None else norm()
        self.rotate, self.scale, self.sees_before = rotate, scale, sees_before

    def __call__(
        self, x_BPD: jax.Array, segment_BP: jax.Array, angles: Any = None, is_key_BP: jax.Array | None = None
    ) -> jax.Array:
        q_BPNH, k_BPNH, v_BPNH = self.q(x_BPD), self.k(x_BPD), self.v(x_BPD)
        if self.q_norm is not None:
            q_BPNH, k_BPNH = self.q_norm(q_BPNH), self.k_norm(k_BPNH)
        if self.rotate is not None:
            q_BPNH, k_BPNH = self.rotate(q_BPNH, angles), self.rotate(k_BPNH, angles)
        if self.repeats > 1:
            k_BPNH, v_BPNH = (jnp.repeat(each, self.repeats, axis=2) for each in (k_BPNH, v_BPNH))
        said: Any = {"scale": self.scale, "sees_before": self.sees_before, "is_key_BP": is_key_BP}
        return self.o(attend(q_BPNH, k_BPNH, v_BPNH, segment_BP, **said, **self.limits(angles)))

    def limits(self, angles: Any) -> dict[str, Any]:
        """Returns further arguments of `attend`."""
        return {}


class MLP(nnx.Module):
    """down(act(up x)), or gated down(act(gate x) up x) (arXiv:2002.05202), x [B, P, D] to [B, P, D].

    Args:
        limit: the largest value of gate x, and the largest size of up x.
    """

    def __init__(
        self,
        config: Any,
        act: Callable[[jax.Array], jax.Array],
        *,
        gated: bool = False,
        bias: bool = True,
        limit: float | None = None,
        dtype: DTypeLike,
        keys: Keys,
    ):
        def product(equation: str) -> Einsum:
            return Einsum(equation, config.sizes, bias=bias, dtype=dtype, keys=keys)

        self.up, self.down = product("BPD,DF->BPF"), product("BPF,FD->BPD")
        self.gate = product("BPD,DF->BPF") if gated else None
        self.act, self.limit = act, limit

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        up_BPF = self.up(x_BPD)
        if self.gate is None:
            return self.down(self.act(up_BPF))
        gate_BPF, up_BPF = limited_factors(self.gate(x_BPD), up_BPF, self.limit)
        return self.down(self.act(gate_BPF) * up_BPF)


def limited_factors(gate: jax.Array, up: jax.Array, limit: float | None) -> tuple[jax.Array, jax.Array]:
    """Returns the two factors of a gated MLP, with values as `MLP` limits them."""
    return (gate, up) if limit is None else (jnp.minimum(gate, limit), jnp.clip(up, -limit, limit))


class Block(nnx.Module):
    """One layer, [B, P, D] to [B, P, D]: attention and MLP, each behind its norm, with residual connections.

    Args:
        norm: creates a norm over D.
        scaled: whether the outputs of attention and MLP are multiplied by a factor for each of D (LayerScale,
            arXiv:2103.17239).
    """

    def __init__(
        self, config: Any, norm: Callable[[], Any], attn: Attention, mlp: MLP, *, scaled: bool = False, dtype: DTypeLike
    ):
        self.attn_norm, self.mlp_norm, self.attn, self.mlp = norm(), norm(), attn, mlp
        ones = nnx.initializers.ones_init()
        self.attn_scale, self.mlp_scale = (
            nnx.Param(ones(jax.random.key(0), (config.sizes["D"],), dtype)) if scaled else None for _ in range(2)
        )

    def __call__(
        self, x_BPD: jax.Array, segment_BP: jax.Array, angles: Any = None, is_key_BP: jax.Array | None = None
    ) -> jax.Array:
        y_BPD = self.attn(self.attn_norm(x_BPD), segment_BP, angles, is_key_BP)
        x_BPD = x_BPD + (y_BPD if self.attn_scale is None else y_BPD * self.attn_scale[...])
        y_BPD = self.mlp(self.mlp_norm(x_BPD))
        return x_BPD + (y_BPD if self.mlp_scale is None else y_BPD * self.mlp_scale[...])


def turning_layers(
    config: Any,
    norm: Callable[[], Any],
    act: Callable[[jax.Array], jax.Array],
    *,
    scaled: bool = False,
    dtype: DTypeLike,
    keys: Keys,
) -> Any:
    """Returns layers whose queries and keys turn pairs of neighbouring dimensions; see `MLP` and `Block`."""
    return nnx.List(
        [
            Block(
                config,
                norm,
                Attention(config, rotate=apply_rope_to_neighbours, dtype=dtype, keys=keys),
                MLP(config, act, dtype=dtype, keys=keys),
                scaled=scaled,
                dtype=dtype,
            )
            for _ in range(config.sizes["L"])
        ]
    )

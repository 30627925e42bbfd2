"""The encoders of MiMo V2.5 and V2.6, after the code of the release as vLLM, mlx-vlm and SGLang-JAX repeat it.

Letters of sounds: G features, R rows of codes of one feature, Y codes of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, apply_rope, gelu, normal
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.angles import cos_sin
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, given, padded
from tpuconv.models.towers.places import bucket
from tpuconv.models.towers.qwen_vit.modules import Merger, QwenVit
from tpuconv.models.towers.vit import MLP, Attention, Block, CosSin

EPS = 1e-6
"""The epsilon of all norms, which no key has."""


class Neighbours(NamedTuple):
    """The angles of patches of MiMo, and their neighbours.

    Attributes:
        cos_sin: by which queries and keys turn.
        by_rows, by_columns: the numbers [1, P] of patches in the order of rows, and of columns; a frame has numbers
            one after the other.
        is_first: True [1, P] for the first patch of each frame, which is the same in both orders.
    """

    cos_sin: CosSin
    by_rows: jax.Array
    by_columns: jax.Array
    is_first: jax.Array


class MimoAttention(Attention):
    """Attention in a layer, to all patches of a frame or to neighbours. Layers with a window may have sinks: a number
    for each head, added to the scores of the first patch of a frame where a patch sees it."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, rotate=self._turned, kv="K", dtype=dtype, keys=keys)
        self.reach = None if config.sees_all(layer) else config.visual_token_window_size
        self.by_columns = config.by_columns(layer)
        has_sinks = layer in config.layer_sets["J"]
        self.sinks = nnx.Param(jnp.zeros(config.sizes["N"], dtype)) if has_sinks else None

    @staticmethod
    def _turned(x_BPNH: jax.Array, angles: Neighbours) -> jax.Array:
        return apply_rope(x_BPNH, angles.cos_sin)

    def limits(self, angles: Neighbours) -> dict[str, Any]:
        if self.reach is None:
            return {}
        place_BP = angles.by_columns if self.by_columns else angles.by_rows
        near = {"place_BP": place_BP, "reach": self.reach}
        if self.sinks is None:
            return near
        sinks_N1 = self.sinks[...].astype(jnp.float32)[:, None]
        return {**near, "bias_BNS": jnp.where(angles.is_first[:, None], sinks_N1, 0.0)}


class MimoVit(QwenVit):
    """The encoder of images of MiMo: patches see neighbours by rows in some layers, by columns in others."""

    def blocks(self, config: Any, dtype: DTypeLike, keys: Keys) -> list[Block]:
        return [
            Block(
                config,
                partial(RMSNorm, "D", config.sizes, EPS, dtype=dtype),
                MimoAttention(config, layer, dtype=dtype, keys=keys),
                MLP(config, ACTS_BY_NAME[config.hidden_act], gated=True, dtype=dtype, keys=keys),
                dtype=dtype,
            )
            for layer in range(config.depth)
        ]

    def window_numbers(self, at_P2: np.ndarray) -> np.ndarray:
        """Returns the number of each patch where squares of merged patches come column by column."""
        s = self.config.spatial_merge_size
        (row, column), height = at_P2.T // s, at_P2[:, 0].max() // s + 1
        inside = at_P2 % s @ [s, 1]
        numbers: np.ndarray = (column * height + row) * s**2 + inside
        return numbers

    def turns(self, at_P2: jax.Array, frames_P: jax.Array, windows_P: jax.Array) -> Neighbours:
        before_P = jnp.concatenate([frames_P[:1] - 1, frames_P[:-1]])
        return Neighbours(
            super().turns(at_P2, frames_P, windows_P),
            jnp.arange(len(frames_P))[None],
            windows_P[None],
            (frames_P != before_P)[None],
        )


class MimoMerger(Merger):
    """The merger of MiMo."""

    norm_type = partial(LayerNorm, eps=EPS, bias=False)
    has_biases = False


class MimoSound(FeatureEncoder):
    """Rows of codes [R G, Y] of a sound to features [G, O]: vectors of the codes are added up, and a transformer reads
    the R rows of each feature. The codes are a codec's, which is a model of its own."""

    takes = ("audio_codes",)
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        self.tables = nnx.Param(normal(keys(), tuple(sizes[letter] for letter in "YVD"), dtype))
        norm = partial(RMSNorm, "D", sizes, EPS, dtype=dtype)
        self.layers = nnx.List(
            [
                Block(
                    config,
                    norm,
                    Attention(config, out_bias=False, rotate=apply_rope, dtype=dtype, keys=keys),
                    MLP(config, ACTS_BY_NAME[config.hidden_act], gated=True, bias=False, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )
        self.norm = norm()

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        codes, (rows, tables, most) = given(features, "audio_codes", 2), self._limits
        if len(codes) % rows or codes.shape[1] != tables or codes.min(initial=0) < 0 or codes.max(initial=0) >= most:
            raise UsageError(
                f"audio_codes has shape {codes.shape} with numbers to {codes.max(initial=0)}; the model has rows of "
                f"{tables} codes less than {most}, and {rows} rows for a feature",
                hint="repeat the last row of each sound until its rows are a multiple",
            )
        codes_GRY = codes.reshape(-1, rows, tables).astype(np.int32)
        count = len(codes_GRY)
        return Prepared((padded(codes_GRY, bucket(count)),), np.arange(count), [count])

    def placed(self, prepared: Prepared, runs: Sequence[int]) -> Prepared:
        return replace(prepared, counts=runs)

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
        rows, tables, most = self._limits
        return {"audio_codes": rng.integers(0, most, (5 * rows, tables))}

    @property
    def _limits(self) -> tuple[int, int, int]:
        return self.config.group_size, self.config.audio_channels, self.config.code_count

    def __call__(self, codes_GRY: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        G, R, Y = codes_GRY.shape
        x_GRD = self.tables[...][jnp.arange(Y), codes_GRY].sum(axis=2)
        rates_A, _ = Rope(theta=self.config.rope_theta).inverse_frequencies(self.config.sizes["H"])
        angles = cos_sin(jnp.arange(R, dtype=jnp.float32)[None, :, None] * rates_A)
        for layer in self.layers:
            x_GRD = layer(x_GRD, jnp.zeros((G, R), jnp.int32), angles)
        return self.projector(self.norm(x_GRD).reshape(G, -1)), ()


class SoundMLP(nnx.Module):
    """Two matrices with GELU between, [G, M] to [G, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        product = partial(Einsum, sizes=config.sizes, dtype=dtype, keys=keys)
        self.up, self.down = product("GM,MW->GW"), product("GW,WO->GO")

    def __call__(self, x_GM: jax.Array) -> jax.Array:
        return self.down(gelu(self.up(x_GM)))

"""Q-Formers: learned queries that read windows of features.

Letters: B rows, Z windows, C vectors of one, P vectors that are read, Q, A, K, I, W, S and R as
`tpuconv.models.towers.qformer.family` has them, O the width of the text model; M, and X and A of an arrangement, as in
`tpuconv.models.towers.llava.modules`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.towers.encoder import ACTS_BY_NAME, resized
from tpuconv.models.towers.image_encoder import joined_squares
from tpuconv.models.towers.llava.modules import Tiles
from tpuconv.models.towers.places import Floats

WINDOW_EPS = 1e-6
"""The epsilon of the norm of what windows are cut of. No key has it."""


class QueryAttention(nnx.Module):
    """Attention of queries [B, Q, A] to vectors [B, P, reads], added to the queries and normed. Scores are in float32.
    `reads` is the letter of the width of the vectors."""

    def __init__(self, config: PartConfig, reads: str, *, dtype: DTypeLike, keys: Keys):
        matrix = partial(Einsum, sizes=config.sizes, bias=True, dtype=dtype, keys=keys)
        self.q, self.o = matrix("BQA,AKI->BQKI"), matrix("BQKI,KIA->BQA")
        self.k, self.v = matrix(f"BP{reads},{reads}KI->BPKI"), matrix(f"BP{reads},{reads}KI->BPKI")
        self.norm = LayerNorm("A", config.sizes, config.query_eps, dtype=dtype)

    def __call__(self, x_BQA: jax.Array, y: jax.Array) -> jax.Array:
        q_BQKI, k_BPKI, v_BPKI = self.q(x_BQA), self.k(y), self.v(y)
        scores = jnp.einsum("BQKI,BPKI->BKQP", q_BQKI, k_BPKI, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * q_BQKI.shape[-1] ** -0.5, axis=-1).astype(v_BPKI.dtype)
        return self.norm(x_BQA + self.o(jnp.einsum("BKQP,BPKI->BQKI", weights, v_BPKI)))


class QueryMLP(nnx.Module):
    """An MLP of queries [B, Q, A], added to them and normed."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        matrix = partial(Einsum, sizes=config.sizes, bias=True, dtype=dtype, keys=keys)
        self.up, self.down, self.act = matrix("BQA,AW->BQW"), matrix("BQW,WA->BQA"), ACTS_BY_NAME[config.query_act]
        self.norm = LayerNorm("A", config.sizes, config.query_eps, dtype=dtype)

    def __call__(self, x_BQA: jax.Array) -> jax.Array:
        return self.norm(x_BQA + self.down(self.act(self.up(x_BQA))))


class QueryLayer(nnx.Module):
    """One layer of queries [B, Q, A] that attend to each other, and in some layers to a window [B, P, S]. An MLP for
    texts is kept, and nothing reads it."""

    def __init__(self, config: PartConfig, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn = QueryAttention(config, "A", dtype=dtype, keys=keys)
        is_reader = layer in config.layer_sets["Z"]
        self.cross = QueryAttention(config, "S", dtype=dtype, keys=keys) if is_reader else None
        self.mlp = QueryMLP(config, dtype=dtype, keys=keys)
        self.text_mlp = QueryMLP(config, dtype=dtype, keys=keys) if config.use_qformer_text_input else None

    def __call__(self, x_BQA: jax.Array, window_BPS: jax.Array) -> jax.Array:
        x_BQA = self.attn(x_BQA, x_BQA)
        return self.mlp(x_BQA if self.cross is None else self.cross(x_BQA, window_BPS))


class QFormer(nnx.Module):
    """Windows [B, Z, C, S] to features [B, Z, Q, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.query = nnx.Param(normal(keys(), (sizes["Q"], sizes["A"]), dtype))
        self.norm = LayerNorm("A", sizes, config.query_eps, dtype=dtype)
        self.layers = nnx.List([QueryLayer(config, i, dtype=dtype, keys=keys) for i in range(sizes["J"])])
        self.matrix = Einsum("BQA,AO->BQO", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, windows_BZCS: jax.Array) -> jax.Array:
        return self.read(jnp.broadcast_to(self.query[...], (*windows_BZCS.shape[:2], *self.query.shape)), windows_BZCS)

    def read(self, query_BZQA: jax.Array, windows_BZCS: jax.Array) -> jax.Array:
        """Returns what queries read of windows [B, Z, Q, O]."""
        B, Z, *window = windows_BZCS.shape
        x_BQA = self.norm(query_BZQA).reshape(B * Z, *query_BZQA.shape[2:])
        for layer in self.layers:
            x_BQA = layer(x_BQA, windows_BZCS.reshape(B * Z, *window))
        return self.matrix(x_BQA).reshape(*query_BZQA.shape[:3], -1)


def area_weights(count: int, rows: int) -> Floats:
    """Returns the weights [count, rows] of the mean of rows that each of fewer places covers, in part or whole."""
    place, row = np.arange(count)[:, None], np.arange(rows)
    covered: Floats = ((row >= place * rows // count) & (row < -(-(place + 1) * rows // count))).astype(np.float32)
    covered /= covered.sum(axis=1, keepdims=True)
    return covered


class WindowQFormer(QFormer):
    """The patches of images [B, P, A] to features [B, P', O] in raster order. The queries of a window begin with its
    patches in a lower resolution: with means, or with one of 2 x 2 patches.

    Args:
        corner: the row and column of that patch; None for means.
    """

    def __init__(self, config: PartConfig, corner: tuple[int, int] | None, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.config, self.corner = config, corner
        self.window_norm = LayerNorm("A", config.sizes, WINDOW_EPS, dtype=dtype)
        self.positions = nnx.Param(normal(keys(), (config.sizes["R"], config.sizes["A"]), dtype))

    def __call__(self, x_BPA: jax.Array) -> jax.Array:
        config, side = self.config, self.config.tower.side
        q, windows = config.query_side, side // config.window_side
        x_BPA = self.window_norm(x_BPA)
        begin_BZQA = cut_squares(self.reduced(x_BPA, windows * q), windows, q)
        windows_BZCA = cut_squares(x_BPA, windows, config.window_side) + self.positions[...]
        y_BZQO = self.read(self.query[...] + begin_BZQA, windows_BZCA)
        B, _, _, out = y_BZQO.shape
        return y_BZQO.reshape(B, windows, windows, q, q, out).swapaxes(2, 3).reshape(B, -1, out)

    def reduced(self, x_BPA: jax.Array, side: int) -> jax.Array:
        """Returns a raster of side x side vectors made of the patches."""
        B, _, A = x_BPA.shape
        if self.corner is not None:
            row, column = self.corner
            return x_BPA.reshape(B, side, 2, side, 2, A)[:, :, row, :, column].reshape(B, -1, A)
        weights = area_weights(side, self.config.tower.side)
        x_BYXA = x_BPA.reshape(B, *weights.shape[1:] * 2, A)
        return resized(x_BYXA, weights, weights).reshape(B, -1, A).astype(x_BPA.dtype)


def cut_squares(x_BPA: jax.Array, count: int, side: int) -> jax.Array:
    """Returns a raster as count x count squares of side x side vectors [B, Z, C, A]."""
    B, _, A = x_BPA.shape
    return joined_squares(x_BPA, count * side, count * side, side).reshape(B, count**2, side**2, A)


class LayeredQFormers(Tiles):
    """Hidden states of tiles, side by side [B, P, M], to the features [X, O] that are the input of the first layer of
    the text model, and those that are added to the outputs of the next ones."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        make, self.config = partial(WindowQFormer, config, dtype=dtype, keys=keys), config
        self.layerwise = nnx.List([make(None) for _ in range(config.sizes["V"])])
        self.spatial = nnx.List([make(divmod(i, 2)) for i in range(config.sizes["Y"])])
        self.newline = nnx.Param(normal(keys(), (config.sizes["O"],), dtype))

    @property
    def tile_side(self) -> int:
        return int(self.config.side // self.config.window_side * self.config.query_side)

    def __call__(self, x_BPM: jax.Array, index_XA: jax.Array, weight_XA: jax.Array) -> Any:
        states = jnp.split(x_BPM, len(self.layerwise) + 1, axis=-1)
        states += [states[-1]] * (len(self.spatial) - 1)
        projectors, targets = (*self.layerwise, *self.spatial), self.config.targets
        found = {
            layer: self.in_rows(projectors[number](states[number]), index_XA, weight_XA)
            for layer, number in targets.items()
        }
        features_XO = found.get(0, jnp.zeros((len(index_XA), *self.newline.shape), x_BPM.dtype))
        return features_XO, tuple(found.get(layer) for layer in range(1, max(found, default=0) + 1))

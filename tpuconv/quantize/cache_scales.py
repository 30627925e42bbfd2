"""Static scales of FP8 KV caches: of the keys and of the values of each layer. Calibration finds them, servers read
them, and the model holds them beside the projections of its attention.

A scale is the largest magnitude by the largest number of float8_e4m3fn, as in vLLM.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.convert.plan.quantization import FoundArray
from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.cache import KV, LARGEST_CACHED, STATIC_DTYPE
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.periods import LayerStacks
from tpuconv.models.common.recurrence import HybridDecoder
from tpuconv.names import CACHE_SCALES
from tpuconv.notation.layout import UNIT


def scale_counts(model: Any, kv_cache: str) -> list[int]:
    """Returns for each layer the number of scales of its keys, and of its values: one, or one for each head; 0 for a
    layer with a state, or nothing, instead.

    Args:
        model: with separate layers; shapes suffice.
        kv_cache: a choice of `tpuconv.options.KV_CACHES`.

    Raises:
        UnsupportedConfig: a layer caches something else than the keys and values of its heads.
    """
    counts: list[int] = []
    why = "the model has no cache"
    if isinstance(model, Decoder) and not (model.config.sees_behind or model.config.head.kind):
        counts, why = _counts(model, per_head=kv_cache == "fp8_per_head")
    if why or not any(counts):
        raise UnsupportedConfig(
            f"static scales of KV caches are not made for {model.config.model_type}: "
            f"{why or 'no layer has keys and values'}",
            hint="leave out `kv_cache` of the calibration",
        )
    return counts


def _counts(model: Decoder, *, per_head: bool) -> tuple[list[int], str]:
    """Returns the numbers of scales, and why there are none; empty if there are some."""
    config, counts = model.config, []
    layers = range(config.num_hidden_layers)
    if config.unrounded_cache:
        return [], config.unrounded_cache
    if type(model).init_cache is not Decoder.init_cache or any(model.source_of(i) is not None for i in layers):
        return [], "layers read the keys and values of other layers"
    for i in layers:
        kv = jax.eval_shape(partial(model.cached, config, i, (1, 1), STATIC_DTYPE))
        if kv is None or (isinstance(model, HybridDecoder) and isinstance(kv, model.state_type)):
            counts.append(0)
        elif type(kv) is KV:
            counts.append(kv.k_BSKH.shape[-2] if per_head else 1)
        else:
            return [], f"layer {i} caches {type(kv).__name__}, not the keys and values of its heads"
    return counts, ""


def add_scales(model: Any, counts: Sequence[int]) -> None:
    """Gives the attention of each layer of a model with separate layers its scales."""
    for block, count in zip(model.layers, counts, strict=True):
        if not count:
            continue
        block.attn.k_scale = nnx.Param(jnp.ones(count, jnp.float32))
        block.attn.v_scale = nnx.Param(jnp.ones(count, jnp.float32))


def scale_arrays(manifest: Manifest, counts: Sequence[int], stacks: LayerStacks | None) -> dict[str, FoundArray]:
    """Returns the arrays of the scales of a checkpoint's model, with an axis of layers where layers are stacked."""
    out: dict[str, FoundArray] = {}
    for layer, count in enumerate(counts):
        if not count:
            continue
        prefix, place = stacks.find(layer) if stacks else (f"layers.{layer}", None)
        letter = UNIT if count == 1 else "K"
        form = FoundArray((count,), letter)
        if place is not None:
            beside = next(array for name, array in manifest.arrays.items() if name.startswith(f"{prefix}."))
            form = FoundArray((beside.shape[0], count), f"{beside.axes.split()[0]} {letter}")
        out |= {f"{prefix}.attn{suffix}": form for suffix in CACHE_SCALES}
    return out


def found_scales(largest_K: np.ndarray, count: int) -> np.ndarray:
    """Returns the scales [1] or [K] of keys or values whose largest magnitudes in each head are these, float32. Where
    all are zero the scale is 1: servers take none that is not positive."""
    largest = largest_K if count > 1 else largest_K.max(keepdims=True)
    scales = largest.astype(np.float32) / np.float32(LARGEST_CACHED[STATIC_DTYPE])
    return np.where(scales > 0, scales, np.float32(1))

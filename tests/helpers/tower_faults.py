"""Ways to break a model that sees or hears, each a row of a table: `KERNELS` of one array, `FUNCTIONS` of the code of
encoders, `TEXTS` of how features enter the text. `of_kernels`, `of_functions` and `of_texts` return how far each moves
the features of a case, or its logits.

Letters: B rows, P patches, C values of a patch, D width, T tokens, s patches along a side of joined ones.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.logits import forward
from helpers.sights import Sight
from helpers.whole_sights import difference
from tpuconv.models.common import seen as sights
from tpuconv.models.common.layers import apply_rope, apply_rope_to_neighbours, gelu, gelu_tanh
from tpuconv.models.common.seen import Seen, placeholders_in
from tpuconv.models.logits import features_in_order
from tpuconv.models.towers import places
from tpuconv.models.towers.encoder import quick_gelu
from tpuconv.models.towers.image_encoder import joined_squares

# -- of one array -----------------------------------------------------------------------------------------------------

Rearrange = Callable[[np.ndarray, int], np.ndarray | None]
"""Returns the broken values of a kernel, by the width of its encoder; None if the fault is not one of this kernel."""


def transposed(kernel: np.ndarray, width: int) -> np.ndarray:
    """The values as they are stored without the transpose."""
    return kernel.T.reshape(kernel.shape)


def joined_in(*order: int) -> Rearrange:
    """The rows, columns and channels of joined patches in another order."""

    def rearrange(kernel: np.ndarray, width: int) -> np.ndarray | None:
        s = round((len(kernel) / width) ** 0.5)
        if s < 2 or s * s * width != len(kernel):
            return None
        return kernel.reshape(s, s, width, -1).transpose(*order, 3).reshape(kernel.shape)

    return rearrange


KERNELS: Mapping[str, Rearrange] = {
    "transpose": transposed,
    "columns of joined patches first": joined_in(1, 0, 2),
    "channels of joined patches first": joined_in(2, 0, 1),
}


def of_kernels(case: Sight, model: Any) -> dict[str, float]:
    """Breaks each kernel by itself, and tables. Kernels that nothing reads are left out."""
    found = {}
    for part in read_parts(case, model):
        encoder, right = getattr(model, part), features(case, model, part)
        width = encoder.config.sizes.get("D", 1)
        for name, parameter in kernels(encoder):
            values = np.asarray(parameter[...])
            changes = {fault: rearrange(values, width) for fault, rearrange in KERNELS.items()}
            changes = {fault: x for fault, x in changes.items() if x is not None and not np.array_equal(x, values)}
            for fault, broken in {"unread": np.full_like(values, np.nan), **changes}.items():
                with holding(parameter, broken):
                    away = distance(features(case, model, part), right)
                if fault != "unread":
                    found[f"{fault}: {part}.{name}"] = away
                elif away == 0:
                    break
    return found


@contextmanager
def holding(parameter: nnx.Param, values: np.ndarray) -> Iterator[None]:
    """The parameter has other values, on its device as before, so that the same program runs."""
    before = parameter[...]
    parameter[...] = jax.device_put(values, before.sharding)
    yield
    parameter[...] = before


def read_parts(case: Sight, model: Any) -> list[str]:
    """The parts of a case that have features."""
    return [part for part in case.parts if set(getattr(model, part).takes) & case.features.keys()]


def kernels(encoder: Any) -> Iterator[tuple[str, nnx.Param]]:
    """Yields the parameters of two axes and more, by name."""
    for path, module in nnx.iter_modules(encoder):
        for name, parameter in vars(module).items():
            if isinstance(parameter, nnx.Param) and parameter[...].ndim > 1 and name != "bias":
                yield ".".join(map(str, (*path, name))), parameter


# -- of the code of encoders ------------------------------------------------------------------------------------------

Breaks = Callable[[pytest.MonkeyPatch, Any], list[bool]]
"""Breaks the code that an encoder runs. Returns a list to which each run adds whether the fault is one of it."""


def modules_with(name: str) -> list[ModuleType]:
    """Returns the modules of towers that have a function."""
    towers = [module for each, module in sys.modules.items() if each.startswith("tpuconv.models.towers")]
    return [module for module in towers if hasattr(module, name)]


def instead(*names: str, of: Callable[..., Any], is_one: Callable[..., bool] = lambda *_, **__: True) -> Breaks:
    """Functions that are replaced in each module that has them. `of` gets the function, then its arguments."""

    def breaks(patch: pytest.MonkeyPatch, encoder: Any) -> list[bool]:
        ran: list[bool] = []

        def replaced(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                ran.append(is_one(*args, **kwargs))
                return of(function, *args, **kwargs)

            return call

        for name in names:
            for module in modules_with(name):
                patch.setattr(module, name, replaced(getattr(module, name)))
        return ran

    return breaks


def attributes(name: str, others: Mapping[Any, Any]) -> Breaks:
    """Attributes of modules that have another value of a table."""

    def breaks(patch: pytest.MonkeyPatch, encoder: Any) -> list[bool]:
        broken = [module for _, module in nnx.iter_modules(encoder) if vars(module).get(name) in others]
        for module in broken:
            patch.setattr(module, name, others[vars(module)[name]])
        return [True] * len(broken)

    return breaks


def segments(change: Callable[[Any], Any]) -> Breaks:
    """Other numbers by which patches see each other."""

    def pairs(segment_BP: Any) -> Any:
        return segment_BP[:, :, None] == segment_BP[:, None, :]

    return instead(
        "attend",
        of=lambda attend, q, k, v, segment_BP, **kwargs: attend(q, k, v, change(segment_BP), **kwargs),
        is_one=lambda q, k, v, segment_BP, **_: bool((pairs(change(segment_BP)) != pairs(segment_BP)).any()),
    )


def arrays(changed: Callable[[np.ndarray], np.ndarray]) -> Breaks:
    """Other arrays, of those that the host prepares."""

    def breaks(patch: pytest.MonkeyPatch, encoder: Any) -> list[bool]:
        ran: list[bool] = []
        encode: Any = sights._encode

        def other(each: Any, prepared: tuple[Any, ...]) -> Any:
            if each is not encoder:
                return encode(each, prepared)
            broken = tuple(changed(np.asarray(x)) for x in prepared)
            ran.extend(bool((x != y).any()) for x, y in zip(prepared, broken, strict=True))
            return encode(each, broken)

        patch.setattr(sights, "_encode", other)
        return ran

    return breaks


def exchanged(one: str, other: str) -> Breaks:
    """Two parameters of a module in each other's place."""

    def breaks(patch: pytest.MonkeyPatch, encoder: Any) -> list[bool]:
        found = [module for _, module in nnx.iter_modules(encoder) if vars(module).get(one) is not None]
        found = [module for module in found if vars(module).get(other) is not None]
        for module in found:
            first, second = getattr(module, one), getattr(module, other)
            patch.setattr(module, one, second)
            patch.setattr(module, other, first)
        return [True] * len(found)

    return breaks


def windows_of_other_layers(patch: pytest.MonkeyPatch, encoder: Any) -> list[bool]:
    """Layers with windows see all, and the others windows."""
    right = getattr(type(encoder), "segments_of", None)
    if right is None or inspect.getsource(right).count("windows_BP") < 2:
        return []
    patch.setattr(
        type(encoder), "segments_of", lambda self, layer, all_BP, windows_BP: right(self, layer, windows_BP, all_BP)
    )
    return [True]


def of_other_places(order: Callable[..., Any], h: int, w: int, sides: Any) -> Any:
    """Blocks column by column."""
    by_columns = order(w, h, sides)
    return (by_columns % h) * w + by_columns // h


def of_other_tables(taps: Callable[..., Any], h: int, w: int, table_h: int, table_w: int, *more: Any, **kw: Any) -> Any:
    """Positions of column and row."""
    return taps(w, h, table_w, table_h, *more, **kw)


NEAREST, BILINEAR = places.nearest_taps, places.bilinear_taps


def of_other_taps(taps: Callable[..., Any], h: int, w: int, table_h: int, table_w: int, *more: Any, **kw: Any) -> Any:
    """The nearest position in place of interpolated ones, or one below in place of the nearest."""
    if taps is not NEAREST:
        return NEAREST(h, w, table_h, table_w)
    found = BILINEAR(h, w, table_h, table_w)
    return replace(found, index_PA=found.index_PA[:, :1])


def of_other_pixels(patches_of: Callable[..., Any], pixels_BCYX: Any, patch: int) -> Any:
    x_BPC = patches_of(pixels_BCYX, patch)
    return x_BPC.reshape(*x_BPC.shape[:2], -1, patch, patch).swapaxes(3, 4).reshape(x_BPC.shape)


def squares_in(*order: int) -> Callable[..., Any]:
    """The rows, columns and channels of joined squares in another order."""

    def join(_: Any, x_BPD: Any, h: int, w: int, s: int) -> Any:
        x_BPM = joined_squares(x_BPD, h, w, s)
        split = x_BPM.reshape(*x_BPM.shape[:2], s, s, x_BPD.shape[-1])
        return split.transpose(0, 1, *(2 + axis for axis in order)).reshape(x_BPM.shape)

    return join


def is_joined(x_BPD: Any, h: int, w: int, s: int) -> bool:
    return s > 1


TAPS = tuple(name for name in vars(places) if name.endswith(("_taps", "_taps_of_centers")))
OTHER_PAIRS = {apply_rope: apply_rope_to_neighbours, apply_rope_to_neighbours: apply_rope}
OTHER_ACTS = {gelu: gelu_tanh, gelu_tanh: gelu, quick_gelu: gelu, nnx.silu: gelu, nnx.relu: nnx.silu}

FUNCTIONS: Mapping[str, Breaks] = {
    "columns of pixels first": instead("patches_of", of=of_other_pixels),
    "columns of patches first": instead("raster", of=lambda raster, h, w: raster(h, w)[:, ::-1]),
    "columns of positions first": instead(*TAPS, of=of_other_tables),
    "interpolation of positions": instead(*TAPS, of=of_other_taps),
    "columns of blocks first": instead("nested_order", of=of_other_places),
    "columns of squares first": instead("joined_squares", of=squares_in(1, 0, 2), is_one=is_joined),
    "channels of squares first": instead("joined_squares", of=squares_in(2, 0, 1), is_one=is_joined),
    "class token behind": instead("with_class_token", of=lambda f, *args: jnp.roll(f(*args), -1, axis=1)),
    "no mask of images": segments(lambda segment_BP: jnp.minimum(segment_BP, 0)),
    "no mask of padding": segments(lambda segment_BP: jnp.maximum(segment_BP, 0)),
    "no mask of keys or frames": arrays(lambda x: np.ones_like(x) if x.dtype == bool else x),
    "no silence behind chunks": instead("before", of=lambda _, x, *lengths: x),
    "columns of places first": arrays(lambda x: x[..., ::-1] if x.dtype == np.int32 and x.shape[-1] == 2 else x),
    "distances of columns": exchanged("rows", "columns"),
    "windows of other layers": windows_of_other_layers,
    "activation": attributes("act", OTHER_ACTS),
    "tanh in GELU": instead("gelu", of=lambda _, x: gelu_tanh(x)),
    "no tanh in GELU": instead("gelu_tanh", of=lambda _, x: gelu(x)),
    "pairs that turn": attributes(
        "rotate", {apply_rope: apply_rope_to_neighbours, apply_rope_to_neighbours: apply_rope}
    ),
    "angles": instead("cos_sin", of=lambda cos_sin, angles, *more: cos_sin(1.01 * angles, *more)),
}


def of_functions(case: Sight, model: Any, faults: Iterable[str] = FUNCTIONS) -> dict[str, float]:
    """Breaks the code of each encoder. Faults of code that it does not run are left out."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sights, "_encode", sights._encode.__wrapped__)  # not compiled, since faults change the program
        for part in read_parts(case, model):
            right = features(case, model, part)
            for fault in faults:
                with patch.context() as broken:
                    ran = FUNCTIONS[fault](broken, getattr(model, part))
                    away = distance(features(case, model, part), right)
                if any(ran):
                    found[f"{fault}: {part}"] = away
    return found


# -- of how features enter the text -----------------------------------------------------------------------------------


def across(seen: Seen, **changes: Callable[[jax.Array], jax.Array]) -> dict[str, Any]:
    """Other arrays of the images that layers attend to, if they do."""
    images = seen.across
    if images is None:
        return {}
    return {"across": replace(images, **{name: change(getattr(images, name)) for name, change in changes.items()})}


TEXTS: Mapping[str, Callable[[Seen], Mapping[str, Any]]] = {
    "the feature before": lambda seen: (
        {"features_XD": jnp.roll(seen.features_XD, 1, axis=0)} if seen.across is None else {}
    ),
    "all tiles": lambda seen: across(seen, sees_BTU=jnp.ones_like),
    "the token before": lambda seen: across(seen, sees_BTU=lambda sees_BTU: jnp.roll(sees_BTU, 1, axis=1)),
    "the features of another tile": lambda seen: across(
        seen, features_BSD=lambda x: jnp.roll(x, x.shape[1] // seen.across.sees_BTU.shape[-1], axis=1)
    ),
    "causal images": lambda seen: {"block_BT": seen.block_BT * 0 - 1} if seen.block_BT is not None else {},
    "columns of rotary positions first": lambda seen: (
        {"at_ABT": seen.at_ABT[jnp.array([0, 2, 1, *range(3, len(seen.at_ABT))])]} if seen.at_ABT is not None else {}
    ),
    "no delta in the cache": lambda seen: {"delta_B1": seen.delta_B1 * 0} if seen.delta_B1 is not None else {},
    "deep features of another layer": lambda seen: {"deep": seen.deep[::-1]} if len(seen.deep) > 1 else {},
    "no deep features": lambda seen: {"deep": ()} if seen.deep else {},
}


def of_texts(case: Sight, model: Any, faults: Iterable[str] = TEXTS) -> dict[str, float]:
    """Breaks how features enter the text: how far the logits move, and those of the next token with a cache."""
    ids_BT, mask_BT = case.ids_BT, case.mask_BT
    seen: Seen = model.see(ids_BT, mask_BT, **case.features)

    def outputs(seen: Seen) -> list[np.ndarray]:
        cache = model.init_cache(len(ids_BT), ids_BT.shape[1] + 1, jnp.float32)
        whole_BTV, cache = forward(model, ids_BT, mask_BT, cache=cache, seen=seen)
        next_B1V, _ = forward(model, np.array(case.later)[: len(ids_BT), :1], cache=cache)
        return [np.asarray(whole_BTV)[mask_BT], np.asarray(next_B1V)]

    right, changes = outputs(seen), {fault: TEXTS[fault](seen) for fault in faults}
    return {fault: distance(outputs(replace(seen, **each)), right) for fault, each in changes.items() if each}


def features(case: Sight, model: Any, part: str) -> list[np.ndarray]:
    """The features [X, D] of the placeholders of a part, and those for the first layers of the text. The encoders of
    other parts do not run."""
    encoders = {each: getattr(model, each) for each in case.parts}
    configs, ids_BT = [each.config for each in encoders.values()], case.ids_BT.copy()
    for name, each in encoders.items():
        if name != part and each.takes:
            ids_BT[placeholders_in(case.ids_BT, each.config, configs)] = 4
    given = {name: array for name, array in case.features.items() if name in encoders[part].takes}
    seen = model.see(ids_BT, case.mask_BT, **given)
    if seen.across is not None:
        return [features_in_order(seen)]
    slots = np.asarray(seen.slot_BT)
    return [np.asarray(each)[slots[slots >= 0]] for each in (seen.features_XD, *seen.deep) if each is not None]


def distance(have: list[np.ndarray], want: list[np.ndarray]) -> float:
    """The largest difference of all arrays."""
    return float(np.max([difference(*pair) for pair in zip(have, want, strict=True)]))

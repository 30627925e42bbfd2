"""Images and sounds as a text model takes them: the features of encoders, and where they are in the text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from tpuconv.errors import ConfigError, UsageError, root_cause
from tpuconv.models.common.across import Across
from tpuconv.models.common.beside import UNKNOWN_TOKEN, VISION, PartConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.explicit import is_explicit, run_on_explicit_mesh
from tpuconv.models.common.layers import times
from tpuconv.models.tokenizer import SETTINGS_FILE

Deep = tuple[jax.Array | None, ...]
"""Features that are added to the output of each of the first layers of a text model; None for a layer without."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """The images and sounds of one call. X counts the features of all of them, padding included.

    Attributes:
        features_XD: what stands in place of the embeddings of placeholders.
        slot_BT: for each token the number of its feature, -1 for text.
        block_BT: for each token the number of the image that it is of, -1 for none; 0 for each token of the call where
            images and text see each other; None in models where all attention is causal and images are
            not routed apart.
        at_ABT: rotary positions by time, row and column, or by the other axes of `Mrope`, counted from the first token
            of the call; None in models whose rotary positions count tokens.
        delta_B1: what is added to the position of later tokens; None like `at_ABT`.
        deep: features [X, D] that are added to the output of each of the first layers; None for a layer without.
        across: images that layers attend to, which have no placeholders that features replace; None in most models.
        added: whether features are added to the embeddings of placeholders, which they replace in most models.
    """

    features_XD: jax.Array
    slot_BT: jax.Array
    block_BT: jax.Array | None = None
    at_ABT: jax.Array | None = None
    delta_B1: jax.Array | None = None
    deep: Deep = ()
    across: Across | None = None
    added: bool = field(default=False, metadata={"static": True})

    def of_images(self) -> jax.Array | None:
        """Returns which tokens [B, T] are of images or count as such; None without `block_BT`."""
        return None if self.block_BT is None else self.block_BT >= 0

    def merged(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the first layer's input [B, T, D], with features in place of placeholders, or added to their
        embeddings; each residual stream of D begins with them."""
        streams = x_BTD.shape[-1] // self.features_XD.shape[-1]
        features_BTD = jnp.tile(self.features_XD[self.slot_BT].astype(x_BTD.dtype), streams)
        return jnp.where(self.slot_BT[..., None] < 0, x_BTD, x_BTD + features_BTD if self.added else features_BTD)

    def deepened(self, x_BTD: jax.Array, layer: jax.Array | int) -> jax.Array:
        """Returns the output [B, T, D] of a layer with the features of this layer added; `layer` may be traced."""
        deep = {number: deep_XD for number, deep_XD in enumerate(self.deep) if deep_XD is not None}
        if isinstance(layer, int):
            return x_BTD + self._added(deep[layer], True) if layer in deep else x_BTD
        if not deep:
            return x_BTD
        is_layer = jnp.asarray(list(deep)) == layer
        deep_XD = jnp.stack(list(deep.values()))[is_layer.argmax()]
        return x_BTD + self._added(deep_XD, is_layer.any()).astype(x_BTD.dtype)

    def _added(self, deep_XD: jax.Array, is_deep: jax.Array | bool) -> jax.Array:
        return jnp.where((self.slot_BT[..., None] >= 0) & is_deep, deep_XD[self.slot_BT], 0)


@dataclass(frozen=True)
class Prepared:
    """The features of a part, as its encoder takes them. All arrays are padded to a size that few calls have.

    Attributes:
        arrays: the arguments of the encoder.
        rows: of each placeholder, in order, the number of its feature in what the encoder returns.
        counts: how many placeholders each image or sound has.
        grids: of each image the rows and columns of its placeholders, by time, for rotary positions
            (`FeatureEncoder.rotary_places`); none where placeholders have positions as text has.
        others: by the id of further tokens that have a feature in place of their embedding its number.
    """

    arrays: tuple[np.ndarray, ...]
    rows: np.ndarray
    counts: Sequence[int]
    grids: Sequence[tuple[int, int, int]] = ()
    others: Mapping[int, int] = field(default_factory=dict)


@nnx.jit
def _encode(encoder: Any, arrays: tuple[np.ndarray, ...]) -> tuple[jax.Array, Deep]:
    def run(encoder: Any, *arrays: Any) -> tuple[jax.Array, Deep]:
        found: tuple[jax.Array, Deep] = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), encoder(*arrays))
        return found

    if is_explicit(weights := jax.tree.leaves(nnx.state(encoder))[0]):
        alike: Any = PartitionSpec()  # type: ignore[no-untyped-call]
        out: tuple[jax.Array, Deep] = run_on_explicit_mesh(run, encoder, weights, alike, *arrays)
        return out
    return run(encoder, *arrays)


def see(
    config: DecoderConfig,
    encoders: Mapping[str, Any],
    ids_BT: np.ndarray,
    mask_BT: np.ndarray,
    features: Mapping[str, Any],
) -> Seen:
    """Runs the encoders of a model; see `Decoder.see`.

    Args:
        config: of the model.
        encoders: by part ("vision").
        ids_BT, mask_BT: the tokens of the call.
        features: by the names that processors give them.
    """
    _check_call(config, encoders, ids_BT, mask_BT, features)
    slot_BT, block_BT = np.full(ids_BT.shape, -1, np.int32), np.full(ids_BT.shape, -1, np.int32)
    encoded: list[tuple[jax.Array, Deep]] = []
    prepared: dict[str, Prepared] = {}
    first, across = 0, None
    for part, encoder in encoders.items():
        given = {name: _numbers(name, value) for name, value in features.items() if name in encoder.takes}
        is_placeholder = placeholders_in(ids_BT, encoder.config, config.parts.values()) & mask_BT
        if not is_placeholder.any() and not any(each.size for each in given.values()):
            continue  # a processor returns arrays without rows for a batch without images
        starts = _starts(is_placeholder)
        prepared[part] = found = _prepared(part, encoder, given, features, is_placeholder, starts)
        if not encoder.config.is_attended:
            slot_BT[is_placeholder] = found.rows + first
        for token, number in found.others.items():
            slot_BT[(ids_BT == token) & mask_BT] = number + first
        if part == VISION:
            block_BT[is_placeholder] = np.cumsum(starts).reshape(starts.shape)[is_placeholder] - 1
            if encoder.config.sees_prompt:
                block_BT[mask_BT] = 0
            if encoder.config.block_tokens:
                block_BT[np.isin(ids_BT, encoder.config.block_tokens) & mask_BT] = 0
        with _readable(part, given):
            encoded.append(_encode(encoder, found.arrays))
        if encoder.config.is_attended:
            across = encoder.across(given, ids_BT, encoded[-1][0])
        first += len(encoded[-1][0])
    if not encoded:
        raise UsageError(
            "there are no features", hint="give what the processor returns, or call the model on the text alone"
        )
    at_ABT, delta_B1 = _rotary_places(config, encoders, prepared, ids_BT, mask_BT)
    features_XD = jnp.concatenate([each for each, _ in encoded]) if len(encoded) > 1 else encoded[0][0]
    return Seen(
        times(features_XD, config.feature_factor),
        jnp.asarray(slot_BT),
        jnp.asarray(block_BT) if config.sees_images or config.routes_images else None,
        at_ABT,
        delta_B1,
        _deep(encoded),
        across,
        added=any(encoders[part].config.adds_features for part in prepared),
    )


def placeholders_in(ids_BT: np.ndarray, part: PartConfig, parts: Iterable[PartConfig]) -> np.ndarray:
    """Returns which tokens [B, T] are placeholders of a part, one of the `parts` of a model."""
    is_placeholder = np.asarray(ids_BT == part.placeholder)
    openings = [each.opening for each in parts if each.opening is not None and each.placeholder == part.placeholder]
    if not openings:
        return is_placeholder
    starts = _starts(is_placeholder)
    before_BT = np.pad(ids_BT, ((0, 0), (1, 0)), constant_values=UNKNOWN_TOKEN)[:, :-1]
    is_opened = before_BT == part.opening if part.opening is not None else ~np.isin(before_BT, openings)
    runs = np.cumsum(starts).reshape(starts.shape)
    return np.asarray(is_placeholder & np.isin(runs, runs[starts & is_opened]))


def _starts(is_placeholder: np.ndarray) -> np.ndarray:
    """Returns which of the placeholders [B, T] begin a run."""
    return np.asarray(is_placeholder & ~np.pad(is_placeholder, ((0, 0), (1, 0)))[:, :-1])


def _check_call(
    config: DecoderConfig,
    encoders: Mapping[str, Any],
    ids_BT: np.ndarray,
    mask_BT: np.ndarray,
    features: Mapping[str, Any],
) -> None:
    """Checks the arguments of `see`.

    Raises:
        ConfigError: the tokenizer of the checkpoint does not have a token that tells where features stand.
        UsageError: the arguments have other shapes, or other names, than the model takes.
    """
    if ids_BT.ndim != 2 or mask_BT.shape != ids_BT.shape:
        raise UsageError(
            f"ids_BT has shape {ids_BT.shape} and mask_BT {mask_BT.shape}",
            hint="give both as [texts, tokens], shorter texts padded",
        )
    if unknown := features.keys() - {name for each in encoders.values() for name in each.takes}:
        known = ", ".join(name for each in encoders.values() for name in each.takes)
        raise UsageError(
            f"{config.model_type} does not read the features {', '.join(sorted(unknown))}",
            hint=f"it reads {known}" if known else "this checkpoint has the text model alone: convert the whole model",
        )
    for encoder in encoders.values():
        is_given = any(np.size(features[name]) for name in encoder.takes if name in features)
        if is_given and (tokens := ", ".join(encoder.config.unknown_tokens.values())):
            raise ConfigError(
                f"{SETTINGS_FILE} does not have the token {tokens}, which tells where features stand",
                hint=f"copy {SETTINGS_FILE} from the release into the folder, and take it into the manifest by "
                "`tpuconv verify --update`",
            )


def _prepared(
    part: str,
    encoder: Any,
    given: Mapping[str, np.ndarray],
    features: Mapping[str, Any],
    is_placeholder: np.ndarray,
    starts: np.ndarray,
) -> Prepared:
    """Returns what an encoder is run on, with as many rows as the text has placeholders.

    Args:
        part: the name of the encoder.
        encoder: of the model.
        given: the features that it takes.
        features: all features of the call.
        is_placeholder, starts: which tokens [B, T] are placeholders, and begin a run of them.

    Raises:
        UsageError: features have other shapes than the encoder takes, or another number than the text has placeholders.
    """
    runs = np.diff(np.append(np.flatnonzero(starts[is_placeholder]), is_placeholder.sum())).tolist()
    beside = {name: _numbers(name, features[name]) for name in encoder.beside if name in features}
    with _readable(part, given):
        found: Prepared = encoder.placed(encoder.prepare({**given, **beside}), runs)
    if (placeholders := int(is_placeholder.sum())) != len(found.rows):
        raise UsageError(
            f"the text has {placeholders} placeholders (id {encoder.config.placeholder}), "
            f"and the features of {part} need {len(found.rows)}",
            hint="expand each image or sound to as many placeholders as it has features",
        )
    return found


@contextmanager
def _readable(part: str, given: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Raises UsageError if features do not have the shapes that an encoder computes with, which its program shows when
    it is traced."""
    try:
        yield
    except (ArithmeticError, IndexError, TypeError, ValueError) as e:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in given.items())
        raise UsageError(
            f"the encoder of {part} cannot take features of these shapes: {shapes}: {root_cause(e)}",
            hint="give what the processor of this release returns, by its own preprocessor_config.json",
        ) from e


def _numbers(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
        raise UsageError(f"{name} has dtype {array.dtype}, not numbers", hint="give what the processor returns")
    return array


def _rotary_places(
    config: DecoderConfig,
    encoders: Mapping[str, Any],
    prepared: Mapping[str, Prepared],
    ids_BT: np.ndarray,
    mask_BT: np.ndarray,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the rotary positions by the axes of `Mrope` [A, B, T], and what is added to later ones [B, 1]; None and
    None of models whose rotary positions count tokens."""
    if config.mrope is None or VISION not in encoders or (VISION in prepared and not prepared[VISION].grids):
        return None, None
    encoder, rows, delta_B1 = encoders[VISION], [], np.zeros((len(ids_BT), 1), np.int32)
    grids = list(prepared[VISION].grids) if VISION in prepared else []
    for row, (ids_T, mask_T) in enumerate(zip(ids_BT, mask_BT, strict=True)):
        own, left = [], int((ids_T[mask_T] == encoder.config.placeholder).sum())
        while left > 0:
            own.append(grids.pop(0))
            left -= encoder.tokens_of(own[-1])
        at_AT, delta_B1[row] = encoder.rotary_places(ids_T[mask_T], own)
        rows.append(np.zeros((len(at_AT), len(ids_T)), np.int32))
        rows[-1][:, mask_T] = at_AT
    return jnp.asarray(np.stack(rows, axis=1)), jnp.asarray(delta_B1)


def _deep(encoded: Sequence[tuple[jax.Array, Deep]]) -> Deep:
    """Returns what is added to the outputs of layers, with zeros for the features of parts that add nothing."""
    out: list[jax.Array | None] = []
    for each in zip_longest(*(deep for _, deep in encoded)):
        of_parts = [jnp.zeros_like(x) if deep is None else deep for deep, (x, _) in zip(each, encoded, strict=True)]
        out.append(None if all(deep is None for deep in each) else jnp.concatenate(of_parts))
    return tuple(out)

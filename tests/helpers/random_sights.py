"""Tiny multimodal models with some keys of their encoders and of what is around them changed at random."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from helpers import sights
from helpers.random_configs import UNTOUCHED, values_of
from helpers.sights import SIGHTS, Sight
from tpuconv.models.towers.encoder import Grids
from tpuconv.verify.sights import SightWindow, media_tokens

LEFT_ALONE = ("text_config", "talker_config", "token2wav_config", "code2wav_config", "vq_config", "quantization_config")
"""Objects of config.json that no encoder reads."""

OF_NO_USE = re.compile(
    "_(token|patch|col)_(id|index)$|dropout|layerdrop|^initializer_|^(enable_audio_output|image_grid_pinpoints)$"
)
"""Keys of tokens, of training, and of what transformers would make in full size: a talker, and thousands of tiles."""

Keys = tuple[str, ...]


@dataclass(frozen=True)
class ChangedSight:
    """A case whose config is changed.

    Attributes:
        name: of the case.
        changes: the other values of keys, by the names of objects and keys from the root on.
        grids: rows and columns of the features of images of any size.
    """

    name: str
    changes: Mapping[Keys, Any]
    grids: Grids

    def made(self) -> Sight:
        """The case. transformers may refuse it."""

        def change(config: Any) -> Any:
            raw = deepcopy(config.to_dict())
            for keys, value in self.changes.items():
                inner = raw
                for key in keys[:-1]:
                    inner = inner[key]
                inner[keys[-1]] = value
            return type(config).from_dict(raw)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sights, "chosen", change)
            return SIGHTS[self.name]()


class Found(Exception):
    """Carries a config out of the function that makes a model of it."""


def config_of(name: str) -> Any:
    """The config of transformers of a case, of which no model is made."""

    def found(config: Any) -> Any:
        raise Found(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sights, "chosen", found)
        try:
            SIGHTS[name]()
        except Found as e:
            return e.args[0]
    raise AssertionError(f"{name} makes no model")


def objects(config: Any, at: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """A config and the configs in it, by the names of their keys from the root on."""
    yield at, config
    for key, inner in vars(config).items():
        if hasattr(inner, "to_dict") and key not in LEFT_ALONE:
            yield from objects(inner, (*at, key))


def strategies(config: Any) -> Iterator[tuple[Keys, st.SearchStrategy[Any]]]:
    """The keys of a config and of the objects in it, with their other values."""
    for at, inner in objects(config):
        for key, old in inner.to_dict().items():
            is_object = hasattr(vars(inner).get(key), "to_dict")
            if is_object or key in UNTOUCHED or key.startswith("_") or OF_NO_USE.search(key):
                continue
            if (values := values_of(type(inner), key, old)) is not None:
                yield (*at, key), values


@st.composite
def changed_sights(draw: st.DrawFn, name: str) -> ChangedSight:
    """A case with one to three keys changed, none of them of the text model."""
    known = dict(strategies(config_of(name)))
    chosen = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=3, unique=True))
    side = st.integers(1, 7)
    grids = draw(st.lists(st.tuples(side, side), min_size=1, max_size=3))
    return ChangedSight(name, {keys: draw(known[keys]) for keys in chosen}, grids)


def windows(case: Sight, model: Any, around: Mapping[str, Any], grids: Grids) -> list[SightWindow]:
    """A text for each part of a model of ours, with random images of these grids or with sounds. `around` is the object
    of config.json that has the config of the text model."""
    rng, out, words = np.random.default_rng(0), [], np.random.default_rng(1).integers(3, 90, 200).tolist()
    kept = media_tokens(around, model.config)
    for part, own in model.config.parts.items():
        encoder = getattr(model, part)
        features = encoder.random_images(rng, grids) or encoder.example(rng)
        if features is None:
            continue
        prepared = encoder.prepare(features)
        texts = [token for token in words if token not in {*kept, *prepared.others}]
        ends = (around.get(f"{part}_{place}_token_id") for place in ("start", "end"))
        begin, end = ([token] if type(token) is int else [] for token in ends)
        begin = begin if own.opening is None else [own.opening]
        ids = texts[:5]
        for number, count in enumerate(prepared.counts, 1):
            ids = [*ids, *begin, *[own.placeholder] * count, *end, *texts[5 * number : 5 * number + 3]]
        features = encoder.in_text(features, np.array([ids]))
        out.append(SightWindow(ids, features=features, part=part, items=len(grids), placeholder=own.placeholder))
    return out

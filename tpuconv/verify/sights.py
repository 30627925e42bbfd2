"""Prompts with images and sounds, to compare with transformers. Both models get the same random features: how a
processor makes them of files is not compared."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import read_checkpoint_config
from tpuconv.errors import UsageError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.logits import Window
from tpuconv.models.registry import get_family
from tpuconv.verify.logits import LogitStatistics
from tpuconv.verify.vectors import VectorStatistics

FEATURE_GATES: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}
"""The largest norm of the difference of all features, by the norm of the reference's."""

WORDS_AROUND = 16
"""The tokens of text around and between images or sounds."""


@dataclass(frozen=True)
class SightStatistics:
    """A model's reading of images or sounds, compared with transformers.

    Attributes:
        part: "vision" or "audio".
        items: the number of images or sounds.
        features: norm of the difference of the features, by the norm of the reference's.
        gate: the bound of that.
        outputs: logits or hidden states of the prompt with them.
    """

    part: str
    items: int
    features: float
    gate: float
    outputs: LogitStatistics | VectorStatistics

    def failures(self) -> list[str]:
        """Returns the gates that failed, one sentence each."""
        near = self.features <= self.gate  # false of NaN
        found = [] if near else [f"the error of the features is {self.features:.3g}, the gate is {self.gate:g}"]
        return [f"with {self.part}: {line}" for line in (*found, *self.outputs.failures())]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts = {"part": self.part, "items": self.items, "features": self.features, "features_gate": self.gate}
        what = "vectors" if isinstance(self.outputs, VectorStatistics) else "logits"
        return {**facts, what: self.outputs.to_json()}


Compared = Callable[
    [Sequence[Sequence[int]], Sequence[np.ndarray], Sequence[np.ndarray]], LogitStatistics | VectorStatistics
]
"""Compares the outputs of two models for some prompts; of the reference first."""


def compare_sights(
    windows: Sequence["SightWindow"],
    theirs: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    ours: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    dtype: str,
    compared: Compared,
) -> list[SightStatistics]:
    """Compares what two models make of prompts with images and sounds.

    Args:
        windows: the prompts.
        theirs, ours: the logits [T, V] or hidden states [T, D] of each prompt, and its features [X, D].
        dtype: of parameters and activations.
        compared: compares logits or hidden states.
    """
    each = zip(windows, *theirs, *ours, strict=True)
    return [
        SightStatistics(
            window.part,
            window.items,
            feature_error(our_features, their_features),
            FEATURE_GATES[dtype],
            compared([window.ids], [their_outputs], [our_outputs]),
        )
        for window, their_outputs, their_features, our_outputs, our_features in each
    ]


@dataclass(frozen=True)
class SightWindow(Window):
    """A prompt with images or sounds.

    Attributes:
        part: "vision" or "audio".
        items: the number of images or sounds.
        placeholder: id of the token in whose place features stand.
    """

    part: str = ""
    items: int = 0
    placeholder: int = -1


MEDIA_TOKEN = re.compile(r"(image|video|vision|audio)\w*_token_(id|index)")
"""The keys of config.json with the ids of placeholders, and of the tokens before and behind them."""


def media_tokens(around: Mapping[str, Any], config: DecoderConfig) -> set[int]:
    """Returns the ids with a meaning for images or sounds: of the config `around` the text model's, placeholders, and
    ids that a projector embeds."""
    named = {token for key, token in around.items() if MEDIA_TOKEN.fullmatch(key) and type(token) is int}
    parts = config.parts.values()
    opening = {own.opening for own in parts if own.opening is not None}
    return named.union(opening, *({own.placeholder, *own.words} for own in parts))


def without_media_tokens(manifest: Manifest, config: DecoderConfig, windows: Sequence[Window]) -> list[Window]:
    """Returns texts with the token 0 in place of those for images or sounds, of which pseudo-random ids have some: the
    reference computes with other embeddings, or positions, there."""
    around = get_family(manifest.family).config.around_text(read_checkpoint_config(manifest))
    tokens = media_tokens(around, config)
    return [replace(each, ids=[0 if token in tokens else token for token in each.ids]) for each in windows]


NO_EXAMPLE = "its features depend on more than config.json"


def sight_windows(
    manifest: Manifest, config: DecoderConfig, prompts: Sequence[Sequence[int]]
) -> tuple[list[SightWindow], dict[str, str]]:
    """Returns a prompt with two images or sounds for each part of a checkpoint beside its text model, and the parts
    without one, with the reasons.

    Args:
        manifest, config: of the checkpoint.
        prompts: token ids, of which the text comes.
    """
    if not config.parts:
        return [], {}
    from flax import nnx

    model = nnx.eval_shape(lambda: get_family(manifest.family).model_class(config))  # no weights are needed
    around = get_family(manifest.family).config.around_text(read_checkpoint_config(manifest))
    others = media_tokens(around, config)
    words = [token for prompt in prompts for token in prompt if token not in others]
    rng, out, without = np.random.default_rng(0), [], {}
    for part, own in config.parts.items():
        encoder = getattr(model, part)
        features = encoder.example(rng)
        if features is None:
            without[part] = NO_EXAMPLE
            continue
        try:
            prepared = encoder.prepare(features)
        except UsageError as e:
            without[part] = e.message
            continue
        ends = (around.get(f"{part}_{place}_token_id") for place in ("start", "end"))
        begin, end = ([token] if type(token) is int else [] for token in ends)
        begin = begin if own.opening is None else [own.opening]
        texts = [token for token in words if token not in prepared.others]
        ids = texts[:WORDS_AROUND]
        for number, count in enumerate(prepared.counts, 1):
            text = texts[number * WORDS_AROUND : (number + 1) * WORDS_AROUND]
            ids = [*ids, *begin, *[own.placeholder] * count, *end, *text]
        features = encoder.in_text(features, np.array([ids]))
        out.append(
            SightWindow(ids, features=features, part=part, items=len(prepared.counts), placeholder=own.placeholder)
        )
    return out, without


def feature_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the norm of the difference of features [X, D], by the norm of the reference's."""
    return float(np.linalg.norm(ours - theirs) / max(float(np.linalg.norm(theirs)), 1e-30))

"""Lenient reading of a config.json by a family that it was not made for: no error for other keys or contradictions."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import Any

from tpuconv.errors import TpuconvError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.key_types import has_type, hints_of
from tpuconv.models.common.rope import ROPE_KEYS
from tpuconv.models.common.rope_keys import without_older_rope_keys
from tpuconv.models.common.wrapper import WrapperConfig
from tpuconv.models.registry import Family
from tpuconv.sources.config import parts_of

TIED = "tie_word_embeddings"
SIZE_FIELDS = frozenset(field.name for field in fields(DecoderConfig)) - DecoderConfig.derived
"""The fields of all decoders."""
FAULTS = (TpuconvError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a config whose values contradict each other."""


def text_of(family: Family, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of the text model in a parsed config.json, as the family finds them or by usual names."""
    if issubclass(family.config, WrapperConfig):
        with suppress(TpuconvError):
            found = family.config.text_of(raw)
            if found.keys() & {*family.config.known_keys()} > {TIED}:
                return found
    parts = parts_of(raw)
    tied = [part[TIED] for part in parts if part.get(TIED) is not None]
    return {**parts[-1], TIED: tied[0]} if tied else parts[-1]


def refused_keys(family: Family, text: Mapping[str, Any]) -> set[str]:
    """Returns the keys of a text model whose values the family does not implement."""
    implemented = family.config.implemented_values().items()
    return {key for key, allowed in implemented if key in text and text[key] not in allowed}


@cache
def _uncritical(config: type[DecoderConfig]) -> type[DecoderConfig]:
    """Returns the class of a config that takes values that contradict each other, under the family's keys alone."""
    methods = {
        "in_our_keys": classmethod(lambda cls, raw: dict(raw)),
        "_unread": classmethod(lambda cls, read: {}),
        "contradictions": lambda self: iter(()),
        "disagreements": classmethod(lambda cls, raw: iter(())),
    }
    return type(config.__name__, (config,), methods)


def lenient_readings(family: Family, text: Mapping[str, Any]) -> Iterator[tuple[DecoderConfig, bool]]:
    """Yields configs of a family from the keys of a text model that it knows, each from fewer keys, and True with the
    one from sizes alone. Their values may contradict each other: what they compute may raise `FAULTS`."""
    config: Any = family.config  # which mypy takes for one that has no hash
    kind = _uncritical(config)
    for some, is_cut in _readable(family, text):
        some["model_type"] = family.config.model_type
        with suppress(*FAULTS):
            yield kind.from_hf({"text_config": some} if issubclass(kind, WrapperConfig) else some), is_cut


def _readable(family: Family, text: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yields the keys that each config of `lenient_readings` is read from."""
    given = dict(text)
    with suppress(TpuconvError):
        given = family.config.in_our_keys(without_older_rope_keys(text))
    derived = family.config.derived
    hints = {family.config._key(name): hint for name, hint in hints_of(family.config).items() if name not in derived}
    taken = hints.keys() & given.keys() - refused_keys(family, given)
    known = {key: given[key] for key in taken if has_type(given[key], hints[key])}
    yield known | {key: given[key] for key in ROPE_KEYS if key in given}, False
    yield known.copy(), False
    yield {key: value for key, value in known.items() if key in map(family.config._key, SIZE_FIELDS)}, True

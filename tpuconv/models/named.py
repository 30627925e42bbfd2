"""Finds families by any name that a user may have: a family, a model_type, or an architecture of config.json."""

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from tpuconv.errors import TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models.common.heads import CAUSAL_ENDS, HEADLESS_ENDS, named_head
from tpuconv.models.families import DRAFT_FAMILIES
from tpuconv.models.left_out import MODELS_LEFT_OUT
from tpuconv.models.registry import Family, all_families, family_names, get_family, near_names
from tpuconv.models.wrappers import WRAPPERS, Wrapper


def families_named(name: str) -> tuple[list[Family], list[Wrapper]]:
    """Returns the families of a name, and the multimodal models around their text models.

    Args:
        name: of a family, a model_type, or an architecture; `...ForSequenceClassification` and `...Model` too.

    Raises:
        UnsupportedConfig: the models of this name are left out; the error has the reason.
        UsageError: there are none; the hint has similar names.
    """
    drafts = [
        family
        for family in map(get_family, DRAFT_FAMILIES)
        if name == family.name or name in family.architectures or name in family.architectures.values()
    ]
    if drafts:
        return drafts, []
    around = [wrapper for wrapper in WRAPPERS.values() if name in (wrapper.model_type, wrapper.architecture)]
    if around:
        return [], around
    first = [get_family(name)] if name in family_names() else []  # an error if it cannot be imported
    known = all_families()
    for found in (
        first + [family for family in known if name in family.architectures.values() and family.name != name],
        [family for family in known if name in family.architectures],
        [family for family in known if named_head(name, family.architectures) is not None],
    ):
        if found:
            return found, []
    if name.partition(".")[0] in WRAPPERS:  # a text model inside one
        return [get_family(name)], []
    if reason := left_out(name):
        raise UnsupportedConfig(
            f"no family reads {name}: {reason}", hint="`tpuconv families --new SRC` compares a model with each family"
        )
    raise UsageError(f"there is no family '{name}'", hint=_suggestion(name, known))


def left_out(name: str) -> str:
    """Returns the reason why the models of a model_type or of an architecture are left out; empty if none is known."""
    plain = {_letters(kind): reason for kind, reason in MODELS_LEFT_OUT.items()}
    ends = (*CAUSAL_ENDS, *HEADLESS_ENDS, "")
    stem = next(name.removesuffix(end) for end in ends if name.endswith(end))
    return MODELS_LEFT_OUT.get(name) or plain.get(_letters(stem), "")


def example_config(family: Family, model_type: str = "") -> dict[str, Any]:
    """Returns a config.json that a family reads: its keys with the defaults of transformers. For a multimodal model,
    and where a default is not supported, it has the names alone.

    Args:
        family: of the model.
        model_type: one of the family; its first one by default.
    """
    architecture, kind = next(pair for pair in family.architectures.items() if not model_type or pair[1] == model_type)
    named: dict[str, Any] = {"architectures": [architecture], "model_type": kind}
    if family.text_types:
        return named | {"text_config": {"model_type": family.text_types[0]}}
    try:
        config = family.config.from_hf(named)
        keys = {each.name: type(config).hf_names.get(each.name, each.name) for each in fields(config)}
        hidden = type(config).derived | type(config).settled_keys
        values = {key: getattr(config, name) for name, key in keys.items() if name not in hidden}
        plain = {key: value for key, value in values.items() if isinstance(value, bool | int | float | str)}
        family.check_config(named | plain)
    except TpuconvError:  # a default is not supported, or its keys stand in `text_config`
        return named
    return named | plain


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _suggestion(name: str, known: Iterable[Family]) -> str:
    names = {*family_names(), *WRAPPERS, *(wrapper.architecture for wrapper in WRAPPERS.values())}
    for family in known:
        names |= {*family.architectures, *family.architectures.values()}
    near = near_names(name, names)
    suggested = f"did you mean {' or '.join(near)}? " if near else ""
    return suggested + "`tpuconv families` lists all; `tpuconv families --new SRC` compares a model with each family"

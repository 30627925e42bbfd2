"""How transformers spells and groups the tensors of each family where that differs from releases.

tools/saved_names.py writes saved_names.json from transformers' own conversion mapping.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from tpuconv.errors import UsageError
from tpuconv.notation.forms import FormPlace
from tpuconv.notation.pairs import PairRow
from tpuconv.notation.release import AS_TABLED, Release
from tpuconv.notation.spelling import module_of
from tpuconv.notation.table import Map, MappingTable

BY_RELEASES, BY_TRANSFORMERS = "released", "transformers"
"""The forms of rows that transformers joins or renames."""


@cache
def _saved() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("tpuconv") / "models" / "common" / "saved_names.json").read_bytes())
    return found


forget_saved = _saved.cache_clear
"""Reads the file again the next time."""


def saved_names(family: str) -> Mapping[str, str]:
    """Returns templates of the names that transformers gives modules of a family, and those of its table."""
    names: Mapping[str, str] = _saved().get(family, {}).get("names", {})
    return names


def saved_release(family: str) -> Release:
    """Returns how transformers itself names and groups the tensors of a family: as its modules have them.

    Raises:
        UsageError: that is not known.
    """
    if family not in _saved():
        raise UsageError(
            f"the names of transformers' modules are not known for {family}",
            hint="leave out `form=`: transformers reads the names of releases too",
        )
    return Release(**_saved()[family].get("release", {}))


def release_of_modules(family: str) -> Release:
    """Returns the names and groups of transformers' modules; of the family's table where transformers has no such
    model. A multimodal type has the same modules around each of its text models: around `llava.qwen2` they are known
    from `llava.llama` (CLIP) and `llava.mistral` (Pixtral)."""
    own = saved_release(family) if family in _saved() else AS_TABLED
    model, dot, _ = family.partition(".")
    alike = [saved_release(name).spelling for name in _saved() if dot and name.startswith(model + dot)]
    return replace(own, spelling={**{a: b for each in alike for a, b in each.items()}, **own.spelling})


INPUTS_FIRST = frozenset({"gpt_oss", "aria", "aria_text"})
"""Families whose experts are [in, out] in transformers, and marked so (`is_transposed`). PEFT 0.21 takes all others for
[out, in], and names the two matrices of a pair accordingly."""


def is_transposed_by_peft(family: str, row: PairRow) -> bool:
    """Returns True if PEFT takes the inputs of a row's matrices for outputs."""
    return row.is_of_experts and row.has_inputs_first and family not in INPUTS_FIRST


BESIDE_TEXT = "of a part beside the text model, which alone is converted"


def saved_outside(family: str) -> dict[str, str]:
    """Returns the modules of transformers' model beside the text model, and why they are skipped."""
    names = _saved().get(family, {}).get("outside", ())
    return {f"{front}{name}.*": BESIDE_TEXT for name in names for front in ("", "model.")}


def saved_places(family: str, table: MappingTable) -> list[FormPlace]:
    """Returns the rows of a family's table that transformers has in another form."""
    out = []
    for each in _saved().get(family, {}).get("forms", ()):
        home = tuple(row for row in table if list(row.hf_names) in each["home"] and row.when == each["when"])
        rows = tuple(
            Map(row["hf"], tuple(row["jax"]), row["layout"], each["when"], home[0].buffer, part=home[0].part)
            for row in each["rows"]
            if home
        )
        if len(home) == len(each["home"]):  # a model without a head has fewer
            front = f"{module_of(rows[0].hf_names[0])}."
            out.append(FormPlace(front, each["when"], BY_RELEASES, {BY_RELEASES: home, BY_TRANSFORMERS: rows}))
    return out

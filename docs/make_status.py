"""Writes docs/status.md from the results of the tests: of each family what was measured, and what it has.

python -m pytest tests/test_models.py -m "slow or not slow" -k of_a_sequence --junitxml build/sequences.xml
python -m pytest tests/test_models.py -m "slow or not slow" -k "prefill and plain" --junitxml build/plain.xml
python -m pytest tests/test_models.py -m "slow or not slow" -k "prefill and not plain" --junitxml build/others.xml
python -m pytest tests/test_wrapped.py -m "slow or not slow" -k logits_of_the_whole --junitxml build/wrapped.xml
python -m pytest tests/test_quantize.py -m "slow or not slow" -k every_family_is_quantized --junitxml build/qwix.xml
python -m pytest tests/test_keep.py -m "slow or not slow" -k every_family_is_kept --junitxml build/kept.xml
python -m pytest tests/test_topology.py -m "slow or not slow" -k compiles_for_a_slice --junitxml build/fit.xml
python docs/make_status.py build/*.xml

Not in one process: XLA crashed there, after more than 300 tests. Of several files the result of a test in a later one
replaces that in an earlier one. A cell without results stays as it is, so that for a new family
`-k "of_a_sequence and step3p5"`, `-k "prefill and step3p5"` and so on are enough.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from transformers import CONFIG_MAPPING

from tpuconv.models.registry import Family, all_families
from tpuconv.models.wrappers import WRAPPERS, wrapped
from tpuconv.targets.registry import TARGETS, get_target

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "status.md"
LISTINGS = ROOT / "tests" / "helpers" / "listings.json"

DIFFERENCES = {"test_logits_of_a_sequence": "difference", "test_prefill_and_decode": "with the cache"}
COMPILED = ("test_every_family_compiles_for_a_slice", "test_every_other_family_compiles_for_a_slice")
"""Tests of a family, by the columns that they fill."""

HEAD = """# Status

Made by `docs/make_status.py` from the results of the tests. The logits come from tiny models in float32, and their
difference from transformers is divided by the largest logit: the worst of all cases of the family, whose limit is 2e-5.
Models that return hidden states, such as EmbeddingGemma 2, have no row: their tests hold 1e-5 of the largest value.

- `scanned`: the same of models whose layers are stacked (`--scan-layers`), where the family has them.
- `as Qwix`: the configs by which the family was quantized to the bits and logits of Qwix.
- `kept`: the encodings of a source that were passed through with `--encoding keep`, and came back by `export`; tests
  give each case of a family FP8 in blocks and another one.
- `fit`: prefill and decode were compiled for a slice by the TPU's compiler.

"""
COLUMNS = (
    *("family", "model_type", "cases", "difference", "with the cache", "scanned", "as Qwix", "kept", "fit"),
    *("targets with a table", "largest listing"),
)

WRAPPED_HEAD = """
## Text models inside multimodal models

Compared with transformers' class of the whole, in the same way. Everything else equals the family of the text model.
[multimodal.md](multimodal.md#measured) has the models whole: features, logits, the cache, targets and `export`.

| family | text model | difference |
|---|---|---|
"""
WRAPPED_TEST = "test_the_text_has_the_logits_of_the_whole_and_comes_back"

Results = dict[str, dict[str, str]]
"""By column and family what stands in the cell."""


def passed(paths: Iterable[Path]) -> dict[str, ElementTree.Element]:
    """Returns the cases of the tests by name.

    Raises:
        SystemExit: a test failed.
    """
    cases = {case.get("name", ""): case for path in paths for case in ElementTree.parse(path).iter("testcase")}
    for name, case in cases.items():
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{name} failed: no page is made")
    return {name: case for name, case in cases.items() if case.find("skipped") is None}


def read_results(cases: dict[str, ElementTree.Element], families: list[str]) -> Results:
    """Returns the cells that the tests' names and differences fill."""
    differences: dict[str, dict[str, list[float]]] = {}
    words: dict[str, dict[str, list[str]]] = {}
    for full_name, case in cases.items():
        test, case_id = full_name.removesuffix("]").partition("[")[::2]
        first, _, others = case_id.partition("-")
        family = max((name for name in families if f"{case_id}-".startswith(f"{name}-")), key=len, default=first)
        value = case.find("properties/property[@name='difference']")
        if column := DIFFERENCES.get(test):
            column = "scanned" if case_id.endswith("-scanned") else column
            if value is not None:
                differences.setdefault(column, {}).setdefault(family, []).append(float(value.get("value", "nan")))
        elif test == "test_every_family_is_quantized_to_what_qwix_makes_of_it":
            words.setdefault("as Qwix", {}).setdefault(others, []).append(first)
        elif test == "test_every_family_is_kept_in_every_encoding":
            words.setdefault("kept", {}).setdefault(family, []).append(others.rpartition("-")[2])
        elif test in COMPILED:
            words.setdefault("fit", {}).setdefault(family, []).append("yes")
    out: Results = {"cases": {family: str(len(found)) for family, found in differences.get("difference", {}).items()}}
    for column, found in differences.items():
        out[column] = {family: f"{max(values):.1e}" for family, values in found.items()}
    for column, named in words.items():
        out[column] = {family: ", ".join(dict.fromkeys(names)) for family, names in named.items()}
    return {column: {f: cell for f, cell in cells.items() if f in families} for column, cells in out.items()}


def read_wrapped(cases: dict[str, ElementTree.Element]) -> dict[str, float]:
    """Returns the measured differences of text models inside multimodal ones."""
    found = {}
    for full_name, case in cases.items():
        name = re.fullmatch(rf"{WRAPPED_TEST}\[(.*)\]", full_name)
        value = case.find("properties/property[@name='difference']")
        if name and value is not None:
            found[name[1]] = float(value.get("value", "nan"))
    return found


def read_page() -> dict[str, dict[str, str]]:
    """Returns the cells of the page as it is, by the name in the first one and by the column."""
    out, columns = {}, list[str]()
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if line.startswith("| family"):
            columns = cells
        elif line.startswith("| `"):
            out[cells[0].strip("`")] = dict(zip(columns, cells, strict=True))
    return out


def largest(listings: dict[str, dict[str, object]], family: Family) -> str:
    """The largest model of the listings that a test plans without a tensor left."""
    types = set(family.architectures.values())
    own = {n: int(str(x["parameters"])) for n, x in listings.items() if dict(x["config"]).get("model_type") in types}  # type: ignore[call-overload]
    if not own:
        return ""
    name = max(own, key=lambda name: own[name])
    return f"{name} ({own[name] / 1e9:.1f} B)"


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |\n"


def main(paths: list[Path]) -> None:
    """Writes the page."""
    families, cases, old = [each for each in all_families() if not each.output], passed(paths), read_page()
    results, wrapped_results = read_results(cases, [family.name for family in families]), read_wrapped(cases)
    listings = json.loads(LISTINGS.read_text())
    trees = {name: get_target(name).trees for name in TARGETS}
    rows = []
    for family in families:
        names = {family.name, *family.architectures.values()}
        measured = {column: found[family.name] for column, found in results.items() if family.name in found}
        known = {
            "family": f"`{family.name}`",
            "model_type": ", ".join(f"`{each}`" for each in dict.fromkeys(family.architectures.values())),
            "targets with a table": ", ".join(
                target for target, tree in trees.items() if tree is None or names & tree.keys()
            ),
            "largest listing": largest(listings, family),
        }
        cells = {**old.get(family.name, {}), **measured, **known}
        if not cells.get("difference"):
            raise SystemExit(f"no results of {family.name}: run the tests with the slow ones")
        rows.append(line(cells.get(column, "") for column in COLUMNS))
    wrapped_rows = []
    of_transformers = (each for each in WRAPPERS.values() if each.in_keys is None and each.model_type in CONFIG_MAPPING)
    for wrapper in of_transformers:  # the others have arrays compared
        for text_type in wrapper.texts:
            family = wrapped(wrapper.model_type, text_type)
            found = wrapped_results.get(f"{wrapper.model_type}-{text_type}")
            difference = old.get(family.name, {}).get("difference") if found is None else f"{found:.1e}"
            if difference is None:
                raise SystemExit(f"no results of {family.name}: run the tests with the slow ones")
            wrapped_rows.append(line((f"`{family.name}`", f"`{family.text}`", difference)))
    head = line(COLUMNS) + f"{'|---' * len(COLUMNS)}|\n"
    PAGE.write_text(HEAD + head + "".join(rows) + WRAPPED_HEAD + "".join(wrapped_rows))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])

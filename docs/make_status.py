"""Writes docs/status.md from the results of the tests: of each family what was measured, and what it has.

python -m pytest tests/test_models.py -m "slow or not slow" -k of_a_sequence --junitxml build/sequences.xml
python -m pytest tests/test_models.py -m "slow or not slow" -k "prefill and plain" --junitxml build/plain.xml
python -m pytest tests/test_models.py -m "slow or not slow" -k "prefill and not plain" --junitxml build/others.xml
python -m pytest tests/test_wrapped.py -m "slow or not slow" -k logits_of_the_whole --junitxml build/wrapped.xml
python docs/make_status.py build/sequences.xml build/plain.xml build/others.xml build/wrapped.xml

Not in one process: XLA crashed there, after more than 300 tests. Of several files the result of a test in a later one
replaces that in an earlier one. A family without results keeps its row, so that `-k "of_a_sequence and step3p5"` and
`-k "prefill and step3p5"` are enough for a new one.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from tpuconv.models.registry import Family, all_families
from tpuconv.models.wrappers import WRAPPERS, wrapped
from tpuconv.targets.registry import TARGETS, get_target

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "status.md"
LISTINGS = ROOT / "tests" / "helpers" / "listings.json"

HEAD = """# Status

Made by `docs/make_status.py` from the results of the tests. Logits are those of tiny models in float32, and their
difference from transformers is divided by the largest logit: the worst of all cases of the family, whose limit is 2e-5.
`scanned` is that of models whose layers are stacked (`--scan-layers`), where the family has them.

| family | model_type | cases | difference | with the cache | scanned | targets with a table | largest listing |
|---|---|---|---|---|---|---|---|
"""

WRAPPED_HEAD = """
## Text models inside multimodal models

Compared with transformers' class of the whole, in the same way. All else is that of the family of the text model.

| family | text model | difference |
|---|---|---|
"""
WRAPPED_TEST = "test_the_text_has_the_logits_of_the_whole_and_comes_back"

Results = dict[str, dict[str, list[float]]]
"""By test and family the differences of its cases. The test of scanned layers has a name of its own."""
SCANNED = "scanned"


def read_results(paths: Iterable[Path], families: list[str]) -> Results:
    """Returns the measured differences.

    Raises:
        SystemExit: a test failed.
    """
    cases = {case.get("name", ""): case for path in paths for case in ElementTree.parse(path).iter("testcase")}
    found: Results = {}
    for full_name, case in cases.items():
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{full_name} failed: no page is made")
        name = re.fullmatch(r"(\w+)\[([a-z0-9_]+)(-.*)?\]", full_name)
        value = case.find("properties/property[@name='difference']")
        if name and name[2] in families and value is not None:
            test = SCANNED if full_name.endswith("-scanned]") else name[1]
            found.setdefault(test, {}).setdefault(name[2], []).append(float(value.get("value", "nan")))
    return found


def read_wrapped(paths: Iterable[Path]) -> dict[str, float]:
    """Returns the measured differences of text models inside multimodal ones."""
    found = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            name = re.fullmatch(rf"{WRAPPED_TEST}\[(.*)\]", case.get("name", ""))
            value = case.find("properties/property[@name='difference']")
            if name and value is not None:
                found[name[1]] = float(value.get("value", "nan"))
    return found


def largest(listings: dict[str, dict[str, object]], family: Family) -> str:
    """The largest model of the listings that a test plans without a tensor left."""
    types = set(family.architectures.values())
    own = {n: int(str(x["parameters"])) for n, x in listings.items() if dict(x["config"]).get("model_type") in types}  # type: ignore[call-overload]
    if not own:
        return ""
    name = max(own, key=lambda name: own[name])
    return f"{name} ({own[name] / 1e9:.1f} B)"


def worst(values: list[float] | None) -> str:
    """The largest difference."""
    return f"{max(values):.1e}" if values else ""


def main(paths: list[Path]) -> None:
    """Writes the page."""
    families = all_families()
    results = read_results(paths, [family.name for family in families])
    wrapped_results = read_wrapped(paths)
    listings = json.loads(LISTINGS.read_text())
    trees = {name: get_target(name).trees for name in TARGETS}
    rows = {row.split("`")[1]: row for row in PAGE.read_text().splitlines(keepends=True) if row.startswith("| `")}
    for family in families:
        names = {family.name, *family.architectures.values()}
        targets = [target for target, known in trees.items() if known is None or names & known.keys()]
        alone = results.get("test_logits_of_a_sequence", {}).get(family.name)
        if not alone:
            if family.name not in rows:
                raise SystemExit(f"no results of {family.name}: run the tests with the slow ones")
            continue
        cached = results.get("test_prefill_and_decode", {}).get(family.name)
        types = ", ".join(f"`{each}`" for each in dict.fromkeys(family.architectures.values()))
        scanned = results.get(SCANNED, {}).get(family.name)
        differences = (worst(alone), worst(cached), worst(scanned))
        cells = (f"`{family.name}`", types, str(len(alone)), *differences, ", ".join(targets))
        rows[family.name] = f"| {' | '.join((*cells, largest(listings, family)))} |\n"
    wrapped_rows = []
    for wrapper in WRAPPERS.values():
        for text_type in wrapper.texts:
            family = wrapped(wrapper.model_type, text_type)
            found = wrapped_results.get(f"{wrapper.model_type}-{text_type}")
            new = None if found is None else f"| `{family.name}` | `{family.text}` | {found:.1e} |\n"
            row = new or rows.get(family.name)
            if row is None:
                raise SystemExit(f"no results of {family.name}: run the tests with the slow ones")
            wrapped_rows.append(row)
    PAGE.write_text(HEAD + "".join(rows[family.name] for family in families) + WRAPPED_HEAD + "".join(wrapped_rows))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])

"""Writes the table of docs/multimodal.md from the results of the tests.

python -m pytest tests/test_sights.py -m "slow or not slow" --junitxml build/sights.xml
python docs/make_multimodal.py build/sights.xml

A row without results stays as it is, so that for a new model `-k NAME` is enough.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parent / "multimodal.md"
NUMBERS = ("features", "logits", "with the cache")
COLUMNS = ("model", "sees by", "hears by", *NUMBERS, "targets", "export whole")
BEGIN = "| model |"


def measured(paths: list[Path]) -> dict[str, dict[str, str]]:
    """Returns the cells of each model that the tests measured.

    Raises:
        SystemExit: a test failed.
    """
    out: dict[str, dict[str, str]] = {}
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        name = case.get("name", "")
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{name} failed: no table is made")
        model = name.removesuffix("]").partition("[")[2]
        for found in case.iter("property"):
            key, value = found.get("name", ""), found.get("value", "")
            if key in COLUMNS:
                out.setdefault(model, {})[key] = f"{float(value):.1e}" if key in NUMBERS else value
    return out


def main(paths: list[Path]) -> None:
    """Replaces the table at the end of the page."""
    text, begin, table = PAGE.read_text().partition(BEGIN)
    columns, _, *lines = ([cell.strip() for cell in x.strip("|").split("|")] for x in f"{begin}{table}".splitlines())
    old = {cells[0].strip("`"): dict(zip(columns, cells, strict=True)) for cells in lines}
    rows = {**old}
    for model, cells in measured(paths).items():
        rows[model] = {**rows.get(model, {}), **cells, "model": f"`{model}`"}
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row.get(x, "") for x in COLUMNS] for _, row in sorted(rows.items()))]
    PAGE.write_text(text + "".join(f"| {' | '.join(cells)} |\n" for cells in lines))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])

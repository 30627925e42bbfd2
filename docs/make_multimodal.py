"""Writes the table of docs/multimodal.md from the results of the tests.

python -m pytest tests/test_sights.py -m "slow or not slow" --junitxml build/sights.xml
python docs/make_multimodal.py build/sights.xml

A row without results stays as it is, so that for a new model `-k NAME` is enough.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parent / "multimodal.md"
COLUMNS = ("model", "sees by", "hears by", "features", "logits", "with the cache")
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
                out.setdefault(model, {})[key] = value if key.endswith(" by") else f"{float(value):.1e}"
    return out


def main(paths: list[Path]) -> None:
    """Replaces the table at the end of the page."""
    text, _, table = PAGE.read_text().partition(BEGIN)
    old = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        old[cells[0].strip("`")] = dict(zip(COLUMNS, cells, strict=True))
    rows = {**old}
    for model, cells in measured(paths).items():
        rows[model] = {**rows.get(model, {}), **cells, "model": f"`{model}`"}
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row.get(x, "") for x in COLUMNS] for _, row in sorted(rows.items()))]
    PAGE.write_text(text + "".join(f"| {' | '.join(cells)} |\n" for cells in lines))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])

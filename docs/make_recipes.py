"""Writes docs/recipes: a page for each released model whose config.json and tensor names are in
tests/helpers/listings.json, and for each in docs/recipe_configs.json, whose tensors follow from the config alone.

python docs/make_recipes.py [MODEL ...]

Without arguments it writes all pages; that takes some minutes. A test keeps them up to date. When commands or sizes
change, set `CHECKED` to the date. `python benchmarks/recipe_fits.py` asks the TPU compiler, and writes
docs/recipe_fits.json.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from tpuconv.api.model_recipe import described_source
from tpuconv.api.recipe_facts import SPARE, ModelForm, ModelRecipe, RecipeStep
from tpuconv.api.recipe_steps import recipe_of
from tpuconv.commands.flags import with_flags
from tpuconv.commands.recipe import SLICES_NOTE, form_cells, sizes, step_lines
from tpuconv.notation.sharding import format_mesh
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import Source
from tpuconv.text import format_size
from tpuconv.verify.topology.request import ESTIMATE_ERROR

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "recipes"
LISTINGS = ROOT / "tests" / "helpers" / "listings.json"
CONFIGS = ROOT / "docs" / "recipe_configs.json"
FITS = ROOT / "docs" / "recipe_fits.json"
CHECKED = "30 November 2026"
SHARD = "model.safetensors"
COPIES = ("meta-llama/Llama-4-Scout-17B-16E-Instruct-withvision",)
"""Listings of copies that have other names than the release: they have no page."""

HEAD = f"""# Recipes

Made by `docs/make_recipes.py` from the config.json and the tensor names of released models, checked on {CHECKED}.
`tpuconv recipe MODEL` prints the same for any model. Commands were planned on these headers; no weights were read. `~`:
the tensors follow from the config alone, without a listing of the release. By the TPU compiler: slices, and times of a
decode step for batch 8.

| model | parameters | release | unquantized | `int8_weight_only` | smallest v5e slice in int8 | by the TPU compiler |
|---|---|---|---|---|---|---|
"""


def names_of(pattern: str) -> list[str]:
    """Returns the names of a pattern such as `layers.{0...3,7}.weight`."""
    fixed, spans = re.split(r"\{[^}]*\}", pattern), re.findall(r"\{([^}]*)\}", pattern)
    values = []
    for span in spans:
        ends = [(each.split("...")[0], each.split("...")[-1]) for each in span.split(",")]
        values.append([str(i) for first, last in ends for i in range(int(first), int(last) + 1)])
    return ["".join(a + b for a, b in zip(fixed, (*chosen, ""), strict=True)) for chosen in product(*values)]


def listed_source(model: str, listing: dict[str, Any]) -> Source:
    """Returns the source of a listing, without bytes."""
    tensors, offset = {}, 0
    for pattern, dtype, shape in listing["tensors"]:
        for name in names_of(pattern):
            nbytes = prod(shape) * DTYPES[dtype].itemsize
            tensors[name] = TensorInfo(name, dtype, tuple(shape), SHARD, offset, nbytes)
            offset += nbytes
    return Source(Path(model.rpartition("/")[2]), listing["config"], tensors, (SourceShard(SHARD, offset),), model)


def found_recipes() -> dict[str, Callable[[], tuple[ModelRecipe, str]]]:
    """Returns for each model a function that makes its recipe, and says what it was checked against."""

    def of_listing(model: str, listing: dict[str, Any]) -> tuple[ModelRecipe, str]:
        found = recipe_of(listed_source(model, listing), model, model, from_headers=True)
        return found, "against the names and shapes of the release"

    def of_config(model: str, known: dict[str, Any]) -> tuple[ModelRecipe, str]:
        source = replace(described_source(model.rpartition("/")[2], known["config"]), repo=model)
        found = recipe_of(source, model, model, from_headers=False)
        return found, f"on the sizes of config.json alone, by {known['from']}; no listing of the release was at hand"

    listed = {model: partial(of_listing, model, each) for model, each in json.loads(LISTINGS.read_text()).items()}
    described = {model: partial(of_config, model, each) for model, each in json.loads(CONFIGS.read_text()).items()}
    known = {model: make for model, make in {**listed, **described}.items() if model not in COPIES}
    return dict(sorted(known.items(), key=lambda item: item[0].lower()))


def config_of(model: str) -> dict[str, Any]:
    """Returns the keys of the config.json of a model."""
    known = {**json.loads(LISTINGS.read_text()), **json.loads(CONFIGS.read_text())}
    config: dict[str, Any] = known[model]["config"]
    return config


def asked_form(found: ModelRecipe) -> ModelForm:
    """Returns the form that the TPU compiler is asked about: the one of the command `fit` of the page."""
    forms = {form.name: form for form in found.forms}
    return forms[found.asked.get("quantize", "as released")]


def page_name(model: str) -> str:
    """Returns the file of a model."""
    return f"{model.rpartition('/')[2].lower()}.md"


def recipe_page(found: ModelRecipe, against: str) -> str:
    """Returns the text of a page."""
    chips = list(found.forms[0].slices)
    forms = [f"| form | bytes in device memory | {' | '.join(chips)} | |", f"|---|---|{'---|' * len(chips)}---|"]
    for form in found.forms:
        cells = form_cells(form)
        cells += [""] * (len(chips) + 1 - len(cells))
        said = with_flags(form.refusal or form.summary)
        forms.append(f"| `{form.name}` | {' | '.join(cells)} | {said.partition(chr(10))[0]} |")
    targets = ["| target | supported | scanned layers | |", "|---|---|---|---|"]
    for each in found.targets:
        words = ["yes" if value else "no" for value in (each.supported, each.scanned)]
        targets.append(f"| `{each.target}` | {' | '.join(words)} | {with_flags(each.refusal)} |")
    return "\n".join(
        [
            f"# {found.model}",
            "",
            f"Made by `docs/make_recipes.py`; checked on {CHECKED} {against}.",
            "",
            f"{sizes(found)[0].upper()}{sizes(found)[1:]}.",
            "",
            *forms,
            "",
            SLICES_NOTE,
            "",
            *fit_lines(found),
            "",
            *targets,
            "",
            *(line for step in found.steps for line in step_section(step)),
        ]
    )


def fit_lines(found: ModelRecipe) -> list[str]:
    """Returns the rows of docs/recipe_fits.json about a model: the answers of the TPU compiler."""
    known = json.loads(FITS.read_text()).get(found.model)
    if known is None:
        return ["The TPU compiler was not asked for this page yet: the command `fit` below asks it."]
    asked, (few, more) = found.asked, next((row["compiled"] for row in known["rows"] if "compiled" in row), (0, 0))
    lines = [
        f"By the TPU compiler, `{known['form']}`, batch {asked['batch']}, context {asked['context']}, for each device "
        f"({known['date']}, libtpu {known['libtpu']}, commit {known['commit']}):",
        "",
        "| slice | mesh | weights | KV cache | programs | in use | decode step | tokens/s in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in known["rows"]:
        if "why" in row:
            lines.append(f"| {row['slice']} | {row['why']} | | | | | | |")
            continue
        parts = [row[kind] for kind in ("weights", "cache", "programs")]
        cells = [row["slice"], format_mesh(row["mesh"]), *map(format_size, parts)]
        cells += [f"{sum(parts) / row['available']:.0%} of {format_size(row['available'])}"]
        cells += [f"{row['decode_ms']:.3g} ms", f"{1e3 * asked['batch'] / row['decode_ms']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"Models with {few} and {more} layers were compiled, and the rest is extrapolated."] * bool(few)
    if not all(row.get("prefill", True) for row in known["rows"]):
        notes += [f"The prefill was not compiled: {SPARE:.0%} of the memory are left for it."]
    return [*lines, "", " ".join([*notes, f"Estimates of steps are experimental: {ESTIMATE_ERROR}."])]


def step_section(step: RecipeStep) -> list[str]:
    """Returns the lines of a step."""
    return [
        f"## {step.title}",
        "",
        f"```{step.language}",
        *step_lines(step),
        "```",
        "",
        *([step.note, ""] * bool(step.note)),
    ]


def index_row(found: ModelRecipe) -> str:
    """Returns the row of a model."""
    forms = {form.name: form for form in found.forms}
    plain, int8 = forms["unquantized"], forms["int8_weight_only"]
    released = "" if found.from_headers else "~ "
    released += format_size(found.source_bytes) + (f", {found.encoding}" if found.encoding else "")
    slices = (int8.slices.get("v5e") or "none").partition(":")[2]
    rows = json.loads(FITS.read_text()).get(found.model, {"rows": []})["rows"]
    fits = "; ".join(f"{row['slice']} {row['decode_ms']:.3g} ms" for row in rows if "why" not in row)
    cells = (
        f"{found.parameters:,}",
        released,
        format_size(plain.device_bytes or 0),
        format_size(int8.device_bytes or 0),
    )
    return f"| [{found.model}]({page_name(found.model)}) | {' | '.join(cells)} | {slices} | {fits} |"


def main(chosen: list[str]) -> None:
    """Writes the pages of the chosen models; the index only with all of them."""
    FOLDER.mkdir(exist_ok=True)
    rows, known = [], found_recipes()
    for model in chosen or known:
        found, against = known[model]()
        (FOLDER / page_name(model)).write_text(recipe_page(found, against), encoding="utf-8")
        rows.append(index_row(found))
    if not chosen:
        (FOLDER / "index.md").write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

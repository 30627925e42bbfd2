"""The recipe of a model, from config.json and headers alone."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.api.recipe_facts import ModelRecipe
from tpuconv.api.recipe_steps import recipe_of
from tpuconv.errors import SourceError
from tpuconv.options import PROGRESS_ARGUMENT, argument, option, takes
from tpuconv.progress import Listener, Progress, ignore

if TYPE_CHECKING:
    from tpuconv.sources.source import Source


@dataclass(eq=False, repr=False)
class RecipeRequest:
    """The arguments of `recipe`."""

    model: str | Path = field(
        metadata=argument("A Hub id, a folder with safetensors or with config.json alone, or a config.json.")
    )
    _: KW_ONLY
    fit: Sequence[str] = option(
        (),
        "Ask the TPU compiler about this slice, such as v5e:4x4; may be repeated. `v5e` alone searches for the "
        "smallest slice. It is asked about the form, batch and context of the command `fit` that is shown.",
        python="Slices to ask the TPU compiler about, such as v5e:4x4. `v5e` alone searches for the smallest slice.",
    )
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(RecipeRequest)
def recipe(asked: RecipeRequest) -> ModelRecipe:
    """Returns the sizes of a model and the commands that convert, quantize, serve, train and load it. No weights are
    read. Forms and targets are planned on the headers: one that the model cannot have is listed with the reason.

    Raises:
        TpuconvError: the source cannot be read, no family reads it, or its tensors do not match the family.
    """
    from tpuconv.api.performance import fit
    from tpuconv.sources.companions import is_config_alone
    from tpuconv.sources.files import CONFIG_FILE
    from tpuconv.sources.hub import resolve, source_location
    from tpuconv.sources.source import open_source

    model, asked_slices = str(asked.model), asked.fit
    asked.progress(Progress("planning"))
    if is_config_alone(folder := source_location(model)):
        model = str(folder / CONFIG_FILE)
    if model.endswith(".json"):
        found = recipe_of(_from_config(model), str(Path(model).parent), model, from_headers=False)
    else:
        with resolve(model, weights=False) as resolved:
            source = open_source(resolved.folder, repo=resolved.repo, commit=resolved.commit)
            found = recipe_of(source, model, model, from_headers=True)
    if asked_slices:
        answer = fit(model, progress=asked.progress, **{**found.asked, "topologies": asked_slices})
        found = replace(found, fit=answer.reports)
    return found


def _from_config(path: str) -> "Source":
    """Returns the source that a config.json describes.

    Raises:
        TpuconvError: the file cannot be read, or no family reads it.
    """
    from tpuconv.sources.hub import fetch_config

    source = described_source(Path(path).absolute().parent.name, fetch_config(path))
    if not source.tensors:
        raise SourceError(f"{path} describes no tensors", hint="give a folder with safetensors")
    return source


def described_source(name: str, raw: Mapping[str, Any]) -> "Source":
    """Returns the source that the keys of a config.json describe.

    Raises:
        TpuconvError: no family reads it.
    """
    from tpuconv.convert.plan.source_from_config import source_from_config
    from tpuconv.models.registry import find_family
    from tpuconv.weight_map.model import described_parts

    family = find_family(raw)
    returns = family.returns(raw)
    parts = described_parts(family, raw, returns)
    config = family.read_config(raw, returns=returns, parts=parts)
    table = family.table_without_release(returns, config.parts)
    return source_from_config(name, raw, table, config)

"""The rules of a config that names a number of bits, such as `auto:4.5`, for a checkpoint.

A checkpoint of tpuconv whose model can run on text gets the types that cost least, by the costs of its groups. They are
measured once, and kept. Other checkpoints, and conversions from a source, get types by the roles of parameters
(`tpuconv.quantize.recipe.roles`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpuconv.api.calibration import CalibrationOptions
from tpuconv.api.opened import OpenedModel
from tpuconv.api.recipes import ROUNDING_METHODS, SensitivityRequest, inputs_of, sensitivity
from tpuconv.progress import Listener

if TYPE_CHECKING:
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.quantize.recipe.search import ParamGroup, SearchSpace

UNMEASURED = "planned by the roles of parameters: `quantize` measures the costs of groups first, and may choose others"


def measured_rules(
    rules: "QuantConfig", opened: OpenedModel, text: CalibrationOptions, progress: Listener
) -> "QuantConfig":
    """Returns the rules by the costs of the groups of a checkpoint, which are measured unless they were kept; the
    config as it is if they cannot be measured.

    Raises:
        TpuconvError: see `tpuconv.api.sensitivity`, and `tpuconv.quantize.recipe.search.choose`.
    """
    from tpuconv.quantize.recipe.groups import find_choices

    if not _is_measurable(opened):
        return rules
    assert rules.target_bits is not None
    _counted(find_choices(opened.manifest).space.groups).check(rules.target_bits)
    measured = sensitivity(
        opened.manifest.folder,
        calibration=text.calibration,
        samples=text.samples,
        length=text.length,
        progress=progress,
    )
    return _cheapest(rules, measured.groups)


def planned_rules(
    rules: "QuantConfig", opened: OpenedModel, text: CalibrationOptions
) -> "tuple[QuantConfig, tuple[str, ...]]":
    """Returns the rules by the costs that an earlier call kept; the config as it is without these, and a note if they
    can be measured."""
    from tpuconv.quantize.recipe.groups import find_choices

    if not _is_measurable(opened):
        return rules, ()
    manifest = opened.manifest
    asked = SensitivityRequest(manifest.folder, calibration=text.calibration, samples=text.samples, length=text.length)
    groups = inputs_of(asked, opened, find_choices(manifest))[2].read()
    return (rules, (UNMEASURED,)) if groups is None else (_cheapest(rules, groups), ())


def _is_measurable(opened: OpenedModel) -> bool:
    """Returns True if the costs of a model can be measured and kept: it is a checkpoint of ours, returns logits, and
    has a tokenizer for the text."""
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.models.tokenizer import has_tokenizer

    with tokenizer_folder(opened.manifest) as folder:
        return opened.plan is None and not opened.manifest.returns and has_tokenizer(folder)


def _counted(groups: "Sequence[ParamGroup]") -> "SearchSpace":
    """Returns the groups whose bits count: of layers. The head stays as it is."""
    from tpuconv.quantize.recipe.search import SearchSpace

    layers = tuple(group for group in groups if group.path.startswith("layers/"))
    return SearchSpace(layers, sum(group.count for group in layers), 0)


def _cheapest(rules: "QuantConfig", groups: "Sequence[ParamGroup]") -> "QuantConfig":
    """Returns the rules that cost least at this number of bits per quantized weight."""
    from tpuconv.quantize.calibration_settings import recipe_calibration
    from tpuconv.quantize.config import parse_config
    from tpuconv.quantize.recipe import search

    assert rules.target_bits is not None
    space = _counted(groups)
    layers = space.groups
    chosen = search.choose(space, rules.target_bits)
    cost = sum(option.kl for option in chosen)
    summary = f"{space.bits(chosen):.3f} bits per quantized weight, KL {cost:.2g} by the sum of measured groups"
    lines = [f"summary: {summary}", "qwix:", "  rules:", *(f"    {rule}" for rule in search.rules(layers, chosen))]
    lines.append(f"calibration: {recipe_calibration(ROUNDING_METHODS[0]).to_yaml()}")
    return parse_config("\n".join(lines).encode(), rules.name, rules.name)

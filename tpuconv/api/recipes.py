"""Measures the cost of rounding each group of parameters, and finds the best recipe for a budget of bits."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tpuconv.api.calibration import CalibrationOptions, CalibrationText
from tpuconv.errors import GateError, UsageError
from tpuconv.location import Location, local_path, to_location
from tpuconv.options import GATES_OPTION, OVERWRITE_OPTION, PROGRESS_ARGUMENT, PROMPTS_OPTION, argument, option, takes
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.api.opened import OpenedModel
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.checkpoint.reader import ReadArray
    from tpuconv.quantize.calibrate.data import CalibrationData
    from tpuconv.quantize.calibration_settings import Calibration
    from tpuconv.quantize.recipe.costs import KeptCosts
    from tpuconv.quantize.recipe.groups import Choices
    from tpuconv.quantize.recipe.layerwise import LayerwiseProbe
    from tpuconv.quantize.recipe.search import Option, ParamGroup, SearchSpace, Sums
    from tpuconv.verify.logits import LogitStatistics


ROUNDING_METHODS = ("gptq", "awq", "nearest")
"""The rounding of weights while their costs are measured; the first is the default."""
GATE_CANDIDATES = 64
"""Recipes among which the smallest that holds its gates is searched, evenly by bits."""
GATE_STRIDE = 8
"""The step between the candidates that are measured first."""


@dataclass(frozen=True, repr=False)
class Recipe(OneLine):
    """A quantization config that was chosen by measured costs.

    Attributes:
        out: the YAML file.
        picture: the page beside it.
        target_bits: the budget, in bits a weight; None if gates were given.
        gates: the bounds that it had to hold; None if a budget was given.
        bits_per_weight: what it takes, scales included.
        predicted_kl: sum of the groups' KL divergences, in nats a token.
        measured_kl, measured_top1: of the model with all groups quantized: KL divergence, and the share of tokens with
            the same most likely next token, ties of two aside.
        chosen: the option of each group, in the order of `Sensitivity.groups`.
    """

    out: Path
    picture: Path
    target_bits: float | None
    gates: Mapping[str, float] | None
    bits_per_weight: float
    predicted_kl: float
    measured_kl: float
    measured_top1: float
    chosen: Sequence["Option"]


@dataclass(frozen=True, repr=False)
class Sensitivity(OneLine):
    """KL(unquantized || one group quantized) for each group of parameters, in nats a token.

    Attributes:
        checkpoint: the checkpoint, or the release.
        dtype: in which the model ran.
        method: how weights were rounded, of `ROUNDING_METHODS`.
        prompts: how many prompts it was measured on.
        tokens: how many tokens they have in all.
        groups: the groups with what each option costs, in the order of the model.
        recipe: the config for a budget of bits; None if none was asked for.
        reused: whether the costs are those that an earlier call measured and kept.
        calibration: how much text weights were rounded by; None where they were rounded to nearest.
    """

    checkpoint: Location
    dtype: str
    method: str
    prompts: int
    tokens: int
    groups: Sequence["ParamGroup"]
    recipe: Recipe | None
    reused: bool = False
    calibration: "CalibrationText | None" = None

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts: dict[str, Any] = {
            "checkpoint": str(self.checkpoint),
            "dtype": self.dtype,
            "method": self.method,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "reused": self.reused,
            **({"calibration": self.calibration.to_json()} if self.calibration else {}),
            "groups": [group.to_json() for group in sorted(self.groups, key=lambda group: -group.worst)],
        }
        if self.recipe:
            chosen = zip(self.groups, self.recipe.chosen, strict=True)
            facts["recipe"] = {
                "out": str(self.recipe.out),
                "picture": str(self.recipe.picture),
                "target_bits": self.recipe.target_bits,
                "gates": self.recipe.gates,
                "bits_per_weight": round(self.recipe.bits_per_weight, 4),
                "predicted_kl": self.recipe.predicted_kl,
                "measured_kl": self.recipe.measured_kl,
                "measured_top1": self.recipe.measured_top1,
                "chosen": {group.pattern: option.qtype for group, option in chosen},
            }
        return facts


@dataclass(eq=False, repr=False)
class SensitivityRequest(CalibrationOptions):
    """The arguments of `sensitivity`."""

    ckpt: str | Location = field(metadata=argument("A checkpoint that is not quantized, or a release."))
    _: KW_ONLY
    target_bits: float | None = option(
        None, "Write the config with the lowest KL divergence at this many bits a weight, and stop."
    )
    gates: Mapping[str, float] | None = field(default=None, metadata=GATES_OPTION)
    recipe: str | Path = option(
        "recipe.yaml",
        "The file that `target_bits=` and `gates=` write. A plot of the choice is beside it, with the suffix .html.",
    )
    method: str = option(
        ROUNDING_METHODS[0],
        "The rounding of weights while their cost is measured. The recipe names it as its calibration.",
        choices=ROUNDING_METHODS,
    )
    prompts: Sequence[str] = field(default=(), metadata=PROMPTS_OPTION)
    prompts_from: str = field(
        default="the default prompts", metadata=argument("The origin of the prompts, for a comment of the recipe.")
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE_OPTION)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(SensitivityRequest)
def sensitivity(asked: SensitivityRequest) -> Sensitivity:
    """Measures, in float32 on prompts, what each group of parameters costs the model in each type of
    `tpuconv.quantize.recipe.groups.OPTION_KINDS`, a layer at a time. The costs are kept beside a checkpoint, and used
    again for the same checkpoint, prompts, and rounding; see `tpuconv.quantize.recipe.costs`. The weights of a release
    are read and decoded a layer at a time, and nothing is kept.

    Raises:
        UsageError: no recipe takes so few bits, the checkpoint is quantized, or there is no text to calibrate on.
        TpuconvError: the release cannot be planned; see `tpuconv.api.plan`.
        OutputError: the recipe's file exists.
        GateError: logits of the model are not finite, or no recipe holds the gates.
    """
    from tpuconv.api.opened import opened_model
    from tpuconv.api.running import downloading_again
    from tpuconv.convert.plan.options import Options
    from tpuconv.quantize.config import check_gates
    from tpuconv.storage.reports import check_free

    if asked.target_bits is not None and asked.gates:
        raise UsageError("a number of bits and gates exclude each other", hint="give one of them")
    check_gates(asked.gates or {})
    out = local_path(asked.recipe)
    is_written = asked.target_bits is not None or bool(asked.gates)
    if is_written:
        for path in (out, out.with_suffix(PICTURE)):
            check_free(path, "recipe", overwrite=asked.overwrite)

    def measured() -> Sensitivity:
        with opened_model(asked.ckpt, Options()) as opened, opened.reading() as read:
            return _measured_costs(asked, out, opened, read)

    return downloading_again(measured, asked.progress)


def _measured_costs(
    asked: SensitivityRequest, out: Path, opened: "OpenedModel", read: "ReadArray | None"
) -> Sensitivity:
    """Returns the costs of a model whose arrays `read` makes, and writes a recipe to `out` if one is asked for."""
    from tpuconv.quantize.calibrate.memory import widest_input
    from tpuconv.quantize.recipe import search
    from tpuconv.quantize.recipe.groups import find_choices
    from tpuconv.quantize.recipe.layerwise import DTYPE, LayerwiseProbe

    folder, manifest = to_location(asked.ckpt), opened.manifest
    choices, is_written = find_choices(manifest), asked.target_bits is not None or bool(asked.gates)
    if asked.target_bits is not None:
        choices.space.check(asked.target_bits)
    ids, rounding, kept = inputs_of(asked, opened, choices)
    data = rounding[1] if rounding else None
    tokens, text = sum(map(len, ids)), None
    if rounding:
        text = CalibrationText.of(rounding[1], widest_input(manifest, choices.all_encoders()))
        text.announce(asked.progress)
    groups, found = kept.read(), None
    reused = groups is not None
    if groups is not None and not is_written:
        return Sensitivity(folder, DTYPE, asked.method, len(ids), tokens, groups, None, reused, text)
    with TemporaryDirectory(dir=out.absolute().parent if is_written else None) as work:
        probe = LayerwiseProbe(manifest, choices, ids, Path(work), rounding, read)
        if groups is None:
            total = sum(group.options[0].bits for group in choices.space.groups) // 8
            groups = probe.each(lambda done, of: asked.progress(Progress("measuring", total * done // of, total)))
            kept.write(groups)
        if is_written:
            asked.progress(Progress("measuring the recipe"))
            space = replace(choices.space, groups=tuple(groups))
            sums = search.best_sums(space)
            if asked.gates:
                chosen, measured = _smallest(space, sums, probe, ids, asked.gates)
            else:
                assert asked.target_bits is not None
                chosen = search.choose(space, asked.target_bits)
                measured = _measured(probe, ids, chosen, {})
            found = Recipe(
                out=out,
                picture=out.with_suffix(PICTURE),
                target_bits=asked.target_bits,
                gates=asked.gates,
                bits_per_weight=space.bits(chosen),
                predicted_kl=sum(option.kl for option in chosen),
                measured_kl=measured.mean_kl,
                measured_top1=measured.top1_decided,
                chosen=chosen,
            )
            _write(manifest, space, sums, found, (ids, asked.prompts_from), (asked.method, data), asked.overwrite)
    return Sensitivity(folder, DTYPE, asked.method, len(ids), tokens, groups, found, reused, text)


def inputs_of(
    asked: SensitivityRequest, opened: "OpenedModel", choices: "Choices"
) -> "tuple[list[list[int]], tuple[Calibration, CalibrationData] | None, KeptCosts]":
    """Returns the token ids of the prompts, the settings and the text of the rounding, and the costs that were kept
    with these."""
    from tpuconv.api.calibration import calibration_data
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.quantize.calibration_settings import recipe_calibration
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.quantize.recipe.costs import KeptCosts
    from tpuconv.verify.preparation import tokenized

    manifest = opened.manifest
    with tokenizer_folder(manifest) as tokenizer:
        ids = tokenized(manifest, tokenizer, asked.prompts)
    settings = None if asked.method == "nearest" else recipe_calibration(asked.method)
    data = None
    if settings or asked.calibration is not None:
        named = QuantConfig(f'`method="{asked.method}"`', "", (), calibration=settings)
        data = calibration_data(manifest, named, asked, opened.load)
    rounding = (settings, data) if settings and data else None
    return ids, rounding, KeptCosts(manifest, choices.space, ids, rounding)


PICTURE = ".html"
"""The suffix of the picture beside a recipe."""


def _measured(
    probe: "LayerwiseProbe",
    ids: Sequence[Sequence[int]],
    options: Sequence["Option"],
    gates: Mapping[str, float],
) -> "LogitStatistics":
    from tpuconv.quantize.recipe.layerwise import DTYPE
    from tpuconv.verify.logits import compare_logits

    plain, quantized = [], []
    for reference, ours in probe.together(options):
        plain.append(reference)
        quantized.append(ours)
    return compare_logits(ids, plain, quantized, DTYPE, gates)


def _smallest(
    space: "SearchSpace",
    sums: "Sums",
    probe: "LayerwiseProbe",
    ids: Sequence[Sequence[int]],
    gates: Mapping[str, float],
) -> "tuple[list[Option], LogitStatistics]":
    """Returns the choice with the fewest bits, of about `GATE_CANDIDATES`, with which the model holds the gates. They
    are measured from the fewest bits on, since more bits do not always lose less: each `GATE_STRIDE`th up to the first
    that holds, then those between it and the one before.

    Raises:
        GateError: none does.
    """
    step = max(1, len(sums.bits) // GATE_CANDIDATES)
    numbers = [number for number in range(len(sums.bits) - 1, -1, -step) if sums.kl[number] > 0][::-1]

    def first_of(candidates: Sequence[int]) -> "tuple[int, list[Option], LogitStatistics] | None":
        for candidate in candidates:
            options = sums.options(space, numbers[candidate])
            measured = _measured(probe, ids, options, gates)
            if not measured.failures():
                return candidate, options, measured
        return None

    last = len(numbers) - 1
    found = first_of([*range(0, last, GATE_STRIDE), last]) if numbers else None
    if found is not None:
        before = (found[0] - 1) // GATE_STRIDE * GATE_STRIDE  # the one that was measured before, and did not hold
        found = first_of(range(before + 1, found[0])) or found
    if found is None:
        raise GateError(
            "no recipe passes the gates " + ", ".join(f"{name}={bound:g}" for name, bound in gates.items()),
            hint="give gates that allow more, or leave the model unquantized",
        )
    return found[1:]


def _write(
    manifest: "Manifest",
    space: "SearchSpace",
    sums: "Sums",
    found: Recipe,
    measured_on: tuple[Sequence[Sequence[int]], str],
    calibrated: "tuple[str, CalibrationData | None]",
    overwrite: bool,
) -> None:
    """Writes a recipe and its picture."""
    from importlib.metadata import version

    from tpuconv.pages import MADE_BY
    from tpuconv.quantize.calibration_settings import recipe_calibration
    from tpuconv.quantize.recipe import picture, search
    from tpuconv.quantize.recipe.layerwise import DTYPE
    from tpuconv.storage.reports import write_report

    (ids, prompts_from), (method, data) = measured_on, calibrated
    asked = (
        f"--target-bits {found.target_bits:g}"
        if found.target_bits is not None
        else " ".join(f"--gate {name}={bound:g}" for name, bound in (found.gates or {}).items())
    )
    origin = manifest.raw["source"]
    made = [
        f"{MADE_BY} {version('tpuconv')}: quantize {asked} --method {method}",
        f"Of {origin['name']} at {origin['commit'] or 'no commit'}",
        f"On {len(ids)} prompts, {sum(map(len, ids))} tokens: {prompts_from}",
    ]
    if data:
        made.append(f"Calibrated on {data.samples} samples of {data.length} tokens: {data.text}")
    made.append(
        f"KL(unquantized || quantized) in nats a token: {found.predicted_kl:.3g} by the sum of the groups below, each "
        f"quantized by itself; {found.measured_kl:.3g} measured, in {DTYPE}"
    )
    text = search.to_yaml(space, found.chosen, made, found.gates, recipe_calibration(method) if data else None)
    chosen = picture.Point(f"{found.out.name}, measured", found.bits_per_weight, found.measured_kl, is_chosen=True)
    points = [*picture.uniform_points(space), chosen]
    page = picture.front_page(f"{origin['name']}: {found.out.name}", space, sums, points)
    for path, content in ((found.out, text), (found.picture, page)):
        write_report(content, path, "recipe", overwrite=overwrite)

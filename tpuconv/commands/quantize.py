"""`tpuconv quantize`."""

from math import prod
from shlex import join
from typing import TYPE_CHECKING, Any

import click

from tpuconv import api
from tpuconv.api.quantization import checked_workspace
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, print_json, say, show
from tpuconv.commands.convert import show_conversion, show_plan
from tpuconv.commands.hub_outputs import OutputParam, local_place, pushed
from tpuconv.commands.inputs import chosen_checkpoint, read_prompts
from tpuconv.commands.params import KnownName, known_configs
from tpuconv.commands.progress import resumable, shown
from tpuconv.errors import UsageError
from tpuconv.location import Location
from tpuconv.memory import check_address_space_for_jax
from tpuconv.text import format_size, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

MEASURING = "--sensitivity, --target-bits or --gate"
BOTH = ("config", *options.flags_of(api.sensitivity))
QUANTIZING = (
    *("explain", "dry_run", *options.PROCESS_OPTIONS),
    *(name for name in options.flags_of(api.quantize) if name not in BOTH),
)
"""Options that only quantizing has."""
CONFIG = {
    "type": KnownName(known_configs, or_file=True),
    "metavar": "NAME",
    "help": "A config of this package (see --list), a YAML file, or auto:BITS for the types that cost least.",
}


@options.command(
    "quantize",
    "tpuconv quantize --config int8_default.yaml",
    "tpuconv quantize Qwen3-8B-orbax --config int4_weight_only --explain",
    "tpuconv quantize Qwen/Qwen3-8B --config int4_gptq",
    "tpuconv quantize Qwen3-8B-orbax /data/Qwen3-8B-mine --config ./mine.yaml",
    "tpuconv quantize Qwen3-8B-orbax hf://my-org/Qwen3-8B-int8 --config int8_default",
    "tpuconv quantize Qwen3-8B-orbax --config auto:4.5",
    "tpuconv quantize Qwen3-8B-orbax --sensitivity",
    "tpuconv quantize Qwen/Qwen3-8B --target-bits 5.5",
    "tpuconv quantize Qwen3-8B-orbax --gate top1=0.99",
    "tpuconv quantize --list",
    "tpuconv quantize --show int4_weight_only > mine.yaml",
)
@options.ckpt
@click.argument("out", required=False, type=OutputParam())
@options.of(api.quantize, "config", config=CONFIG)
@click.option("--list", "as_list", is_flag=True, help="List the configs of this package.")
@click.option(
    "--show", "shown_config", type=KnownName(known_configs), metavar="NAME", help="Print a config of this package."
)
@click.option("--explain", is_flag=True, help="Show how each parameter would be quantized, and stop.")
@click.option("--sensitivity", is_flag=True, help="Measure the cost of rounding each group of parameters, and stop.")
@options.of(api.sensitivity, "target_bits", "gates", "recipe", "method", "prompts")
@options.of(api.quantize, "calibration", "samples", "length", "compress")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@options.of(api.quantize, "overwrite", "check", "workspace")
@options.of(api.quantize)
@options.processes
@options.as_json
def quantize(
    ckpt: Location | None,
    out: Location | None,
    as_list: bool,
    shown_config: str | None,
    explain: bool,
    sensitivity: bool,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Quantize CKPT, a checkpoint or a release, by Qwix rules to OUT (by default <CKPT>-<config> beside a checkpoint,
    ./<name>-orbax-<config> of a release). OUT may be hf://ORG/NAME, as of `tpuconv convert`.

    CKPT defaults to the newest unquantized checkpoint in the current folder. OUT appears complete or not at all. After
    an interruption the same command continues. OUT contains the arrays that Qwix computes, bit for bit, and a report,
    quantization.html.

    If the config has a calibration, as int4_gptq has, the model runs on text, layer by layer, and weights are rounded
    so that the outputs of each layer change less.

    With --config auto:4.5 the costs of groups of parameters are measured once, and OUT has the types that cost least at
    4.5 bits per quantized weight.

    --sensitivity, --target-bits and --gate measure and do not quantize CKPT. The model runs on prompts, layer by layer
    in float32, to measure the KL divergence of each group of parameters in int8 and in int4. --gate searches for the
    smallest config that passes.
    """
    if as_list:
        _list_configs(as_json)
    elif shown_config is not None:
        _show_config(shown_config, as_json)
    elif sensitivity or _searches(given):
        _check_modes(True, out, given)
        _measure(ckpt, as_json, given)
    else:
        _check_modes(False, out, given)
        _quantize(ckpt, out, explain, dry_run, as_json, given)


def _searches(given: "Mapping[str, Any]") -> bool:
    """Returns True if a config is searched for a budget or for gates."""
    return given["target_bits"] is not None or given["gates"] is not None


def _check_modes(measures: bool, out: Location | None, given: "Mapping[str, Any]") -> None:
    """Raises UsageError for an option that goes with another mode of the command."""
    if measures and (given["config"] or out):
        raise UsageError(
            f"{MEASURING} measures and quantizes nothing",
            hint="leave out OUT and --config; then quantize with `--config recipe.yaml`",
        )
    for mode, is_given, names in (
        (MEASURING, measures, ("prompts", "method")),
        ("--target-bits or --gate", _searches(given), ("recipe",)),
        ("--method gptq or awq", given["method"] != "nearest", ("calibration", "samples", "length")),
        ("--config", not measures, QUANTIZING),
    ):
        options.require_mode(mode, is_given, *names)
    if not measures and given["config"] is None:
        raise UsageError("--config is missing", hint="`tpuconv quantize --list` lists the configs of this package")


def _measure(ckpt: Location | None, as_json: bool, given: "Mapping[str, Any]") -> None:
    """Measures the cost of rounding, and finds a config if a budget or gates are given."""
    chosen = chosen_checkpoint(ckpt, "Measuring", quiet=as_json, own=True, quantized=False)
    asked, file = options.asked_of(api.sensitivity, given), given["prompts"]
    asked |= {"prompts": read_prompts(file), "prompts_from": f"the prompts of {file}" if file else "the default ones"}
    with shown(as_json) as progress:
        found = api.sensitivity(chosen, progress=progress, **asked)
    text = [name for name in ("calibration", "samples", "length") if options.is_given(name)]
    _show_sensitivity(found, as_json, [word for name in text for word in (f"--{name}", str(given[name]))])


def _quantize(
    ckpt: Location | None,
    out: Location | None,
    explain: bool,
    dry_run: bool,
    as_json: bool,
    given: dict[str, Any],
) -> None:
    """Quantizes a checkpoint, or shows how."""
    from tpuconv.quantize.config import find_config

    quantize_model = options.on_processes(api.quantize, given)
    config = find_config(given["config"])  # read before CKPT, to report its mistakes first
    if config.calibration is None and config.target_bits is None:
        options.require_mode("a config that has `calibration`", False, "samples", "length")
    chosen = chosen_checkpoint(ckpt, "Quantizing", quiet=as_json, own=True, quantized=False)
    check_address_space_for_jax()
    place, there = local_place(out, given, planned=explain or dry_run)
    if explain or dry_run:
        checked_workspace(given["workspace"], place or chosen, config)  # as the quantization does
        plan = api.plan_quantization(chosen, **options.asked_of(api.plan_quantization, given))
        if explain:
            _show_explanation(plan, as_json)
        else:
            if place is not None:
                options.check_planned_place(plan.plan.source.folder, place)
            show_plan(plan, as_json, place or chosen)
        return
    with resumable(as_json) as progress:
        asked = options.asked_of(api.quantize, given)
        made = quantize_model(chosen, place, progress=progress, elsewhere=there, **asked)
        done = pushed(out, made, there, progress)
    show_conversion(done, given["check"], as_json)


def _list_configs(as_json: bool) -> None:
    from tpuconv.quantize.config import config_names, find_config

    configs = [find_config(name) for name in config_names()]
    if as_json:
        print_json({"configs": [config.to_json() | {"bits_per_weight": config.bits} for config in configs]})
        return
    columns = ("name", "bits a weight", "summary")
    table = Table("quantization configs", columns, right=("bits a weight",), optional=("bits a weight",))
    for config in configs:
        table.add_row(config.name, " and ".join(f"{bits:.3g}" for bits in config.bits), config.summary)
    console().print(table)
    show(
        "  bits a weight: quantized weights and their share of the scales of groups, in bfloat16; a scale for each "
        "channel adds less than 0.1; auto:BITS, such as auto:4.5, chooses types for a model"
    )


def _show_config(name: str, as_json: bool) -> None:
    """Prints the file of a config, for the user to edit."""
    from tpuconv.quantize.config import config_names, configs_folder, find_config

    config = find_config(name)
    if config.name not in config_names():
        raise UsageError(f"--show prints configs of this package, and {name} is not one of them", hint="see --list")
    if as_json:
        print_json(config.to_json() | {"bits_per_weight": config.bits})
    else:
        click.echo((configs_folder() / f"{config.name}.yaml").read_bytes(), nl=False)


def _show_explanation(plan: "api.ConversionPlan", as_json: bool) -> None:
    """Shows how each parameter would be quantized."""
    from tpuconv.names import collapse
    from tpuconv.quantize.explain import explain

    assert plan.rules is not None
    rows = explain(plan.plan, plan.rules)
    if as_json:
        print_json({"config": plan.rules.to_json(), "parameters": rows})
        return
    by_name = {row["parameter"]: row for row in rows}
    table = Table(
        f"{plan.plan.source.name} by {plan.rules.name}",
        ("parameter", "line", "type", "axes", "shape", "one scale for", "bits", "before", "after"),
        right=("line", "bits", "before", "after"),
        optional=("axes", "shape", "before", "line", "one scale for", "after"),
    )
    by_kind = {name: str(row | {"parameter": ""}) for name, row in by_name.items()}
    for pattern, names in collapse(by_name, by_kind.__getitem__).items():
        row = by_name[names[0]]
        table.add_row(
            pattern,
            str(row["line"] or "-"),
            row["qtype"] or "unchanged",
            row["axes"],
            " ".join(map(str, row["shape"])),
            " ".join(map(str, row["tiles"])) if row["tiles"] else "",
            f"{row['bits']:.4g}",
            format_size(sum(by_name[name]["bytes_before"] for name in names)),
            format_size(sum(by_name[name]["bytes"] for name in names)),
        )
    console().print(table)
    wide = [row for row in rows if isinstance(row["tile_size"], int) and prod(row["tiles"]) > row["tile_size"]]
    for pattern, names in collapse(row["parameter"] for row in wide).items():
        values = prod(by_name[names[0]]["tiles"])
        show(f"  {pattern}: one scale for {values} values: Qwix applies tile_size to the last contracted axis only")
    show(
        f"{format_size(sum(row['bytes_before'] for row in rows))} -> {format_size(plan.plan.output_bytes)} at most; "
        f"line: the line of the rule in {plan.rules.name}; quantized values of less than 8 bits are compressed on the "
        "disk"
    )


def _show_sensitivity(found: "api.Sensitivity", as_json: bool, text: list[str]) -> None:
    """Shows the measurements and the recipe. `text` has the options of the text that weights were rounded on."""
    if as_json:
        print_json(found.to_json())
        return
    recipe = found.recipe
    kinds = list(dict.fromkeys(str(option) for group in found.groups for option in group.options[1:]))
    table = Table(
        f"{found.checkpoint}, {found.prompts} prompts, {found.tokens} tokens, rounded by {found.method}",
        ("group", "weights", *kinds, *(["chosen"] if recipe else [])),
        right=("weights", *kinds),
        optional=("weights",),
    )
    chosen = recipe.chosen if recipe else [None] * len(found.groups)
    for group, option in sorted(zip(found.groups, chosen, strict=True), key=lambda pair: -pair[0].worst):
        costs = {str(o): f"{o.kl:.2e}, {o.bits / group.count:.2f} bits" for o in group.options[1:]}
        cells = [costs.get(kind, "") for kind in kinds]
        table.add_row(group.pattern, f"{group.count:,}", *cells, *([str(option)] if recipe else []))
    console().print(table)
    kept = "; reused from an earlier run" if found.reused else ""
    show(f"  KL(unquantized || this group quantized), nats a token, worst first{kept}")
    if recipe:
        show(
            (str(recipe.out), "bold"),
            f": {recipe.bits_per_weight:.2f} bits a weight; KL {recipe.measured_kl:.3g} and "
            f"top-1 {100 * recipe.measured_top1:.2f}% measured, KL {recipe.predicted_kl:.3g} predicted by the sum "
            "over groups; "
            f"plot: {recipe.picture}. Next:",
        )
        say("  " + plain(join(["tpuconv", "quantize", str(found.checkpoint), "--config", str(recipe.out), *text])))

"""Finds what a model can be converted to, and writes the steps of its recipe."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from tpuconv.api.recipe_facts import SPARE, CommandCall, ModelForm, ModelRecipe, ModelTarget, RecipeStep
from tpuconv.errors import TpuconvError
from tpuconv.names import OWN_TARGET

if TYPE_CHECKING:
    from tpuconv.convert.plan.options import Options
    from tpuconv.convert.plan.types import Plan
    from tpuconv.models.registry import Family
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.sources.source import Source
    from tpuconv.targets.target import Target

FIT_BATCH, FIT_CONTEXT = 8, 4096
"""The batch and the context, in tokens, that `fit` is asked about."""

DENSE_CONFIGS = ("int8_default", "fp8_default", "int8_weight_only", "int4_ends_int8", "int4_weight_only")
EXPERT_CONFIGS = ("int8_default", "fp8_default", "int8_weight_only", "int8_attn_int4_mlp", "mxfp4_weight_only")
"""The packaged configs of a recipe, for dense models and for models with experts."""

SERVED_CONFIGS = (
    ("int8_default", None, "int8, for v5e, v5p, v6e", False),
    ("fp8_default", None, "FP8, for TPU7x", True),
    ("int4_weight_only", "awq", "int4 in the layout of AWQ, the smallest weights", True),
)
"""Config, scheme, description, and whether tpu-inference 0.32.0 takes experts in it (docs/consumers.md)."""

MOST_TENSORS = 20_000
"""Tensors of a source whose files for servers are planned: to plan more of them takes minutes."""

LARGE = 20_000_000_000
"""Bytes of a model that is compared with transformers layer by layer."""

PROGRAM_NAMES = {
    "maxtext": "MaxText",
    "tunix": "Tunix",
    "gemma": "the library gemma",
    "nnx": "Flax NNX and Orbax",
    "jax-llm-examples": "jax-llm-examples",
}


class _Planner:
    """Plans conversions of one source."""

    def __init__(self, source: "Source", family: "Family"):
        self.source, self.family = source, family
        self.parts = family.parts_among(source.tensors)
        self.returns = family.returns(source.config, source.tensors)
        self.config: Any = self._read(())

    def plan(self, options: "Options", config: str | None = None) -> "Plan":
        """Returns a plan without faults; raises TpuconvError if the conversion is refused."""
        from tpuconv.api.quantizers import find_rules, quantizer_by
        from tpuconv.convert.plan.planning import plan_source

        rules = find_rules(config)
        quantizer = quantizer_by(rules) if rules else None
        plan = plan_source(self.source, self.family, None, options, quantizer, None, self.parts)
        plan.check()
        return plan

    def check_target(self, target: "Target", *, scan_layers: bool) -> None:
        """Raises TpuconvError if a target has no place for a parameter of the model."""
        from tpuconv.targets.compose import target_table

        name, model_type = self.family.in_targets(self.source.config["model_type"])
        config = self._read(self.parts_in(target))
        released = self.family.table_for(self.source.tensors, config, self.returns)
        table, sizes = target_table(
            target, name, model_type, released, config, scan_layers=scan_layers, include_mtp=False
        )
        table.bind(sizes)

    def parts_in(self, target: "Target") -> tuple[str, ...]:
        """Returns the encoders of the model that a target has."""
        from tpuconv.targets.trees import placed_parts

        name, model_type = self.family.in_targets(self.source.config["model_type"])
        return placed_parts(target, name, model_type, self.parts, self._read)

    def _read(self, parts: Collection[str]) -> Any:
        return self.family.read_config(self.source.config, (), self.source.tensors, self.returns, parts)


def recipe_of(source: "Source", src: str, model: str, *, from_headers: bool) -> ModelRecipe:
    """Returns the recipe of a source.

    Args:
        source: its headers.
        src: the source as commands name it: a Hub id or a folder.
        model: what the user asked about.
        from_headers: whether the headers were read; otherwise they follow from config.json.

    Raises:
        TpuconvError: no family reads the source, or its tensors do not match the family.
    """
    from tpuconv.convert.plan.options import Options
    from tpuconv.models.common.config import context_of
    from tpuconv.models.registry import find_family

    family = find_family(source.config)
    planner = _Planner(source, family)
    plain = planner.plan(Options())
    config: Any = plain.config
    encoding = source.encoding
    facts = ModelRecipe(
        model=model,
        family=family.name,
        summary=family.summary,
        architecture=(source.config.get("architectures") or [""])[0],
        model_type=source.config["model_type"],
        encoding=str(encoding.get("quant_method", "quantized")) if encoding else None,
        returns=planner.returns or "logits",
        from_headers=from_headers,
        tensors=len(source.tensors),
        source_bytes=sum(tensor.nbytes for tensor in source.tensors.values()),
        parameters=plain.parameters,
        arrays=len(plain.arrays),
        output_bytes=plain.output_bytes,
        parts=planner.parts,
        positions=context_of(planner.config),
        forms=list(_forms(planner, plain, has_experts=bool(config.sizes.get("E")))),
        targets=list(_targets(planner)),
        steps=(),
    )
    return replace(facts, steps=tuple(_steps(facts, planner, src, has_experts=bool(config.sizes.get("E")))))


def _forms(planner: _Planner, plain: "Plan", *, has_experts: bool) -> Iterator[ModelForm]:
    """Yields the unquantized form, the form of the release if it is encoded, and the forms of packaged configs."""
    from tpuconv.api.quantizers import find_rules
    from tpuconv.convert.plan.options import Options

    dtypes = sorted({array.dtype.name for array in plain.arrays.values() if not array.buffer})
    yield _form("unquantized", " and ".join(dtypes), _device_bytes(plain))
    if planner.source.encoding:
        try:
            kept = planner.plan(Options(encoding="keep"))
            yield _form("as released", 'encoded weights stay as they are: `encoding="keep"`', _device_bytes(kept))
        except TpuconvError as error:
            yield ModelForm("as released", "encoded weights stay as they are", None, refusal=error.message)
    for name in EXPERT_CONFIGS if has_experts else DENSE_CONFIGS:
        rules = find_rules(name)
        assert rules
        try:
            yield _form(name, rules.summary, _quantized_bytes(planner, plain, rules))
        except TpuconvError as error:
            yield ModelForm(name, rules.summary, None, refusal=error.message)


def _form(name: str, summary: str, device_bytes: int) -> ModelForm:
    return ModelForm(name, summary, device_bytes, smallest_slices(device_bytes))


def smallest_slices(device_bytes: int) -> dict[str, str | None]:
    """Returns by kind of chip the smallest slice whose memory holds this many bytes with `SPARE` to spare; None if no
    slice does."""
    from tpuconv.verify.topology.chips import CHIPS, Slice

    found: dict[str, str | None] = {}
    for kind, chip in CHIPS.items():
        slices = (Slice(f"{kind}:{shape}") for shape in chip.slices)
        holds = (each.name for each in slices if device_bytes <= (1 - SPARE) * chip.hbm * each.devices)
        found[kind] = next(holds, None)
    return found


def _device_bytes(plan: "Plan") -> int:
    from tpuconv.checkpoint.manifest import element_bits

    return sum(prod(array.shape) * element_bits(array.dtype.name) for array in plan.arrays.values()) // 8


def _quantized_bytes(planner: _Planner, plain: "Plan", rules: "QuantConfig") -> int:
    """Returns the bytes of all parameters in device memory, quantized by rules, with their scales."""
    from tpuconv.api.quantizers import quantizer_by
    from tpuconv.convert.plan.options import Options

    chosen = quantizer_by(rules)(plain, planner.family, planner.config)
    if chosen.passthrough:  # the release has these weights in the wanted type, with scales of its own
        return _device_bytes(planner.plan(Options(), rules.name))
    bits = {name: prod(array.shape) * 8 * array.dtype.itemsize for name, array in plain.arrays.items()}
    encoders: Mapping[str, Any] = chosen.encoders
    bits |= {name: prod(plain.arrays[name].shape) * encoder.bits for name, encoder in encoders.items()}
    return int(sum(bits.values())) // 8


def _targets(planner: _Planner) -> Iterator[ModelTarget]:
    from tpuconv.targets.registry import get_target, target_names

    for name in target_names():
        try:
            target = get_target(name)
            if target.is_safetensors:
                yield ModelTarget(name, True, parts=planner.parts)
                continue
            planner.check_target(target, scan_layers=False)
        except TpuconvError as error:
            yield ModelTarget(name, False, error.message)
            continue
        scanned = target.layer_axis is not None
        if scanned:
            try:
                planner.check_target(target, scan_layers=True)
            except TpuconvError:
                scanned = False
        yield ModelTarget(name, True, scanned=scanned, parts=planner.parts_in(target))


def _steps(facts: ModelRecipe, planner: _Planner, src: str, *, has_experts: bool) -> Iterator[RecipeStep]:
    name = src.rstrip("/").rpartition("/")[2] or "model"
    ckpt, decodes = f"{name}-orbax", facts.returns == "logits"
    form = "int8_weight_only"
    if facts.encoding and any(each.name == "as released" and each.device_bytes for each in facts.forms):
        options: dict[str, Any] = {"encoding": "keep"}
    else:
        options = {"quantize": form}
    asked = {"topologies": ["v5e", "v6e", "tpu7x"], "batch": FIT_BATCH, "context": FIT_CONTEXT, **options}
    plan = [CommandCall("convert", (src,), {"dry_run": True})]
    plan += [CommandCall("fit", (src,), asked)] if decodes else []
    yield RecipeStep("Plan", tuple(plan), note="No weights are read. `fit` needs the TPU compiler, and no TPU.")
    yield RecipeStep(
        "Load without a conversion",
        elsewhere=(
            "import jax",
            "import tpuconv",
            "",
            'mesh = jax.make_mesh((1, jax.device_count()), ("data", "tensor"))',
            f'model = tpuconv.load("{src}", mesh=mesh)',
        ),
        language="python",
    )
    yield from _checkpoint_steps(facts, src, ckpt, decodes)
    yield from _served_steps(planner, src, name, has_experts=has_experts)
    yield from _trainer_steps(facts, src, name)


def _checkpoint_steps(facts: ModelRecipe, src: str, ckpt: str, decodes: bool) -> Iterator[RecipeStep]:
    compared: dict[str, Any] = {"compare_hf": True}
    if facts.source_bytes > LARGE:
        compared["layerwise"] = True
    yield RecipeStep(
        "Convert to a checkpoint",
        (CommandCall("convert", (src,)), CommandCall("verify", (ckpt,)), CommandCall("verify", (ckpt,), compared)),
        note="The comparison with transformers needs the source on a disk"
        + (" and the memory of one layer." if facts.source_bytes > LARGE else " and the memory of both models."),
    )
    if any(form.name == "as released" and form.device_bytes for form in facts.forms):
        kept = CommandCall("convert", (src, f"{ckpt}-kept"), {"encoding": "keep"})
        yield RecipeStep("Keep the quantized weights of the release", (kept,))
    configs = [form for form in facts.forms if form.device_bytes and form.name not in ("unquantized", "as released")]
    if configs:
        if facts.source_bytes > LARGE:  # without the unquantized checkpoint between
            calls = [CommandCall("convert", (src,), {"quantize": form.name}) for form in configs]
        else:
            calls = [CommandCall("quantize", (ckpt,), {"config": form.name}) for form in configs]
        yield RecipeStep(
            "Quantize",
            tuple(calls),
            note="Choose one: the table of forms has the sizes, docs/tasks/quantize.md the chip for each.",
        )
    loads = [f'model = tpuconv.load("{ckpt}", mesh=mesh)']
    yield RecipeStep("Load the checkpoint", elsewhere=("import tpuconv", "", *loads), language="python")
    if decodes:
        prompt = CommandCall("generate", (ckpt,), {"prompt": "Once upon a time"})
        yield RecipeStep("Generate", (prompt,))


def _served_steps(planner: _Planner, src: str, name: str, *, has_experts: bool) -> Iterator[RecipeStep]:
    """Yields a step for each format of servers that holds the model."""
    yield RecipeStep(
        "Serve as it is", elsewhere=(f"vllm serve {src}",), note="No conversion, if vLLM has the architecture."
    )
    is_planned = len(planner.source.tensors) <= MOST_TENSORS
    for config, scheme, described, takes_experts in SERVED_CONFIGS:
        if (has_experts and not takes_experts) or (is_planned and not _is_served(planner, config, scheme)):
            continue
        out = f"{name}-{scheme or config.partition('_')[0]}"
        options: dict[str, Any] = {"target": "huggingface", "quantize": config}
        options |= {"scheme": scheme} if scheme else {}
        if not is_planned:
            yield RecipeStep(
                f"Ask whether it can be served in {described}",
                (CommandCall("convert", (src, out), {**options, "dry_run": True}),),
                note="This plan takes minutes. The command names parameters that the format cannot hold.",
            )
            continue
        yield RecipeStep(
            f"Serve in {described}",
            (CommandCall("convert", (src, out), options),),
            (f"MODEL_IMPL_TYPE=vllm vllm serve ./{out}",),
            note="If vLLM has the architecture. Our tests run its loaders on CPUs: docs/consumers.md.",
        )


def _is_served(planner: _Planner, config: str, scheme: str | None) -> bool:
    """Returns True if a format of servers holds the model, quantized by a config."""
    from tpuconv.convert.export.export import planned_files
    from tpuconv.convert.plan.options import Options
    from tpuconv.convert.run.sizing import Limits

    try:
        plan = planner.plan(Options(target="huggingface", scheme=scheme), config)
        planned_files(plan, Limits(1, 1 << 60))
    except TpuconvError:
        return False
    return True


def _trainer_steps(facts: ModelRecipe, src: str, name: str) -> Iterator[RecipeStep]:
    from tpuconv.targets.registry import get_target

    for each in facts.targets:
        if not each.supported or each.target == OWN_TARGET or (target := get_target(each.target)).is_safetensors:
            continue
        out = f"{name}-{each.target}"
        options: dict[str, Any] = {"target": each.target}
        if each.scanned and each.target == "maxtext":
            options["scan_layers"] = True
        back = CommandCall("export", ("RUN", f"{name}-tuned"), {"config": src, "target": each.target})
        yield RecipeStep(
            f"Train in {PROGRAM_NAMES.get(each.target, each.target)}, and back",
            (CommandCall("convert", (src, out), options), back),
            note=f"To load {out} there: {target.loading.replace('OUT', out)}. RUN is the folder of the trained run.",
        )

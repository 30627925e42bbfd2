"""What rounding each group of parameters costs a model, and the recipe that a budget of bits allows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.progress import Listener, Progress, ignore

if TYPE_CHECKING:
    from tpuconv.quantize.recipe.search import Option, ParamGroup


@dataclass(frozen=True)
class Recipe:
    """A quantization config that was chosen by measured costs.

    Attributes:
        out: the YAML file.
        target_bits: the budget, in bits a weight.
        bits_per_weight: what it takes, scales included.
        predicted_kl: sum of the groups' KL divergences, in nats a token.
        measured_kl: KL divergence of the model with all groups quantized.
        chosen: the option of each group, in the order of `Sensitivity.groups`.
    """

    out: Path
    target_bits: float
    bits_per_weight: float
    predicted_kl: float
    measured_kl: float
    chosen: Sequence["Option"]


@dataclass(frozen=True)
class Sensitivity:
    """KL(unquantized || one group quantized) for each group of parameters, in nats a token.

    Attributes:
        checkpoint: the folder of the checkpoint.
        dtype: in which the model ran.
        prompts: how many prompts it was measured on.
        tokens: how many tokens they have in all.
        groups: the groups with what each option costs, in the order of the model.
        recipe: the config for a budget of bits; None if none was asked for.
    """

    checkpoint: Path
    dtype: str
    prompts: int
    tokens: int
    groups: Sequence["ParamGroup"]
    recipe: Recipe | None

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        facts: dict[str, Any] = {
            "checkpoint": str(self.checkpoint),
            "dtype": self.dtype,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "groups": [group.to_json() for group in sorted(self.groups, key=lambda group: -group.worst)],
        }
        if self.recipe:
            chosen = zip(self.groups, self.recipe.chosen, strict=True)
            facts["recipe"] = {
                "out": str(self.recipe.out),
                "target_bits": self.recipe.target_bits,
                "bits_per_weight": round(self.recipe.bits_per_weight, 4),
                "predicted_kl": self.recipe.predicted_kl,
                "measured_kl": self.recipe.measured_kl,
                "chosen": {group.pattern: option.qtype for group, option in chosen},
            }
        return facts


def sensitivity(
    ckpt: str | Path,
    *,
    prompts: Sequence[str] = (),
    prompts_from: str = "the default prompts",
    target_bits: float | None = None,
    recipe: str | Path = "recipe.yaml",
    overwrite: bool = False,
    progress: Listener = ignore,
) -> Sensitivity:
    """Measures, in float32 on prompts, what each group of parameters costs the model in int8 and in int4.

    Args:
        ckpt: a checkpoint that is not quantized.
        prompts: texts; a built-in set by default.
        prompts_from: what the recipe says of where the prompts come from.
        target_bits: also write the config with the lowest KL divergence at this many bits a weight.
        recipe: where to write it.
        overwrite: replace a file that is there.
        progress: called while it runs.

    Raises:
        UsageError: no recipe takes so few bits, or the checkpoint is quantized.
        OutputError: the recipe's file exists.
        GateError: logits of the model are not finite.
    """
    from importlib.metadata import version

    from tpuconv.api.evaluation import tokenized
    from tpuconv.api.models import load_on_all_devices
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.quantize.recipe import search
    from tpuconv.quantize.recipe.groups import find_choices
    from tpuconv.quantize.recipe.measure import DTYPE, Probe

    folder, out = Path(ckpt), Path(recipe)
    manifest = read_manifest(folder)
    choices = find_choices(manifest)
    if target_bits is not None:
        search.check_free(out, overwrite)
        choices.space.check(target_bits)
    ids = tokenized(manifest, manifest.folder, prompts)
    tokens = sum(map(len, ids))
    probe = Probe(load_on_all_devices(manifest.folder, DTYPE), choices, ids)
    total, groups = sum(group.options[0].bits for group in choices.space.groups) // 8, []
    for group in probe.each():
        groups.append(group)
        progress(Progress("measuring", sum(group.options[0].bits for group in groups) // 8, total))
    found = None
    if target_bits is not None:
        model = replace(choices.space, groups=tuple(groups))
        chosen = search.choose(model, target_bits)
        predicted, measured = sum(option.kl for option in chosen), probe.together(chosen)
        origin = manifest.raw["source"]
        made = (
            f"Made by tpuconv {version('tpuconv')}: quantize --target-bits {target_bits:g}",
            f"Of {origin['name']} at {origin['commit'] or 'no commit'}",
            f"On {len(ids)} prompts, {tokens} tokens: {prompts_from}",
            f"KL(unquantized || quantized) in nats a token: {predicted:.3g} by the sum of the groups below, each "
            f"quantized by itself; {measured:.3g} measured, in {DTYPE}",
        )
        search.write(search.to_yaml(model, chosen, made), out, overwrite)
        found = Recipe(out, target_bits, model.bits(chosen), predicted, measured, chosen)
    return Sensitivity(folder, DTYPE, len(ids), tokens, groups, found)

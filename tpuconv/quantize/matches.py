"""Matches the rules of a config with the modules of a model: each rule must match a module."""

import re
from collections.abc import Collection, Iterable, Sequence

from tpuconv.errors import ConfigError
from tpuconv.patterns import check_patterns
from tpuconv.quantize.config import EMBEDDING, MTP_MODULE, QuantConfig


def check_rules(config: QuantConfig, modules: Iterable[str]) -> None:
    """Checks that the patterns of all rules can be matched with the names of modules (`layers/0/attn`).

    Raises:
        ConfigError: a pattern is invalid, or takes too long.
    """
    patterns = [(f"{config.name}, line {rule.line}", rule.module_path) for rule in config.rules]
    check_patterns(patterns, modules, ConfigError)


def check_parts(config: QuantConfig, parts: Iterable[str]) -> None:
    """Checks that rules that name a part beside the text model quantize its weights alone.

    Raises:
        ConfigError: a rule quantizes activations there.
    """
    for rule in config.rules:
        if rule.act_qtype and (part := next(filter(rule.names_part, parts), None)):
            raise ConfigError(
                f"{config.name}, line {rule.line}: '{rule.module_path}' has act_qtype, and of {part} weights alone are "
                "quantized",
                hint="leave out act_qtype, or name other modules",
            )


def check_used(config: QuantConfig, modules: Sequence[str], unmatched: Collection[int], used: Collection[int]) -> None:
    """Checks that every rule matches something first, and quantizes something.

    Args:
        config: the rules.
        modules: the modules that have a product, in the order of the computation.
        unmatched: numbers of the rules that match none of them, or none first.
        used: numbers of the rules that a parameter is quantized by.

    Raises:
        ConfigError: a rule does nothing.
    """
    faults, shadowed, of_mtp = [], False, False
    named = [path for path in modules if path.partition("/")[0] != EMBEDDING]
    for i, rule in enumerate(config.rules):
        first = next((config.rule_of(path) for path in named if rule.matches(path)), None)
        if i in unmatched and first == i:
            operations = ", ".join(rule.op_names)
            faults.append(f"line {rule.line}: '{rule.module_path}' matches no module with the op_names {operations}")
        elif i in unmatched and first is not None:
            earlier_line = config.rules[first].line
            faults.append(f"line {rule.line}: '{rule.module_path}': line {earlier_line} already matches these modules")
            shadowed = True
        elif i in unmatched and rule.matches(EMBEDDING):
            faults.append(f"line {rule.line}: '{rule.module_path}' matches the embedding alone, which stays as it is")
        elif i in unmatched:
            faults.append(f"line {rule.line}: '{rule.module_path}' matches no module with a product")
            of_mtp |= rule.names_part(MTP_MODULE)
        elif rule.weight_qtype and not rule.act_qtype and i not in used:
            faults.append(f"line {rule.line}: '{rule.module_path}' matches no product with a weight")
    idle = [rule.module_path for i, rule in enumerate(config.rules) if i in unmatched]
    if faults:
        raise ConfigError(
            f"{len(faults)} of the {len(config.rules)} rules of {config.name} "
            + ("has no effect" if len(faults) == 1 else "have no effect"),
            details=faults,
            hint="the rules are for models with experts, and this one has none: take int4_weight_only or fp8_default"
            if idle
            and all("moe" in path and "mlp" not in path for path in idle)
            and not any("moe" in path for path in modules)
            else ("the first rule that matches counts: put the narrower one first; " if shadowed else "")
            + ("the head is the embedding, which stays as it is; " if len(named) < len(modules) else "")
            + ("the module for multi-token prediction is converted by `include_mtp=True`; " if of_mtp else "")
            + "modules have names like "
            + ", ".join(_examples(named)),
        )


def _examples(modules: Iterable[str]) -> list[str]:
    """One module of each kind, ignoring numbers."""
    kinds: dict[str, str] = {}
    for path in modules:
        kinds.setdefault(re.sub(r"\d+", "0", path), path)
    return list(kinds.values())[:12]

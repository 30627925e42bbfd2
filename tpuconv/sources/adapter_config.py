"""The keys of adapter_config.json, from peft 0.21's `LoraConfig`: which are read, which have no effect on merged
weights, and which change them in a way that is not implemented."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import Each, Optional, Size, check, short

SCHEMA = {
    "peft_type": str,
    "r": int,
    "lora_alpha": float,
    "alpha_pattern": Optional((Each(float), None)),
    "rank_pattern": Optional((Each(int), None)),
    "use_rslora": Optional((bool, None)),
    "use_dora": Optional((bool, None)),
    "target_parameters": Optional(([str], None)),
    "trainable_token_indices": Optional(([Size], Each([Size]), None)),
    "peft_version": Optional((str, None)),
}
"""The keys that are read."""

NO_EFFECT_ON_MERGED = frozenset(
    (
        # what was changed: the tensors of the file show it
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
        *("ensure_weight_tying", "auto_mapping"),
        # how it was trained
        *("lora_dropout", "inference_mode", "task_type", "runtime_config", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
        # the model tells which of its matrices are [in, out]
        "fan_in_fan_out",
        # of which model
        *("base_model_name_or_path", "revision"),
    )
)
"""Keys without an effect on merged weights."""

REFUSED = frozenset(
    (
        *("lora_bias", "use_qalora", "megatron_config", "alora_invocation_tokens"),
        *("layer_replication", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
    )
)
"""Keys that change weights in a way that is not implemented, unless they are false or empty."""

NEVER_MERGED = frozenset(
    (
        *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"),
        *("CARTRIDGE", "POLY", "XLORA"),
    )
)
"""Methods without `merge_and_unload`."""

INITIALISATION = "init_lora_weights"
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `INITIALISATION`: those that change the weights of the model too, by what the file does not
have."""

EXPERT_LAYOUT_SINCE = (0, 19, 1)
"""The first version of peft that writes the matrices of all experts (`target_parameters`) as they are read here.
Before, inputs and outputs were swapped for some models."""


def check_adapter_config(config: Mapping[str, Any], path: Path) -> None:
    """Checks that a parsed adapter_config.json says nothing that is not implemented.

    Raises:
        ConfigError: a value has the wrong type.
        UnsupportedConfig: it says so. All such keys are listed.
    """
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedConfig(
            f"{path}: peft_type={short(kind)} is not implemented, only LORA",
            hint="peft computes with it beside the weights, and merges it into none: serve it with peft"
            if str(kind) in NEVER_MERGED
            else "convert the model that `PeftModel.from_pretrained(...).merge_and_unload()` of peft returns",
        )
    check(config, SCHEMA, str(path), ConfigError)
    faults = [
        f"{key}={short(value)}" + ("" if key in REFUSED else ", an unknown key")
        for key, value in config.items()
        if value and key not in SCHEMA and key not in NO_EFFECT_ON_MERGED and key != INITIALISATION
    ]
    how = str(config.get(INITIALISATION) or "").lower()
    faults += [f"{INITIALISATION}={how!r}"] if how.startswith(CHANGE_BASE) else []
    version = config.get("peft_version")
    if config.get("target_parameters") and _numbers(version or "0") < EXPERT_LAYOUT_SINCE:
        faults.append(
            f"peft_version={version!r} with target_parameters: before "
            f"{'.'.join(map(str, EXPERT_LAYOUT_SINCE))} the layout of experts' matrices was another one"
        )
    if faults:
        raise UnsupportedConfig(
            f"{path} has settings that are not implemented",
            details=faults,
            hint="merge the adapter with peft first, with the version that wrote it; a key without effect on weights "
            "can be removed from the file",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers at the start of a version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part[:9]) for part in found[0].split(".")) if found else (0,)

"""The keys of config.json that are not read, as plans report them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tpuconv.errors import UsageError
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import MOST_HINTS, SUPPORTED_VALUES, given_keys, near_key, without_keys
from tpuconv.models.common.rope import ROPE_KEYS
from tpuconv.models.common.rope_keys import without_older_rope_keys
from tpuconv.sources.config import INSIDE_KEYS

SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "qkv_bias": ("q_proj.bias", "q.bias"),
    "use_qk_norm": ("q_norm",),
    "qk_norm": ("q_norm",),
    "qk_layernorm": ("q_norm",),
    "add_qkv_bias": ("q_proj.bias", "q.bias"),
    "use_routing_bias": ("e_score_correction_bias",),
    "shared_expert_intermediate_size": ("shared_expert",),
}
"""Keys that the reference may not read because the tensors show their value, and parts of the names of such tensors."""


@dataclass(frozen=True)
class IgnoredKey:
    """A key of config.json that is not read: `reason` says why; `warning` says why it may still matter, or is empty."""

    key: str
    value: Any
    reason: str
    warning: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"key": self.key, "value": short(self.value), "reason": self.reason, "warning": self.warning or None}


@dataclass(frozen=True)
class ConfigReport:
    """The result of `Family.check_config`: the config, and the keys of config.json that are not read."""

    config: DecoderConfig
    ignored: tuple[IgnoredKey, ...]


def report_ignored(
    config: DecoderConfig, raw: Mapping[str, Any], allow: Collection[str], tensors: Collection[str]
) -> ConfigReport:
    """Returns the config with the keys of config.json that are not read.

    Args:
        config: made from `raw` without the keys `allow`.
        raw: the parsed config.json.
        allow: keys that the user lets through.
        tensors: names of the checkpoint's tensors.

    Raises:
        UsageError: a key of `allow` is not in config.json, or the conversion reads it.
    """
    given = given_keys(raw, allow)
    read = (*config.known_keys(), *config.known_aliases(), *config.synonyms, *config.left_out)
    known = [key for key in read if key not in config.only]
    for key in allow:
        if key in known or key in ROPE_KEYS or key in ("model_type", "architectures", *INSIDE_KEYS):
            raise UsageError(
                f"`allow_config={[key]}`: the conversion reads this key", hint="edit config.json to change its value"
            )
    ignored = [IgnoredKey(key, given[key], "allowed by `allow_config=`") for key in allow]
    reason = f"not read by transformers for {config.model_type}"
    for key, value in type(config).ignored_keys(without_older_rope_keys(without_keys(raw, allow))).items():
        shown = any(part in name for part in SHOWN_BY.get(key, ()) for name in tensors)
        warning = ""
        if value and not isinstance(value, str) and not shown:
            near = near_key(key, known, SUPPORTED_VALUES) if len(ignored) < MOST_HINTS else ""
            warning = f"this may change the model, and no tensor shows that it does{near}"
        ignored.append(IgnoredKey(key, value, reason, warning))
    return ConfigReport(config, tuple(ignored))

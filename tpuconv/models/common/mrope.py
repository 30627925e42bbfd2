"""Rotary positions of text in models that see (mrope, arXiv:2409.12191)."""

from collections.abc import Mapping
from typing import Any

from tpuconv.models.common.rope import PARAMETER_KEYS, check_rope_keys


class MropeConfig:
    """Reads rotary positions with sections for time, height and width as plain ones. A family's Config derives from
    this class and from the Config of the text model, in this order."""

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """See `DecoderConfig.read_ropes`."""
        out: dict[str, Any] = super().read_ropes(without_mrope(raw), context)  # type: ignore[misc]
        return out


def without_mrope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed config.json whose rotary positions have sections for time, height and width (mrope,
    arXiv:2409.12191) without them: the three positions of a text token are equal, so that it turns by the plain
    angles."""
    check_rope_keys(raw)
    out = dict(raw)
    for key in PARAMETER_KEYS:
        if given := raw.get(key):
            plain = {k: value for k, value in given.items() if k not in ("mrope_section", "mrope_interleaved")}
            out[key] = {k: "default" if value == "mrope" else value for k, value in plain.items()}
    return out

"""The rules of a quantization by their name, and what decides by them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpuconv.errors import UsageError

if TYPE_CHECKING:
    from tpuconv.convert.plan.planning import Quantizer
    from tpuconv.convert.plan.quantization import Quantization
    from tpuconv.convert.plan.types import Plan
    from tpuconv.models.common.config import DecoderConfig
    from tpuconv.models.registry import Family
    from tpuconv.quantize.calibrate.data import CalibrationData
    from tpuconv.quantize.config import QuantConfig


def find_rules(config: str | Path | None, encoding: str = "dequantize") -> "QuantConfig | None":
    """Returns the quantization config of a name or path; None where none is given.

    Raises:
        ConfigError: it is no valid config.
        UsageError: there is none of this name, or encoded weights are to be kept.
    """
    if config is None:
        return None
    if encoding == "keep":
        raise UsageError(
            '`encoding="keep"` and `quantize=` exclude each other: weights that stay encoded are not quantized again',
            hint="give one of them",
        )
    from tpuconv.quantize.config import find_config

    return find_config(str(config))


def quantizer_by(rules: "QuantConfig", data: "CalibrationData | None" = None, notes: Sequence[str] = ()) -> "Quantizer":
    """Returns what decides by rules how the parameters of a plan are quantized; it imports jax when it is called. The
    result has the notes."""

    def quantizer(
        plain: "Plan", family: "Family", config: "DecoderConfig", *, for_servers: bool = False
    ) -> "Quantization":
        from tpuconv.quantize.apply import quantization

        return quantization(plain, family, config, rules, data, notes, for_servers=for_servers)

    return quantizer

"""The `calibration` of a quantization config: its method, and the settings of the method."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tpuconv.options import KV_CACHES
from tpuconv.quantize.strict_yaml import YamlValue


class RuleTypes(Protocol):
    """The fields of a rule that a calibration depends on."""

    @property
    def line(self) -> int:
        """Its line in the file."""

    @property
    def weight_qtype(self) -> str | None:
        """The type of weights."""

    @property
    def act_qtype(self) -> str | None:
        """The type of activations."""

    @property
    def tile_axes(self) -> str:
        """The axes that have groups."""

    @property
    def act_static_scale(self) -> bool:
        """True if activations have one scale for each product."""


CALIBRATION_FIELDS: Mapping[str, tuple[str, ...]] = {
    "gptq": ("damping", "act_order", "refine", "propagate", "distill"),
    "awq": ("distill",),
    "smooth_quant": (),
    "nearest": ("distill",),
}
"""The methods of calibration, and the settings of each. `nearest` rounds weights to nearest: it is for the scales of
activations and of KV caches, or for scales that are distilled."""


@dataclass(frozen=True)
class Calibration:
    """The use of the inputs of products to round their weights. See `tpuconv.quantize.calibrate`.

    Attributes:
        method: of `CALIBRATION_FIELDS`.
        damping: gptq: what is added to the diagonal of the Hessian, relative to its mean.
        act_order: gptq: whether inputs are rounded in the order of their size, the largest first.
        refine: gptq: how often each quantized value, and each scale of `mse`, takes its best with all others fixed.
        propagate: gptq: the part of the errors of the layers before it that a layer makes up for, from 0 to 1.
        distill: passes over the samples in which the scales of weights are distilled; see
            `tpuconv.quantize.calibrate.distill`.
        kv_cache: of `KV_CACHES`, for any method: the static scales of KV caches to find; None for none.
    """

    method: str
    damping: float = 0.01
    act_order: bool = True
    refine: int = 1
    propagate: float = 0.0
    distill: int = 0
    kv_cache: str | None = None

    @property
    def propagates(self) -> bool:
        """True if layers make up for errors of earlier ones."""
        return self.method == "gptq" and self.propagate > 0

    @property
    def runs_exact(self) -> bool:
        """True if the model that is not quantized runs beside the quantized one."""
        return self.propagates or self.distill > 0

    def to_json(self) -> dict[str, Any]:
        """Returns the method and its settings."""
        names = ("method", *CALIBRATION_FIELDS[self.method], *(["kv_cache"] if self.kv_cache else []))
        return {name: getattr(self, name) for name in names}

    def to_yaml(self) -> str:
        """Returns the value of `calibration` in a config: the method, and the settings that are not the default."""
        usual = Calibration(self.method)
        changed = {name: value for name, value in self.to_json().items() if value != getattr(usual, name)}
        settings = {"method": self.method} | changed
        words = (f"{name}: {str(value).lower()}" for name, value in settings.items())  # false, as YAML spells it
        return f"{{{', '.join(words)}}}"


RECIPE_PROPAGATE = 0.5
"""The `propagate` of configs that are written: on every model that was measured, divergence falls."""


def recipe_calibration(method: str) -> Calibration:
    """Returns the settings of a method in configs that are written."""
    return Calibration(method, propagate=RECIPE_PROPAGATE if method == "gptq" else 0.0)


MOST_ROUNDS = 100
"""The most rounds of `refine`, and passes of `distill`."""


def _rounds(value: YamlValue) -> int:
    number = value.number(MOST_ROUNDS, least=0)
    if not isinstance(number, int):
        raise value.error("must be a whole number")
    return number


def _kv_cache(value: YamlValue) -> str:
    if value.is_scalar("int8"):
        raise value.error(
            "no server reads scales of int8 KV caches from a checkpoint",
            hint="use fp8; or leave it out: `cache_dtype=` rounds to int8 with a scale for each vector, without scales",
        )
    return str(value.choice(tuple(KV_CACHES), null=False))


def parse_calibration(value: YamlValue, rules: Iterable[RuleTypes]) -> Calibration:
    """Parses the `calibration` of a config with these rules.

    Raises:
        ConfigError: a setting is not valid, or not for such rules.
    """
    every = tuple(dict.fromkeys(name for names in CALIBRATION_FIELDS.values() for name in names))
    fields = value.mapping("method", "kv_cache", *every)
    if "method" not in fields:
        raise value.error("has no 'method'", hint=f"known are {', '.join(CALIBRATION_FIELDS)}")
    method = str(fields["method"].choice(tuple(CALIBRATION_FIELDS), null=False))
    for name in fields.keys() - {"method", "kv_cache", *CALIBRATION_FIELDS[method]}:
        raise fields[name].error(f"{method} has no such setting")
    given: dict[str, Any] = {}
    if "damping" in fields:
        given["damping"] = float(fields["damping"].number(1.0, least=0))
    if given.get("damping") == 0:
        raise fields["damping"].error("must be more than 0: the Hessian of few tokens has no inverse without it")
    if "act_order" in fields:
        given["act_order"] = fields["act_order"].boolean()
    if "refine" in fields:
        given["refine"] = _rounds(fields["refine"])
    if "propagate" in fields:
        given["propagate"] = float(fields["propagate"].number(1, least=0))
    if "distill" in fields:
        given["distill"] = _rounds(fields["distill"])
    if "kv_cache" in fields:
        given["kv_cache"] = _kv_cache(fields["kv_cache"])
    has_static_scales = "kv_cache" in fields or any(rule.act_static_scale for rule in rules)
    if given.get("distill") and has_static_scales:
        raise fields["distill"].error(
            "changes weights after the static scales of activations and of KV caches are found",
            hint="leave out `distill`, or `act_static_scale` and `kv_cache`",
        )
    if method == "nearest" and not given.get("distill") and not has_static_scales:
        raise value.error(
            "nearest finds scales of activations or of KV caches, and no rule has act_static_scale",
            hint="leave `calibration` out: weights are rounded to nearest without it; or add `kv_cache: fp8`, or "
            "`distill: 1`, which improves scales",
        )
    for rule in rules:
        if method == "gptq" and rule.tile_axes == "block":
            raise value.error(
                f"gptq rounds one output after the other, and the rule of line {rule.line} has blocks of outputs",
                hint="leave out `tile_axes: block`, or calibrate with awq",
            )
        if method == "smooth_quant" and rule.weight_qtype and rule.act_qtype != "int8":
            raise value.error(
                f"smooth_quant is for int8 activations, and the rule of line {rule.line} has none",
                hint="give the rule `act_qtype: int8`, or calibrate with gptq or awq",
            )
    return Calibration(method, **given)

"""Rotary position embeddings (arXiv:2104.09864): the frequency of each pair of a head's dimensions, and the scaling of
frequencies for longer contexts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short

ORIGINAL = "original_max_position_embeddings"
PARAMETER_KEYS = ("rope_scaling", "rope_parameters")
ROPE_KEYS = ("rope_theta", *PARAMETER_KEYS, ORIGINAL)
"""The keys of config.json that `Rope.from_hf` reads. The first and the last may be parameters instead."""

REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
OPTIONAL = {
    "default": (),
    "linear": (),
    "llama3": (ORIGINAL,),
    "yarn": (
        ORIGINAL,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "dynamic": (),
    "longrope": (ORIGINAL, "attention_factor", "factor"),
    "proportional": ("partial_rotary_factor", "factor"),
}
"""The parameters of each implemented type, besides the type and `rope_theta`."""

EXTENDED = tuple(kind for kind, names in OPTIONAL.items() if ORIGINAL in names)
"""The types that depend on the context before it was extended."""

LARGEST_ROPE_VALUE = 1e15
"""The largest value of a parameter."""

MOST_FACTORS = 1 << 15
"""The largest number of factors in a list."""

FloatArray = NDArray[np.float32]


ONE_OF_BOTH = "leave one of them, with all values of the model: transformers drops the other without a word"


@dataclass(frozen=True)
class Rope:
    """Type and base (`theta`) of rotary positions, and the parameters of the type, with their names in config.json."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], model_type: str, max_position_embeddings: int) -> Self:
        """Returns the rotary positions that a parsed config.json describes: by `rope_theta` and `rope_scaling`, or by
        `rope_parameters`, which has both.

        Raises:
            UnsupportedConfig: the type or a parameter is not implemented.
            ConfigError: a value is wrong, missing, or contradicts another.
        """
        key, given, kind, theta, values = _described(raw, cls.theta)
        unknown = [name for name in values if kind in REQUIRED and name not in (*REQUIRED[kind], *OPTIONAL[kind])]
        if kind not in REQUIRED or unknown:
            fault = [f"the type {kind} has no parameter {', '.join(map(short, unknown))}"] if unknown else []
            types = [f"{k}: {', '.join(REQUIRED[k] + OPTIONAL[k]) or 'no parameters'}" for k in REQUIRED]
            raise UnsupportedConfig(
                f"{key}={short(given, 300)} is not implemented for {model_type}",
                details=[*fault, *types],
                hint="these types are implemented, with these parameters",
            )
        if missing := [name for name in REQUIRED[kind] if name not in values]:
            raise ConfigError(
                f"config.json: {key}={short(given, 300)} lacks {', '.join(missing)}",
                hint="add them, as the model was trained",
            )
        if kind in EXTENDED:
            values.setdefault(ORIGINAL, max_position_embeddings)
        for name in ("short_factor", "long_factor"):
            if name in values:
                values[name] = _checked_factors(name, values[name])
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if values.get(name) == 0:  # means the default, as in transformers
                del values[name]
        _check_numbers(values | {"rope_theta": theta})
        if kind == "dynamic":
            values[ORIGINAL] = max_position_embeddings
        if kind == "longrope":
            values.setdefault("factor", max_position_embeddings / values[ORIGINAL])
        rope = cls(kind, theta, **values)
        if rope.theta <= 1 or (kind == "llama3" and rope.low_freq_factor > rope.high_freq_factor):
            raise ConfigError(
                f"config.json: rotary positions cannot be made of rope_theta={short(theta)}, {key}={short(given, 300)}"
            )
        return rope

    @property
    def depends_on_length(self) -> bool:
        """True if angles depend on the length of the sequence; with a cache this is the number of its slots."""
        return self.type in ("longrope", "dynamic")

    def inverse_frequencies(self, head_dim: int, length: int = 0) -> tuple[FloatArray, float]:
        """Returns the angular frequencies [H/2] in radians per position, and a factor for cosine and sine. The float32
        operations equal transformers, in the same order: at position 100,000 the last bit of a frequency changes the
        angle noticeably. The types `longrope` and `dynamic` depend on the length of the sequence."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        theta = self.theta
        if self.type == "dynamic":
            theta *= self.growth(max(length, self.original_max_position_embeddings)) ** (head_dim / (head_dim - 2))
        # Computed in float64, then rounded: numpy's powers in float32 are less accurate than torch's.
        periods = (theta ** exponents.astype(np.float64)).astype(np.float32)
        rates: FloatArray = np.float32(1) / periods
        match self.type:
            case "linear":
                return rates / np.float32(self.factor), 1.0
            case "llama3":
                return self._llama3(rates), 1.0
            case "proportional":  # of the slower pairs none turns
                turning = int(self.partial_rotary_factor * head_dim // 2)
                return np.where(np.arange(head_dim // 2) < turning, rates / np.float32(self.factor), np.float32(0)), 1.0
            case "yarn":
                return self._yarn(periods), self._yarn_attention_factor()
            case "longrope":
                is_long = length > self.original_max_position_embeddings
                factors = np.asarray(self.long_factor if is_long else self.short_factor, np.float32)
                return np.float32(1) / (factors * periods), self._longrope_attention_factor()
        return rates, 1.0

    def growth(self, length: Any) -> Any:
        """Returns what `dynamic` raises theta by, to the power H / (H - 2), for sequences of this length, which is at
        least the original one: NTK-aware scaling, as transformers computes it."""
        return self.factor * length / self.original_max_position_embeddings - (self.factor - 1)

    def _llama3(self, rates: FloatArray) -> FloatArray:
        """Returns the scaling of Llama 3.1, as in transformers: high frequencies are kept, low ones are divided by
        `factor`, and those between are interpolated, by the number of rotations within the original context."""
        wavelengths = np.float32(2 * math.pi) / rates
        original = self.original_max_position_embeddings
        rotations = np.float32(original) / wavelengths
        width = self.high_freq_factor - self.low_freq_factor or 1.0  # 0: no frequencies are between
        blend = (rotations - self.low_freq_factor) / width
        blended = (1 - blend) * rates / self.factor + blend * rates
        slow = wavelengths > original / self.low_freq_factor
        fast = wavelengths < original / self.high_freq_factor
        return np.select([slow, fast], [rates / self.factor, rates], blended).astype(np.float32)

    def _yarn(self, periods: FloatArray) -> FloatArray:
        """YaRN (arXiv:2309.00071): pairs with more than `beta_fast` rotations within the original context are kept,
        pairs with fewer than `beta_slow` are divided by `factor`, and those between are interpolated."""
        pairs = len(periods)

        def pair_of(rotations: float) -> float:
            """Returns the pair with this number of rotations within the original context."""
            context = self.original_max_position_embeddings
            return pairs * math.log(context / (rotations * 2 * math.pi)) / math.log(self.theta)

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The upper limit is a head dimension instead of a pair, as in transformers.
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first or 0.001
        divided = np.clip((np.arange(pairs, dtype=np.float32) - np.float32(first)) / np.float32(width), 0, 1)
        kept = 1 - divided
        rates = 1 / (np.float32(self.factor) * periods) * (1 - kept) + 1 / periods * kept
        return np.asarray(rates, np.float32)

    def _yarn_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def _longrope_attention_factor(self) -> float:
        """Returns the factor of LongRoPE (arXiv:2402.13753, section 3.3)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


def _described(raw: Mapping[str, Any], default_theta: float) -> tuple[str, Mapping[str, Any], str, Any, dict[str, Any]]:
    """Returns the key of config.json that describes rotary positions, what it has, and of that the type, theta, and the
    other parameters. Raises ConfigError if values contradict each other."""
    check_rope_keys(raw)
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(key) or {}
    if key == "rope_scaling" and raw.get("rope_parameters") and raw["rope_parameters"] != given:
        raise ConfigError("config.json has both rope_scaling and rope_parameters, and they differ", hint=ONE_OF_BOTH)

    # "type" is the older name of "rope_type"; null is as good as absent.
    values = {name: value for name, value in given.items() if value is not None}
    kinds = {values.pop(name) for name in ("type", "rope_type") if isinstance(values.get(name), str)}
    if len(kinds) > 1:
        raise ConfigError(f"config.json: {key}={short(given, 300)} has two types", hint=ONE_OF_BOTH)
    kind = kinds.pop() if kinds else "default"
    outside = raw.get("rope_theta")
    theta = values.pop("rope_theta", default_theta if outside is None else outside)
    if outside not in (None, theta):
        raise ConfigError(
            f"config.json: rope_theta={short(outside)} outside {key}, {short(theta)} inside", hint=ONE_OF_BOTH
        )
    context = raw.get(ORIGINAL)
    if context is not None and kind in EXTENDED and values.setdefault(ORIGINAL, context) != context:
        raise ConfigError(
            f"config.json: {ORIGINAL}={short(context)} outside {key}, {short(values[ORIGINAL])} inside",
            hint=ONE_OF_BOTH,
        )
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    return key, given, kind, theta, values


def _checked_factors(name: str, given: Any) -> tuple[float, ...]:
    """Returns the factors of LongRoPE, one for each pair."""
    if not isinstance(given, list) or len(given) > MOST_FACTORS:
        raise ConfigError(f"config.json: {name}={short(given)} of the rotary positions is not a list of numbers")
    _check_numbers({f"{name}[{i}]": value for i, value in enumerate(given)})
    return tuple(given)


def with_default_rope(raw: Mapping[str, Any], default: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json with the default rotary positions of its family where it has none; a `rope_theta`
    of its own wins."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters")
    theta = {name: value for name, value in default.items() if name == "rope_theta" and raw.get(name) is None}
    if not given:
        return {**raw, **theta, "rope_parameters": {k: v for k, v in default.items() if k != "rope_theta"}}
    return raw if "rope_theta" in given else {**raw, **theta}


def rope_of_layers(
    raw: Mapping[str, Any], kind: str, theta: float, scaling: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the `rope_parameters` of the layers of one of the `layer_types`, as `Rope.from_hf` reads them.

    Args:
        raw: a parsed config.json. Newer files have an object for each type of layer in `rope_parameters`.
        kind: the type of layer.
        theta: its base in older files, and where the object of its type has none.
        scaling: its `rope_scaling` in older files.

    Raises:
        ConfigError: `rope_parameters` is not an object of objects.
    """
    check_rope_keys(raw)
    nested = raw.get("rope_parameters") or {}
    if not all(value is None or isinstance(value, Mapping) for value in nested.values()):
        raise ConfigError(f"config.json: rope_parameters={short(nested, 300)} has no object for each type of layer")
    own = nested.get(kind) or (scaling if not nested else None) or {}
    return {"rope_parameters": {"rope_theta": theta, **{k: v for k, v in own.items() if v is not None}}}


def check_rope_keys(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError if `rope_scaling` or `rope_parameters` is not an object."""
    for key in PARAMETER_KEYS:
        given = raw.get(key)
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"config.json: {key}={short(given, 300)} is not an object")


def _check_numbers(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in ("short_factor", "long_factor"):
            continue  # checked one by one
        if name == "truncate":
            if type(value) is not bool:
                raise ConfigError(f"config.json: truncate={short(value)} of the rotary positions is not a bool")
        elif type(value) not in (int, float) or not 0 < value <= LARGEST_ROPE_VALUE:
            raise ConfigError(
                f"config.json: {name}={short(value)} of the rotary positions is not a positive number of at most "
                f"{LARGEST_ROPE_VALUE:g}"
            )


PLAIN_ROPE = Rope()
"""The rotary positions of a config.json without `ROPE_KEYS`."""

GLOBAL_ROPE = Rope(theta=1e6)
"""The rotary positions of Gemma's layers that see all tokens, of a config.json without any."""


def refuse_ropes(model_type: str, raw: Mapping[str, Any], keys: Iterable[str], hint: str) -> None:
    """Checks that a config.json has none of the keys of rotary positions that a family does not read.

    Raises:
        UnsupportedConfig: it has one.
    """
    for key in keys:
        if raw.get(key) is not None:
            raise UnsupportedConfig(f"{key}={short(raw[key], 300)} is not implemented for {model_type}", hint=hint)


def layers_with_rope(given: Sequence[int] | None, interval: int, count: int) -> tuple[bool, ...]:
    """Returns for each layer True if it has rotary positions.

    Args:
        given: `no_rope_layers` of config.json, which has 1 for a layer WITH rotary positions.
        interval: `no_rope_layer_interval`. Without a list every layer whose number is a multiple has none.
        count: of the layers.
    """
    return tuple(map(bool, given)) if given is not None else tuple(i % interval != 0 for i in range(1, count + 1))

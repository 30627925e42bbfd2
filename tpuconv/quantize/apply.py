"""From a config to what a plan needs to quantize while it converts."""

from collections.abc import Mapping
from importlib.metadata import version

import jax.numpy as jnp
import numpy as np

from tpuconv.convert.codecs.schemes import Scheme
from tpuconv.convert.plan import Plan, Quantization
from tpuconv.errors import UnsupportedConfig
from tpuconv.models.config import DecoderConfig
from tpuconv.models.registry import Family
from tpuconv.quantize.config import QuantConfig
from tpuconv.quantize.encode import QwixEncoder
from tpuconv.quantize.report import html
from tpuconv.quantize.rules import How, resolve


def quantization(plain: Plan, family: Family, config: DecoderConfig, rules: QuantConfig) -> Quantization:
    """How the parameters of a plan without quantization become quantized ones.

    Raises:
        ConfigError: see `tpuconv.quantize.rules.resolve`.
        UnsupportedConfig: layers that are stacked are not quantized alike, or only a part of the model is converted.
    """
    plain.check()
    if plain.options.layers is not None:
        raise UnsupportedConfig("a part of the layers cannot be quantized", hint="leave --layers out")
    stacked = plain.options.scan_layers
    hows = resolve(lambda: family.model_class(config, dtype=jnp.bfloat16), rules, stacked=stacked)
    kept = _kept(plain, hows)
    encoders = {}
    for name, how in hows.items():
        if name in kept:
            continue
        dtype = plain.arrays[name].dtype
        scale_dtype = dtype if rules.scale_dtype is None else jnp.dtype(rules.scale_dtype)
        encoders[name] = QwixEncoder(name, how, dtype, np.dtype(scale_dtype))
    return Quantization(encoders, {**rules.to_json(), "qwix": version("qwix")}, html, kept)


def _kept(plain: Plan, hows: Mapping[str, How]) -> dict[str, int]:
    """The parameters of those rows that the source has in the very type that is asked for, with their rules."""
    kept: dict[str, int] = {}
    for binding in plain.bindings:
        scheme = plain.tensors[binding.src[0].names[0]].scheme
        names = [name for stack in binding.dst for name in stack.names]
        if scheme and all(name in hows and _is_type_of(hows[name], scheme) for name in names):
            kept |= {name: hows[name].rule for name in names}
    return kept


def _is_type_of(how: How, scheme: Scheme) -> bool:
    symmetric = str(how.how.calibration_method).startswith(("absmax", "rms"))
    return symmetric and how.qtype in (scheme.qtype, scheme.title.lower())

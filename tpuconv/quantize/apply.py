"""From a config to what a plan needs to quantize while it converts."""

from importlib.metadata import version

import jax.numpy as jnp
import numpy as np

from tpuconv.convert.plan import Plan, Quantization
from tpuconv.errors import UnsupportedConfig
from tpuconv.models.config import DecoderConfig
from tpuconv.models.registry import Family
from tpuconv.quantize.config import QuantConfig
from tpuconv.quantize.encode import QwixEncoder
from tpuconv.quantize.report import html
from tpuconv.quantize.rules import resolve


def quantization(plain: Plan, family: Family, config: DecoderConfig, rules: QuantConfig) -> Quantization:
    """How the parameters of a plan without quantization become quantized ones.

    Raises:
        ConfigError: see `tpuconv.quantize.rules.resolve`.
        UnsupportedConfig: layers are stacked, or only a part of the model is converted.
    """
    plain.check()
    if plain.options.layers is not None:
        raise UnsupportedConfig("a part of the layers cannot be quantized", hint="leave --layers out")
    scan = plain.options.scan_layers
    hows = resolve(lambda: family.model_class(config, scan_layers=scan, dtype=jnp.bfloat16), rules)
    encoders = {}
    for name, how in hows.items():
        dtype = plain.arrays[name].dtype
        scale_dtype = dtype if rules.scale_dtype is None else jnp.dtype(rules.scale_dtype)
        encoders[name] = QwixEncoder(name, how, dtype, np.dtype(scale_dtype))
    return Quantization(encoders, {**rules.to_json(), "qwix": version("qwix")}, html)

"""Static scales of activations: one for the input of a product, which Qwix holds in the module of the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpuconv.errors import ConfigError
from tpuconv.models.common.decoder import Decoder
from tpuconv.names import INPUT_SCALE
from tpuconv.private import averaging, flax_util, ptq, qarray
from tpuconv.quantize.config import ALL_TOKENS, QuantConfig


@dataclass(frozen=True)
class InputScale:
    """The static scale of a product's input, as Qwix holds it.

    Attributes:
        axes: the number of axes of the array, all of size 1; of one layer if layers are stacked.
        qwix_how: Qwix's `HowToQuantize` of the input.
    """

    axes: int
    qwix_how: Any


def input_scales(config: QuantConfig, model: Any, last_module: Callable[[], str]) -> dict[str, InputScale]:
    """The static scales of a quantized model, by module.

    Args:
        config: the rules that it is quantized by.
        model: with shapes instead of arrays.
        last_module: the module that asked for a rule last.

    Raises:
        ConfigError: a module has one for another product than the product of each token with its weights, or multiplies
            its weights in another way when the model decodes.
    """
    if not any(rule.act_static_scale for rule in config.rules):
        return {}
    scales, kernels = _qwix_nodes(model)
    faults = {
        module: "has no single product of each token with weights"
        for module, of_module in scales.items()
        if list(of_module) != [QWIX_NAME] or kernels.get(module) != 1 or not _is_for_all_tokens(of_module[QWIX_NAME])
    }
    if isinstance(model, Decoder) and not (model.config.head.kind or model.config.sees_behind or faults):
        try:
            model(jnp.zeros((1, 1), jnp.int32), cache=model.init_cache(1, 8))
        except ValueError:  # of Qwix: a scale has another shape
            faults[last_module()] = "has other products when the model decodes"
        faults |= {m: "has other products when the model decodes" for m in _qwix_nodes(model)[0].keys() - scales.keys()}
    if faults:
        lines = {config.rules[config.rule_of(module)].line for module in faults}
        raise ConfigError(
            f"act_static_scale of {config.name}, line {', '.join(map(str, sorted(lines)))}, cannot be used in "
            f"{len(faults)} modules",
            details=[f"{module}: {why}" for module, why in faults.items()][:10],
            hint="put a rule without act_static_scale for these modules before it",
        )
    return {module: InputScale(node[QWIX_NAME].ndim, node[QWIX_NAME].how) for module, node in scales.items()}


QWIX_NAME = INPUT_SCALE.split(".")[1]


class MeanScale:
    """The static scale of an input, as Qwix computes it: the scale of the mean, over tokens and samples, of
    what its calibration method finds for each token.

    Args:
        how: Qwix's `HowToQuantize` of the input.
    """

    def __init__(self, how: Any):
        self.how = how
        self._average, self._stat = averaging.SimpleMovingAverage(), None

    def add(self, x_TI: np.ndarray) -> None:
        """Adds the inputs of one sample, float32."""
        found = qarray.calibrate(jnp.asarray(x_TI)[None], self.how)
        means = {name: x.mean(axis=ALL_TOKENS, keepdims=True) for name, x in found.items()}
        self._stat = self._average.update(self._average.init(means) if self._stat is None else self._stat, means)

    @property
    def scale(self) -> float:
        """The scale of what was added."""
        mean = self._average.get_calibration(self._stat)
        return float(qarray.compute_scale_zero_point(mean, self.how.qtype)[0].item())


def _is_for_all_tokens(scale: Any) -> bool:
    return list(scale.how.channelwise_axes) == list(ALL_TOKENS) and set(scale.shape) == {1}


def _qwix_nodes(model: Any) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """By module: the static scales of a quantized model, and the number of quantized parameters."""
    scales: dict[str, dict[str, Any]] = {}
    kernels: dict[str, int] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, ptq.WithAux):
            module = "/".join(map(str, path[:-1]))
            if isinstance(flax_util.unbox(node.array), qarray.QArray):
                kernels[module] = kernels.get(module, 0) + 1
            else:
                scales.setdefault(module, {})[str(path[-1])] = node
    return scales, kernels

"""What rounding a group of parameters costs the model: KL(unquantized || with that group quantized), on prompts.

One model is loaded and compiled once; its weights are replaced by rounded ones. It computes in float32, 4 bytes per
weight: the rounding of bfloat16 is larger than the effect of one group in int8.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from tpuconv.errors import GateError
from tpuconv.models.logits import divergences, forward, log_softmax
from tpuconv.quantize.recipe.groups import Choices
from tpuconv.quantize.recipe.search import Option, ParamGroup

DTYPE = "float32"


class Probe:
    """Measures on one model, whose weights it changes and restores.

    Args:
        model: unquantized, in float32, on one device or several.
        choices: what to measure.
        prompts: the token ids of each.

    Its methods raise GateError if the logits are not finite.
    """

    def __init__(self, model: Any, choices: Choices, prompts: Sequence[Sequence[int]]):
        from flax import nnx

        self._choices = choices
        self._run = forward(model, prompts, DTYPE)
        params = ((path, leaf) for path, leaf in nnx.iter_graph(model) if isinstance(leaf, nnx.Param))
        self._weights = {".".join(map(str, path)): leaf for path, leaf in params}
        self._reference = [log_softmax(logits) for logits in self._run()]

    def each(self) -> Iterator[ParamGroup]:
        """Yields the groups with the cost of each option."""
        for group in self._choices.space.groups:
            yield replace(group, options=tuple(self._alone(group, option) for option in group.options))

    def _alone(self, group: ParamGroup, option: Option) -> Option:
        if option.qtype is None:
            return option
        originals = {name: self._weights[name][...] for name in group.names}
        self._round(group, option)
        cost = self._divergence()
        for name, original in originals.items():
            self._weights[name][...] = original
        return replace(option, kl=cost)

    def together(self, options: Sequence[Option]) -> float:
        """The KL divergence of the model with these options of all groups. Only to be called last: the weights are not
        restored, so that there is no second model in memory."""
        for group, option in zip(self._choices.space.groups, options, strict=True):
            if option.qtype is not None:
                self._round(group, option)
        return self._divergence()

    def _round(self, group: ParamGroup, option: Option) -> None:
        """Replaces weights by rounded ones, as a conversion makes them from the stored weights. float32 holds both
        exactly."""
        import jax

        for name in group.names:
            weight, encoder = self._weights[name], self._choices.encoders[str(option.qtype)][name]
            values = np.asarray(weight[...]).astype(encoder.dtype)
            weight[...] = jax.device_put(encoder.rounded(values), weight[...].sharding)

    def _divergence(self) -> float:
        ours = [log_softmax(logits) for logits in self._run()]
        mean = float(divergences(self._reference, ours).mean())
        if not isfinite(mean):
            raise GateError(
                "the logits of the model on these prompts are not finite: there is nothing to compare",
                hint="`tpuconv verify --compare-hf` says whether the unquantized model is right",
            )
        return mean

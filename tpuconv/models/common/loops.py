"""Looped layers: some run several times, each time with keys and values of their own. The same decoder serves layers
that run once, and read what enters earlier ones."""

from typing import Any

import jax

from tpuconv.models.common.cache import scaled_kv
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step, Steps, windows_of


class LoopedDecoder(Decoder):
    """A decoder whose layers run in the order of `executed_layers`. A cache has an entry for each execution."""

    def entering(self, execution: int, x_BTD: jax.Array, kept: dict[str, Any]) -> jax.Array:
        """Returns the hidden states [B, T, D] that enter an execution, made of the output of the one before. `kept` is
        for what later executions of the same call need."""
        return x_BTD

    def given_to(self, execution: int, step: Step, kept: dict[str, Any]) -> Step:
        """Returns the other inputs of an execution, made of the inputs of its layer. `kept` is as in `entering`."""
        return step

    def leaving(self, execution: int, kv: Any, kept: dict[str, Any]) -> None:
        """Keeps what later executions of the same call need of the keys and values of an execution."""

    def _run(self, x_BTD: jax.Array, steps: Steps, kvs: Any) -> tuple[jax.Array, Any]:
        kept: dict[str, Any] = {}
        new_kvs = []
        windows = windows_of(self.config)
        for execution, layer in enumerate(self.config.executed_layers):
            x_BTD = placed(self.entering(execution, x_BTD, kept), "B T D")
            steps.enter(layer, x_BTD)
            kv = None if kvs is None else scaled_kv(kvs[execution], self.layers[layer])
            x_BTD, kv = self.layers[layer](x_BTD, self.given_to(execution, steps[layer], kept), windows[layer], kv)
            self.leaving(execution, kv, kept)
            new_kvs.append(kv)
        return x_BTD, tuple(new_kvs)

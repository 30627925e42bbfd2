"""Changes of parameters that hold all experts of a layer (`target_parameters` of PEFT 0.21)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from tpuconv.sources.adapter_changes import AdapterFile, LowRank

NESTED = ".base_layer"
"""The name that PEFT inserts into the name of a module for each parameter that is wrapped further out."""
IN_ORDER = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""Parameters of transformers' modules of experts, in their order."""


@dataclass(frozen=True)
class ExpertChange:
    """The change of a parameter of all experts. How many there are only the model tells.

    Attributes:
        module, parameter: their names in transformers.
        a: [experts * R, in], the expert first.
        b: [out, R * experts], the expert last.
        alpha: times the adapter's weight.
        use_rslora: whether alpha is divided by the square root of the rank.
    """

    module: str
    parameter: str
    a: np.ndarray
    b: np.ndarray
    alpha: float
    use_rslora: bool
    file: AdapterFile

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return f"{self.module}.{self.parameter}"

    def stacked(self, experts: int, *, input_first: bool) -> LowRank:
        """Returns the change of the parameter as one tensor."""
        right = self.a.reshape(experts, -1, self.a.shape[1])  # [E, R, in]
        left = self.b.reshape(self.b.shape[0], -1, experts).transpose(2, 0, 1)  # [E, out, R]
        if input_first:
            left, right = right.transpose(0, 2, 1), left.transpose(0, 2, 1)
        return LowRank(left, right, self._scaling(experts), self.file, rounded=True)

    def alone(self) -> LowRank:
        """Returns the change of a parameter that is one matrix."""
        return self.of_expert(0, 1, slice(None))

    def of_expert(self, expert: int, experts: int, outputs: slice) -> LowRank:
        """Returns the change of some outputs of one expert: [out, in]."""
        whole = self.stacked(experts, input_first=False)
        return LowRank(whole.left[expert, outputs], whole.right[expert], whole.scaling, self.file, rounded=True)

    def _scaling(self, experts: int) -> float:
        rank = max(1, self.a.shape[0] // experts)
        return self.alpha / (sqrt(rank) if self.use_rslora else rank)


def nesting_order(parameter: str) -> int:
    """Returns a key that sorts the parameters of a module as PEFT wraps them, the innermost first."""
    return IN_ORDER.index(parameter) if parameter in IN_ORDER else len(IN_ORDER)


def parameters_by_wrapper(modules: Sequence[str], targets: Sequence[str]) -> Mapping[str, tuple[str, str]]:
    """By the name of a wrapper in the file, the module and the parameter that it changes.

    Wrappers nest: the first parameter of a module is wrapped innermost, and each further one adds `NESTED` to its name.
    """
    out: dict[str, tuple[str, str]] = {}
    bare = dict.fromkeys(module.replace(NESTED, "") for module in modules)
    for module in bare:
        names = {name.rpartition(".")[2] for name in targets if f"{module}.".endswith(f"{name.rpartition('.')[0]}.")}
        own = sorted(names, key=nesting_order)
        wrappers = sorted((name for name in modules if name.replace(NESTED, "") == module), key=len, reverse=True)
        if len(own) == len(wrappers):
            out |= {wrapper: (module, parameter) for wrapper, parameter in zip(wrappers, own, strict=True)}
    return out

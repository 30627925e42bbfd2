"""The files of an adapter as PEFT 0.21 reads them: the names of its tensors, and adapter_config.json."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuconv.notation.layout import Shape
from tpuconv.notation.pairs import Pair
from tpuconv.sources.adapter import PEFT_PREFIX
from tpuconv.sources.adapter_experts import NESTED, nesting_order
from tpuconv.sources.headers import CODES

OF_LINEAR = ".weight"
"""The end of the name of a linear layer's matrix."""
EXPERTS_PART = ".experts."
NAMES_OF_EXPERTS = ("gate", "router", "v_router", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Modules that PEFT takes for parts of experts, in a model that has experts, wherever they are; and routers, which are
no linear layers. So routers, dense MLPs and shared experts of such a model are named by their parameters."""
EXPERT_LAYOUT = "0.19.1"
"""The version of peft whose layout of the matrices of all experts is written; later ones read it too."""


@dataclass(frozen=True, eq=False)
class AdapterTensor:
    """A tensor of an adapter."""

    name: str
    values: np.ndarray

    @property
    def dtype(self) -> str:
        """Safetensors' name of its dtype."""
        return CODES[self.values.dtype.name]

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.values.nbytes


@dataclass(frozen=True)
class PeftAdapter:
    """The contents of an adapter.

    Attributes:
        tensors: of adapter_model.safetensors, in their order.
        config: adapter_config.json.
    """

    tensors: Sequence[AdapterTensor]
    config: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def peft_adapter(
    pairs: Mapping[str, Pair],
    tensors: Collection[str],
    base: str,
    alpha: float,
    *,
    whole: bool,
    input_first: bool,
    has_experts: bool,
    is_causal: bool,
) -> PeftAdapter:
    """Returns the adapter of pairs.

    Args:
        pairs: by the name of the tensor that each changes, as transformers' modules have it.
        tensors: the names of all tensors of the model.
        base: the name of the model.
        alpha: of the training.
        whole: whether the model has no modules besides, such as towers.
        input_first: whether matrices are [in, out], as in Conv1D.
        has_experts: whether the model has experts.
        is_causal: whether the model writes token by token, which PEFT calls a task.
    """
    pairs = dict(sorted(pairs.items(), key=lambda each: _numbered(each[0])))
    changed = {}
    for name, pair in pairs.items():
        module = name.removesuffix(OF_LINEAR)
        is_module = module != name and pair.a.ndim == 2 and not (has_experts and _end(module) in NAMES_OF_EXPERTS)
        changed[module if is_module else name] = pair
    modules = [name for name in changed if name not in pairs]
    parameters = [name for name in changed if name in pairs]
    known = {name if name in parameters else name.removesuffix(OF_LINEAR) for name in tensors}
    ranks = {name: pair.b.shape[-1] for name, pair in changed.items()}
    alphas = {name: _number(pair.scale * ranks[name]) for name, pair in changed.items()}
    # PEFT takes patterns for parameters too, but warns that they match no module.
    rank = Counter(ranks[name] for name in parameters or changed).most_common(1)[0][0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_causal else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": _pattern(ranks, rank),
        "alpha_pattern": _pattern(alphas, _number(alpha)),
        "target_modules": _targets(modules, known, whole=whole),
        **({"target_parameters": _targets(parameters, known, whole=whole)} if parameters else {}),
        **({"peft_version": EXPERT_LAYOUT} if parameters else {}),
        **({"fan_in_fan_out": True} if input_first else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    wrappers = _wrappers(parameters)
    found = [t for name, pair in changed.items() for t in _tensors(wrappers.get(name, name), pair)]
    return PeftAdapter(found, config)


def _wrappers(parameters: Collection[str]) -> dict[str, str]:
    """The names of PEFT's modules that change parameters of all experts: they nest, and the first is the innermost."""
    by_module: dict[str, list[str]] = {}
    for name in parameters:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    out: dict[str, str] = {}
    for module, names in by_module.items():
        names.sort(key=lambda name: nesting_order(name.rpartition(".")[2]))
        out |= {name: module + NESTED * depth for depth, name in enumerate(reversed(names))}
    return out


def _tensors(module: str, pair: Pair) -> list[AdapterTensor]:
    a, b = pair.a, pair.b
    if a.ndim == 3:  # PEFT has the experts before the ranks of A, and after the ranks of B
        a, b = a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    return [AdapterTensor(f"{PEFT_PREFIX}{module}.lora_{part}{OF_LINEAR}", x) for part, x in (("A", a), ("B", b))]


def _targets(names: Collection[str], known: Collection[str], *, whole: bool) -> list[str]:
    """The ends of names; the complete names where others of the model have the same end."""
    ends, own = (Counter(map(_end, each)) for each in (known, names))
    # The number of a layer would be the end of other names, such as `h.0`.
    short = {end for end, count in own.items() if whole and count == ends[end] and not end.isdigit()}
    return sorted({end if (end := _end(name)) in short else name for name in names}, key=_numbered)


def _end(name: str) -> str:
    """The end of a name that layers share: `q_proj` of a module, `mlp.experts.down_proj` of a parameter."""
    parts = name.split(".")
    is_parameter = parts[-1] == OF_LINEAR[1:] or EXPERTS_PART[1:-1] in parts
    return ".".join(parts[-3 if is_parameter else -1 :])


def _pattern(values: Mapping[str, float], default: float) -> dict[str, float]:
    """The values that differ from the default: by the end of the name where all names with it have the same."""
    by_end: dict[str, set[float]] = {}
    for name, value in values.items():
        by_end.setdefault(_end(name), set()).add(value)
    found = {end if len(by_end[end := _end(name)]) == 1 else name: value for name, value in values.items()}
    return {name: value for name, value in found.items() if value != default}


def _number(value: float) -> float:
    """The number, as an integer if it is one."""
    nearest = round(value)
    return nearest if abs(value - nearest) < 1e-9 * max(1.0, abs(value)) else value


def _numbered(name: str) -> list[tuple[bool, int, str]]:
    """A key that sorts names by their numbers, layer 2 before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]

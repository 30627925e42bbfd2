"""Experts in another form than transformers or a release has them."""

import re
from collections.abc import Callable, Mapping

import numpy as np


def stacked(
    tensors: Mapping[str, np.ndarray], is_stacked: Callable[[str], bool] = lambda _: True
) -> dict[str, np.ndarray]:
    """The tensors with the experts of these modules in one tensor each, as transformers 5 has them."""
    out = dict(tensors)
    for front in sorted({name.partition(".experts.")[0] for name in tensors if ".experts.0." in name}):
        if not is_stacked(front):
            continue
        parts: dict[str, list[np.ndarray]] = {}
        for name in sorted(tensors, key=lambda name: [int(x) for x in re.findall(r"\d+", name)]):
            if name.startswith(f"{front}.experts."):
                parts.setdefault(name.split(".")[-2], []).append(out.pop(name))
        gate, up, down = (np.stack(parts[kind]) for kind in ("gate_proj", "up_proj", "down_proj"))
        out[f"{front}.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        out[f"{front}.experts.down_proj"] = down
    return out

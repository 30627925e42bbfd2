"""Compares the hidden states or scores of a converted model with transformers on the same tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

VECTOR_GATES: Mapping[str, Mapping[str, float]] = {
    "float32": {"relative_error": 1e-4},
    "bfloat16": {"relative_error": 5e-2},
    "float16": {"relative_error": 5e-2},
}
"""The largest `relative_error` by dtype, as of a layer (`tpuconv.verify.layerwise.LAYER_GATES`)."""


@dataclass(frozen=True)
class VectorStatistics:
    """Statistics over all vectors: the hidden states of every token, or the scores of every prompt.

    Attributes:
        returns: what the vectors are.
        dtype: that both models computed in.
        prompts, tokens: how many were compared.
        vectors, width: how many vectors there are, and the length of one.
        max_abs_difference: largest absolute difference of two numbers.
        mean_abs_difference: mean absolute difference of two numbers.
        max_abs: largest absolute number of the reference.
        relative_error: |ours - reference| / |reference|, Euclidean norms over all vectors.
        least_cosine: the smallest cosine of the angle between a vector and its reference.
        gates: bounds by the name of a statistic.
    """

    returns: str
    dtype: str
    prompts: int
    tokens: int
    vectors: int
    width: int
    max_abs_difference: float
    mean_abs_difference: float
    max_abs: float
    relative_error: float
    least_cosine: float
    gates: Mapping[str, float]

    def failures(self) -> list[str]:
        """Returns the gates that failed, one sentence each."""
        failed = {name: float(getattr(self, name)) for name in self.gates if self.fails(name)}
        return [f"{name} is {value:.3g}, the gate is {self.gates[name]:g}" for name, value in failed.items()]

    def fails(self, name: str) -> bool:
        """Returns True if a gate failed, as it does for a NaN."""
        return not float(getattr(self, name)) <= self.gates[name]

    @property
    def passed(self) -> bool | None:
        """True if all gates hold; None if there are no gates."""
        return not self.failures() if self.gates else None

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"passed": self.passed, **asdict(self), "failures": self.failures()}


def compare_vectors(
    returns: str,
    prompts: Sequence[Sequence[int]],
    hf: Sequence[np.ndarray],
    ours: Sequence[np.ndarray],
    dtype: str,
    gates: Mapping[str, float],
) -> VectorStatistics:
    """Returns the statistics of two models' vectors.

    Args:
        returns: what the vectors are.
        prompts: token ids of each prompt.
        hf: the reference's vectors in float32 for each prompt: hidden states [T, D], or scores [1, O].
        ours: our vectors, of the same shapes.
        dtype: that both models computed in.
        gates: bounds by the name of a statistic.
    """
    theirs, mine = (np.concatenate(side).astype(np.float64) for side in (hf, ours))
    difference, lengths = np.abs(mine - theirs), np.linalg.norm(mine, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines = (mine * theirs).sum(axis=1) / np.maximum(lengths, 1e-300)
    return VectorStatistics(
        returns=returns,
        dtype=dtype,
        prompts=len(prompts),
        tokens=sum(map(len, prompts)),
        vectors=len(theirs),
        width=theirs.shape[1],
        max_abs_difference=float(difference.max()),
        mean_abs_difference=float(difference.mean()),
        max_abs=float(np.abs(theirs).max()),
        relative_error=float(np.linalg.norm(difference) / max(float(np.linalg.norm(theirs)), 1e-300)),
        least_cosine=float(cosines.min()),
        gates=gates,
    )

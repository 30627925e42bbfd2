"""Models can be trained: their gradients lead to a smaller loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.families import Case
from helpers.quantizing import ONE_OF_EACH
from helpers.sights import SIGHTS
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.models.stored import model_config
from tpuconv.verify.sights import sight_windows

FAST = {"qwen3", "qwen3_moe"}
PROMISED = 2e-3
"""By how much a step would lower the loss, without curvature."""
SMALLER = {"kimi_k3": 2e-4}
"""The same, of models whose tokens change their experts within such a step."""
IDS = np.random.default_rng(0).integers(3, 60, (2, 9)).astype(np.int32)


def cases() -> list[object]:
    return [
        pytest.param(case, id=family, marks=[] if family in FAST else [pytest.mark.slow])
        for family, case in ONE_OF_EACH.items()
    ]


def loss_of(model: nnx.Module, ids_BT: np.ndarray = IDS, **features: np.ndarray) -> jax.Array:
    """The mean negative logarithm of the probabilities of the next tokens."""
    seen = model.see(ids_BT, **features) if features else None
    log_probabilities_BTV = jax.nn.log_softmax(model(ids_BT, seen=seen)[:, :-1])
    next_BT = np.minimum(ids_BT[:, 1:], log_probabilities_BTV.shape[-1] - 1)  # a placeholder may have no logit
    return -jnp.take_along_axis(log_probabilities_BTV, next_BT[..., None], axis=-1).mean()


def step_down(
    model: nnx.Module, *given: Any, promised: float = PROMISED, **features: Any
) -> tuple[float, dict[str, float]]:
    """How much a step along the gradient lowers the loss, and the length of the gradient of each module."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit  # the same program for both losses: others may choose other experts
    def loss_at(params: nnx.State, rest: nnx.State) -> jax.Array:
        return loss_of(nnx.merge(graph, params, rest), *given, **features)

    with jax.default_matmul_precision("highest"):
        gradients = jax.jit(jax.grad(loss_at))(params, rest)
        squares: dict[str, float] = {}
        for path, leaf in nnx.to_flat_state(gradients):
            squares[path[0]] = squares.get(path[0], 0.0) + float(jnp.sum(jnp.square(leaf[...])))
        share = promised / sum(squares.values())
        moved = jax.tree.map(lambda value, slope: value - share * slope, params, gradients)
        lower = loss_at(params, rest) - loss_at(moved, rest)
    return float(lower), {name: each**0.5 for name, each in squares.items()}


@pytest.mark.parametrize("case", cases())
def test_a_step_along_the_gradient_lowers_the_loss(case: Case, orbax) -> None:
    """By what the gradient promises, but for curvature and for tokens that change their expert."""
    lower, _ = step_down(tpuconv.load(orbax(case, "float32")))
    assert lower == pytest.approx(PROMISED, rel=0.3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "qwen3_vl" else [pytest.mark.slow]) for name in SIGHTS]
)
def test_models_learn_from_what_they_see(name: str, whole: Callable[[str], tuple[Path, Path]]) -> None:
    """The encoders have gradients too."""
    manifest = read_manifest(whole(name)[1])
    windows, without = sight_windows(manifest, model_config(manifest), [IDS[0].tolist()])
    if not windows:
        pytest.skip(f"no example: {without}")
    model = tpuconv.load(manifest.folder, "float32")
    for window in windows:
        promised = SMALLER.get(name, PROMISED)
        lower, lengths = step_down(model, np.asarray(window.ids)[None], promised=promised, **window.features)
        assert lengths[window.part] > 0
        assert lower == pytest.approx(promised, rel=0.3)

"""Every family with configs that nobody chose: it computes what transformers computes, or says what it does not
support."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import tpuconv
from helpers.families import FAMILIES, Case, hf_model, save
from helpers.logits import forward
from helpers.random_configs import changed_cases
from tpuconv import api
from tpuconv.errors import TpuconvError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

LIMIT = 2e-5
"""As of the cases that were chosen: of the largest logit."""


def logits_of_transformers(case: Case, ids: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns transformers' logits (B, T, V) of `ids` (B, T), computed in `dtype`."""
    model = hf_model(case)
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # the grouped products have no float64
    with torch.no_grad():
        return model.to(dtype)(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(data=st.data())
@settings(
    max_examples=8,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_what_is_converted_computes_what_transformers_does(family: str, data: st.DataObject) -> None:
    case = data.draw(changed_cases(family))
    ids = np.random.default_rng(0).integers(3, 101, (2, 40))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            save(case, folder / "hf")
            theirs = logits_of_transformers(case, ids, torch.float32)
        except Exception:  # whatever transformers says of a config that makes no model
            theirs = np.array(np.nan)
        assume(np.isfinite(theirs).all())
        try:
            api.convert(folder / "hf", folder / "out")
        except TpuconvError:
            return
        ours = np.asarray(forward(tpuconv.load(folder / "out"), ids))
    assert ours.shape == theirs.shape
    if np.abs(ours - theirs).max() > LIMIT * np.abs(theirs).max():
        # Eleven layers of A.X K2 enlarge a rounding that much: ours has to be as near to the exact logits as theirs.
        exact = logits_of_transformers(case, ids, torch.float64)
        assert np.abs(ours - exact).max() <= 2 * np.abs(theirs - exact).max()

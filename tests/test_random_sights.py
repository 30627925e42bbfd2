"""Multimodal models with configs that nobody chose: features and logits are those of transformers and every tensor
comes back, or the config is refused."""

import json
import re
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.logits import forward
from helpers.random_sights import changed_sights, windows
from helpers.sights import OF_OTHER_TYPES, SIGHTS, Sight
from tpuconv import api
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.models.logits import features_in_order
from tpuconv.models.registry import find_family
from tpuconv.verify.reference import Reference, _seen
from tpuconv.verify.sights import SightWindow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

LIMIT = 2e-5
"""As of the cases that were chosen: of the largest value."""
LEFT_OUT = ("kimi_k3", "gemma4_with_sound", "gemma3n", *OF_OTHER_TYPES)
"""Cases of which transformers has no config, or no float64, by which roundings are told from faults."""
COUNTS_DIFFER = re.compile(r"features and \w+ tokens do not match")
"""Said by transformers where a text has another number of placeholders than it makes features."""


def reference(model: Any, window: SightWindow) -> Reference | None:
    """The outputs of transformers' model; None where it cannot compute with its config."""
    try:
        found = _seen(model, [window], "float32")
    except Exception as e:
        if COUNTS_DIFFER.search(str(e)):
            raise
        return None
    return found if np.isfinite(found.logits[0]).all() else None


def is_near(have: np.ndarray, want: np.ndarray) -> bool:
    assert have.shape == want.shape
    return bool(np.abs(have - want).max() <= LIMIT * np.abs(want).max())


def assert_nearer(have: np.ndarray, want: np.ndarray, exact: np.ndarray) -> None:
    assert is_near(have, want) or np.abs(have - exact).max() <= 2 * np.abs(want - exact).max()


def compare(case: Sight, model: Any, window: SightWindow) -> None:
    whole = getattr(case.model, "thinker", case.model)
    if (want := reference(whole, window)) is None:
        return
    ids_BT = np.array([window.ids])
    seen = model.see(ids_BT, **window.features)
    logits_TV = np.asarray(forward(model, ids_BT, seen=seen))[0]
    features_XD = features_in_order(seen)
    if is_near(logits_TV, want.logits[0]) and is_near(features_XD, want.features[0]):
        return
    precise = deepcopy(whole).double()
    precise.set_experts_implementation("eager")  # the grouped products have no float64
    exact = _seen(precise, [window], "float32")  # enlarged roundings: as near as transformers is
    assert_nearer(logits_TV, want.logits[0], exact.logits[0])
    assert_nearer(features_XD, want.features[0], exact.features[0])


@pytest.mark.parametrize("name", [name for name in SIGHTS if name not in LEFT_OUT])
@given(data=st.data())
@settings(
    max_examples=6,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_what_is_converted_sees_what_transformers_does(name: str, data: st.DataObject) -> None:
    changed = data.draw(changed_sights(name))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            case = changed.made()
            case.save(folder / "hf")
        except Exception:  # whatever transformers says of a config that makes no model
            assume(False)
        try:
            api.convert(folder / "hf", folder / "out")
        except TpuconvError:
            return
        api.export(folder / "out", folder / "back")
        source, back = read_tensors(folder / "hf"), read_tensors(folder / "back")
        assert back.keys() == {each for each in source if not re.search(case.derived, each)}
        assert all(np.array_equal(source[each], back[each]) for each in back)
        model, raw = tpuconv.load(folder / "out"), json.loads((folder / "hf" / "config.json").read_text())
        try:
            seen = windows(case, model, find_family(raw).config.around_text(raw), changed.grids)
        except UsageError:  # no image fits this config, such as 10 features for a square
            return
    for window in seen:
        compare(case, model, window)

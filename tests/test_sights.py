"""Multimodal models whole, against transformers: logits of texts with images or sounds, several in a row, padded on the
left, then with a cache; the way back to safetensors."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.sights import SIGHTS, Sight
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.stored import model_config

FAST = ("gemma3", "qwen3_vl")
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SIGHTS]
)


@cache
def made(name: str) -> Sight:
    return SIGHTS[name]()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folders of a case's source and checkpoint, by its name."""

    @cache
    def folders(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        made(name).save(folder / "src")
        api.convert(folder / "src", folder / "out")
        return folder / "src", folder / "out"

    return folders


def difference(have: Any, want: np.ndarray) -> float:
    """The largest difference, by the largest value."""
    return float(np.abs(np.asarray(have) - want).max() / max(1, np.abs(want).max()))


@EACH
def test_logits_with_images_or_sounds(name, whole):
    case = made(name)
    ids_BT, mask_BT = case.ids_BT, case.mask_BT
    want = case.reference(ids_BT, mask_BT, case.features)[mask_BT]
    model: Any = tpuconv.load(whole(name)[1])
    seen = model.see(ids_BT, mask_BT, **case.features)
    have = np.asarray(model(ids_BT, mask_BT, seen=seen))[mask_BT]
    assert difference(have, want) < case.tolerance
    assert (have.argmax(axis=-1) == want.argmax(axis=-1)).all()
    without = np.asarray(model(jnp.where(seen.slot_BT < 0, ids_BT, 0), mask_BT))[mask_BT]
    assert difference(without, want) > 0.01  # the reference has seen something

    cache = model.init_cache(*(len(ids_BT), ids_BT.shape[1] + 2), jnp.float32)
    have, cache = model(ids_BT, mask_BT, cache=cache, seen=seen)
    assert difference(np.asarray(have)[mask_BT], want) < case.tolerance
    later_BT = np.array(case.later)[: len(ids_BT)]
    longer_BT = np.concatenate([ids_BT, later_BT], axis=1)
    want = case.reference(longer_BT, np.pad(mask_BT, ((0, 0), (0, 2)), constant_values=True), case.features)[:, -2:]
    for token in range(2):
        have, cache = model(later_BT[:, token : token + 1], cache=cache)
        assert difference(have[:, 0], want[:, token]) < case.tolerance


@EACH
def test_every_tensor_comes_back(name, whole, tmp_path):
    src, out = whole(name)
    assert list(read_manifest(out).parts) == list(made(name).parts)
    api.export(out, tmp_path / "back")
    source, back = read_tensors(src), read_tensors(tmp_path / "back")
    expected = {each for each in source if not re.search(made(name).derived, each)}
    assert back.keys() == expected
    assert all(np.array_equal(source[each], back[each]) for each in expected)


@EACH
def test_stacked_layers_see_the_same(name, whole, tmp_path):
    case, folder = made(name), tmp_path / "out"
    if model_config(read_manifest(whole(name)[1])).unscannable:
        with pytest.raises(UnsupportedConfig, match="scan_layers"):
            api.convert(whole(name)[0], folder, scan_layers=True)
        return
    api.convert(whole(name)[0], folder, scan_layers=True)
    apart, stacked = tpuconv.load(whole(name)[1]), tpuconv.load(folder)
    logits = [
        np.asarray(model(case.ids_BT, case.mask_BT, seen=model.see(case.ids_BT, case.mask_BT, **case.features)))
        for model in (apart, stacked)
    ]
    assert difference(logits[1][case.mask_BT], logits[0][case.mask_BT]) < case.tolerance


def test_text_alone_is_what_it_was(whole, tmp_path):
    """Bit for bit, and the same program is compiled."""
    import jax
    from flax import nnx

    src, out = whole("qwen3_vl")
    api.convert(src, tmp_path / "text", text_only=True)
    assert not read_manifest(tmp_path / "text").parts
    ids_BT, programs, logits = jnp.asarray([[5, 9, 3, 11]]), [], []
    for folder in (out, tmp_path / "text"):
        model: Any = tpuconv.load(folder)
        for part in read_manifest(folder).parts:
            delattr(model, part)
        logits.append(model(ids_BT))
        graph, state = nnx.split(model)
        programs.append(jax.jit(lambda state, ids, graph=graph: nnx.merge(graph, state)(ids)).lower(state, ids_BT))
    assert (logits[0] == logits[1]).all()
    assert programs[0].as_text() == programs[1].as_text()


def test_features_that_do_not_fit_are_refused(whole):
    case, model = made("qwen3_vl"), tpuconv.load(whole("qwen3_vl")[1])
    patches, grids = case.features["pixel_values"], case.features["image_grid_thw"]
    with pytest.raises(UsageError, match=r"31 placeholders.*and the features of vision need 23"):
        model.see(case.ids_BT, case.mask_BT, pixel_values=patches[:92], image_grid_thw=grids[:2])
    with pytest.raises(UsageError, match="does not read the features input_features"):
        model.see(case.ids_BT, case.mask_BT, input_features=np.zeros(3))
    with pytest.raises(UsageError, match="image_grid_thw is missing"):
        model.see(case.ids_BT, case.mask_BT, pixel_values=patches)

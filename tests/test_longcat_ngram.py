"""LongCat-Flash-Lite beside the logits of its cases: names of its word embedding, the cache of tokens, shardings."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.families import BY_ID, save
from tpuconv import api
from tpuconv.models.registry import get_family
from tpuconv.notation.sharding import partition

IDS_BT = np.random.default_rng(1).integers(3, 101, (2, 19))
LONG = BY_ID["longcat_flash_ngram-long"]
OURS, TORCHS = "model.embed_tokens.weight", "model.ngram_embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(LONG, tmp_path_factory.mktemp("hf") / "hf")


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    api.convert(source, source.parent / "out")
    return tpuconv.load(source.parent / "out")


@pytest.mark.parametrize("names", [pytest.param((TORCHS,), marks=pytest.mark.slow), (OURS, TORCHS)])
def test_the_word_embedding_has_the_name_of_either_module(
    names: tuple[str, ...], source: Path, model: Any, tmp_path: Path
) -> None:
    """Two modules of the release share it: files may have it under one of both names, or twice."""
    tensors = read_tensors(source)
    tensors |= dict.fromkeys(names, tensors.pop(OURS))
    write_checkpoint(tmp_path / "hf", json.loads((source / "config.json").read_text()), tensors)
    api.convert(tmp_path / "hf", tmp_path / "out")
    np.testing.assert_array_equal(tpuconv.load(tmp_path / "out")(IDS_BT), model(IDS_BT))
    api.export(tmp_path / "out", tmp_path / "back")
    back = read_tensors(tmp_path / "back")
    assert back.keys() - {OURS, TORCHS} == tensors.keys() - {OURS, TORCHS}
    assert all(x.tobytes() == tensors[name].tobytes() for name, x in back.items() if name in tensors)


@pytest.mark.slow
def test_steps_see_the_tokens_of_earlier_steps(model: Any) -> None:
    """Rows have other numbers of padding columns, on other sides, in each step."""
    whole = np.asarray(model(IDS_BT))
    for cuts in ((1, 1, 2, 3, 12), (7, 6, 6)):
        cache, done_B = model.init_cache(2, 40), np.zeros(2, int)
        for step, count in enumerate(cuts):
            ids_BT, mask_BT = np.full((2, count + 2), 7), np.zeros((2, count + 2), bool)
            starts = (step % 3, 2 - step % 3)
            for row, start in enumerate(starts):
                ids_BT[row, start : start + count] = IDS_BT[row, done_B[row] :][:count]
                mask_BT[row, start : start + count] = True
            logits, cache = model(ids_BT, jnp.asarray(mask_BT), cache=cache)
            for row, start in enumerate(starts):
                want = whole[row, done_B[row] :][:count]
                np.testing.assert_allclose(logits[row, start : start + count], want, atol=2e-5 * np.abs(whole).max())
            done_B += count


def test_tables_are_sharded_by_the_elements_of_vectors() -> None:
    """The number of vectors has few divisors. A projection is sharded by its inputs, as the last product of an MLP."""
    rows = {row.jax_names[0].rpartition("}.")[2]: row for row in get_family("longcat_flash_ngram").table}
    sizes = {"data": 2, "tensor": 16}
    assert partition(rows["embedding"].layout, (10223617, 256), sizes) == (None, "tensor")
    assert partition(rows["out.kernel"].layout.partition("->")[2].strip(), (256, 3072), sizes)[0] == "tensor"

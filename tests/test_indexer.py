"""Attention to selected tokens and blocks: the indexers select what transformers' do."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpuconv
from helpers.conversions import convert
from helpers.families import BY_ID, hf_model, save
from tpuconv.models.deepseek_v32 import modules
from tpuconv.models.glm5_next import modules as glm5_next
from tpuconv.models.minimax_m3_vl_text import modules as minimax_m3
from tpuconv.models.qwen4_exp_text import modules as qwen4
from tpuconv.models.registry import get_family

pytestmark = pytest.mark.slow

NAMES = [
    "deepseek_v32-plain",
    "glm_moe_dsa-plain",
    "glm_moe_dsa-shared",
    "mistral_large4-plain",
    "dots3_note_text-plain",
]
LENGTH, PROMPT = 60, 45


@pytest.fixture
def selections(monkeypatch):
    """The masks [B, T, S] that our indexers return, in the order of the calls."""
    masks, real = [], modules.Indexer.__call__

    def recorded(self, *args):
        masks.append(np.asarray(mask := real(self, *args)))
        return mask

    monkeypatch.setattr(modules.Indexer, "__call__", recorded)
    return masks


def theirs(case, ids):
    """The masks [B, T, S] of transformers' indexers, of tokens that are seen."""
    found, hf = [], hf_model(case)
    for layer in getattr(hf.model, "language_model", hf.model).layers:
        if getattr(layer.self_attn, "indexer", None) is not None:
            layer.self_attn.indexer.register_forward_hook(lambda *args: found.append(args[2]))
    with torch.no_grad():
        hf(torch.tensor(ids))
    masks = []
    for top in found:
        mask = np.zeros((*ids.shape, ids.shape[1]), bool)
        np.put_along_axis(mask, top.numpy().astype(np.int64), True, axis=-1)
        masks.append(mask & np.tri(ids.shape[1], dtype=bool))
    return masks


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_are_selected(name, tmp_path, selections):
    """In a prefill, and in a prefill and steps with the cache."""
    case = BY_ID[name]
    ids = np.random.default_rng(5).integers(3, 101, (2, LENGTH))
    convert(save(case, tmp_path / "hf"), tmp_path / "out")
    model = tpuconv.load(tmp_path / "out", "float32")
    want = theirs(case, ids)
    assert len(want) == len(model.config.indexers)
    model(ids)
    for mask, expected in zip(selections, want, strict=True):
        assert (mask == expected).all()
        assert (mask.sum(-1) == np.minimum(np.arange(LENGTH) + 1, model.config.index_topk)).all()
    selections.clear()
    _, cache = model(ids[:, :PROMPT], cache=model.init_cache(2, LENGTH))
    for at in range(PROMPT, LENGTH):
        _, cache = model(ids[:, at : at + 1], cache=cache)
    layers = len(want)
    for layer, expected in enumerate(want):
        mine = selections[layer::layers]
        assert (mine[0] == expected[:, :PROMPT]).all()
        for step, mask in enumerate(mine[1:]):
            assert (mask == expected[:, PROMPT + step][:, None]).all()


@pytest.mark.parametrize("name", ["minimax_m3_vl_text-plain", "minimax_m3_vl_text-groups", "minimax_m3_vl-pairs"])
def test_the_same_blocks_are_selected(name, tmp_path, monkeypatch):
    """In a prefill, and in a prefill and steps with the cache."""
    case, ours, real = BY_ID[name], [], minimax_m3.MaxBlockIndexer.__call__

    def recorded(self, *args):
        ours.append(np.asarray(mask := real(self, *args)))
        return mask

    monkeypatch.setattr(minimax_m3.MaxBlockIndexer, "__call__", recorded)
    ids = np.random.default_rng(5).integers(3, 101, (2, LENGTH))
    convert(save(case, tmp_path / "hf"), tmp_path / "out")
    model = tpuconv.load(tmp_path / "out", "float32")
    found, hf, size = [], hf_model(case), model.config.index_block_size
    for layer in hf.get_decoder().layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(lambda *args: found.append(args[2].numpy()))
    with torch.no_grad():
        hf(torch.tensor(ids))
    blocks = np.arange(LENGTH) // size
    want = [(top[..., None] == blocks).any(-2) & np.tri(LENGTH, dtype=bool) for top in found]
    assert len(want) == len(model.config.layer_sets["indexer_layers"])
    model(ids)
    for mask, expected in zip(ours, want, strict=True):
        assert (mask == expected).all()
        assert not expected[:, :, -1].all()
    ours.clear()
    _, cache = model(ids[:, :PROMPT], cache=model.init_cache(2, LENGTH))
    for at in range(PROMPT, PROMPT + 5):  # into another block
        _, cache = model(ids[:, at : at + 1], cache=cache)
    for layer, expected in enumerate(want):
        mine = ours[layer :: len(want)]
        assert (mine[0][..., :PROMPT] == expected[:, :, :PROMPT, :PROMPT]).all()
        for step, mask in enumerate(mine[1:]):
            assert (mask == expected[:, :, PROMPT + step][:, :, None]).all()


def test_few_tokens_are_all_selected():
    """A token that sees no more than `index_topk` attends to all, as in DeepSeek V3; a later one does not."""
    case = BY_ID["deepseek_v32-plain"]
    config = get_family("deepseek_v32").config.from_hf(case.hf_config().to_dict())
    ids, few = np.random.default_rng(5).integers(3, 101, (2, 20)), config.index_topk
    sparse, dense = (modules.Model(config, dtype=jnp.float32) for _ in range(2))
    for layer in dense.layers:
        layer.attn.indexer.count = len(ids[0])
    ours, theirs = np.asarray(sparse(ids)), np.asarray(dense(ids))
    assert np.array_equal(ours[:, :few], theirs[:, :few])
    assert (ours[:, few:] != theirs[:, few:]).any(-1).all()


MEANS = {
    "qwen4_exp_text-plain": qwen4.MeanBlockIndexer,
    "qwen4_exp_text-two-tables": qwen4.MeanBlockIndexer,
    "glm5_next-plain": glm5_next.PoolIndexer,
    "glm5_next-shared": glm5_next.PoolIndexer,
}


def as_mask(selected):
    """What transformers' indexers of these models return, as a mask [B, T, S]: a mask with an axis of heads, or the
    numbers of the selected tokens and -1."""
    if selected.dtype == torch.bool:
        return selected[:, 0].numpy()
    return (selected.numpy()[..., None] == np.arange(LENGTH)).any(-2)


@pytest.mark.parametrize("name", MEANS)
def test_the_same_blocks_are_selected_by_their_means(name, tmp_path, monkeypatch):
    """In a prefill, and in steps with the cache: the complete blocks with the highest scores, and all tokens after the
    last complete one."""
    case, masks, want, kind = BY_ID[name], [], [], MEANS[name]
    real = kind.__call__

    def recorded(self, *args):
        masks.append(np.asarray(mask := real(self, *args)))
        return mask

    monkeypatch.setattr(kind, "__call__", recorded)
    ids = np.random.default_rng(5).integers(3, 101, (2, LENGTH))
    hf = hf_model(case)
    for layer in hf.get_decoder().layers:
        if getattr(getattr(layer, "self_attn", None), "indexer", None) is not None:
            layer.self_attn.indexer.register_forward_hook(lambda *args: want.append(as_mask(args[2])))
    with torch.no_grad():
        hf(torch.tensor(ids))
    convert(save(case, tmp_path / "hf"), tmp_path / "out")
    model = tpuconv.load(tmp_path / "out", "float32")
    config, seen = model.config, np.arange(LENGTH) + 1
    rate = config.index_kpool if case.family == "glm5_next" else config.indexer_compress_ratio
    budget = config.index_topk if case.family == "glm5_next" else config.indexer_budget
    counts = np.minimum(seen, budget + seen % rate)
    model(ids)
    for mask, expected in zip(masks, want, strict=True):
        assert (mask == expected).all()
        assert (mask.sum(-1) == counts).all()
    masks.clear()
    _, cache = model(ids[:, :PROMPT], cache=model.init_cache(2, LENGTH))
    for at in range(PROMPT, LENGTH):
        _, cache = model(ids[:, at : at + 1], cache=cache)
    for layer, expected in enumerate(want):
        mine = np.concatenate([mask[:, :, :LENGTH] for mask in masks[layer :: len(want)]], axis=1)
        assert (mine == expected).all()

"""Layers of several kinds that repeat with a period: stacked for each place, in our own tree and for MaxText."""

import jax
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.conversions import same_bits
from helpers.families import Case, save
from helpers.logits import forward
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.periods import LayerStacks, find_period
from tpuconv.verify.pairs import tensor_differences
from tpuconv.verify.weights.trees import layer_weights

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
    "num_hidden_layers": 5,
}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 8},
    **{"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
}
QWEN3_NEXT = Case("qwen3_next-rest", "qwen3_next", "qwen3_next", DELTA | LINEAR)
GRANITE = Case(
    "granitemoehybrid-rest",
    "granitemoehybrid",
    "granitemoehybrid",
    {"layer_types": ["mamba", "attention", "mamba", "attention", "mamba"], "num_hidden_layers": 5},
)


@pytest.mark.parametrize(
    ("kinds", "period"),
    [("aaaa", 1), ("a", 1), ("abab", 2), ("ababa", 2), ("aabaabaa", 3), ("abc", 0), ("abbb", 0), ("ab", 0)],
)
def test_the_period_is_the_shortest_that_repeats_twice(kinds, period):
    assert find_period(kinds) == period


def test_every_layer_is_in_one_place():
    stacks = LayerStacks(8, 3)
    assert stacks.find(0) == ("layers.0", 0)
    assert stacks.find(5) == ("layers.2", 1)
    assert stacks.find(7) == ("rest.1", None)
    assert LayerStacks(3, 1).find(2) == ("layers", 2)
    found = [stacks.find(layer) for layer in range(8)]
    assert len(set(found)) == 8
    held = stacks.names_in("layers.2.attn.q.kernel")
    assert held == [("layers.2.attn.q.kernel", 0), ("layers.5.attn.q.kernel", 1)]
    assert stacks.names_in("rest.1.mlp.up.kernel") == [("layers.7.mlp.up.kernel", None)]
    assert stacks.names_in("embed.embedding") == [("embed.embedding", None)]
    assert LayerStacks(2, 1).names_in("layers.norm.scale") == [("layers.0.norm.scale", 0), ("layers.1.norm.scale", 1)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The source of a case, and its checkpoints with layers apart and stacked."""
    folder = tmp_path_factory.mktemp("periods")
    save(QWEN3_NEXT, folder / "hf")
    for name, scan in (("apart", False), ("stacked", True)):
        api.convert(folder / "hf", folder / name, scan_layers=scan)
    return folder


def test_the_stacked_model_has_the_logits_of_the_plain_one(made):
    """Of a sequence, and with a cache of both kinds of layers."""
    ids = np.random.default_rng(0).integers(3, 90, (2, 12))
    apart, stacked = (tpuconv.load(made / name) for name in ("apart", "stacked"))
    manifest = read_manifest(made / "stacked")
    assert manifest.arrays["layers.1.attn.q.kernel"].shape[0] == 2
    assert manifest.arrays["layers.1.attn.q.kernel"].axes.startswith("Y ")
    assert "rest.0.attn.a_log" in manifest.arrays
    want = np.asarray(apart(ids))
    limit = 2e-5 * np.abs(want).max()
    assert np.abs(np.asarray(stacked(ids)) - want).max() < limit
    cache = stacked.init_cache(2, 12)
    first, cache = stacked(ids[:, :9], cache=cache)
    more, cache = stacked(ids[:, 9:], cache=cache)
    assert np.abs(np.concatenate([first, more], axis=1) - want).max() < limit


def test_a_stacked_checkpoint_comes_back_as_it_was(made, tmp_path):
    api.verify(made / "stacked").check()
    api.export(made / "stacked", tmp_path / "back")
    source, back = read_tensors(made / "hf"), read_tensors(tmp_path / "back")
    assert back.keys() == read_manifest(made / "stacked").source_names
    assert all(same_bits(values, source[name]) for name, values in back.items())


def test_a_stacked_checkpoint_is_compared_with_one_of_separate_layers(made):
    apart, stacked = (read_manifest(made / name) for name in ("apart", "stacked"))
    for reference, other in ((apart, stacked), (stacked, apart), (stacked, stacked)):
        differences = list(tensor_differences(layer_weights(reference), layer_weights(other)))
        assert {difference.name for difference in differences} == apart.arrays.keys()
        assert all(difference.snr_db == np.inf for difference in differences)


@pytest.mark.slow
def test_stacked_layers_are_quantized_as_separate_ones(made, tmp_path):
    """Each layer has its own scales, and a changed model is the same in both forms."""
    for name in ("apart", "stacked"):
        api.quantize(made / name, tmp_path / name, config="int8_weight_only")
    apart, stacked = (read_manifest(tmp_path / name) for name in ("apart", "stacked"))
    ids = np.random.default_rng(1).integers(3, 90, (1, 8))
    want, have = (np.asarray(forward(tpuconv.load(tmp_path / name), ids)) for name in ("apart", "stacked"))
    assert np.abs(have - want).max() < 2e-5 * np.abs(want).max()
    assert stacked.arrays["layers.1.attn.q.kernel.array.scale"].shape[0] == 2
    assert len(apart.quantization["parameters"]) > len(stacked.quantization["parameters"])


@pytest.mark.slow
def test_a_mesh_shards_stacked_layers(made):
    mesh = jax.make_mesh((1,), ("tensor",))
    ids = np.random.default_rng(0).integers(3, 90, (1, 6))
    want = np.asarray(forward(tpuconv.load(made / "stacked"), ids))
    assert np.array_equal(np.asarray(forward(tpuconv.load(made / "stacked", mesh=mesh), ids)), want)


def test_layers_that_do_not_repeat_and_parts_of_periods_are_refused(made, tmp_path):
    with pytest.raises(UsageError, match="`layers=` and layers that are stacked by periods exclude each other"):
        api.convert(made / "hf", tmp_path / "part", scan_layers=True, layers=range(0, 2))
    config = DELTA | LINEAR | {"layer_types": ["linear_attention"] * 4 + ["full_attention"]}
    save(Case("qwen3_next-once", "qwen3_next", "qwen3_next", config), tmp_path / "hf")
    with pytest.raises(UnsupportedConfig, match="do not repeat with a period"):
        api.convert(tmp_path / "hf", tmp_path / "out", scan_layers=True)

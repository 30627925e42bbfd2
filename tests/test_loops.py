"""Looped layers: caches, work and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.families import BY_ID
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.models.registry import find_family
from tpuconv.quantize.calibrate.layers import LayerRunner
from tpuconv.verify.benchmark import Roofline

CASE = BY_ID["dory-three-loops"]


@pytest.fixture(scope="module")
def model():
    raw = CASE.hf_config().to_dict()
    family = find_family(raw)
    return nnx.eval_shape(lambda: family.model_class(family.config.from_hf(raw), dtype=jnp.float32))


def test_a_cache_has_keys_of_each_execution(model):
    assert model.config.executed_layers == (0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4)
    cache = jax.eval_shape(lambda: model.init_cache(2, 8))
    assert len(cache.layers) == 11
    assert len(model.layers) == 5


def test_work_counts_each_execution(model):
    def weights(part):
        return sum(x.size for x in jax.tree.leaves(nnx.state(part)))

    again = 2 * sum(weights(model.layers[i]) for i in (1, 2, 3))
    work = Roofline(model)
    assert work.dense[1] == weights(model) + again
    assert work.dense[0] == 32 * (weights(model) + again)


def test_layers_that_run_several_times_are_not_run_one_by_one(orbax):
    with pytest.raises(UnsupportedConfig, match="run several times"):
        LayerRunner(read_manifest(orbax(CASE, "bfloat16")), 8)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"recurrent_kv_cache_mode": "last_loop"}, "recurrent_kv_cache_mode='last_loop' is not implemented"),
        ({"n_input_layers": 4}, "do not count num_hidden_layers"),
        ({"layer_types": ["full_attention", "mlp", "mlp"]}, "no list of pairs"),
        ({"num_hidden_layers": 9}, "no list of pairs"),
        ({"initializer_range": 0.0}, "not positive"),
    ],
)
def test_a_config_of_dory_is_checked(change, error):
    raw = CASE.hf_config().to_dict() | change
    family = find_family(raw)
    with pytest.raises((ConfigError, UnsupportedConfig)) as raised:
        family.check_config(raw)
    assert error in str(raised.value) + " ".join(map(str, getattr(raised.value, "details", ())))


def test_layers_are_counted_with_and_without_their_mlps():
    raw = CASE.hf_config().to_dict()
    halves = {key: raw[key] // 2 for key in ("num_hidden_layers", "n_input_layers", "n_output_layers")}
    alone = raw | halves | {"n_recurrent_layers": None, "layer_types": raw["layer_types"][::2]}
    config = find_family(raw).config
    assert config.from_hf(alone).executed_layers == config.from_hf(raw).executed_layers
    assert np.array_equal(config.from_hf(alone).windows, config.from_hf(raw).windows)


@pytest.mark.parametrize("is_older", [False, True])
def test_stacks_of_hrm_text_run_in_turn(is_older):
    raw = BY_ID["hrm_text-more-cycles"].hf_config().to_dict()
    assert raw["num_hidden_layers"] == 9  # as transformers writes it: an entry of the cache for each execution
    if is_older:
        raw |= {"num_hidden_layers": raw.pop("num_layers_per_stack")}
    config = find_family(raw).config.from_hf(raw)
    assert config.num_hidden_layers == 2
    assert config.executed_layers == (0, 0, 1) * 3


def test_keys_of_loop_config_are_read():
    raw = BY_ID["inkling2_loop_text-plain"].hf_config().to_dict()
    config = find_family(raw).config
    loop = {"core_start": 4, "core_end": 6, "num_passes": 2, "gate_rank": 5}
    nested = config.from_hf(raw | {"loop_config": loop})
    assert nested.executed_layers == (0, 1, 2, 3, 4, 5, 4, 5, 6)
    assert nested.loop_gate_rank == 5
    assert not config.ignored_keys(raw | {"loop_config": loop})
    with pytest.raises(ConfigError, match="loop_config=3 is no object"):
        config.from_hf(raw | {"loop_config": 3})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"loop_layer_index_start": 3}, "loop_layer_index_start=3 is not a multiple of n_layers_per_attn_res_block=2"),
        ({"loop_layer_index_end": 5}, "loop_layer_index_end=5 is not a multiple"),
        ({"loop_layer_index_end": 8}, "from layer 2 to 8 is not inside of num_hidden_layers=7"),
        ({"loop_layer_index_start": 6}, "from layer 6 to 6 is not inside"),
        ({"loop_layer_index_start": 0}, "loop_layer_index_start=0 is less than 1"),
        ({"loop_num_passes": 0}, "loop_num_passes=0 is less than 1"),
    ],
)
def test_a_loop_of_inkling_2_is_checked(change, error):
    raw = BY_ID["inkling2_loop_text-plain"].hf_config().to_dict() | change
    with pytest.raises(ConfigError) as raised:
        find_family(raw).config.from_hf(raw)
    assert error in str(raised.value) + " ".join(map(str, raised.value.details))

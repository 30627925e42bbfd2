"""Weight maps: any tree of a model to any other one, on arrays in memory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh

from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.commands import tpuconv as command
from helpers.conversions import assert_same, same_bits
from helpers.families import BY_ID, CASES, CORE, Case
from helpers.released import GEMMA4, GEMMA4_SHARED, gemma3n
from helpers.trainers import arrays_of, changed_leaf
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, MappingError, UnsupportedConfig, UsageError
from tpuconv.models.common.placement import sharding
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.registry import FAMILIES
from tpuconv.notation.arithmetic import Plus, Times
from tpuconv.notation.arrays import NUMPY
from tpuconv.notation.sharding import MESH_AXES
from tpuconv.targets.registry import get_target, target_names
from tpuconv.weight_map.local import letters_divided, spec_of
from tpuconv.weight_map.on_devices import JAX

PROGRAM = Path(__file__).parent / "helpers" / "mapped_on_devices.py"
TREES = [name for name in target_names() if not get_target(name).is_safetensors]


def in_jax(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In the dtypes that jax has: DeepSeek V4 stores the experts of tokens in int64."""
    return {name: array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) for name, array in arrays.items()}


def on_host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in tree.items()}


# -- every family and tree --------------------------------------------------------------------------------------------


def forms() -> list:
    first = {case.family: case for case in reversed(CASES) if case.family in FAMILIES}
    first |= {family: BY_ID[f"{family}-released"] for family in ("gemma3_text", "gemma4_text", "deepseek_v4")}
    shared = Case("gemma4-shared", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_SHARED)
    fast = {
        *("llama-plain-maxtext-scanned", "qwen3_moe-few-experts-tunix", "qwen3-tied-jax-llm-examples"),
        *("deepseek_v3-groups-nnx", "gemma4-shared-tunix"),
    }
    out = []
    for case in (*first.values(), shared, gemma3n(7)):
        for tree in TREES:
            trees = get_target(tree).trees
            if trees is not None and (case.written_as or case.model_type) not in trees:
                continue
            for scan in (False, True) if get_target(tree).layer_axis is not None else (False,):
                if tree == "nnx" and case.family not in CORE:
                    continue  # our own tree under other names
                name = f"{case.id}-{tree}{'-scanned' * scan}"
                out.append(pytest.param(case, tree, scan, id=name, marks=[] if name in fast else [pytest.mark.slow]))
    return out


@pytest.mark.parametrize(("case", "tree", "scan"), forms())
def test_a_map_makes_what_convert_and_export_write(case: Case, tree, scan, hf, tmp_path):
    """Bit for bit, as one program and as a stream; and back."""
    try:
        api.convert(hf(case), tmp_path / "out", target=tree, scan_layers=scan)
    except (UnsupportedConfig, ConfigError) as error:
        try:  # layers that cannot be stacked stay apart in a map
            assert not api.weight_map(hf(case), "huggingface", tree, scan_layers=scan).target.form.scan_layers
        except type(error):
            pass
        pytest.skip(f"{tree} has no such model: {error.message}")
    wanted = in_jax(arrays_of(tmp_path / "out"))
    there = api.weight_map(hf(case), "huggingface", tree, scan_layers=scan)
    source = in_jax({name: x for name, x in read_tensors(hf(case)).items() if name in there.source.shapes})
    assert_same(on_host(jax.jit(there)(source)), wanted)
    assert_same(on_host(there.stream(source)), wanted)
    released = in_jax(exported(tmp_path / "out", hf(case), tmp_path / "back"))
    assert_same(on_host(jax.jit(there.inverse)(wanted)), {name: released[name] for name in there.source.shapes})
    assert_same(on_host(there.inverse.stream(wanted)), {name: released[name] for name in there.source.shapes})
    rounded = {name for row in there.rows if not row.exact for name in row.released}
    if not rounded:
        assert_same({name: released[name] for name in source}, source)


ALL = ("tpuconv", "nnx", "maxtext", "tunix", "jax-llm-examples", "huggingface", "vllm")
PAIRS = {
    "qwen3-tied": ALL,
    "llama-plain": ALL,
    "qwen3_moe-few-experts": ALL,
    "gpt_oss-plain": ("tpuconv", "maxtext", "huggingface"),
    "deepseek_v3-groups": ("tpuconv", "maxtext", "huggingface"),
}


@pytest.mark.parametrize(
    ("case", "names"),
    [
        pytest.param("qwen3-tied", ("maxtext", "tunix", "vllm"), id="some"),
        *(pytest.param(case, names, id=case, marks=pytest.mark.slow) for case, names in PAIRS.items()),
    ],
)
def test_every_pair_of_trees_has_a_map(case, names, hf, tmp_path):
    """What `convert` writes for one target becomes what it writes for another one; but for a change that rounds on the
    way back from a target that has it."""
    source, trees = hf(BY_ID[case]), {}
    tensors = read_tensors(source)
    for name in names:
        if name in TREES:
            scan = api.weight_map(source, name, name, scan_layers=True).source.form.scan_layers
            api.convert(source, tmp_path / name, target=name, scan_layers=scan)
            trees[name] = arrays_of(tmp_path / name)
        else:
            trees[name] = on_host(jax.jit(api.weight_map(source, "huggingface", name))(tensors))
    for one, other in permutations(trees, 2):
        there = api.weight_map(source, one, other, scan_layers=True)
        made = on_host(there.stream(trees[one]))
        rounded = {name for named in there.steps if named.step.rounds and one == "maxtext" for name in named.dst}
        assert made.keys() == trees[other].keys()
        different = {name for name in made if not same_bits(made[name], trees[other][name])}
        assert (one, other, different - rounded) == (one, other, set())


CHAINS = {
    "qwen3_moe-few-experts": ("maxtext", "tunix", "tpuconv", "vllm"),
    "mixtral-plain": ("maxtext", "tpuconv", "vllm"),
    "gpt_oss-plain": ("maxtext", "tpuconv"),
}


@pytest.mark.parametrize("scan", [False, True], ids=["apart", "scanned"])
@pytest.mark.parametrize("case", CHAINS)
def test_pairs_of_experts_have_a_map(case, scan, hf):
    """Through the trees of trainers and back: bit for bit. To vLLM, which joins two matrices, and back."""
    source, rng = hf(BY_ID[case]), np.random.default_rng(0)
    shapes = api.weight_map(source, "huggingface", "tpuconv").source.shapes
    pairs = {}
    for name in shapes:
        if "experts." in name and "bias" not in name:
            *stack, rows, columns = shapes[name]
            rows, columns = (columns, rows) if stack else (rows, columns)  # GPT-OSS has [E, D, M] of all experts
            pairs[name] = (rng.normal(size=(*stack, 4, columns)), rng.normal(size=(*stack, rows, 4)))
            pairs[name] = tuple(x.astype(np.float32) for x in pairs[name])
    names = ("huggingface", *CHAINS[case], "huggingface")
    now = pairs
    for one, other in pairwise(names):
        now = api.weight_map(source, one, other, scan_layers=scan).lora(now, 8.0)
    assert now.keys() == pairs.keys()
    for name, pair in pairs.items():
        assert all(same_bits(made, wanted) for made, wanted in zip(now[name], pair, strict=True))


def exported(out: Path, source: Path, folder: Path) -> dict[str, np.ndarray]:
    """What `export` writes of a checkpoint; with the tensors of its source that the checkpoint lacks."""
    skipped = any(is_outside(skip["reason"]) for skip in read_manifest(out).raw["skipped"])
    api.export(out, folder, with_skipped=source if skipped else None)
    return read_tensors(folder)


# -- vLLM -------------------------------------------------------------------------------------------------------------


def joined_by_hand(tensors: dict[str, np.ndarray], layer: str, names: Sequence[str], shards: int) -> np.ndarray:
    """The rows of several matrices, one below the other in each shard."""
    parts = [np.split(tensors[f"{layer}.{name}"], shards) for name in names]
    return np.concatenate([part[shard] for shard in range(shards) for part in parts])


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("case", ["qwen3-tied", "qwen3_moe-few-experts", "mixtral-plain"])
def test_vllm_has_joined_rows(case, shards, hf):
    """As vLLM's loaders of QKVParallelLinear, MergedColumnParallelLinear and FusedMoE cut and lay them."""
    tensors = read_tensors(hf(BY_ID[case]))
    there = api.weight_map(hf(BY_ID[case]), "huggingface", "vllm", tensor_parallel=shards)
    made = on_host(jax.jit(there)(tensors))
    attention = "model.layers.1.self_attn"
    names = [f"{part}_proj.weight" for part in "qkv"]
    assert same_bits(made[f"{attention}.qkv_proj.weight"], joined_by_hand(tensors, attention, names, shards))
    experts = next((name for name in tensors if ".layers.1." in name and ".experts.0." in name), None)
    if experts is None:
        names = ["gate_proj.weight", "up_proj.weight"]
        wanted = joined_by_hand(tensors, "model.layers.1.mlp", names, shards)
        assert same_bits(made["model.layers.1.mlp.gate_up_proj.weight"], wanted)
    else:
        front = experts.partition("0.")[0].partition(".experts.")[0] + ".experts"
        gate, up, down = ("w1", "w3", "w2") if case.startswith("mixtral") else ("gate_proj", "up_proj", "down_proj")
        numbers = range(len({name for name in tensors if name.startswith(front) and name.endswith(f"{down}.weight")}))
        each = [joined_by_hand(tensors, f"{front}.{i}", [f"{gate}.weight", f"{up}.weight"], shards) for i in numbers]
        assert same_bits(made[f"{front}.w13_weight"], np.stack(each))
        assert there.target.axes[f"{front}.w2_weight"] == "E D M"
        assert same_bits(made[f"{front}.w2_weight"], np.stack([tensors[f"{front}.{i}.{down}.weight"] for i in numbers]))
    assert_same(on_host(jax.jit(there.inverse)(made)), tensors)


def test_experts_that_lie_as_inputs_by_outputs_are_turned(hf):
    """Llama 4 has all experts of a layer in one tensor [E, D, 2 M]."""
    tensors = read_tensors(hf(BY_ID["llama4-scout"]))
    there = api.weight_map(hf(BY_ID["llama4-scout"]), "huggingface", "vllm", tensor_parallel=2)
    source = {name: x for name, x in tensors.items() if name in there.source.shapes}
    made = on_host(jax.jit(there)(source))
    name = next(name for name in source if name.endswith("experts.gate_up_proj"))
    gate, up = (np.split(x, 2, 1) for x in np.split(source[name].transpose(0, 2, 1), 2, 1))
    wanted = np.concatenate([gate[0], up[0], gate[1], up[1]], 1)
    assert same_bits(made[name.replace("gate_up_proj", "w13_weight")], wanted)
    down = name.replace("gate_up_proj", "down_proj")
    assert same_bits(made[name.replace("gate_up_proj", "w2_weight")], source[down].transpose(0, 2, 1))
    assert_same(on_host(jax.jit(there.inverse)(made)), source)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (qwen3_config(), {"tensor_parallel": 4}, "4 shards do not divide the key-value heads of"),
        ({"model_type": "deepseek_v3"}, {}, "the tree of vLLM is known for models with q_proj"),
        ({"model_type": "gpt_oss"}, {}, "it is not known how vLLM joins"),
        ({"model_type": "nemotron_h"}, {}, "it is not known how vLLM joins"),
        ({"model_type": "minimax"}, {}, "it is not known how vLLM joins"),
    ],
)
def test_what_vllm_joins_in_another_way_is_refused(model, options, message):
    with pytest.raises(UnsupportedConfig, match=message):
        api.weight_map(model, "tpuconv", "vllm", **options)


# -- trees of trainers, and data --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("qwen3") / "hf", qwen3_config())


def test_trees_of_trainers_are_found_below_other_names(qwen3):
    """A nested tree of MaxText as it lives, `base`, or in its files; beside the state of an optimizer."""
    tensors = read_tensors(qwen3)
    there = api.weight_map(qwen3, "maxtext", "huggingface", scan_layers=True)
    tree = jax.jit(there.inverse)(tensors)
    bare = {name.removeprefix("params.params."): x for name, x in tree.items()}
    for front in ("", "base.", "params.", "params.params."):
        assert_same(on_host(jax.jit(there)({front + name: x for name, x in bare.items()})), tensors)
    nested = unflatten_dict(bare, sep=".")
    state = {"params": {"params": nested}, "step": np.int32(3), "opt_state": [{"mu": nested}]}
    assert_same(on_host(jax.jit(there)(state)), tensors)


def test_linen_variables_of_maxtext_are_found_in_their_collections(hf):
    case = BY_ID["deepseek_v3-groups"]
    weight_map = api.weight_map(hf(case), "huggingface", "maxtext")
    arrays = weight_map(read_tensors(hf(case)))
    tree: dict[str, Any] = {}
    for name, values in arrays.items():
        collection = "MoEBiasVar" if name.endswith(".gate.bias") else "params"
        tree = changed_leaf(tree, name.replace("params.params", collection), values)
    assert tree["MoEBiasVar"]
    assert_same(weight_map.inverse(tree), weight_map.inverse(arrays))


def test_the_state_of_a_model_of_flax(qwen3, tmp_path):
    """`nnx.state` of the model that `load` returns, and the layers of MaxText."""
    from flax import nnx

    import tpuconv

    api.convert(qwen3, tmp_path / "out")
    state = nnx.state(tpuconv.load(tmp_path / "out"))
    assert_same(on_host(api.weight_map(tmp_path / "out", "nnx", "huggingface")(state)), read_tensors(qwen3))
    there = api.weight_map(tmp_path / "out", "tpuconv", "maxtext", scan_layers=True)
    with pytest.raises(MappingError, match="the arrays differ from the tree tpuconv with scanned layers") as error:
        there(state)
    assert "missing: layers.attn_norm.scale" in error.value.details
    assert "unknown: layers.{0...2}.attn_norm.scale" in error.value.details


def test_arrays_that_do_not_fit_are_named(qwen3):
    tensors = read_tensors(qwen3)
    there = api.weight_map(qwen3, "huggingface", "vllm")
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(MappingError, match="the arrays differ from the tree huggingface") as error:
        there(tensors | {name: tensors[name][1:]})
    assert error.value.details == (f"{name} is [31, 32] instead of [32, 32]",)
    with pytest.raises(UsageError, match=r"have the dtypes bfloat16, float32"):
        there(tensors | {name: tensors[name].astype(np.float32)})


def test_a_map_is_data_and_says_what_rounds():
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    for head_dim, exact in ((16, True), (24, False)):
        raw = {"model_type": "llama", **sizes, "head_dim": head_dim, "num_key_value_heads": 2}
        there = api.weight_map(raw, "maxtext", "huggingface", scan_layers=True)
        (row,) = [row for row in there.rows if row.source.changes]
        assert row.source.names == ("params.params.decoder.layers.self_attention.query.kernel",)
        assert row.source.layouts == ("L (N H) D -> D L N H",)
        assert row.source.changes == ("* H^-0.5",)
        assert row.target.layouts == ("(N H) D",)
        assert row.target.names == row.released == ("model.layers.{0,1}.self_attn.q_proj.weight",)
        assert (row.exact, there.to_json()["exact"]) == (exact, exact)
    json.dumps(there.to_json())


def test_layers_that_cannot_be_stacked_stay_apart_in_our_tree(hf):
    """MaxText has the dense layers and the layers with experts in two stacks."""
    there = api.weight_map(hf(BY_ID["deepseek_v3-groups"]), "maxtext", "tpuconv", scan_layers=True)
    assert (there.source.form.scan_layers, there.target.form.scan_layers) == (True, False)
    with pytest.raises(UnsupportedConfig, match="tunix has no table for deepseek_v3"):
        api.weight_map(hf(BY_ID["deepseek_v3-groups"]), "maxtext", "tunix")


def test_a_change_that_both_trees_have_is_left_out():
    """From MaxText to MaxText nothing is divided and multiplied again, which would round."""
    raw = {"model_type": "gemma3_text", "hidden_size": 40, "num_hidden_layers": 2, "vocab_size": 64}
    there = api.weight_map(raw, "maxtext", "maxtext")
    assert all(row.exact and not row.source.changes for row in there.rows)
    rng = np.random.default_rng(0)
    given = {name: rng.normal(size=shape).astype("bfloat16") for name, shape in there.source.shapes.items()}
    assert_same(on_host(jax.jit(there)(given)), given)


def test_no_result_is_the_buffer_of_an_argument(qwen3):
    """A trainer may donate its weights to the next step while a sampler has the results."""
    there = api.weight_map(qwen3, "tunix", "huggingface")
    tensors = read_tensors(qwen3)
    given = there.inverse(tensors)
    made, jitted, streamed = there(given), jax.jit(there)(given), there.stream(given, free=False)
    for x in given.values():
        x.delete()
    assert_same(on_host(made), tensors)
    assert_same(on_host(jitted), tensors)
    assert_same(on_host(streamed), tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("change", [Times("H", -0.5), Times("D", 0.5, in_their_dtype=True), Plus(1.0)])
def test_values_change_on_devices_as_in_numpy(change, dtype, users_compiler):
    """XLA divides by a constant as if it multiplied, leaves out a rounding before a wider dtype, and rounds the
    subnormal numbers of float16 to zero."""
    sizes, rng = {"H": 24, "D": 1152}, np.random.default_rng(0)
    values = (rng.normal(size=4096) * 10.0 ** rng.integers(-8, 1, 4096)).astype(jax.numpy.dtype(dtype))

    def changed(x, arrays):
        applied = change.apply(x, sizes, arrays)
        return applied, change.undo(x, sizes, arrays), change.undo(applied, sizes, arrays)

    compiled = jax.jit(lambda x: changed(x, JAX), compiler_options=users_compiler)
    have, want = compiled(values), changed(values, NUMPY)
    assert [same_bits(np.asarray(a), b) for a, b in zip(have, want, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("maxtex", "vllm", {}), "there is no tree 'maxtex'"),
        (("tunix", "huggingface", {"tensor_parallel": 2}), "tunix and huggingface have no shards"),
    ],
)
def test_wrong_arguments_are_named(given, message):
    source, target, options = given
    with pytest.raises(UsageError, match=message):
        api.weight_map(qwen3_config(), source, target, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: 1.0, "norm.scale is a float, no array"),
        (lambda x: "x", "norm.scale is a str, no array"),
        (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), "norm.scale is a ShapeDtypeStruct, no array"),
        (lambda x: x.astype("int8"), "norm.scale is int8: quantized values are not mapped"),
        (lambda x: x[1:], r"norm.scale is \[31\] instead of \[32\]"),
        (lambda x: None, "missing: norm.scale"),
    ],
)
def test_wrong_arrays_are_named(change, message):
    there = api.weight_map(qwen3_config(), "tpuconv", "huggingface")
    given = {name: np.zeros(shape, "f4") for name, shape in there.source.shapes.items()}
    given["norm.scale"] = change(given["norm.scale"])
    for call in (there, there.stream):
        with pytest.raises(MappingError) as error:
            call(given)
        assert len(error.value.details) == 1
        assert re.fullmatch(message, error.value.details[0])


def test_wrong_sides_shardings_and_pairs_are_named():
    there = api.weight_map(qwen3_config(), "tpuconv", "huggingface")
    given = {name: np.zeros(shape, "f4") for name, shape in there.source.shapes.items()}
    with pytest.raises(UsageError, match="a map has no side 'targets'"):
        there.shardings("targets", AbstractMesh((1,), ("tensor",)))
    shardings = dict.fromkeys(there.target.shapes, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    del shardings["model.norm.weight"]
    with pytest.raises(UsageError, match=r"out_shardings has no sharding of model\.norm\.weight"):
        there.stream(given, shardings, free=False)
    empty = (np.zeros((0, 32)), np.zeros((64, 0)))
    for pair in (None, (np.zeros((32, 2)),), (1.0, 2.0), (np.float32(1), np.float32(2)), empty):
        with pytest.raises(MappingError) as error:
            there.lora({"layers.0.mlp.up.kernel": pair}, 1.0)
        assert error.value.details == ("layers.0.mlp.up.kernel: two matrices are a pair",)


def test_a_quantized_checkpoint_has_no_map(qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "out", quantize="int8_weight_only")
    with pytest.raises(UsageError, match="has quantized parameters"):
        api.weight_map(tmp_path / "out", "tpuconv", "huggingface")


def test_a_checkpoint_knows_the_names_of_its_release(qwen3, tmp_path):
    """Of a release with a prefix, whose config.json does not say so."""
    tensors = {f"module.{name}": x for name, x in read_tensors(qwen3).items()}
    write_checkpoint(tmp_path / "hf", qwen3_config(), tensors)
    api.convert(tmp_path / "hf", tmp_path / "out")
    for model in (tmp_path / "hf", tmp_path / "out"):
        assert api.weight_map(model, "tpuconv", "huggingface").target.shapes.keys() == tensors.keys()
    assert set(api.weight_map(tmp_path / "hf" / "config.json", "tpuconv", "huggingface").target.shapes) == set(
        read_tensors(qwen3)
    )


def test_the_command_shows_a_map(tmp_path):
    found = json.loads(command("families", "qwen3", "--map", "maxtext:vllm", "--scan-layers", "--json").stdout)
    assert found["source"] == {"tree": "maxtext", "scan_layers": True, "tensor_parallel": 1}
    assert found["target"] == {"tree": "vllm", "scan_layers": False, "tensor_parallel": 1}
    (row,) = [row for row in found["rows"] if "qkv_proj" in row["target"]["names"][0]]
    assert row["source"]["layouts"] == ["L (N H) D -> D L N H", "L (K H) D -> D L K H"]
    assert row["target"]["layouts"] == ["(N H) D, (K H) D, (K H) D -> ((N H) + (K H) + (K H)) D"]
    shown = command("families", "qwen3", "--map", "maxtext:vllm", "--tensor-parallel", "2").stdout
    assert "qwen3: maxtext to vllm in 2 shards" in shown
    assert "SRC:DST" in command("families", "--map", "maxtext:vllm", code=2).stderr
    assert "--scan-layers goes with --map" in command("families", "qwen3", "--scan-layers", code=2).stderr


# -- parts of devices -------------------------------------------------------------------------------------------------

MESH = {"tensor": 4, "data": 2, "expert": 2, "group": 1}


@pytest.mark.parametrize(
    ("tree", "specs", "parts"),
    [
        ("tpuconv", [(None, None, "tensor", None), (None, None, "tensor", None)], {"N": 4}),
        ("tpuconv", [("data", None, "tensor"), (None, "data", ("tensor", "group"))], {"N": 4, "D": 2}),
        ("tpuconv", [(), ()], {}),
        ("huggingface", [(None, None, "tensor"), *[("tensor",)] * 4], {"N": 4}),
        # sharded in one tree alone, or in another way
        ("tpuconv", [(None, None, "tensor"), ()], None),
        ("tpuconv", [(None, None, "tensor"), (None, None, ("tensor", "expert"))], None),
        # within a head; the 6 heads of a tree are not divided by 4
        ("huggingface", [(None, None, None, "tensor"), *[("tensor",)] * 3], None),
        ("tpuconv", [(None, None, ("tensor", "expert")), (None, None, ("tensor", "expert"))], None),
        # layers of a device, of which the other tree needs one by one
        ("tpuconv", [(None, "data", None), ("data", None, None)], {"L": 2}),
        ("huggingface", [(None, "data", None), *[()] * 4], None),
    ],
)
def test_each_device_has_what_it_needs(tree, specs, parts):
    """Queries [D, L, N, H] of MaxText with 4 layers and 4 heads become [L, D, N, H] or matrices of [N H, D]."""
    raw = qwen3_config(num_hidden_layers=4)
    there = api.weight_map(raw, "maxtext", tree, scan_layers=True)
    step = next(named.step for named in there.steps if "query.kernel" in named.src[0])
    specs += [()] * (len(step.src) + sum(len(side.layout.dst) for side in step.dst) - len(specs))
    assert letters_divided(step, [spec_of(spec, MESH) for spec in specs], MESH) == parts


def test_released_tensors_must_be_divided_alike_too():
    """vLLM names a part of F in another way: where F is sharded its shards must be."""
    there = api.weight_map(qwen3_config(), "maxtext", "vllm", tensor_parallel=2)
    step = next(named.step for named in there.steps if "wi_0" in named.src[0])
    mesh = {"tensor": 2}
    sharded, whole = ((), ("tensor",)), ()
    assert letters_divided(step, [sharded, sharded, (("tensor",), ())], mesh) == {"F": 2, "shards": 2}
    assert letters_divided(step, [sharded, sharded, whole], mesh) is None
    assert letters_divided(step, [whole, whole, (("tensor",), ())], mesh) is None


def test_experts_of_a_device_are_no_single_ones():
    raw = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    raw["norm_topk_prob"] = True
    for tree, parts in (("tunix", {"E": 2}), ("huggingface", None)):
        there = api.weight_map(raw, "maxtext", tree)
        step = next(named.step for named in there.steps if "wi_0" in named.src[0])
        specs = [(("expert",),)] + [(("expert",),) if tree == "tunix" else ()] * (len(step.picks))
        assert letters_divided(step, specs, {"expert": 2}) == parts


def test_shardings_leave_heads_whole():
    """Of 4 query and 2 key-value heads of 16; a loader could cut a matrix of 32 rows into 4."""
    there = api.weight_map(qwen3_config(), "tpuconv", "huggingface")
    mesh = AbstractMesh((4, 2), ("tensor", "data"))
    specs = {name: tuple(each.spec) for name, each in there.shardings("target", mesh).items()}
    front = "model.layers.0.self_attn"
    assert specs[f"{front}.q_proj.weight"] == ("tensor", "data")
    assert specs[f"{front}.k_proj.weight"] == (None, "data")
    with pytest.raises(UsageError, match="nothing is sharded over the axes fsdp of a mesh"):
        there.shardings("target", AbstractMesh((4,), ("fsdp",)))


def test_our_own_tree_is_sharded_as_load_does(qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "out")
    mesh = AbstractMesh((2, 2), ("tensor", "data"))
    there = api.weight_map(tmp_path / "out", "tpuconv", "huggingface")
    arrays = read_manifest(tmp_path / "out").arrays
    assert there.shardings("source", mesh) == {
        name: sharding(array.axes, array.shape, mesh, MESH_AXES) for name, array in arrays.items()
    }


# -- on eight devices -------------------------------------------------------------------------------------------------


def on_eight_devices(*cases: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts that the program of eight devices prints."""
    command = [sys.executable, "-W", "error", str(PROGRAM), *map(json.dumps, cases)]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    env.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # programs are those of users
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def mapped(config: str, target: str, mesh: str, source: str = "maxtext", **more: Any) -> dict[str, Any]:
    scan = more.pop("scan", True)
    return {
        "facts": "one mesh",
        "config": config,
        "source": source,
        "target": target,
        "mesh": mesh,
        "scan": scan,
    } | more


TENSOR, EXPERT = "tensor=4,data=2", "tensor=2,expert=4"
ALIKE = [
    mapped("dense", "tunix", TENSOR),
    mapped("dense", "vllm", TENSOR, shards=4, explicit=True),
    mapped("experts", "tunix", EXPERT),
]
MORE_ALIKE = [
    mapped("dense", "huggingface", TENSOR),
    mapped("dense", "tpuconv", TENSOR),
    mapped("dense", "tpuconv", TENSOR, scan=False),
    mapped("dense", "nnx", TENSOR, dtype="float32"),
    mapped("llama3", "huggingface", TENSOR, dtype="float32"),
    mapped("llama3", "tunix", TENSOR, explicit=True),
    mapped("dense", "maxtext", TENSOR, source="tunix"),
    mapped("experts", "tpuconv", EXPERT, source="tunix"),
    mapped("experts", "maxtext", EXPERT, source="tunix", explicit=True),
    mapped("experts", "vllm", "tensor=4,data=2", shards=4),
    mapped("dense", "vllm", "tensor=4,data=2", source="huggingface", shards=4),
]
APART = [mapped("dense", "vllm", TENSOR), mapped("experts", "huggingface", EXPERT, explicit=True)]


PEAK = {"facts": "peak", "mesh": "tensor=4,expert=2", "scan": True}
FAST = [
    *ALIKE,
    {"facts": "two meshes"},
    PEAK | {"source": "maxtext", "target": "tunix"},
    PEAK | {"source": "maxtext", "target": "vllm", "shards": 4},
    PEAK | {"source": "tunix", "target": "maxtext"},
]


@pytest.fixture(scope="module")
def fast_facts() -> list[dict[str, Any]]:
    """The facts of `FAST`, of one program."""
    return on_eight_devices(*FAST)


def assert_equal_to_one_device(facts: dict[str, Any]) -> None:
    """One program, one that may reuse its arguments, and a stream; and the stream back."""
    assert facts["different"] == [[], [], []]
    assert facts["back"] == []
    assert facts["shardings"] == []
    assert facts["left"] == []  # the stream freed all, or none if it was told so
    assert facts["gone"] == []
    assert facts["divided"] >= 10


def assert_nothing_is_exchanged(case: dict[str, Any], facts: dict[str, Any]) -> None:
    assert_equal_to_one_device(facts)
    assert (case, facts["one program"], facts["stream"]) == (case, {}, {})


@pytest.mark.parametrize("number", range(len(ALIKE)))
def test_trees_that_are_sharded_alike_exchange_nothing(number, fast_facts):
    assert_nothing_is_exchanged(FAST[number], fast_facts[number])


@pytest.mark.slow
def test_more_trees_that_are_sharded_alike_exchange_nothing():
    for case, facts in zip(MORE_ALIKE, on_eight_devices(*MORE_ALIKE), strict=True):
        assert_nothing_is_exchanged(case, facts)


@pytest.mark.slow
def test_trees_that_are_not_sharded_alike_are_equal_too():
    """Joined matrices that are no shards of their own; experts one by one."""
    for facts in on_eight_devices(*APART):
        assert_equal_to_one_device(facts)
        assert facts["one program"]
        assert facts["stream"]


def test_a_stream_delivers_to_other_devices(fast_facts):
    assert fast_facts[len(ALIKE)] == {"different": [], "elsewhere": [], "left": []}


def test_a_stream_of_30b_takes_little_more_than_its_shards(fast_facts):
    """Layers of stacked arrays are sent off one by one. An array into which layers are stacked is there before the
    last of them is free: a third of this model."""
    apart, joined, stacked = fast_facts[-3:]
    assert max(apart["sent"], joined["sent"]) < 1.05
    assert max(apart["kept"], stacked["sent"], stacked["kept"]) < 1.35
    for facts in (apart, joined, stacked):
        assert facts["temporary"] < 0.05 * facts["bytes"]
        assert facts["programs"] < 15
    assert apart["collectives"] == stacked["collectives"] == {}


@pytest.mark.slow
def test_the_example_updates_a_sampler_each_step(converted):
    """On two devices of a trainer and two of a sampler; on one device that both have."""
    script = PROGRAM.parents[2] / "examples" / "sync_weights.py"
    for count in (4, 1):
        env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        words = [sys.executable, "-W", "error", str(script), str(converted / "tiny-qwen3-orbax")]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        *steps, last = done.stdout.splitlines()
        assert [line.partition(": loss ")[0] for line in steps] == ["step 1", "step 2", "step 3"]
        assert last == f"the sampler has the weights of the trainer, on {max(1, count // 2)} devices"

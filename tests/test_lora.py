"""LoRA that was trained in JAX comes back as an adapter of PEFT: peft itself loads it, and computes the same logits."""

import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
import torch
from flax import nnx
from safetensors.numpy import load_file

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same
from helpers.families import BY_ID, FIRST, STATES_ALONE, Case, hf_model, one_fast_of_each
from helpers.logits import forward
from helpers.peft_models import adapter_of_peft, peft_logits
from helpers.trainers import changed_leaf, save_standard, trained_tree
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.export.array_source import CheckpointArrays
from tpuconv.convert.export.exporting import describe_exporting
from tpuconv.errors import MappingError, OutputError, SourceError, UnsupportedConfig, UsageError
from tpuconv.notation.pairs import PairRow
from tpuconv.targets.registry import get_target, target_names

RANK, ALPHA = 4, 8.0
LINEAR = r".*(attn|mlp|moe)(/.*)?|lm_head"
IDS_BT = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def trained(case: Case, src: Path, folder: Path, path: str = LINEAR, **rule_keys: Any) -> nnx.Module:
    """A model with LoRA by Qwix whose pairs are random, as after training."""
    api.convert(src, folder / "base", text_only=True)
    model = tpuconv.load(folder / "base", "float32")
    rule = qwix.LoraProvider(module_path=path, rank=RANK, alpha=ALPHA, **rule_keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nnx.jit(lambda model: qwix.apply_lora_to_model(model, rule, IDS_BT, rngs=nnx.Rngs(0)))(model)
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    state = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda x: 0.1 * jax.random.normal(next(keys), x.shape, x.dtype), state))
    return model


def pairs_of(model: nnx.Module) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))


def assert_close(got: Any, want: np.ndarray) -> None:
    got = np.asarray(got, np.float32)
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


FAST = ("qwen3", "qwen3_moe")


NOT_BY_PEFT = {
    **dict.fromkeys(
        ("deepseek_ocr2", "exaone", "laguna", "mistral_large4"),
        "peft renames the tensors of its own adapters of this model while it loads them, and does not find them",
    ),
    **dict.fromkeys(("step3p5", "step3p7"), "peft fails while it renames the tensors of an adapter of this model"),
    **dict.fromkeys(("nemotron_h", *STATES_ALONE), "peft changes no out_proj of a model with Mamba layers"),
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), "peft counts the experts that compute nothing"),
}
KNOWN_TO_PEFT = {
    "zaya": r".*(attn/(q|k|v|v_delayed|o)|moe)(/.*)?",  # the convolutions of heads are no linear layers
    # peft renames the pairs of `weight_proj` while it loads them, also its own, and does not
    # find them; the head of transformers has no rows for tokens without logits.
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), r".*(attn/(q|k|v|o|gate|sinks)|mlp|moe)(/.*)?"),
}
"""The parts of models whose adapters peft reads, where it does not read those of others."""
NO_PAIRS = (
    *("dbrx", "jetmoe", "deepseek_v4", "deepseek_v41", "glm5_next", "recurrent_gemma"),
    *("inkling_text", "inkling_mm_model"),
)
"""Families of which Qwix changes what is no matrix of PEFT: experts, groups or blocks in one, or no linear layer."""


@pytest.mark.parametrize("case", one_fast_of_each(FAST))
def test_an_adapter_of_qwix(case: Case, hf, tmp_path: Path) -> None:
    if case.family in NOT_BY_PEFT:
        pytest.skip(NOT_BY_PEFT[case.family])
    if case.traits.read_as or case.traits.thinker_of:
        pytest.skip("transformers' model has modules of other names than the release's")
    model = trained(case, hf(case), tmp_path, KNOWN_TO_PEFT.get(case.family, LINEAR))
    save_standard(tmp_path / "run", pairs_of(model))
    has_none = case.family in NO_PAIRS and case.id != "inkling_text-all-dense"  # which has no experts
    if (
        has_none or case.id == "deepseek_v3-all-experts"
    ):  # whose latent is narrower than heads: pairs of absorbed products
        with pytest.raises(MappingError, match="change no matrix of the model"):
            api.export(tmp_path / "run", tmp_path / "lora", config=hf(case), adapter=True, lora_alpha=ALPHA)
        return
    done = api.export(tmp_path / "run", tmp_path / "lora", config=hf(case), adapter=True, lora_alpha=ALPHA)
    api.verify(tmp_path / "lora").check()
    assert done.target == "tpuconv"
    assert_close(forward(model, IDS_BT), peft_logits(case, tmp_path / "lora", IDS_BT))


def test_a_model_with_lora_is_saved_as_an_adapter(hf, tmp_path: Path) -> None:
    """In a model of scanned layers' checkpoint too; QLoRA's base does not matter."""
    case = FIRST["qwen3"]
    model = trained(case, hf(case), tmp_path)
    with pytest.raises(UsageError, match="alpha is not in it"):
        tpuconv.save(model, tmp_path / "lora", tmp_path / "base")
    tpuconv.save(model, tmp_path / "lora", tmp_path / "base", lora_alpha=ALPHA)
    tpuconv.save(model, tmp_path / "lora", tmp_path / "base", lora_alpha=ALPHA)
    with pytest.raises(OutputError):
        tpuconv.save(model, tmp_path / "lora", tmp_path / "base", lora_alpha=2 * ALPHA)
    api.verify(tmp_path / "lora").check()
    assert_close(forward(model, IDS_BT), peft_logits(case, tmp_path / "lora", IDS_BT))
    base = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["base_model_name_or_path"]
    api.convert(base, tmp_path / "merged", adapter=[tmp_path / "lora"])  # the base is the release, not its conversion


@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_the_model_may_be_quantized(qtype: str, hf, tmp_path: Path) -> None:
    """QLoRA: experts compute with what Qwix made of their kernels, and the tree has the adapter all the same."""
    case, limit = FIRST["qwen3_moe"], {"int8": 0.05, "nf4": 0.5}[qtype]
    model = trained(case, hf(case), tmp_path, weight_qtype=qtype, tile_size=4)
    tpuconv.save(model, tmp_path / "lora", tmp_path / "base", lora_alpha=ALPHA)
    wanted = peft_logits(case, tmp_path / "lora", IDS_BT)
    assert np.abs(np.asarray(forward(model, IDS_BT)) - wanted).max() < limit * np.abs(wanted).max()
    if qtype == "int8":  # Orbax saves no 4 bits
        save_standard(tmp_path / "run", nnx.to_pure_dict(nnx.state(model)))
        done = api.export(tmp_path / "run", tmp_path / "again", config=hf(case), adapter=True, lora_alpha=ALPHA)
        assert [skip.reason for skip in done.skipped] == ["arrays of the model that the adapter changes"]
        assert_same(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("lora", "again")))
        with pytest.raises(MappingError) as info:
            api.export(tmp_path / "run", tmp_path / "merged", config=hf(case), merge=True, lora_alpha=ALPHA)
        assert "the model is quantized" in str(info.value.hint)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_merged(family: str, hf, tmp_path: Path) -> None:
    case = FIRST[family]
    model = trained(case, hf(case), tmp_path)
    save_standard(tmp_path / "run", nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.LoRAParam))))
    api.export(tmp_path / "run", tmp_path / "merged", config=hf(case), merge=True, lora_alpha=ALPHA)
    with torch.no_grad():
        merged = type(hf_model(case)).from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert_close(forward(model, IDS_BT), merged(torch.from_numpy(np.array(IDS_BT))).logits.numpy())


ON_MESHES = """
import sys, jax, numpy as np, optax, qwix, tpuconv
from flax import nnx
from tpuconv.verify.logits import device_mesh
ids = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
rule = dict(module_path=".*(attn|moe).*", rank=4, alpha=8.0)

def steps(mesh):
    model = tpuconv.load(sys.argv[1], "float32", mesh=mesh)
    model = qwix.apply_lora_to_model(model, qwix.LoraProvider(**rule), ids, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer)) for _ in range(4)], nnx.state(model, nnx.LoRAParam)

want, state = steps(None)
assert want[-1] < want[0], want
assert any("moe" in path for path, _ in nnx.to_flat_state(state)), "no pair of experts"
for sizes in ({"tensor": 2}, {"expert": 2}, {"tensor": 2, "expert": 2}):
    mesh = device_mesh(sizes)
    with jax.sharding.set_mesh(mesh):
        have, _ = steps(mesh)
    np.testing.assert_allclose(have, want, rtol=1e-4)
"""


@pytest.mark.slow
def test_experts_are_trained_on_meshes(hf, tmp_path: Path) -> None:
    api.convert(hf(FIRST["qwen3_moe"]), tmp_path / "base")
    done = subprocess.run(
        [sys.executable, "-c", ON_MESHES, str(tmp_path / "base")],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


GEMMA2 = Case(
    "gemma2-released",
    "gemma2",
    "gemma2",
    {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "num_hidden_layers": 4},
)
"""As Tunix has it: keys and values are in one parameter."""


def forms() -> list[Any]:
    """Of some families the trees of all targets, plain and scanned."""
    out = []
    for family in ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gemma2", "gemma3_text", "gpt_oss"):
        case = {"gemma2": GEMMA2, "gemma3_text": BY_ID["gemma3_text-released"]}.get(family, FIRST[family])
        for name in target_names():
            target = get_target(name)
            if (
                target.is_safetensors
                or name == "jax-llm-examples"
                or (target.trees is not None and case.model_type not in target.trees)
            ):
                continue
            for scan in (False, True) if target.layer_axis is not None else (False,):
                fast = (family in ("qwen3", "deepseek_v3") and name != "nnx") or (family, name) == ("gemma2", "tunix")
                marks = [] if fast else [pytest.mark.slow]
                out.append(pytest.param(case, name, scan, id=f"{family}-{name}{'-scanned' * scan}", marks=marks))
    return out


@pytest.mark.parametrize(("case", "target", "scan"), forms())
def test_pairs_of_trees(case: Case, target: str, scan: bool, hf, tmp_path: Path) -> None:
    """The tree whose parameters have the products of pairs added comes back as the release with the adapter, and as
    what `merge=True` writes."""
    src = hf(case)
    try:
        api.convert(src, tmp_path / "out", target=target, scan_layers=scan, text_only=True)
    except UnsupportedConfig as error:
        pytest.skip(f"{target} has no such model: {error.message}")
    tree = trained_tree(tmp_path / "out")
    pairs, changed = with_pairs(tmp_path / "out", tree)
    save_standard(tmp_path / "pairs", pairs)
    save_standard(tmp_path / "all", merged_trees(tree, pairs))
    save_standard(tmp_path / "changed", changed)
    done = api.export(tmp_path / "pairs", tmp_path / "lora", config=src, adapter=True, lora_alpha=ALPHA)
    assert done.target == target
    api.export(tmp_path / "all", tmp_path / "again", config=src, adapter=True, lora_alpha=ALPHA)
    assert_same(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("lora", "again")))
    api.export(tmp_path / "changed", tmp_path / "wanted", config=src)
    wanted = read_tensors(tmp_path / "wanted")
    api.convert(src, tmp_path / "merged", target="huggingface", adapter=[str(tmp_path / "lora")])
    api.export(tmp_path / "all", tmp_path / "merged2", config=src, merge=True, lora_alpha=ALPHA)
    for folder in ("merged", "merged2"):
        found = read_tensors(tmp_path / folder)
        assert found.keys() >= wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def with_pairs(out: Path, tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pairs as Qwix makes them for the matrices of a tree, and the tree with their products added."""
    manifest = read_manifest(out)
    what = describe_exporting(CheckpointArrays(manifest))
    is_stacked = manifest.scan_layers and get_target(manifest.target).trees is None
    table = what.table.stack_layers(what.config) if is_stacked else what.table
    rng = np.random.default_rng(0)
    pairs: dict[str, Any] = {}
    changed = tree
    for binding in table.bind(what.config):
        if not re.search(r"(proj|kv_[ab]|lm_head|experts\.\w+(?<!_bias))(\.weight)?$", binding.src[0].names[0]):
            continue
        row = PairRow(binding)
        for i, name in enumerate(row.parameters):
            stack = [binding.sizes[x] for x in row.shared]
            ins, outs = ([x.size(binding.sizes) for x in axes] for axes in (row.of_inputs(name), row.of_outputs(name)))
            a, b = rng.normal(0, 0.3, (*stack, *ins, RANK)), rng.normal(0, 0.3, (*stack, RANK, *outs))
            delta = np.einsum("sir,sro->sio", a.reshape(-1, np.prod(ins), RANK), b.reshape(-1, RANK, np.prod(outs)))
            axes = [*map(str, row.shared), *map(str, row.of_inputs(name)), *map(str, row.of_outputs(name))]
            order = [axes.index(str(axis)) for axis in row.parameters[name]]
            delta = delta.reshape(*stack, *ins, *outs).transpose(order) * (ALPHA / RANK)
            changed = changed_leaf(changed, name, (reduce(getitem, name.split("."), tree) + delta).astype(np.float32))
            # Flat, as `dot_general` has them, or with all axes, as einsum has them.
            flat = len(stack) == 0 and i % 2 == 1
            a = a.reshape(-1, RANK) if flat else stacked_as_parameter(a, row, name)
            b = b.reshape(RANK, -1) if flat else stacked_as_parameter(b, row, name)
            base = name.removesuffix(".value")
            for end, values in (("_lora_a", a), ("_lora_b", b)):
                pairs = changed_leaf(pairs, f"{base}{end}{name.removeprefix(base)}", values.astype(np.float32))
    return pairs, changed


def stacked_as_parameter(values: np.ndarray, row: PairRow, name: str) -> np.ndarray:
    """Moves the stacks, which are in front, to where the parameter has them."""
    places = {axis.letter: i for i, axis in enumerate(row.parameters[name]) if axis.letter in row.shared}
    order = [*map(row.shared.index, places), *range(len(places), values.ndim)]
    targets = [min(place, values.ndim - 1) for place in places.values()]
    return np.moveaxis(values.transpose(order), range(len(places)), targets)


def merged_trees(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged_trees(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **both}


KEPT = {
    "qwen3": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
    "gemma2": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]},
    "deepseek_v3": {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "qwen3_moe": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


@pytest.mark.parametrize(("case", "target", "scan"), [each for each in forms() if each.values[0].family in KEPT])
def test_an_adapter_that_is_kept_comes_back(case: Case, target: str, scan: bool, hf, tmp_path: Path) -> None:
    """Bit for bit, from the tree that a trainer would save."""
    src, options = hf(case), {"target": target, "scan_layers": scan, "adapter": [str(tmp_path / "lora")]}
    adapter_of_peft(case, tmp_path / "lora", r=RANK, lora_alpha=ALPHA, **KEPT[case.family])
    try:
        api.convert(src, tmp_path / "tree", keep_adapter=True, **options)
    except UnsupportedConfig as error:
        pytest.skip(f"{target} has no such model: {error.message}")
    api.verify(tmp_path / "tree").check()
    save_standard(tmp_path / "run", trained_tree(tmp_path / "tree"))
    for saved, back in (("run", "back"), ("tree", "untrained")):
        api.export(tmp_path / saved, tmp_path / back, config=src, adapter=True, lora_alpha=ALPHA)
    before, after, untrained = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("lora", "back", "untrained")
    )
    assert_same(untrained, after)
    if target == "maxtext" and case.family in ("gemma2", "deepseek_v3"):  # which multiplies queries
        assert before.keys() == after.keys()
        for name, values in before.items():
            np.testing.assert_allclose(after[name], values, rtol=1e-6)
    else:
        assert_same(after, before)


@pytest.mark.parametrize(
    ("options", "weight"),
    [({"use_rslora": True}, ""), ({}, ":0.5"), ({"alpha_pattern": {".*": 3}}, ""), ({"lora_alpha": 0}, "")],
    ids=["rslora", "weight", "alpha_pattern", "zero"],
)
def test_a_kept_adapter_has_the_scale_of_its_alpha(options: dict, weight: str, hf, tmp_path: Path) -> None:
    """A trainer is given `lora_alpha` of the adapter, and scales by alpha / r alone."""
    src, given = hf(FIRST["qwen3"]), [f"{tmp_path / 'lora'}{weight}"]
    adapter_of_peft(FIRST["qwen3"], tmp_path / "lora", target_modules=["q_proj"], r=4, **{"lora_alpha": 8} | options)
    api.convert(src, tmp_path / "tree", adapter=given, target="tunix", keep_adapter=True)
    api.export(tmp_path / "tree", tmp_path / "back", config=src, adapter=True, lora_alpha=8)
    found = []
    for name, adapter in (("want", given), ("have", [str(tmp_path / "back")])):
        api.convert(src, tmp_path / name, adapter=adapter, target="huggingface")
        found.append(read_tensors(tmp_path / name))
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_kept_adapter_is_trained_further(family: str, hf, tmp_path: Path) -> None:
    case = FIRST[family]
    adapter_of_peft(case, tmp_path / "lora", r=RANK, lora_alpha=ALPHA, **KEPT[family])
    api.convert(hf(case), tmp_path / "tree", adapter=[str(tmp_path / "lora")], keep_adapter=True)
    model = trained(
        case, hf(case), tmp_path, path=".*(attn/q|moe/(gate|up|down))" if "moe" in family else ".*(attn|mlp)/.*"
    )
    tree, flat = trained_tree(tmp_path / "tree"), dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    assert len(jax.tree.leaves(tree)) == len(flat)
    for path, parameter in flat.items():
        parameter[...] = jnp.array(reduce(getitem, map(str, path), tree))
    nnx.update(model, nnx.from_flat_state(flat))
    assert_close(forward(model, IDS_BT), peft_logits(case, tmp_path / "lora", IDS_BT))


@pytest.mark.parametrize("case", [FIRST["qwen3"], GEMMA2, FIRST["qwen3_moe"]], ids=str)
def test_pairs_ride_along_with_a_weight_map(case: Case, hf, tmp_path: Path) -> None:
    """From PEFT's through the trees of trainers and back: bit for bit."""
    adapter_of_peft(case, tmp_path / "lora", r=RANK, lora_alpha=ALPHA, **KEPT[case.family])
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    found = {name[: -len(".lora_A.weight")]: name for name in tensors if name.endswith("lora_A.weight")}
    pairs = {
        f"{module.removeprefix('base_model.model.')}.weight": (tensors[name], tensors[name.replace("lora_A", "lora_B")])
        for module, name in found.items()
        if "experts" not in module
    }
    others = [] if case.family == "gemma2" else ["maxtext"]  # which multiplies queries of Gemma
    now, names = pairs, ["huggingface", "tunix", *others, "tpuconv", "huggingface"]
    for before, after in itertools.pairwise(names):
        now = api.weight_map(hf(case), before, after).lora(now, ALPHA)
    assert now.keys() == pairs.keys()
    for name, (a, b) in pairs.items():
        np.testing.assert_array_equal(now[name][0], a)
        np.testing.assert_array_equal(now[name][1], b)
    with pytest.raises(MappingError, match="1 pairs have no place"):
        api.weight_map(hf(case), "huggingface", "tunix").lora({"model.norm.weight": pairs[next(iter(pairs))]}, ALPHA)


def test_pairs_that_diverged_are_not_written(hf, tmp_path: Path) -> None:
    case = FIRST["qwen3"]
    model = trained(case, hf(case), tmp_path)
    a = model.layers[0].mlp.down.kernel_lora_a
    a[...] = a[...].at[2, 1].set(jnp.inf)
    with pytest.raises(SourceError, match="kernel_lora_a is not finite"):
        tpuconv.save(model, tmp_path / "lora", tmp_path / "base", lora_alpha=ALPHA)
    save_standard(tmp_path / "run", pairs_of(model))
    with pytest.raises(SourceError, match="kernel_lora_a is not finite"):
        api.export(tmp_path / "run", tmp_path / "lora", config=hf(case), adapter=True, lora_alpha=ALPHA)
    assert not (tmp_path / "lora").exists()

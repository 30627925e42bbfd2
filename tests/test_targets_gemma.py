"""The models of the library gemma, with what `--target gemma` writes, restored by its `load_params`: every array, the
logits of transformers, and the names and shapes of whole models. Slow: it makes an environment of Python 3.12."""

import json
import re
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same, flatten, same_bits
from helpers.families import Case
from helpers.oracles import ask
from helpers.released import GEMMA4, GEMMA4_EXPERTS, GEMMA4_INPUTS, GEMMA4_SHARED, gemma3n, save_with_constant_norms
from tpuconv import api
from tpuconv.models.registry import find_family
from tpuconv.targets.compose import target_table
from tpuconv.targets.registry import get_target

pytestmark = [pytest.mark.slow, pytest.mark.oracles]

LISTINGS = json.loads((Path(__file__).parent / "helpers" / "listings.json").read_text())
PAGE = Path(__file__).parents[1] / "docs" / "targets.md"
WHOLE = {
    "Gemma2_9B": LISTINGS["google/gemma-2-9b-it"]["config"],
    "Gemma3_27B": LISTINGS["google/gemma-3-27b-it"]["config"],
    "Gemma3n_E4B": {"model_type": "gemma3n_text"},  # whose sizes are transformers' defaults
    "Gemma4_E2B": {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 256,
    },
}
SIZES = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
COMPARED = [
    Case("gemma2-released", "gemma2", "gemma2", SIZES | {"num_hidden_layers": 4}),
    Case("gemma2-27b", "gemma2", "gemma2", SIZES | {"num_hidden_layers": 4, "query_pre_attn_scalar": 8}),
    Case("gemma3-released", "gemma3_text", "gemma3_text", SIZES | {"num_hidden_layers": 7}),
    Case("gemma4-dense", "gemma4_text", "gemma4_text", GEMMA4),
    Case("gemma4-experts", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_EXPERTS),
    Case("gemma4-layer-inputs", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_INPUTS),
    Case("gemma4-shared", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_SHARED),
    gemma3n(0),
    gemma3n(7),
]
KINDS = {"sliding_attention": "LOCAL_SLIDING", "full_attention": "GLOBAL"}


def settings(case: Case, config) -> dict[str, object]:
    """The library's settings of a model with this config."""
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose global layers have settings of their own
    rope = config.rope_parameters
    both = {
        "num_embed": config.vocab_size,
        "embed_dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_key_value_heads,
        "final_logit_softcap": config.final_logit_softcapping,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "attention_types": [KINDS[kind] for kind in config.layer_types],
        "sliding_window_size": config.sliding_window,
    }
    if case.family != "gemma2":
        both |= {
            "local_base_frequency": int(rope["sliding_attention"]["rope_theta"]),
            "global_base_frequency": int(rope["full_attention"]["rope_theta"]),
        }
    shared = getattr(config, "num_kv_shared_layers", 0)
    sharing = {
        "kv_cache_sharing_config": {
            "frac_shared_layers": shared / config.num_hidden_layers,
            "share_global": True,
            "share_local": True,
        }
    }
    both |= sharing if shared else {}
    if case.family == "gemma3n_text":
        return both | {
            "num_embed": config.vocab_size_per_layer_input,
            "hidden_dim": config.intermediate_size[0],
            "query_pre_attn_norm": "NONE",
            "attn_logits_soft_cap": None,
            "transpose_gating_einsum": True,
            "use_qk_norm": True,
            "use_value_norm": True,
            "activation_sparsity_pattern": config.activation_sparsity_pattern,
            "use_altup": True,
            "per_layer_input_dim": config.hidden_size_per_layer_input,
            "use_laurel": True,
            "laurel_rank": config.laurel_rank,
            "scale_plus_one": False,
            "guard_against_excess_precision": True,
        }
    if case.family != "gemma4_text":
        by_width = "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS"
        is_by_head = config.query_pre_attn_scalar == config.head_dim
        return both | {
            "query_pre_attn_norm": "BY_ONE_OVER_SQRT_HEAD_DIM" if is_by_head else by_width,
            "attn_logits_soft_cap": config.attn_logit_softcapping,
            "use_qk_norm": case.family == "gemma3_text",
            "transpose_gating_einsum": True,
        }
    experts = {
        "enable_moe": True,
        "num_experts": config.num_experts,
        "expert_dim": config.moe_intermediate_size,
        "top_k_experts": config.top_k_experts,
        "moe_dense_hidden_dim": config.intermediate_size,
    }
    return (
        both
        | {
            "num_global_kv_heads": case.config["num_global_key_value_heads"],
            "global_key_size": case.config["global_head_dim"],
            "k_eq_v_global": config.attention_k_eq_v,
            "global_rope_proportion": rope["full_attention"]["partial_rotary_factor"],
            "local_rope_proportion": 1.0,
            "per_layer_input_dim": config.hidden_size_per_layer_input,
            "override_kv_shared_ffw_hidden": 2 * config.intermediate_size if config.use_double_wide_mlp else None,
        }
        | (experts if config.enable_moe_block else {})
    )


def package(family: str) -> str:
    return {"gemma4_text": "gemma.gm.nn.gemma4", "gemma3n_text": "gemma.gm.nn.gemma3n"}.get(family, "gemma.gm.nn")


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    """For each case the library's logits and those of transformers, its arrays and those that `convert` wrote."""
    import torch

    base = tmp_path_factory.mktemp("gemma")
    ids = np.random.default_rng(0).integers(3, 100, (2, 12))
    np.save(base / "ids.npy", ids)
    requests, wanted = [], {}
    for case in COMPARED:
        folder = base / case.id
        model = save_with_constant_norms(case, folder / "hf")
        with torch.no_grad():
            wanted[case.id] = model(torch.from_numpy(ids)).logits.numpy()
        api.convert(folder / "hf", folder / "out", target="gemma")
        requests.append(
            {
                "module": package(case.family),
                "settings": settings(case, model.config),
                "root": str(folder / "out" / "params"),
                "ids": str(base / "ids.npy"),
                "out": str(folder / "restored.npz"),
            }
            | ({"rest": "further_embedding"} if case.id == "gemma3n-7" else {})
        )
    ask("gemma", "gemma_models.py", requests)

    def found(case: Case):
        path = base / case.id / "restored.npz"
        error = path.with_suffix(".error")
        assert not error.exists(), error.read_text()
        theirs = dict(np.load(path))
        with ocp.StandardCheckpointer() as checkpointer:
            ours = dict(flatten(checkpointer.restore(base / case.id / "out" / "params")))
        return theirs.pop("logits"), wanted[case.id], theirs, ours

    return found


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_the_library_restores_every_array(case, restored):
    _, _, theirs, written = restored(case)
    assert theirs.keys() == written.keys() - {"embedder.further_embedding"}
    for name, values in theirs.items():
        assert same_bits(values, written[name]), name


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_the_library_computes_the_logits_of_transformers(case, restored):
    logits, wanted, _, _ = restored(case)
    wanted = wanted[..., : logits.shape[-1]]  # of Gemma 3n the library has no ids of images and sounds
    assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 2e-5


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_every_tensor_comes_back(case, tmp_path):
    save_with_constant_norms(case, tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out", target="gemma")
    api.export(tmp_path / "out", tmp_path / "back")
    found, source = read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf")
    assert_same({name: found[name] for name in source}, source)


def answer(request: dict[str, object], out: Path) -> dict[str, np.ndarray]:
    """What the library answers to one request."""
    ask("gemma", "gemma_models.py", [request | {"out": str(out)}])
    error = out.with_suffix(".error")
    assert not error.exists(), error.read_text()
    return dict(np.load(out))


@pytest.mark.parametrize(("name", "model_class"), [("gemma3-released", "Gemma3_4B"), ("gemma3n-7", "Gemma3n_E2B")])
def test_the_code_of_the_page_loads_a_checkpoint(name, model_class, tmp_path):
    case = next(each for each in COMPARED if each.id == name)
    model = save_with_constant_norms(case, tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out", target="gemma")
    np.save(tmp_path / "ids.npy", np.arange(8)[None])
    blocks = re.findall(r"```python\n(import dataclasses\nfrom gemma import gm\n.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if f"gm.nn.{model_class}(" in block)
    code, replaced = re.subn(r"/data/gemma-[^/]+/", f"{tmp_path / 'out'}/", code)
    assert replaced == 1
    sizes = settings(case, model.config)
    if "num_embed=" in code:
        code = code.replace("262208", str(model.config.vocab_size))
        sizes |= {"num_embed": 2 * model.config.vocab_size}
    request = {"module": package(case.family), "model": model_class, "settings": sizes, "code": code}
    found = answer(request | {"ids": str(tmp_path / "ids.npy")}, tmp_path / "restored.npz")
    assert np.isfinite(found.pop("logits")).all()
    with ocp.StandardCheckpointer() as checkpointer:
        written = dict(flatten(checkpointer.restore(tmp_path / "out" / "params")))
    assert found.keys() == written.keys() - {"embedder.further_embedding"}
    assert all(same_bits(values, written[name]) for name, values in found.items())


@pytest.mark.parametrize("model", WHOLE)
def test_names_and_shapes_are_those_of_whole_models(model, tmp_path):
    raw = WHOLE[model]
    family = find_family(raw)
    own = family.in_targets(raw["model_type"])
    config = family.read_config(raw)
    table, config = target_table(get_target("gemma"), *own, family.table_without_release(), config)
    shapes = {name: shape for binding in table.bind(config) for name, shape in binding.dst_shapes().items()}
    kept = getattr(config, "vocab_size_per_layer_input", config.vocab_size)
    request = {"module": package(family.name), "model": model, "settings": {"num_embed": kept}}
    found = answer(request, tmp_path / "shapes.npz")
    assert (shapes.pop("embedder.further_embedding", None) is not None) == (kept < config.vocab_size)
    assert shapes == {name: tuple(shape) for name, shape in found.items()}

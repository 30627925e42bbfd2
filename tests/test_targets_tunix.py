"""Tunix's own models, with what `--target tunix` writes, restored by its CheckpointManager: every array, and the logits
of transformers. Slow: it makes an environment of Python 3.11 with Tunix."""

from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same, flatten, same_bits
from helpers.families import BY_ID, Case, hf_model, save
from helpers.oracles import ask
from helpers.peft_models import adapter_of_peft, peft_logits
from helpers.released import GEMMA4, GEMMA4_EXPERTS, GEMMA4_INPUTS, GEMMA4_SHARED, save_with_constant_norms
from tpuconv import api

pytestmark = [pytest.mark.slow, pytest.mark.oracles]

MODELS = {
    "llama": ("tunix.models.llama3.model", "Llama3"),
    "qwen2": ("tunix.models.qwen2.model", "Qwen2"),
    "qwen3": ("tunix.models.qwen3.model", "Qwen3"),
    "qwen3_moe": ("tunix.models.qwen3.model", "Qwen3"),
    "gemma": ("tunix.models.gemma.model", "Gemma"),
    "gemma2": ("tunix.models.gemma.model", "Gemma"),
    "gemma3_text": ("tunix.models.gemma3.model", "Gemma3"),
    "gemma4_text": ("tunix.models.gemma4.model", "Gemma4"),
}


def settings(case: Case, config) -> dict[str, object]:
    """Tunix's settings of a model with this config."""
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose global layers have settings of their own
    rope = config.rope_parameters
    experts = getattr(config, "num_experts", None)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "num_layers": config.num_hidden_layers,
        "embed_dim": config.hidden_size,
        "hidden_dim": config.moe_intermediate_size if experts else config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "head_dim": head,
        "num_kv_heads": config.num_key_value_heads,
    }
    if case.family == "gemma3_text":
        return sizes | {
            "num_embed": config.vocab_size,
            "sliding_window_size": config.sliding_window,
            "local_base_frequency": int(rope["sliding_attention"]["rope_theta"]),
            "global_base_frequency": int(rope["full_attention"]["rope_theta"]),
            "param_dtype": "float32",
        }
    if case.family == "gemma4_text":
        full, kinds = rope["full_attention"], {"sliding_attention": "LOCAL_SLIDING", "full_attention": "GLOBAL"}
        own = {"num_experts": experts, "num_experts_per_tok": config.top_k_experts} if experts else {}
        return (
            sizes
            | own
            | {
                "num_embed": config.vocab_size,
                "hidden_dim": config.intermediate_size,
                "final_logit_softcap": config.final_logit_softcapping,
                "sliding_window_size": config.sliding_window,
                "per_layer_input_dim": config.hidden_size_per_layer_input,
                "frac_shared_layers": config.num_kv_shared_layers / config.num_hidden_layers,
                "override_kv_shared_ffw_hidden": 2 * config.intermediate_size if config.use_double_wide_mlp else None,
                "num_global_kv_heads": case.config.get("num_global_key_value_heads"),
                "global_key_size": case.config["global_head_dim"],
                "attention_pattern": [kinds[kind] for kind in config.layer_types],
                "global_rope_proportion": full["partial_rotary_factor"],
                "k_eq_v_global": config.attention_k_eq_v,
                "local_base_frequency": int(rope["sliding_attention"]["rope_theta"]),
                "global_base_frequency": int(full["rope_theta"]),
                "enable_moe": config.enable_moe_block,
                "expert_dim": config.moe_intermediate_size,
            }
        )
    if case.family.startswith("gemma"):
        second = case.family == "gemma2"
        kinds = {"sliding_attention": "LOCAL_SLIDING", "full_attention": "GLOBAL"}
        layers = config.layer_types if second else ["full_attention"] * config.num_hidden_layers
        return sizes | {
            "num_embed": config.vocab_size,
            "final_logit_softcap": config.final_logit_softcapping if second else None,
            "use_post_attn_norm": second,
            "use_post_ffw_norm": second,
            "attention_types": [kinds[kind] for kind in layers],
            "attn_logits_soft_cap": config.attn_logit_softcapping if second else None,
            "sliding_window_size": config.sliding_window if second else None,
        }
    tied = "weight_tying" if case.family == "llama" else "use_tied_embedding"
    own = {"num_experts": experts, "num_experts_per_tok": config.num_experts_per_tok} if experts else {}
    return (
        sizes
        | own
        | {
            "vocab_size": config.vocab_size,
            "rope_theta": int(rope["rope_theta"]),
            "norm_eps": config.rms_norm_eps,
            tied: config.tie_word_embeddings,
        }
    )


ROPE = {"rope_type": "default", "rope_theta": 1e6}
"""What Tunix's Llama and Qwen3 compute with, whatever their settings say."""


def tied(case: Case, value: bool) -> Case:
    return Case(
        f"{case.id}-{'tied' if value else 'head'}",
        case.family,
        case.model_type,
        dict(case.config)
        | {"tie_word_embeddings": value}
        | ({} if case.family == "qwen2" else {"rope_parameters": ROPE}),
    )


COMPARED = [
    tied(BY_ID[name], value)
    for name in ("llama-plain", "qwen2-plain", "qwen3-tied", "qwen3_moe-few-experts")
    for value in (False, True)
]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
COMPARED += [
    Case("gemma-released", "gemma", "gemma", {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}),
    Case("gemma2-released", "gemma2", "gemma2", GEMMA | {"num_hidden_layers": 4}),
    Case("gemma3-released", "gemma3_text", "gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    Case("gemma4-dense", "gemma4_text", "gemma4_text", GEMMA4),
    Case("gemma4-experts", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_EXPERTS),
    Case("gemma4-layer-inputs", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_INPUTS),
    Case("gemma4-shared", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_SHARED),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of all cases."""
    return tmp_path_factory.mktemp("tunix")


@pytest.fixture(scope="module")
def restored(runs):
    """For each case Tunix's logits and those of transformers, Tunix's arrays and those that `convert` wrote."""
    import orbax.checkpoint as ocp
    import torch

    base = runs
    ids = np.random.default_rng(0).integers(3, 100, (2, 12))
    np.save(base / "ids.npy", ids)
    requests, wanted = [], {}
    for case in COMPARED:
        folder = base / case.id
        model = save_with_constant_norms(case, folder / "hf")
        with torch.no_grad():
            wanted[case.id] = model(torch.from_numpy(ids)).logits.numpy()
        api.convert(folder / "hf", folder / "out", target="tunix")
        module, name = MODELS[case.family]
        requests.append(
            {
                "root": str(folder / "out"),
                "run": str(folder / "run"),
                "ids": str(base / "ids.npy"),
                "out": str(folder / "restored.npz"),
                "module": module,
                "model": name,
                "settings": settings(case, model.config),
            }
        )
    ask("tunix", "tunix_models.py", requests)

    def found(case: Case):
        path = base / case.id / "restored.npz"
        error = path.with_suffix(".error")
        assert not error.exists(), error.read_text()
        theirs = dict(np.load(path))
        with ocp.StandardCheckpointer() as checkpointer:
            ours = dict(flatten(checkpointer.restore(base / case.id / "out" / "0" / "model_params")))
        return theirs.pop("logits"), wanted[case.id], theirs, ours

    return found


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_tunix_restores_every_array(case, restored):
    _, _, theirs, written = restored(case)
    assert {f"{name}.value" for name in theirs} == written.keys()
    for name, values in theirs.items():
        assert same_bits(values, written[f"{name}.value"]), name


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_tunix_computes_the_logits_of_transformers(case, restored):
    logits, wanted, _, _ = restored(case)
    assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 2e-5


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_every_tensor_comes_back(case, tmp_path):
    save(case, tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out", target="tunix")
    api.export(tmp_path / "out", tmp_path / "back")
    found, source = read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf")
    assert_same({name: found[name] for name in source}, source)


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_a_run_as_tunix_saves_it_is_exported(case, restored, runs, tmp_path):
    restored(case)
    folder = runs / case.id
    done = api.export(folder / "run", tmp_path / "back", config=folder / "hf")
    assert done.target == "tunix"
    found, source = read_tensors(tmp_path / "back"), read_tensors(folder / "hf")
    assert_same({name: found[name] for name in source}, source)


RULE = {
    "module_path": ".*(([qkvo]|gate|up|down)_proj|(q|k|kv|attn_vec)_einsum)",
    "rank": 4,
    "alpha": 8.0,
}
DENSE = [case for case in COMPARED if case.family != "qwen3_moe" and "num_experts" not in case.config]


def request_of(case: Case, folder: Path, ids: Path, **lora: object) -> dict[str, object]:
    """The request for Tunix's logits of a case, whose model is in `folder`, with LoRA."""
    api.convert(folder / "hf", folder / "out", target="tunix")
    module, name = MODELS[case.family]
    return {
        **lora,
        "root": str(folder / "out"),
        "ids": str(ids),
        "out": str(folder / "restored.npz"),
        "module": module,
        "model": name,
        "settings": settings(case, hf_model(case).config),
    }


def made_in(folder: Path, name: str = "logits") -> np.ndarray:
    error = folder / "restored.error"
    assert not error.exists(), error.read_text()
    return np.load(folder / "restored.npz")[name]


@pytest.fixture(scope="module")
def lora_ids(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(3, 100, (2, 12)))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, lora_ids) -> Path:
    """For each dense case the logits of Tunix's model with LoRA, of which it saved the pairs alone."""
    base = tmp_path_factory.mktemp("lora")
    requests = []
    for case in DENSE:
        save(case, base / case.id / "hf")
        folder = base / case.id
        requests.append(request_of(case, folder, lora_ids, lora=str(folder / "run"), rule=RULE))
    ask("tunix", "tunix_models.py", requests)
    return base


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_peft_computes_the_logits_of_lora_that_tunix_trained(case, trained, lora_ids):
    folder = trained / case.id
    logits = made_in(folder)
    done = api.export(folder / "run", folder / "lora", config=folder / "hf", adapter=True, lora_alpha=RULE["alpha"])
    assert done.target == "tunix"
    found = peft_logits(case, folder / "lora", np.load(lora_ids))
    assert np.abs(logits - found).max() / np.abs(found).max() < 2e-5


@pytest.fixture(scope="module")
def kept(tmp_path_factory, lora_ids) -> Path:
    """For each dense case the logits of Tunix's model with an adapter of peft that it restored, and trained a step."""
    base = tmp_path_factory.mktemp("kept")
    requests = []
    for case in DENSE:
        folder = base / case.id
        save(case, folder / "hf")
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        adapter_of_peft(case, folder / "lora", target_modules=names, r=RULE["rank"], lora_alpha=RULE["alpha"])
        adapter = [str(folder / "lora")]
        api.convert(folder / "hf", folder / "kept", target="tunix", adapter=adapter, keep_adapter=True)
        joined = {"module_path": ".*kv_einsum", "rank": 2 * RULE["rank"], "alpha": RULE["alpha"]}
        requests.append(
            request_of(
                *(case, folder, lora_ids),
                lora=str(folder / "run"),
                rule={"rules": [joined, RULE]},
                kept=str(folder / "kept"),
            )
        )
    ask("tunix", "tunix_models.py", requests)
    return base


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_tunix_restores_an_adapter_of_peft(case, kept, lora_ids):
    folder = kept / case.id
    logits = made_in(folder)
    found = peft_logits(case, folder / "lora", np.load(lora_ids))
    assert np.abs(logits - found).max() / np.abs(found).max() < 2e-5


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_an_adapter_of_peft_is_trained_further_in_tunix(case, kept, lora_ids):
    folder = kept / case.id
    before, after = made_in(folder, "losses")
    assert after < before
    api.export(folder / "run", folder / "back", config=folder / "hf", adapter=True, lora_alpha=RULE["alpha"])
    logits, found = made_in(folder, "trained"), peft_logits(case, folder / "back", np.load(lora_ids))
    assert np.abs(logits - found).max() / np.abs(found).max() < 2e-5

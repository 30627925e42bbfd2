"""MaxText's own models, with what `--target maxtext` writes, beside transformers. Slow: it makes an environment of
Python 3.12, and compiles a model twice for each case."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same
from helpers.families import BY_ID, Case, save
from helpers.maxtext_settings import compared_model, settings
from helpers.oracles import ask
from helpers.peft_models import adapter_of_peft, peft_logits
from helpers.released import GEMMA4, GEMMA4_EXPERTS, GPT_OSS_ROPE, KIMI, KIMI_ROPE, LATENT, LLAMA31
from tpuconv import api

pytestmark = [pytest.mark.slow, pytest.mark.oracles]

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "num_hidden_layers": 4}
DELTA = dict(BY_ID["qwen3_next-plain"].config) | {
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "shared_expert_intermediate_size": 20,
    "rms_norm_eps": 1e-6,
}
LLAMA4 = {
    "intermediate_size": 20,
    "intermediate_size_mlp": 56,
    "head_dim": 8,
    "attention_chunk_size": 6,
    "num_local_experts": 5,
    "num_hidden_layers": 8,
}
V4 = dict(BY_ID["deepseek_v4-released"].config) | {"swiglu_limit": 1e6}
"""MaxText does not limit the activations of the shared expert."""
COMPARED = [
    BY_ID["llama-plain"],
    Case("llama-3.1", "llama", "llama", {"rope_parameters": LLAMA31, "max_position_embeddings": 131072}),
    BY_ID["llama-mistral-full"],
    BY_ID["qwen2-plain"],
    BY_ID["qwen3-tied"],
    BY_ID["qwen3_moe-few-experts"],
    BY_ID["mixtral-plain"],
    # Of the limit and the factor of its activation MaxText has the release's alone.
    Case(
        "gpt_oss-released",
        "gpt_oss",
        "gpt_oss",
        dict(BY_ID["gpt_oss-plain"].config)
        | {"swiglu_limit": 7.0, "max_position_embeddings": 131072}
        | {"rope_parameters": GPT_OSS_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    ),
    Case("deepseek_v3-released", "deepseek_v3", "deepseek_v3", LATENT),
    Case(
        "kimi_k2-released",
        "kimi_k2",
        "deepseek_v3",
        LATENT | KIMI | {"rope_parameters": KIMI_ROPE},
        written_as="kimi_k2",
    ),
    Case("deepseek_v3-plain-query", "deepseek_v3", "deepseek_v3", LATENT | {"q_lora_rank": None}),
    Case(
        "deepseek_v2-released",
        "deepseek_v2",
        "deepseek_v2",
        {name: value for name, value in LATENT.items() if "group" not in name}
        | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
        | {"rope_parameters": LATENT["rope_parameters"] | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    # Rotary positions as in Maverick: Scout's scaling is not in MaxText, which has that of Llama 3.1 alone.
    Case("llama4-scout-unscaled", "llama4_text", "llama4_text", LLAMA4),
    Case(
        "llama4-maverick",
        "llama4_text",
        "llama4_text",
        LLAMA4 | {"interleave_moe_layer_step": 2, "use_qk_norm": False},
    ),
    # With YaRN MaxText applies it to the layers with a window too, transformers does not.
    Case("olmo3-unscaled", "olmo3", "olmo3", {"num_hidden_layers": 4, "sliding_window": 6, "num_key_value_heads": 6}),
    Case("gemma2-released", "gemma2", "gemma2", GEMMA),
    Case("gemma3-released", "gemma3_text", "gemma3_text", GEMMA | {"num_hidden_layers": 8}),
    Case("gemma4-dense", "gemma4_text", "gemma4_text", GEMMA4),
    Case(
        "gemma4-experts",
        "gemma4_text",
        "gemma4_text",
        GEMMA4 | GEMMA4_EXPERTS,
    ),
    Case("qwen3_next-periods", "qwen3_next", "qwen3_next", DELTA),
    # Of another size than Qwen3-Next: with its random weights float32 alone is 2.6e-5 from float64 in transformers.
    Case("qwen3_5_moe-periods", "qwen3_5_moe_text", "qwen3_5_moe_text", DELTA | {"linear_value_head_dim": 16}),
    Case(
        "deepseek_v32-released",
        "deepseek_v32",
        "deepseek_v32",
        LATENT
        | {"num_key_value_heads": 6, "num_hidden_layers": 3}
        # With few heads many scores are 0, and of equal ones MaxText takes all.
        | {"index_topk": 8, "index_head_dim": 20, "index_n_heads": 16},
    ),
    Case("deepseek_v4-released", "deepseek_v4", "deepseek_v4", V4),
    Case(
        *("deepseek_v4-short", "deepseek_v4", "deepseek_v4"),
        V4 | {"compress_rates": V4["compress_rates"] | {"heavily_compressed_attention": 8}},
    ),
]
APART = {"deepseek_v4-short"}
"""Cases without scanned layers in MaxText: its scanned layers compress 128 tokens, more than the test has."""
FORMS = [
    pytest.param(case, scan, id=f"{case}-{'scanned' if scan else 'apart'}")
    for case in COMPARED
    for scan in (False, True)
    if not (scan and case.id in APART)
]


def checked(path: Path) -> Path:
    """A file or folder that MaxText wrote, where it ended without an error."""
    assert path.exists(), path.with_suffix(".error").read_text()
    return path


class Compared(NamedTuple):
    """What MaxText did with all cases: a folder for each, and the logits of transformers."""

    base: Path
    wanted: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    import torch

    base = tmp_path_factory.mktemp("maxtext")
    ids = np.random.default_rng(0).integers(3, 100, (2, 12))
    np.save(base / "ids.npy", ids)
    requests, wanted = [], {}
    for case in COMPARED:
        folder = base / case.id
        save(case, folder / "hf")
        model = compared_model(case)
        with torch.no_grad():
            wanted[case.id] = model(torch.from_numpy(ids)).logits.numpy()
        for scan in (False, True) if case.id not in APART else (False,):
            out = folder / str(scan)
            api.convert(folder / "hf", out, target="maxtext", scan_layers=scan)
            given = settings(case, model.config) | {"scan_layers": str(scan).lower()}
            request = {"items": str(out / "0" / "items"), "settings": given}
            requests.append(request | {"ids": str(base / "ids.npy"), "out": f"{out}.npy"})
            requests.append(request | {"run": True, "out": str(folder / f"run-{scan}")})
    ask("maxtext", "maxtext_models.py", requests)
    return Compared(base, wanted)


@pytest.mark.parametrize(("case", "scan"), FORMS)
def test_maxtext_computes_the_logits_of_transformers(case, scan, compared):
    found, wanted = np.load(checked(compared.base / case.id / f"{scan}.npy")), compared.wanted[case.id]
    assert np.abs(found - wanted).max() < 5e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(("case", "scan"), FORMS)
def test_a_step_as_the_trainer_saves_it_is_exported(case, scan, compared, tmp_path):
    folder = compared.base / case.id
    api.export(checked(folder / f"run-{scan}"), tmp_path / "back", config=folder / "hf")
    api.export(folder / str(scan), tmp_path / "known")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "known"))


# -- LoRA -------------------------------------------------------------------------------------------------------------

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ALL, OF_ATTENTION = ".*/(query|key|value|out|wi_0|wi_1|wo)", ".*/(query|key|value|out)"
ADAPTED = {
    "llama-plain": (ATTENTION + MLP, ALL),
    "qwen3-tied": (ATTENTION + MLP, ALL),
    "gemma3-released": (ATTENTION + MLP, ALL),
    "mixtral-plain": (ATTENTION, OF_ATTENTION),
    "gpt_oss-released": (ATTENTION, OF_ATTENTION),
    "deepseek_v3-released": (LATENTS, ".*self_attention/(wq_a|wq_b|wkv_a|wkv_b|out)"),
}
"""By case, the modules of an adapter, and MaxText's pattern of their names. Qwix does not change MaxText's experts."""
WITH_LORA = [case for case in COMPARED if case.id in ADAPTED]
RANK, ALPHA = 4, 8.0


@pytest.fixture(scope="module")
def with_lora(tmp_path_factory) -> Path:
    """A folder for each case, with an adapter of peft that MaxText restored and trained a step."""
    base = tmp_path_factory.mktemp("lora")
    np.save(base / "ids.npy", np.random.default_rng(0).integers(3, 100, (2, 12)))
    requests = []
    for case in WITH_LORA:
        folder, (modules, pattern) = base / case.id, ADAPTED[case.id]
        save(case, folder / "hf")
        adapter_of_peft(case, folder / "lora", r=RANK, lora_alpha=ALPHA, target_modules=modules)
        for scan in (False, True):
            out, options = folder / str(scan), {"target": "maxtext", "scan_layers": scan}
            api.convert(folder / "hf", out, **options)
            kept = folder / f"kept-{scan}"
            api.convert(folder / "hf", kept, adapter=[str(folder / "lora")], keep_adapter=True, **options)
            lora = {"enable_lora": "true", "lora_rank": RANK, "lora_alpha": ALPHA, "lora_module_path": pattern}
            lora["lora_restore_path"] = str(kept / "0" / "items")
            given = settings(case, compared_model(case).config) | {"scan_layers": str(scan).lower()}
            request = {"items": str(out / "0" / "items"), "ids": str(base / "ids.npy"), "out": f"{out}.npz"}
            request["settings"] = given | {f"lora.{key}": value for key, value in lora.items()}
            requests.append(request | {"saved": str(folder / f"saved-{scan}")})
    ask("maxtext", "maxtext_models.py", requests)
    return base


def logits_of_peft(case: Case, base: Path, adapter: Path) -> np.ndarray:
    return peft_logits(case, adapter, np.load(base / "ids.npy"), compared_model(case))


@pytest.mark.parametrize("scan", [False, True], ids=["apart", "scanned"])
@pytest.mark.parametrize("case", WITH_LORA, ids=str)
def test_maxtext_restores_an_adapter_of_peft(case, scan, with_lora):
    found = np.load(checked(with_lora / case.id / f"{scan}.npz"))["restored"]
    wanted = logits_of_peft(case, with_lora, with_lora / case.id / "lora")
    assert np.abs(found - wanted).max() < 5e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("scan", [False, True], ids=["apart", "scanned"])
@pytest.mark.parametrize("case", WITH_LORA, ids=str)
def test_peft_computes_the_logits_of_lora_that_maxtext_trained(case, scan, with_lora, tmp_path):
    """From what its `save_checkpoint` wrote, with the alpha, and what its fine-tuning does, without."""
    folder = with_lora / case.id
    made = np.load(checked(folder / f"{scan}.npz"))
    before, after = made["losses"]
    assert after < before
    for saved, alpha in (("run", None), ("state", ALPHA)):
        run = folder / f"saved-{scan}" / saved
        api.export(run, tmp_path / saved, config=folder / "hf", adapter=True, lora_alpha=alpha)
        wanted = logits_of_peft(case, with_lora, tmp_path / saved)
        assert np.abs(made["trained"] - wanted).max() < 5e-5 * np.abs(wanted).max()

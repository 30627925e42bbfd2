"""MaxText's own models, with what `--target maxtext` writes, beside transformers. Slow: it makes an environment of
Python 3.12, and compiles a model twice for each case."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same
from helpers.families import BY_ID, Case, hf_model, save
from helpers.maxtext_settings import settings
from helpers.oracles import ask
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
]


class Compared(NamedTuple):
    """What MaxText did with all cases: a folder for each, and the logits of transformers."""

    base: Path
    wanted: dict[str, np.ndarray]

    def checked(self, case: Case, name: str) -> Path:
        """A file or folder that MaxText wrote, where it ended without an error."""
        path = self.base / case.id / name
        assert path.exists(), path.with_suffix(".error").read_text()
        return path


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
        model = hf_model(case)
        if model.config.tie_word_embeddings:  # MaxText computes these logits with its embedding in bfloat16
            factor = model.config.hidden_size**0.5 if case.family.startswith("gemma") else 1.0
            head = (model.lm_head.weight * factor).bfloat16().float() / factor
            model.lm_head.weight = torch.nn.Parameter(head)
        with torch.no_grad():
            wanted[case.id] = model(torch.from_numpy(ids)).logits.numpy()
        for scan in (False, True):
            out = folder / str(scan)
            api.convert(folder / "hf", out, target="maxtext", scan_layers=scan)
            given = settings(case, model.config) | {"scan_layers": str(scan).lower()}
            request = {"items": str(out / "0" / "items"), "settings": given}
            requests.append(request | {"ids": str(base / "ids.npy"), "out": f"{out}.npy"})
            requests.append(request | {"run": True, "out": str(folder / f"run-{scan}")})
    ask("maxtext", "maxtext_models.py", requests)
    return Compared(base, wanted)


@pytest.mark.parametrize("scan", [False, True], ids=["apart", "scanned"])
@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_maxtext_computes_the_logits_of_transformers(case, scan, compared):
    found, wanted = np.load(compared.checked(case, f"{scan}.npy")), compared.wanted[case.id]
    assert np.abs(found - wanted).max() < 5e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("scan", [False, True], ids=["apart", "scanned"])
@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_a_step_as_the_trainer_saves_it_is_exported(case, scan, compared, tmp_path):
    folder = compared.base / case.id
    api.export(compared.checked(case, f"run-{scan}"), tmp_path / "back", config=folder / "hf")
    api.export(folder / str(scan), tmp_path / "known")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "known"))

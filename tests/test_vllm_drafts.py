"""vLLM's build for CPUs drafts with what we export, in an environment of its own; see `make consumers`.

Models have 12 tokens, so that drafts with random weights guess some of them. Where vLLM accepts as many of as many
drafts as we do, each draft is the same; and no draft changes a token.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers import dflash, dspark, eagle3
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.consumers import BASE
from helpers.drafts import save_with_drafts
from helpers.families import Case, save
from helpers.oracles import ask
from tpuconv import api
from tpuconv.models.drafts import DraftSpeculator
from tpuconv.models.generate import Generator
from tpuconv.models.speculate import Speculator

pytestmark = [pytest.mark.slow, pytest.mark.consumers]

NEW, VOCABULARY, PART = 32, 12, 7
TARGET = Case(
    "target-served",
    "qwen3",
    "qwen3",
    {**BASE, "num_hidden_layers": 3, "vocab_size": VOCABULARY, "initializer_range": 0.15},
)
PROMPTS = [list(map(int, np.random.default_rng(1).integers(0, VOCABULARY, length))) for length in (9, 3, 21, 14)]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""Sizes of drafts that vLLM's attention has on CPUs."""
V1 = "Model Runner V1 does not support"


@dataclass(frozen=True)
class Draft:
    """A draft with random weights.

    Attributes:
        save: writes it.
        name, cases: its config is the one of this name.
        forms: in which it is exported; the empty form is that of its release.
        tokens: how many tokens vLLM is asked to draft in a step.
        changes: keys of its config beside the sizes.
        error: a part of vLLM's error, if it refuses the draft.
    """

    save: Callable[..., Path]
    name: str
    cases: Mapping[str, Mapping[str, Any]]
    forms: tuple[str, ...]
    tokens: int = 3
    changes: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def written(self, folder: Path) -> Path:
        config = json.loads(json.dumps(self.cases[self.name]))
        config.get("transformer_layer_config", config).update(SIZES)
        if "draft_vocab_size" in config:
            config["draft_vocab_size"] = PART
        for place in (config, config.get("dflash_config", {})):
            if "mask_token_id" in place:
                place["mask_token_id"] = VOCABULARY - 1
        return self.save(self.name, folder, **config | self.changes)


def of_eagle3(name: str, forms: tuple[str, ...], **changes: Any) -> Draft:
    return Draft(eagle3.save_draft, name, eagle3.CASES, forms, changes=changes)


def save_with_one_norm(name: str, folder: Path, **config: Any) -> Path:
    """Writes a DFlash draft with one norm for the keys of all layers, and returns the folder: vLLM's kernel for CPUs
    applies the norm of the first layer to the context of each."""
    dflash.save_dflash(name, folder, **config)
    tensors = read_tensors(folder)
    norms = {key: tensors["layers.0.self_attn.k_norm.weight"] for key in tensors if key.endswith("k_norm.weight")}
    return write_checkpoint(folder, config, tensors | norms)


def of_dflash(name: str, forms: tuple[str, ...], tokens: int, error: str = "") -> Draft:
    return Draft(save_with_one_norm, name, dflash.CASES, forms, tokens, error=error)


def of_dspark(name: str, forms: tuple[str, ...], tokens: int) -> Draft:
    return Draft(dspark.save_dspark, name, dspark.CASES, forms, tokens, error=V1)


STATES = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
NARROW = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "target_hidden_size": 256}
METHODS: Mapping[str, Mapping[str, Draft]] = {
    "eagle3": {
        "sglang": of_eagle3("sglang", ("sglang", "speculators"), eagle_config=STATES),
        "narrow": of_eagle3("narrow", ("sglang", "speculators"), eagle_config=STATES, **NARROW),
        "speculators": of_eagle3("speculators", ("",), eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        "four states": of_eagle3("speculators", ("speculators",), eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3]),
    },
    "dflash": {
        "z-lab": of_dflash("z-lab", ("", "speculators"), 3),
        "speculators": of_dflash("speculators", ("speculators",), 4),
        "windows": of_dflash("windows", ("",), 5, f"{V1}: mixed sliding/full dflash drafts"),
    },
    "dspark": {
        "deepspec": of_dspark("deepspec", ("", "speculators"), 5),
        "sglang": of_dspark("sglang", ("sglang", "speculators"), 3),
        "recurrent": of_dspark("recurrent", ("",), 4),
    },
}


MODULES: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    },
    "exaone_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 4},
        "sliding_window": 16,
    },
}
"""Models with a module for multi-token prediction: keys of their configs beside the target's."""
HIDES_A_TOKEN = ("glm4_moe",)
"""Models in whose modules vLLM sets the first embedding to 0, so that some drafts differ."""


def texts(generate: Generator) -> list[list[int]]:
    return np.stack(list(generate(PROMPTS, NEW)), axis=1).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(TARGET, tmp_path_factory.mktemp("target") / "hf")


@pytest.mark.parametrize("method", METHODS)
def test_vllm_drafts_as_we_do(method: str, target: Path, tmp_path: Path) -> None:
    api.convert(target, tmp_path / "target")
    model = tpuconv.load(tmp_path / "target")
    free, runs, expected = texts(Generator(model)), [], []
    for name, draft in METHODS[method].items():
        ours = tmp_path / f"{name}-ours"
        api.convert(draft.written(tmp_path / name), ours)
        speculator = DraftSpeculator(model, tpuconv.load(ours))
        assert texts(speculator) == free
        drafts = speculator.drafts
        assert drafts.accepted > 0
        for form in draft.forms:
            runs.append(exported(ours, form, target, method, draft.tokens))
            facts = {"texts": free, "drafted": drafts.checked, "accepted": drafts.accepted}
            expected.append((f"{name}, {form or 'released'}", draft.error, facts))
    for (name, error, want), found in zip(expected, generated(tmp_path, runs), strict=True):
        if error:
            assert error in found.get("error", ""), name
        else:
            assert found == want, name


def exported(ours: Path, form: str, target: Path, method: str, tokens: int) -> dict[str, Any]:
    """Exports a draft, and returns the run of vLLM with it."""
    out = ours.with_name(f"{ours.name}-{form or 'released'}")
    of_target = {"draft_for": str(target)} if form == "speculators" else {}
    api.export(ours, out, **({"form": form} if form else {}), **of_target)
    speculative = {"method": method, "model": str(out), "num_speculative_tokens": tokens}
    return {"target": str(target), "dtype": "float32", "speculative": speculative}


NO_RECURRENCE = "There is no module or parameter named 'markov_head.joint_proj'"


def test_vllm_loads_the_weights_of_dspark(target: Path, tmp_path: Path) -> None:
    """Its class has the vanilla head alone."""
    runs, names = [], []
    for name, draft in METHODS["dspark"].items():
        api.convert(draft.written(tmp_path / name), tmp_path / f"{name}-ours")
        for form in draft.forms:
            runs.append(exported(tmp_path / f"{name}-ours", form, target, "dspark", draft.tokens))
            names.append(name)
    results = tmp_path / "results.json"
    request = {"runs": runs, "results": str(results)}
    ask("vllm", "vllm_draft_weights.py", request, VLLM_USE_V2_MODEL_RUNNER="1")
    for name, found in zip(names, json.loads(results.read_text()), strict=True):
        if name == "recurrent":
            assert NO_RECURRENCE in found.get("error", "")
        else:
            assert found == {"model": "Qwen3DSparkForCausalLM"}, name


def generated(folder: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what became of each run: see `helpers/vllm_drafts.py`."""
    results = folder / "results.json"
    ask("vllm", "vllm_drafts.py", {"prompts": PROMPTS, "tokens": NEW, "runs": runs, "results": str(results)})
    return json.loads(results.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", MODULES)
def test_vllm_drafts_with_the_module_of_a_model(family: str, tmp_path: Path) -> None:
    """Both draft one token in a step."""
    case = Case(f"{family}-served", family, family, {**TARGET.config, **MODULES[family]})
    api.convert(save_with_drafts(case, tmp_path / "hf"), tmp_path / "ours", include_mtp=True)
    model = tpuconv.load(tmp_path / "ours", mtp=True)
    speculator = Speculator(model)
    free = texts(Generator(model))
    assert texts(speculator) == free
    drafts = speculator.drafts
    assert drafts.accepted > 0
    api.export(tmp_path / "ours", tmp_path / "theirs")
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    run = {"target": str(tmp_path / "theirs"), "dtype": "float32", "speculative": speculative}
    (found,) = generated(tmp_path, [run])
    assert found.get("texts") == free, found
    assert found["accepted"] > 0
    if family not in HIDES_A_TOKEN:
        assert (found["drafted"], found["accepted"]) == (drafts.checked, drafts.accepted)

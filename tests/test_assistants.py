"""Assistants of Gemma 4, drafts that read the keys and values of their target, beside transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import convert
from helpers.drafts import assert_exported_as_released, save_target
from helpers.families import BY_ID, PROMPTS, save
from helpers.logits import forward
from tpuconv import api
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models.common.cache import KV
from tpuconv.models.drafts import DraftSpeculator
from tpuconv.models.generate import Generator, left_padded
from tpuconv.models.named import families_named
from tpuconv.models.registry import find_family

TOLERANCE = 2e-5
NEW = 12
TEXT: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "initializer_range": 0.2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    },
}
CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "plain": ({}, {"backbone_hidden_size": 50}),
    "clusters": (
        {"sliding_window": 20},
        {
            "backbone_hidden_size": 30,
            "use_ordered_embeddings": True,
            "num_centroids": 12,
            "centroid_intermediate_top_k": 5,
        },
    ),
    "global-keys": (
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3, "sliding_window": 3},
        {"backbone_hidden_size": 24},
    ),
    "unified": ({"num_hidden_layers": 4, "layer_types": None, "num_key_value_heads": 1}, {"backbone_hidden_size": 38}),
}
"""Keys of `text_config` and of config.json."""


def save_assistant(folder: Path, text: Mapping[str, Any], keys: Mapping[str, Any], unified: bool = False) -> Path:
    """Writes an assistant as `save_pretrained` does, with random weights, and returns the folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind = "Gemma4UnifiedAssistant" if unified else "Gemma4Assistant"
    of_text = getattr(transformers, "Gemma4UnifiedTextConfig" if unified else "Gemma4TextConfig")
    merged = {key: value for key, value in {**TEXT, **text}.items() if value is not None}
    merged["num_kv_shared_layers"] = merged["num_hidden_layers"]
    config = getattr(transformers, f"{kind}Config")(text_config=of_text(**merged), **keys)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" in name:
                values.uniform_(0.5, 1.5)
        for layer in model.model.layers:
            layer.layer_scalar.uniform_(0.8, 1.2)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(config.text_config.vocab_size))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_assistant(tmp_path_factory.mktemp(name) / "draft", *CASES[name], unified=name == "unified")
        for name in CASES
    }


@pytest.fixture(scope="module")
def checkpoints(sources: dict[str, Path]) -> dict[str, Path]:
    for source in sources.values():
        api.convert(str(source), str(source.parent / "out"))
    return {name: source.parent / "out" for name, source in sources.items()}


def inputs(config: Any, length: int = 11) -> dict[str, Any]:
    """Random inputs of a draft for two sequences, the second padded on the left, and the keys of the target."""
    rng, sizes = np.random.default_rng(1), config.sizes
    heads = {
        "sliding_attention": (sizes["K"], sizes["H"]),
        "full_attention": (sizes["full_kv_heads"], sizes["full_head_dim"]),
    }
    mask_BS = np.ones((2, length), bool)
    mask_BS[1, :4] = False
    return {
        "mask_BS": mask_BS,
        "embedded": rng.normal(size=(2, 1, config.backbone_hidden_size)).astype("f4"),
        "x": rng.normal(size=(2, 1, config.backbone_hidden_size)).astype("f4"),
        "kvs": {
            kind: [rng.normal(size=(2, length, *shape)).astype("f4") for _ in range(2)] for kind, shape in heads.items()
        },
    }


def ours(model: Any, given: Mapping[str, Any]) -> Any:
    mask_BS = given["mask_BS"]
    pos_BS = np.where(mask_BS, mask_BS.cumsum(axis=1) - 1, -1)
    kvs = {kind: KV(*map(jnp.asarray, pair)) for kind, pair in given["kvs"].items()}
    ids, pos_BT = jnp.zeros((2, 1), jnp.int32), jnp.asarray(mask_BS.sum(axis=1, keepdims=True))
    return forward(
        model,
        ids,
        jnp.asarray(given["embedded"]),
        jnp.asarray(given["x"]),
        kvs=kvs,
        pos_BT=pos_BT,
        pos_BS=jnp.asarray(pos_BS),
    )


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    import torch
    import transformers

    model = tpuconv.load(checkpoints[name])
    given = inputs(model.config)
    kind = "Gemma4UnifiedAssistantForCausalLM" if name == "unified" else "Gemma4AssistantForCausalLM"
    theirs = getattr(transformers, kind).from_pretrained(sources[name], dtype=torch.float32).eval()
    keys = {kind: tuple(torch.tensor(x.transpose(0, 2, 1, 3)) for x in pair) for kind, pair in given["kvs"].items()}
    with torch.no_grad():
        want = theirs(
            inputs_embeds=torch.tensor(np.concatenate([given["embedded"], given["x"]], axis=-1)),
            attention_mask=torch.tensor(given["mask_BS"].astype("i8")),
            position_ids=torch.tensor(given["mask_BS"].sum(axis=1, keepdims=True)),
            shared_kv_states=keys,
        )
    have = ours(model, given)
    for a, b in ((have.logits_BTV, want.logits.numpy()), (have.x_BTD, want.last_hidden_state.numpy())):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(b).max())


@pytest.mark.parametrize("name", CASES)
def test_export_gives_the_tensors_back(name: str, sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    out = checkpoints[name].parent / "back"
    assert_exported_as_released(checkpoints[name], sources[name], out)
    assert json.loads((out / "config.json").read_text()) == json.loads((sources[name] / "config.json").read_text())


@pytest.mark.parametrize("name", ["plain", "clusters"])
def test_quantized_assistants_are_near(name: str, checkpoints: dict[str, Path]) -> None:
    """And are exported for servers, with matrices of layers in compressed-tensors' format."""
    out = checkpoints[name].parent / "int8"
    api.quantize(str(checkpoints[name]), str(out), config="int8_weight_only")
    given = inputs(tpuconv.load(out).config)
    states = [np.asarray(ours(tpuconv.load(folder), given).x_BTD) for folder in (checkpoints[name], out)]
    difference = np.abs(states[0] - states[1]).max() / np.abs(states[0]).max()
    assert 0 < difference < 0.05
    api.export(str(out), str(out.parent / "served"))
    tensors = read_tensors(out.parent / "served")
    assert tensors["model.layers.0.self_attn.q_proj.weight_packed"].dtype == np.int32
    assert tensors["model.embed_tokens.weight"].dtype == np.float32
    assert '"method": "mtp"' in (out.parent / "served" / "README.md").read_text()


@pytest.fixture(scope="module")
def target(shared: Any) -> Any:
    """The release of a case whose layers add little, so that the next token depends on the last one mostly."""

    def saved(name: str) -> Path:
        return shared(f"{name}-assisted-hf", lambda folder: save_target(BY_ID[name], folder, 0.3))  # type: ignore[no-any-return]

    return saved


def for_target(source: Path, folder: Path, **keys: Any) -> Path:
    """Writes a random assistant that fits a target, and returns the folder."""
    text = json.loads((source / "config.json").read_text())
    of_layers = text.get("per_layer_config") or {"": {}}
    inside = next(iter(of_layers.values()))
    same = ("vocab_size", "head_dim", "num_key_value_heads", "num_attention_heads", "attention_k_eq_v", "hidden_size")
    read = {
        **{key: text[key] for key in same},
        "global_head_dim": inside.get("head_dim", text["head_dim"]),
        "num_global_key_value_heads": inside.get("num_key_value_heads"),
    }
    return save_assistant(folder, read, {"backbone_hidden_size": text["hidden_size"], **keys})


def agreeing(source: Path, folder: Path) -> Path:
    """Changes an assistant of a target so that it returns the target's logits of the last token alone."""
    tensors, of_target = read_tensors(folder), read_tensors(source)
    width = of_target["model.norm.weight"].shape[0]
    square, zero = np.eye(width, dtype="f4"), np.zeros((width, width), "f4")
    tensors |= {name: x * 0 for name, x in tensors.items() if name.endswith(("o_proj.weight", "down_proj.weight"))}
    tensors |= {name: np.ones_like(x) for name, x in tensors.items() if name.endswith("layer_scalar")}
    same = ("model.norm.weight", "model.embed_tokens.weight")
    tensors |= {"pre_projection.weight": np.concatenate([square, zero], axis=1)}
    tensors |= {name: of_target[name] for name in same}
    return write_checkpoint(folder, json.loads((folder / "config.json").read_text()), tensors)


def loaded(source: Path, out: Path) -> Any:
    convert(source, out)
    return tpuconv.load(out)


def tokens(generate: Generator, prompts: list[list[int]] = PROMPTS) -> np.ndarray:
    return np.stack(list(generate(prompts, NEW)), axis=1)


CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 101, "centroid_intermediate_top_k": 30}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gemma4_text-plain", {}),
        *(
            pytest.param(name, CLUSTERS, marks=pytest.mark.slow)
            for name in ("gemma4_text-shared", "gemma4_text-experts", "gemma4_unified_text-plain")
        ),
    ],
)
def test_assistants_change_no_token(name: str, keys: dict[str, Any], target: Any, tmp_path: Path) -> None:
    """Random drafts, and drafts that know the last token, of which many are accepted."""
    source = target(name)
    model = loaded(source, tmp_path / "target")
    free = tokens(Generator(model))
    draft = for_target(source, tmp_path / "draft", **keys)
    random = DraftSpeculator(model, loaded(draft, tmp_path / "random"))
    np.testing.assert_array_equal(tokens(random), free)
    assert random.drafts.checked > 0
    near = DraftSpeculator(model, loaded(agreeing(source, draft), tmp_path / "near"))
    np.testing.assert_array_equal(tokens(near), free)
    np.testing.assert_array_equal(tokens(near, PROMPTS[:1])[0], free[0])
    assert random.drafts.share < near.drafts.share
    assert near.drafts.accepted > 0


def test_each_draft_is_the_one_of_transformers(target: Any, tmp_path: Path) -> None:
    """The drafts after prompts, most of them longer than the window, from transformers' target and assistant."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    rng, source = np.random.default_rng(3), target("gemma4_text-plain")
    prompts = [list(map(int, rng.integers(3, 101, length))) for length in (10, 4, 13, 9, 8, 12, 7, 11)]
    folder = for_target(source, tmp_path / "draft")
    model, draft = loaded(source, tmp_path / "target"), loaded(folder, tmp_path / "converted")
    speculator = DraftSpeculator(model, draft)
    have, _ = speculator.read(*left_padded(prompts), NEW, jax.random.key(0))

    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assistant = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assistant.generation_config.num_assistant_tokens = speculator.ahead
    theirs.generation_config.max_length = 100
    for prompt, drafted in zip(prompts, np.asarray(have), strict=True):
        candidates = SinglePositionMultiTokenCandidateGenerator(
            assistant, theirs.get_input_embeddings(), theirs.generation_config
        )
        with torch.no_grad():
            out = theirs(torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True)
            ids = torch.tensor([[*prompt, int(out.logits[0, -1].argmax())]])
            want, _ = candidates.get_candidates(ids, {"attention_mask": torch.ones_like(ids)}, out, False, 0)
        assert drafted.tolist() == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("place", "changes", "error"),
    [
        ("text_config", {"num_kv_shared_layers": 1}, ConfigError),
        ("text_config", {"enable_moe_block": True}, UnsupportedConfig),
        ("text_config", {"a_new_key": 1}, UnsupportedConfig),
        ("", {"tie_word_embeddings": False}, UnsupportedConfig),
        ("", {"num_centroids": 13}, ConfigError),
        ("", {"centroid_intermediate_top_k": 13}, ConfigError),
    ],
)
def test_other_assistants_are_refused(
    place: str, changes: dict[str, Any], error: type[TpuconvError], sources: dict[str, Path]
) -> None:
    config = json.loads((sources["clusters"] / "config.json").read_text())
    (config[place] if place else config).update(changes)
    with pytest.raises(error):
        find_family(config).read_config(config)


def test_targets_of_other_families_are_refused(target: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    draft = tpuconv.load(checkpoints["plain"])
    llama = loaded(save(BY_ID["llama-plain"], tmp_path / "llama"), tmp_path / "out")
    with pytest.raises(UsageError, match="which llama does not have"):
        DraftSpeculator(llama, draft)
    with pytest.raises(UsageError, match="sizes differ") as error:
        DraftSpeculator(loaded(target("gemma4_text-plain"), tmp_path / "target"), draft)
    assert "width of the target: 50 in the draft, 48 in the target" in error.value.details
    with pytest.raises(UsageError, match="is for EAGLE-3, DFlash and DSpark drafts"):
        api.export(str(checkpoints["plain"]), str(tmp_path / "served"), form="sglang")


@pytest.mark.parametrize("name", ["gemma4_assistant", "gemma4_unified_assistant", "Gemma4AssistantForCausalLM"])
def test_names_of_assistants_are_known(name: str) -> None:
    assert [family.name for family in families_named(name)[0]] == ["gemma4_assistant"]
    assert find_family({"model_type": "gemma4_assistant"}).name == "gemma4_assistant"

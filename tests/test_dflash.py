"""DFlash drafts: conversion, values, quantization, export, and drafts that change no token."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import convert
from helpers.dflash import CASES, block_states, facts, save_dflash, save_muse
from helpers.drafts import assert_exported_as_released, save_target
from helpers.families import BY_ID, PROMPTS
from helpers.logits import forward
from tpuconv import api
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models.drafts import DraftSpeculator
from tpuconv.models.generate import Generator, left_padded
from tpuconv.models.named import families_named
from tpuconv.models.registry import find_family

TOLERANCE = 2e-5
NEW = 12
NAMES = (*CASES, "muse", "muse-full")
FOR_TARGET = {"speculators": {"draft_for": "some/target"}}
WITH_TARGET = ("z-lab", "windows", "both-ways", "speculators", "muse")
MUSE_FULL = {"layer_types": ["full_attention"] * 3, "target_layer_ids": [0, 1], "block_size": 3}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dflash")
    saved = {name: save_dflash(name, folder / name) for name in CASES}
    return {
        **saved,
        "muse": save_muse(folder / "muse"),
        "muse-full": save_muse(folder / "muse-full", **MUSE_FULL),
    }


@pytest.fixture(scope="module")
def checkpoints(sources: dict[str, Path]) -> dict[str, Path]:
    outs = {name: source.parent / f"{name}-out" for name, source in sources.items()}
    for name, source in sources.items():
        api.convert(str(source), str(outs[name]))
    return outs


def inputs(model: Any, tokens: int = 11) -> tuple[np.ndarray, np.ndarray]:
    """Random hidden states of two sequences, and embeddings of a block."""
    rng, sizes = np.random.default_rng(1), model.config.sizes
    states = rng.normal(size=(2, tokens, sizes["target_states"])).astype("f4")
    return states, rng.normal(size=(2, model.config.block_size, sizes["D"])).astype("f4")


def ours(model: Any, states: np.ndarray, embedded: np.ndarray) -> np.ndarray:
    ids = jnp.zeros(embedded.shape[:2], jnp.int32)
    return np.asarray(forward(model, ids, jnp.asarray(states), embedded_BTD=jnp.asarray(embedded))[0])


@pytest.mark.parametrize("name", CASES)
def test_states_of_blocks_are_those_of_the_formulas(
    name: str, sources: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    model = tpuconv.load(checkpoints[name])
    states, embedded = inputs(model)
    want = block_states(CASES[name], read_tensors(sources[name]), states, embedded)
    np.testing.assert_allclose(ours(model, states, embedded), want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("name", ["muse", "muse-full"])
def test_states_of_blocks_are_those_of_transformers(
    name: str, sources: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    import torch
    from transformers import MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    model = tpuconv.load(checkpoints[name])
    states, embedded = inputs(model)
    theirs = MuseGlimmerAssistantModel.from_pretrained(sources[name], dtype=torch.float32).eval()
    cache = DFlashCache(config=theirs.config)
    cache.set_previous_accepted_tokens(states.shape[1])
    with torch.no_grad():
        out = theirs(noise_embeds=torch.tensor(embedded), context_hidden_states=torch.tensor(states), cache=cache)
    want = out.last_hidden_state.numpy()
    np.testing.assert_allclose(ours(model, states, embedded), want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("name", NAMES)
def test_export_writes_the_release_again(name: str, sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    out = checkpoints[name].parent / f"{name}-back"
    assert_exported_as_released(checkpoints[name], sources[name], out)
    assert facts(out) == facts(sources[name])


@pytest.mark.parametrize("name", ["z-lab", "muse"])
def test_quantized_blocks_are_near(name: str, checkpoints: dict[str, Path]) -> None:
    out = checkpoints[name].parent / f"{name}-int8"
    api.quantize(str(checkpoints[name]), str(out), config="int8_weight_only")
    model = tpuconv.load(checkpoints[name])
    given = inputs(model)
    states = [ours(each, *given) for each in (model, tpuconv.load(out))]
    difference = np.abs(states[0] - states[1]).max() / np.abs(states[0]).max()
    assert 0 < difference < 0.05
    api.export(str(out), f"{out}-served")
    tensors = read_tensors(Path(f"{out}-served"))
    assert tensors["layers.0.self_attn.q_proj.weight_packed"].dtype == np.int32
    assert '"method": "dflash"' in Path(f"{out}-served", "README.md").read_text()


@pytest.mark.parametrize("name", ["z-lab", "both-ways"])
def test_formats_hold_the_same_block(name: str, sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    """From z-lab's format to the format of speculators and back."""
    out = checkpoints[name].parent / f"{name}-forms"
    api.export(str(checkpoints[name]), str(out / "speculators"), form="speculators", draft_for="some/target")
    config = facts(out / "speculators")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert config["aux_hidden_state_layer_ids"] == [1]
    assert config["sliding_window_non_causal"]  # no layer is causal
    api.convert(str(out / "speculators"), str(out / "again"))
    api.export(str(out / "again"), str(out / "sglang"), form="sglang")
    model = tpuconv.load(checkpoints[name])
    given = inputs(model)
    for form in ("speculators", "sglang"):
        have, want = read_tensors(out / form), read_tensors(sources[name])
        assert {key: x.tobytes() for key, x in have.items()} == {key: x.tobytes() for key, x in want.items()}
        np.testing.assert_array_equal(ours(tpuconv.load(out / form), *given), ours(model, *given))


def test_formats_refuse_other_blocks(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for name, form, why in (
        ("windows", "speculators", "input_embedding_scale"),
        ("speculators", "sglang", "part of the vocabulary"),
        ("muse", "sglang", "format of its own"),
    ):
        with pytest.raises(UnsupportedConfig, match=why):
            api.export(str(checkpoints[name]), str(tmp_path / "out"), form=form, **FOR_TARGET.get(form, {}))


@pytest.fixture(scope="module")
def target(shared: Any) -> Path:
    """A release whose layers add little, so that the next token depends on the last one mostly."""
    return shared("llama-plain-target-hf", lambda folder: save_target(BY_ID["llama-plain"], folder))  # type: ignore[no-any-return]


def loaded(source: Path, out: Path) -> Any:
    convert(source, out)
    return tpuconv.load(out)


def tokens(generate: Generator, prompts: list[list[int]] = PROMPTS) -> np.ndarray:
    return np.stack(list(generate(prompts, NEW)), axis=1)


def knowing(target: Path, source: Path, folder: Path, token: int) -> Path:
    """Writes a draft whose block is the same token everywhere: so it is right where the target repeats this token."""
    tensors, config = read_tensors(source), facts(source)
    embedding = read_tensors(target)["model.embed_tokens.weight"]
    head = read_tensors(target).get("lm_head.weight", embedding)
    tensors |= {name: x * 0 for name, x in tensors.items() if name.endswith(("o_proj.weight", "down_proj.weight"))}
    ratio = head[token] / embedding[config["dflash_config"]["mask_token_id"]]
    return write_checkpoint(folder, config, {**tensors, "norm.weight": ratio.astype("f4")})


@pytest.mark.parametrize("name", ["z-lab", *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_TARGET[1:])])
def test_blocks_change_no_token(name: str, target: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    model = loaded(target, tmp_path / "target")
    free = tokens(Generator(model))
    speculator = DraftSpeculator(model, loaded(sources[name], tmp_path / "draft"))
    np.testing.assert_array_equal(tokens(speculator), free)
    np.testing.assert_array_equal(tokens(speculator, PROMPTS[:1])[0], free[0])
    assert speculator.drafts.checked > 0


def test_blocks_that_are_right_are_accepted(target: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    model = loaded(target, tmp_path / "target")
    free = tokens(Generator(model))
    followed = np.unique(free[:, 1:], return_counts=True)
    token = int(followed[0][followed[1].argmax()])
    draft = knowing(target, sources["z-lab"], tmp_path / "knowing", token)
    speculator = DraftSpeculator(model, loaded(draft, tmp_path / "draft"))
    np.testing.assert_array_equal(tokens(speculator), free)
    np.testing.assert_array_equal(tokens(speculator, PROMPTS[1:2])[0], free[1])
    assert speculator.drafts.accepted > 0


def test_each_block_is_the_one_of_transformers(target: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    """The drafts after prompts and after a further step, from transformers' target, assistant and generator."""
    import torch
    from transformers import AutoModelForCausalLM, MuseGlimmerAssistantModel
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    rng = np.random.default_rng(3)
    prompts = [list(map(int, rng.integers(3, 99, length))) for length in (10, 4, 13, 7)]
    model, draft = loaded(target, tmp_path / "target"), loaded(sources["muse"], tmp_path / "draft")
    speculator = DraftSpeculator(model, draft)
    ids_BT, mask_BT = left_padded(prompts)
    have, cache = speculator.read(ids_BT, mask_BT, NEW, jax.random.key(0))
    first = np.asarray(have)
    decode = speculator.decode(len(prompts), cache.positions_BS.shape[1])
    (have, best, accepted), _ = decode(speculator.weights, have, cache, jax.random.key(0))
    second, accepted = np.asarray(have), np.asarray(accepted)

    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    theirs.generation_config.max_length = 100
    for row, prompt in enumerate(prompts):
        assistant = MuseGlimmerAssistantModel.from_pretrained(sources["muse"], dtype=torch.float32).eval()
        candidates = DFlashTokenCandidateGenerator(
            assistant, theirs.get_input_embeddings(), theirs.get_output_embeddings(), theirs.generation_config
        )

        def drafted(ids: list[int], read: int, matches: int) -> list[int]:
            """Returns the drafts behind tokens, of which the target read so many in its last step."""
            given = torch.tensor([ids])
            facts = {"position_ids": torch.arange(len(ids))[None], "attention_mask": torch.ones_like(given)}
            with torch.no_grad():
                out = theirs(given[:, :-1], output_hidden_states=True)
            out.hidden_states = tuple(states[:, -read:] for states in out.hidden_states)
            found, _ = candidates.get_candidates(given, facts, out, False, matches)  # noqa: B023
            return found[0, len(ids) :].tolist()  # type: ignore[no-any-return]

        known = [*prompt, int(first[row, 0])]
        assert drafted(known, len(prompt), 0) == first[row, 1:].tolist()
        taken = 1 + int(accepted[row])
        known += [int(x) for x in np.asarray(best)[row, :taken]]
        assert drafted(known, taken, taken - 1) == second[row, 1:].tolist()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dflash_config": {"target_layer_ids": [0]}}, ConfigError),
        ({"dflash_config": {"mask_token_id": 3}}, ConfigError),
        ({"dflash_config": {"mask_token_id": 101, "target_layer_ids": [0]}}, ConfigError),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 0]}}, ConfigError),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0], "use_swa": True}}, UnsupportedConfig),
        ({"block_size": 1}, ConfigError),
        ({"architectures": ["DFlash2DraftModel"]}, UnsupportedConfig),
        ({"sample_from_anchor": True}, UnsupportedConfig),
    ],
)
def test_other_blocks_are_refused(changes: dict[str, Any], error: type[TpuconvError]) -> None:
    config = {**CASES["z-lab"], **changes}
    with pytest.raises(error):
        find_family(config).read_config(config)


def test_targets_that_do_not_fit_are_refused(target: Path, tmp_path: Path) -> None:
    model = loaded(target, tmp_path / "target")
    draft = save_dflash("z-lab", tmp_path / "draft", dflash_config={"mask_token_id": 9, "target_layer_ids": [0, 2]})
    with pytest.raises(UsageError, match="the target has 2"):
        DraftSpeculator(model, loaded(draft, tmp_path / "out"))
    narrow = save_dflash("z-lab", tmp_path / "narrow", hidden_size=30)
    with pytest.raises(UsageError, match="sizes differ"):
        DraftSpeculator(model, loaded(narrow, tmp_path / "narrow-out"))
    muse = save_muse(tmp_path / "muse", mask_token_id=101)  # its config.json has no vocabulary
    with pytest.raises(UsageError, match="the mask of the draft is the token 101, and the target has 101"):
        DraftSpeculator(model, loaded(muse, tmp_path / "muse-out"))


@pytest.mark.parametrize("name", ["dflash", "DFlashDraftModel", "muse_glimmer_assistant", "MuseGlimmerAssistantModel"])
def test_names_of_dflash_are_known(name: str) -> None:
    assert [family.name for family in families_named(name)[0]] == ["dflash"]

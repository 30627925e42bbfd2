"""Drafts by another model, EAGLE-3: they change no token of the target, and agree where they can."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.commands import EXAMPLE
from helpers.conversions import convert
from helpers.drafts import save_target
from helpers.eagle3 import CASES, drafted, save_agreeing_draft, save_draft, save_twins
from helpers.families import BY_ID, PROMPTS
from tpuconv import api, cli
from tpuconv.api.opened import OpenedModel
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.types import Options
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.drafts import DraftSpeculator
from tpuconv.models.generate import ENDED, Generator, Sampling

NEW = 12
RANDOM = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "eagle_config": None}
FAST = ("llama-plain",)
SLOW = (
    "qwen3_next-plain",
    "gemma4_text-plain",
    "glm_moe_dsa-plain",
    "mistral_large4-plain",
    "gpt_oss-plain",
    "deepseek_v3-groups",
)


@pytest.fixture(scope="module")
def target(shared: Any) -> Any:
    """The release of a case whose layers add little, so that the next token depends on the last one mostly."""

    def saved(name: str) -> Path:
        return shared(f"{name}-target-hf", lambda folder: save_target(BY_ID[name], folder))  # type: ignore[no-any-return]

    return saved


def tokens(generate: Generator, prompts: list[list[int]] = PROMPTS, **options: Any) -> np.ndarray:
    return np.stack(list(generate(prompts, NEW, **options)), axis=1)


def loaded(source: Path, out: Path, **options: Any) -> Any:
    convert(source, out, Options(**options))
    return tpuconv.load(out)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_random_drafts_change_no_token(name: str, target: Any, tmp_path: Path) -> None:
    source = target(name)
    model = loaded(source, tmp_path / "target")
    changes = RANDOM | {"eagle_aux_hidden_state_layer_ids": [0, 1, model.config.num_hidden_layers]}
    draft = loaded(save_draft("sglang", tmp_path / "draft", **changes), tmp_path / "converted")
    speculator = DraftSpeculator(model, draft)
    np.testing.assert_array_equal(tokens(speculator), tokens(Generator(model)))
    assert speculator.drafts.checked > 0


def test_a_draft_is_converted_for_its_target(target: Any, tmp_path: Path) -> None:
    """The target may be a release or a checkpoint; exports name it, of a quantized draft too."""
    source = target("llama-plain")
    draft = save_draft("sglang", tmp_path / "draft", **RANDOM, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    api.convert(source, tmp_path / "converted")
    for number, place in enumerate((source, tmp_path / "converted")):
        out = tmp_path / f"out-{number}"
        api.convert(draft, out, draft_for=str(place))
        api.quantize(out, tmp_path / f"int8-{number}", config="int8_weight_only")
        for ckpt in (out, tmp_path / f"int8-{number}"):
            form = {"form": "speculators"}
            api.export(ckpt, tmp_path / f"{ckpt.name}-export", **form)
            config = json.loads((tmp_path / f"{ckpt.name}-export" / "config.json").read_text())
            assert config["speculators_config"]["verifier"]["name_or_path"] == read_manifest(ckpt).draft_for
            assert read_manifest(ckpt).draft_for in (source.name, "converted")
    api.export(tmp_path / "out-0", tmp_path / "named", form="speculators", draft_for="some/other")
    config = json.loads((tmp_path / "named" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/other"


def test_a_draft_for_another_target_is_refused_before_weights_are_read(target: Any, tmp_path: Path) -> None:
    draft = save_draft("sglang", tmp_path / "draft", **RANDOM)
    with pytest.raises(UsageError, match="is a model of its own"):
        api.plan(target("llama-plain"), draft_for=str(target("llama-plain")))
    config = json.loads((target("llama-plain") / "config.json").read_text()) | {"vocab_size": 77}
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="its sizes differ from the target's") as error:
        api.plan(draft, draft_for=str(tmp_path / "target"))
    assert error.value.details == ("vocabulary: 101 in the draft, 77 in the target",)


@pytest.mark.slow
def test_drafts_beyond_the_last_learned_position_change_no_token(target: Any, tmp_path: Path) -> None:
    """A step may draft tokens behind the last position that the target has."""
    model = loaded(target("gpt2-plain"), tmp_path / "target")
    source = save_draft("sglang", tmp_path / "draft", **RANDOM, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    draft = loaded(source, tmp_path / "converted")
    ids = np.random.default_rng(0).integers(0, 101, model.config.max_position_embeddings - NEW).tolist()
    prompts = [ids, ids[5:]]
    np.testing.assert_array_equal(tokens(DraftSpeculator(model, draft), prompts), tokens(Generator(model), prompts))


@pytest.mark.parametrize(
    ("name", "noise"), [("llama-plain", 0.03), pytest.param("qwen3_next-plain", 0.0, marks=pytest.mark.slow)]
)
def test_drafts_that_agree_are_accepted(name: str, noise: float, target: Any, tmp_path: Path) -> None:
    """In a batch whose sequences accept other numbers of drafts in a step, and one by one."""
    source = target(name)
    model = loaded(source, tmp_path / "target")
    free = tokens(Generator(model))
    chosen = np.unique(np.concatenate([free[:, : NEW // 2].ravel(), np.arange(0, 101, 3)]))
    draft = loaded(save_agreeing_draft(source, tmp_path / "draft", chosen, noise), tmp_path / "converted")
    speculator = DraftSpeculator(model, draft)
    np.testing.assert_array_equal(tokens(speculator), free)
    assert 0.1 < speculator.drafts.share < 1
    np.testing.assert_array_equal(tokens(speculator, PROMPTS[:1])[0], free[0])
    eos = int(free[0, 3])
    ended = [tokens(generate, eos=(eos,)) for generate in (speculator, Generator(model))]
    assert ENDED in ended[0]
    np.testing.assert_array_equal(*ended)


@pytest.mark.slow
def test_a_draft_that_is_never_wrong_is_always_accepted(tmp_path: Path) -> None:
    target, draft = save_twins(tmp_path)
    model = loaded(target, tmp_path / "model")
    speculator = DraftSpeculator(model, loaded(draft, tmp_path / "converted"))
    rng = np.random.default_rng(1)
    for lengths in ((9,), (13, 17, 9)):
        prompts = [[0, *map(int, rng.integers(1, 101, length))] for length in lengths]
        np.testing.assert_array_equal(tokens(speculator, prompts), tokens(Generator(model), prompts))
    assert speculator.drafts.share == 1


def test_each_draft_is_the_one_of_the_formulas(target: Any, tmp_path: Path) -> None:
    """The drafts after a prompt, against the draft without a cache in torch, on hidden states of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    source, prompt = target("llama-plain"), [5, 17, 3, 88, 41, 9, 62]
    config = {**CASES["sglang"], **RANDOM, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    save_draft("sglang", tmp_path / "draft", **config)
    model, draft = loaded(source, tmp_path / "target"), loaded(tmp_path / "draft", tmp_path / "converted")
    speculator = DraftSpeculator(model, draft)
    mask = np.ones((1, len(prompt)), bool)
    have, _ = speculator.read(np.array([prompt], np.int32), mask, NEW, jax.random.key(0))

    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    layers: list[Any] = []
    theirs.model.layers[-1].register_forward_hook(lambda module, given, out: layers.append(out))
    with torch.no_grad():
        out = theirs(torch.tensor([prompt]), output_hidden_states=True)
    states = torch.cat([*out.hidden_states[:2], layers[0]], dim=-1).numpy()
    embedding, tensors = read_tensors(source)["model.embed_tokens.weight"], read_tensors(tmp_path / "draft")
    ids, further = [*prompt[1:], int(out.logits[0, -1].argmax())], np.zeros((1, 0, 48), "f4")
    for _ in range(speculator.ahead):
        positions = np.arange(len(ids))[None]
        logits, x = drafted(config, tensors, states, embedding[ids][None], positions, further)
        chosen = int(logits[0, -1].argmax())
        ids.append(chosen + int(tensors["d2t"][chosen]))
        further = np.concatenate([further, x[:, -1:]], axis=1)
    assert np.asarray(have)[0].tolist() == ids[len(prompt) - 1 :]


@pytest.mark.slow
def test_quantized_targets_and_drafts_change_no_token(target: Any, tmp_path: Path) -> None:
    source = target("llama-plain")
    convert(source, tmp_path / "target")
    model = tpuconv.load(quantized(tmp_path / "target"))
    chosen = np.arange(0, 101, 2)
    convert(save_agreeing_draft(source, tmp_path / "draft", chosen), tmp_path / "converted")
    speculator = DraftSpeculator(model, tpuconv.load(quantized(tmp_path / "converted")), cache_dtype="int8")
    np.testing.assert_array_equal(tokens(speculator), tokens(Generator(model, cache_dtype="int8")))
    assert speculator.drafts.accepted > 0


def quantized(ckpt: Path) -> Path:
    api.quantize(str(ckpt), f"{ckpt}-int8", config="int8_weight_only")
    return Path(f"{ckpt}-int8")


def test_drafts_of_other_models_are_refused(target: Any, tmp_path: Path) -> None:
    source = target("llama-plain")
    model = loaded(source, tmp_path / "target")

    def draft(**changes: Any) -> Any:
        convert(save_draft("sglang", tmp_path / "draft", **RANDOM | changes), tmp_path / "out", overwrite=True)
        return tpuconv.load(tmp_path / "out")

    fits = draft(eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    with pytest.raises(UsageError, match=r"temperature is 0\.5"):
        DraftSpeculator(model, fits, Sampling(temperature=0.5))
    with pytest.raises(UsageError, match="no draft of another"):
        DraftSpeculator(model, model)
    with pytest.raises(UsageError, match="the target has 2"):
        DraftSpeculator(model, draft())
    with pytest.raises(UsageError, match="sizes differ") as error:
        DraftSpeculator(model, draft(vocab_size=99, target_hidden_size=30))
    assert list(error.value.details) == [
        "vocabulary: 99 in the draft, 101 in the target",
        "width of the target: 30 in the draft, 48 in the target",
    ]
    for damaged, place in ((100000, "d2t[3] is 100000"), (-9, "d2t[3] is -9")):
        fits.d2t[...] = fits.d2t[...].at[3].set(damaged)
        with pytest.raises(UsageError, match="leads to tokens that the target does not have") as error:
            DraftSpeculator(model, fits)
        assert list(error.value.details) == [f"{place}: the token {damaged + 3} of 101"]
    fits.d2t[...] = jnp.zeros_like(fits.d2t[...])
    model.stack_layers()
    with pytest.raises(UnsupportedConfig, match="stacked"):
        DraftSpeculator(model, fits)


def test_commands_draft_with_a_checkpoint(converted: Path, tmp_path: Path) -> None:
    """`generate` and `benchmark` of the example, with a draft that is a release."""
    source = save_agreeing_draft(EXAMPLE, tmp_path / "draft", np.arange(0, 256))
    ckpt = converted / f"{EXAMPLE.name}-orbax"

    def run(*command: Any) -> Any:
        done = CliRunner().invoke(cli.tpuconv, list(map(str, command)))
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    asked = ("generate", ckpt, "--prompt", "Once upon a time", "--max-new-tokens", 12, "--json")
    plain, with_drafts = run(*asked), run(*asked, "--speculate", source)
    assert with_drafts["ids"] == plain["ids"]
    assert 0 <= with_drafts["accepted_share"] <= 1
    assert "accepted_share" not in plain
    first = run(*asked[:-2], 1, "--json", "--speculate", source)
    assert (first["ids"], "accepted_share" in first) == (plain["ids"][:1], False)
    sizes = ("--repeats", 1, "--prompt-length", 4, "--new-tokens", 8)
    timing = run("benchmark", ckpt, "--speculate", source, *sizes, "--json")["timings"][0]
    assert timing["accepted_share"] == pytest.approx((timing["tokens_per_step"] - 1) / 3)
    with pytest.raises(UsageError, match="is no draft"):
        api.generator(str(ckpt), speculate=str(ckpt))


def test_pairs_are_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(EXAMPLE, tmp_path / "stacked", Options(scan_layers=True))
    fits = save_agreeing_draft(EXAMPLE, tmp_path / "fits", np.arange(0, 256))
    config = json.loads((fits / "config.json").read_text())
    tensors = read_tensors(fits)
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    for name, keys in (("dynamic", dynamic), ("deep", {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]})):
        write_checkpoint(tmp_path / name, {**config, **keys}, tensors)
    monkeypatch.setattr(OpenedModel, "load", lambda *args, **options: pytest.fail("weights are read"))
    with pytest.raises(UnsupportedConfig, match="stacked"):
        api.generator(str(tmp_path / "stacked"), speculate=str(fits))
    with pytest.raises(UnsupportedConfig, match="longer with drafts"):
        api.generator(str(EXAMPLE), speculate=str(tmp_path / "dynamic"))
    with pytest.raises(UsageError, match="the target has 5") as error:
        api.generator(str(EXAMPLE), speculate=str(tmp_path / "deep"))
    assert "give a draft of this target" in str(error.value.hint)


@pytest.mark.slow
def test_several_devices_draft_the_same_tokens(converted: Path, tmp_path: Path) -> None:
    """The draft has the mesh of its target."""
    source = save_agreeing_draft(EXAMPLE, tmp_path / "draft", np.arange(0, 256))
    ckpt = str(converted / f"{EXAMPLE.name}-orbax")
    program = f"""
from tpuconv import api
plain, drafting = (api.generator({ckpt!r}, speculate=by) for by in (False, {str(source)!r}))
assert drafting.generator.mesh.size == 4
assert plain(["Once upon a time"], 12)[0].ids == drafting(["Once upon a time"], 12)[0].ids
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)

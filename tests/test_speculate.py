"""Drafts of the module for multi-token prediction: what they are, and that they change no token."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import tpuconv
from helpers.commands import EXAMPLE
from helpers.conversions import convert
from helpers.drafts import save_with_drafts
from helpers.families import CASES, PROMPTS, Case
from tpuconv import cli
from tpuconv.convert.plan.types import Options
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.generate import ENDED, Generator, Sampling
from tpuconv.models.speculate import Speculator

pytestmark = pytest.mark.usefixtures("quick_compiler")

NEW = 10
BY_ID = {case.id: case for case in CASES}
WITH_MODULE = (
    *("deepseek_v3-groups", "deepseek_v32-plain", "glm_moe_dsa-plain", "glm_moe_dsa-shared", "glm4_moe-air"),
    *("glm4_moe_lite-plain", "qwen3_next-plain", "qwen3_5_text-plain", "qwen3_5-plain", "qwen3_5_moe_text-plain"),
    "qwen3_5_moe-plain",
)


@pytest.fixture(scope="module")
def drafting(shared: Any) -> Any:
    """The folder of a case with its module, as tpuconv converts it."""

    def converted(name: str) -> Path:
        source = shared(f"{name}-drafts-hf", lambda folder: save_with_drafts(BY_ID[name], folder))
        return shared(f"{name}-drafts", lambda folder: convert(source, folder, Options(include_mtp=True)))

    return converted


def tokens(generate: Generator, prompts: list[list[int]], **options: Any) -> np.ndarray:
    return np.stack(list(generate(prompts, NEW, **options)), axis=1)


@pytest.mark.parametrize("name", WITH_MODULE)
def test_drafts_change_no_token(name: str, drafting: Any) -> None:
    """In a batch of which sequences take drafts at different steps."""
    model = tpuconv.load(drafting(name), mtp=True)
    speculator = Speculator(model)
    np.testing.assert_array_equal(tokens(speculator, PROMPTS), tokens(Generator(model), PROMPTS))
    assert 0 < speculator.drafts.accepted < speculator.drafts.checked
    assert speculator.drafts.checked + speculator.drafts.accepted >= len(PROMPTS) * (NEW - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm_moe_dsa-shared", "qwen3_next-plain"])
def test_drafts_change_no_token_of_one_sequence_nor_with_an_int8_cache(name: str, drafting: Any) -> None:
    model = tpuconv.load(drafting(name), mtp=True)
    speculator, generator = Speculator(model), Generator(model)
    for prompt in PROMPTS:
        np.testing.assert_array_equal(tokens(speculator, [prompt]), tokens(generator, [prompt]))
    small = [make(model, cache_dtype="int8") for make in (Speculator, Generator)]
    np.testing.assert_array_equal(*(tokens(generate, PROMPTS) for generate in small))
    free = tokens(generator, PROMPTS)
    eos = int(free[0, 3])
    ended = [tokens(generate, PROMPTS, eos=(eos,)) for generate in (speculator, generator)]
    assert ENDED in ended[0]
    np.testing.assert_array_equal(*ended)


@pytest.mark.slow
def test_drafts_change_no_token_of_stacked_layers(drafting: Any, shared: Any, tmp_path: Path) -> None:
    name = "qwen3_next-plain"
    drafting(name)
    source = shared(f"{name}-drafts-hf", lambda folder: None)
    convert(source, tmp_path / "out", Options(include_mtp=True, scan_layers=True))
    model = tpuconv.load(tmp_path / "out", mtp=True)
    speculator = Speculator(model)
    np.testing.assert_array_equal(tokens(speculator, PROMPTS), tokens(Generator(model), PROMPTS))
    assert 0 < speculator.drafts.accepted < speculator.drafts.checked


@pytest.mark.slow
def test_long_prompts_are_read_in_chunks(drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a chunk has its successor in the next one."""
    model = tpuconv.load(drafting("glm_moe_dsa-shared"), mtp=True)
    whole = Speculator(model)
    expected = tokens(whole, PROMPTS)
    monkeypatch.setattr("tpuconv.models.generate.PREFILL_TOKENS", 2 * len(PROMPTS) + 1)
    chunked = Speculator(model)
    np.testing.assert_array_equal(tokens(chunked, PROMPTS), expected)
    assert chunked.drafts == whole.drafts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3-groups", "glm4_moe-air", "qwen3_next-plain", "qwen3_5_text-plain"])
def test_the_module_is_a_layer_of_transformers_on_joined_inputs(name: str, drafting: Any, shared: Any) -> None:
    """Its layer is loaded as one more layer of the model of transformers, which drops the module; the formula around
    it is that of arXiv:2412.19437, section 2.2, on the hidden states after the last norm."""
    import torch
    from safetensors.torch import load_file

    folder = drafting(name)
    source = shared(f"{name}-drafts-hf", lambda folder: None)
    tensors = load_file(source / "model.safetensors")
    case = BY_ID[name]
    hf = one_more_layer(case)
    L = case.hf_config().num_hidden_layers
    of_qwen = any(key.startswith("mtp.") for key in tensors)
    renamed = {key.replace("mtp.layers.0.", f"model.layers.{L}."): value for key, value in tensors.items()}
    missing = hf.load_state_dict(stacked_experts(renamed, hf), strict=False).missing_keys
    assert not missing
    part = "mtp." if of_qwen else f"model.layers.{L}."
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    embed_norm, hidden_norm, joining, last = (
        tensors[f"{part}{key}.weight"]
        for key in (names if of_qwen else ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    )
    ids = torch.tensor([PROMPTS[0]])
    layers, hf.model.layers = hf.model.layers, hf.model.layers[:L]
    with torch.no_grad():
        normed = hf.model(ids[:, :-1]).last_hidden_state

        def norm(x: Any, scale: Any) -> Any:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + hf.config.rms_norm_eps)
            return x * (scale + 1 if of_qwen else scale)

        both = torch.cat([norm(hf.model.embed_tokens(ids[:, 1:]), embed_norm), norm(normed, hidden_norm)], dim=-1)
        inputs = both @ joining.T
        positions = torch.arange(inputs.shape[1])[None]
        causal = torch.full((inputs.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        out = layers[L](
            inputs,
            attention_mask=causal,
            position_ids=positions,
            position_embeddings=hf.model.rotary_emb(inputs, positions),
        )
        expected = hf.lm_head(norm(out[0] if isinstance(out, tuple) else out, last)).numpy()
    model: Any = tpuconv.load(folder, mtp=True)
    ids_BT = jnp.asarray([PROMPTS[0]])
    x_BTD, cache = model.run_layers(ids_BT[:, :-1], jnp.ones((1, 8), bool), model.init_cache(1, 8))
    y_BTD, _ = model.draft(model.norm(x_BTD), ids_BT[:, 1:], cache, 0)
    np.testing.assert_allclose(model.head(y_BTD), expected, atol=2e-5 * np.abs(expected).max())


def one_more_layer(case: Case) -> Any:
    """The model of transformers, with a layer more that has full attention and, in a model with experts, experts."""
    from transformers import AutoModelForCausalLM

    config = case.hf_config()
    config.num_hidden_layers += 1
    for key, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, key, None):
            setattr(config, key, [*getattr(config, key)[: config.num_hidden_layers - 1], kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def stacked_experts(tensors: Any, hf: Any) -> dict[str, Any]:
    """The tensors with the names that a model has in memory, where experts are stacked."""
    import torch

    out = dict(tensors)
    for name in hf.state_dict():
        if ".experts." in name and name not in out:
            front, _, last = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            count = hf.state_dict()[name].shape[0]
            experts = [torch.cat([tensors[f"{front}.{e}.{part}.weight"] for part in parts]) for e in range(count)]
            out[name] = torch.stack(experts)
    return out


def test_what_cannot_draft_is_refused(with_mtp: Path, converted: Path, tmp_path: Path) -> None:
    convert(with_mtp, tmp_path / "without")
    with pytest.raises(UsageError, match="no layers for multi-token prediction") as error:
        tpuconv.load(tmp_path / "without", mtp=True)
    assert "--include-mtp" in str(error.value.hint)
    convert(with_mtp, tmp_path / "with", Options(include_mtp=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = tpuconv.load(tmp_path / "with")
    with pytest.raises(UsageError, match=r"loaded without its module") as error:
        Speculator(model)
    assert "mtp=True" in str(error.value.hint)
    with pytest.raises(UsageError, match=r"temperature is 0\.5"):
        Speculator(model, Sampling(temperature=0.5))
    model.add_mtp()
    model.config = replace(model.config, rope=replace(model.config.rope, type="dynamic"))
    with pytest.raises(UnsupportedConfig, match="longer with drafts"):
        Speculator(model)
    llama: Any = tpuconv.load(converted / f"{EXAMPLE.name}-orbax")
    with pytest.raises(UnsupportedConfig, match="not implemented for"):
        llama.add_mtp()


@pytest.mark.slow
def test_commands_tell_how_many_drafts_were_accepted(drafting: Any, tmp_path: Path) -> None:
    def run(*command: Any) -> Any:
        done = CliRunner().invoke(cli.tpuconv, list(map(str, command)))
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    folder = drafting("deepseek_v3-groups")
    found = run(
        *("benchmark", folder, "--speculate", "--repeats", 1, "--prompt-length", 4, "--new-tokens", NEW, "--json")
    )
    timing = found["timings"][0]
    assert 1 <= timing["tokens_per_step"] <= 2
    assert timing["tokens_per_second"] == pytest.approx(timing["tokens_per_step"] / timing["step_seconds"])

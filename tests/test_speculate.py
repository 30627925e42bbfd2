"""Drafts of the module for multi-token prediction: what they are, and that they change no token."""

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

import tpuconv
from helpers.commands import EXAMPLE
from helpers.conversions import convert
from helpers.drafts import NOISE, WITH_MODULE, drafted, save_with_drafts
from helpers.families import BY_ID, PROMPTS
from tpuconv import api, cli
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.types import Options
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.generate import ENDED, Generator, Sampling
from tpuconv.models.speculate import Speculator

NEW = 10
NEVER_RIGHT = {"nemotron_h-latent"}
"""Cases whose random module drafts no right token: it has other parts than the model's last layers. What the module
computes is measured in tests/test_mtp_modules.py."""


@pytest.fixture(scope="module")
def drafting(shared: Any) -> Any:
    """The folder of a case with its module, as tpuconv converts it."""

    def converted(name: str, noise: float = NOISE[0]) -> Path:
        source = shared(f"{name}-drafts-{noise}-hf", lambda folder: save_with_drafts(BY_ID[name], folder, noise))
        return shared(f"{name}-drafts-{noise}", lambda folder: convert(source, folder, Options(include_mtp=True)))

    return converted


def tokens(generate: Generator, prompts: list[list[int]], **options: Any) -> np.ndarray:
    return np.stack(list(generate(prompts, NEW, **options)), axis=1)


@pytest.mark.parametrize("name", WITH_MODULE)
def test_drafts_change_no_token(name: str, drafting: Any) -> None:
    """In a batch of which sequences take drafts at different steps: some are right, and some are not."""
    accepted = []
    for noise in NOISE:
        model = tpuconv.load(drafting(name, noise), mtp=True)
        speculator = Speculator(model)
        np.testing.assert_array_equal(tokens(speculator, PROMPTS), tokens(Generator(model), PROMPTS))
        drafts = speculator.drafts
        assert drafts.checked + drafts.accepted >= len(PROMPTS) * (NEW - 1)
        accepted.append(drafts.accepted)
        if 0 < drafts.accepted < drafts.checked:
            return
    assert max(accepted) > 0 or name in NEVER_RIGHT
    assert min(accepted) < drafts.checked


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
    source = shared(f"{name}-drafts-{NOISE[0]}-hf", lambda folder: None)
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


def test_what_cannot_draft_is_refused(with_mtp: Path, converted: Path, tmp_path: Path) -> None:
    convert(with_mtp, tmp_path / "without")
    with pytest.raises(UsageError, match="no layers for multi-token prediction") as error:
        tpuconv.load(tmp_path / "without", mtp=True)
    assert "`include_mtp=True`" in str(error.value.hint)
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


PATTERN = "mtp/.*/(attn|mlp|moe)/(?!(.*/)?router).*"
BY_NAME = f"""
qwix:
  rules:
    - module_path: '{PATTERN}'
      weight_qtype: int8
    - module_path: '.*/(attn|mlp|moe)/(?!(.*/)?router).*'
      weight_qtype: int8
"""
"""The module for multi-token prediction is quantized by a rule that names it."""

NOT_SERVED = {"alice_ai-plain"}
"""Cases whose experts are in one tensor, which no format of servers holds."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MODULE)
def test_a_module_that_a_rule_names_is_quantized(name: str, tmp_path: Path) -> None:
    """It drafts as the module of the values that its export holds, and changes no token."""
    save_with_drafts(BY_ID[name], tmp_path / "hf")
    (tmp_path / "mtp.yaml").write_text(BY_NAME)
    api.convert(tmp_path / "hf", tmp_path / "int8", include_mtp=True, quantize=str(tmp_path / "mtp.yaml"))
    named = [name for name in read_manifest(tmp_path / "int8").quantization["parameters"] if name.startswith("mtp.")]
    assert any(".attn." in name for name in named)
    model = tpuconv.load(tmp_path / "int8", mtp=True)
    assert sum(x.dtype == jnp.int8 for x in jax.tree.leaves(nnx.state(model.mtp))) == len(named)
    speculator = Speculator(model)
    np.testing.assert_array_equal(tokens(speculator, PROMPTS), tokens(Generator(model), PROMPTS))
    assert speculator.drafts.checked
    if name in NOT_SERVED:
        with pytest.raises(UsageError, match="which is not a linear layer's weight"):
            api.export(tmp_path / "int8", tmp_path / "served")
        return
    api.export(tmp_path / "int8", tmp_path / "served")
    api.convert(tmp_path / "served", tmp_path / "again", include_mtp=True, dtype="float32")
    again = tpuconv.load(tmp_path / "again", mtp=True)
    ours, theirs = (drafted(each) for each in (model, again))
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_a_rule_is_for_a_module_that_is_converted(tmp_path: Path) -> None:
    (tmp_path / "mtp.yaml").write_text(BY_NAME)
    save_with_drafts(BY_ID["glm4_moe-air"], tmp_path / "hf")
    plan = partial(api.plan, tmp_path / "hf", quantize=str(tmp_path / "mtp.yaml"))
    quantized = plan(include_mtp=True).plan.quantization
    assert quantized is not None
    of_mtp = {name.split(".", 2)[2] for name in quantized.encoders if name.startswith("mtp.")}
    assert {"attn.q.kernel", "moe.down.kernel", "moe.shared.up.kernel"} <= of_mtp
    assert not of_mtp & {"moe.router.kernel", "from_hidden.kernel"}
    with pytest.raises(ConfigError) as error:
        plan()
    (fault,) = error.value.details
    assert fault == f"line 4: '{PATTERN}' matches no module with a product"
    assert "`include_mtp=True`" in str(error.value.hint)


def test_a_calibration_does_not_run_the_module(tmp_path: Path) -> None:
    (tmp_path / "mtp.yaml").write_text(BY_NAME.replace("int8", "int4") + "calibration: {method: gptq}\n")
    save_with_drafts(BY_ID["glm4_moe-air"], tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out", include_mtp=True)
    with pytest.raises(ConfigError, match="does not run the module for multi-token prediction"):
        api.quantize(tmp_path / "out", tmp_path / "int4", config=str(tmp_path / "mtp.yaml"), calibration="self")

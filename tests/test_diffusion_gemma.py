"""DiffusionGemma: its canvases against transformers. The tests of all families compare its encoder."""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import tpuconv
from helpers.commands import tpuconv as tpuconv_command
from helpers.families import BY_ID, FIRST, Case, hf_model, one_fast_of_each
from helpers.pages import saved
from tpuconv import api
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.models.denoise import Denoiser, Denoising, entropies
from tpuconv.models.drafts import generator_of
from tpuconv.models.generate import Sampling
from tpuconv.models.registry import find_family
from tpuconv.quantize.config import find_config
from tpuconv.quantize.provider import Provider, quantized

CASES = [FIRST["diffusion_gemma"], BY_ID["diffusion_gemma-odd"]]
RNG = np.random.default_rng(3)
IDS_BT = RNG.integers(3, 100, (2, 11))
CANVAS_BC = RNG.integers(0, 101, (2, 9))
LOGITS_BCV = 9 * RNG.normal(size=(3, 24, 101)).astype(np.float32)


def padded_on(side: str) -> np.ndarray:
    mask_BT = np.ones(IDS_BT.shape, bool)
    if side == "left":
        mask_BT[1, :3] = False
    return mask_BT


def theirs(model: Any, mask_BT: np.ndarray, *temperatures: float) -> list[np.ndarray]:
    """transformers' logits [B, C, V] of steps, each conditioned on the one before, at these temperatures."""
    import torch

    mask, width, canvas = torch.tensor(mask_BT), CANVAS_BC.shape[1], torch.tensor(CANVAS_BC)
    out: list[Any] = []
    with torch.no_grad():
        encoded = model.base_model.encoder(input_ids=torch.tensor(IDS_BT), attention_mask=mask.long())
        for step in range(len(temperatures) + 1):
            before = out[-1] / temperatures[step - 1] if step else None
            out.append(
                model.denoise(
                    cache=encoded.cache,
                    decoder_input_ids=canvas,
                    self_conditioning_logits=before,
                    decoder_attention_mask=torch.nn.functional.pad(mask, (0, width), value=True),
                    decoder_position_ids=torch.arange(mask.shape[1], mask.shape[1] + width)[None],
                ).logits
            )
    return [logits.numpy() for logits in out]


@pytest.mark.parametrize("side", ["left", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", one_fast_of_each(cases=CASES))
def test_logits_of_a_canvas(case: Case, side: str, hf) -> None:
    """Of canvases longer than the window too, and after a step that was thrown away."""
    mask_BT = padded_on(side)
    wanted = theirs(hf_model(case), mask_BT, 0.7)
    model = tpuconv.load(hf(case), dtype="float32")
    cache = model.init_cache(2, IDS_BT.shape[1] + CANVAS_BC.shape[1])
    _, cache = model(jnp.asarray(IDS_BT), jnp.asarray(mask_BT), cache=cache)
    used, positions = int(cache.used), np.asarray(cache.positions_BS)
    mean_BCD = jnp.zeros((*CANVAS_BC.shape, model.config.hidden_size))
    _, cache = model.denoise(jnp.asarray(CANVAS_BC[::-1]), cache, mean_BCD)
    first, cache = model.denoise(jnp.asarray(CANVAS_BC), cache, mean_BCD)
    second, cache = model.denoise(jnp.asarray(CANVAS_BC), cache, model.mean_embeddings(jnp.asarray(wanted[0]) / 0.7))
    assert (int(cache.used), np.asarray(cache.positions_BS).tolist()) == (used, positions.tolist())
    for ours, reference in zip((first, second), wanted, strict=True):
        assert np.abs(np.asarray(ours) - reference).max() <= 2e-5 * np.abs(reference).max()


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8_default", "all"])
def test_steps_of_quantized_models(config: str, hf, tmp_path: Path) -> None:
    """They equal the model's that Qwix makes, with the matrices of self-conditioning where a rule names them."""
    (tmp_path / "all.yaml").write_text("qwix: {rules: [{module_path: '.*', weight_qtype: int8}]}")
    chosen = str(tmp_path / "all.yaml") if config == "all" else config
    rules = find_config(chosen)
    api.convert(hf(CASES[0], "bfloat16"), tmp_path / "plain")
    api.quantize(tmp_path / "plain", tmp_path / "int8", config=chosen)
    logits = []
    for model in (tpuconv.load(tmp_path / "int8"), quantized(tpuconv.load(tmp_path / "plain"), Provider(rules))):
        assert isinstance(model.self_conditioning.mlp.gate.kernel, nnx.Param) == (config != "all")
        cache = model.init_cache(2, IDS_BT.shape[1] + CANVAS_BC.shape[1])
        _, cache = model(jnp.asarray(IDS_BT), cache=cache)
        mean_BCD = model.mean_embeddings(jnp.asarray(LOGITS_BCV[:2, :9]))
        logits.append(np.asarray(model.denoise(jnp.asarray(CANVAS_BC), cache, mean_BCD)[0]))
    assert np.array_equal(*logits)


def test_samples_are_accepted_as_by_transformers() -> None:
    import torch
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        EntropyBoundSampler,
        EntropyBoundSamplerConfig,
    )

    for bound in (1e-3, 0.1, 2.0, 1e3):
        sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), 24, 101, 48)
        sampler.accept_canvas(torch.zeros((3, 24)), torch.ones((3, 24)), torch.tensor(LOGITS_BCV), 1)
        ours = Denoising(entropy_bound=bound).accepted(entropies(jnp.asarray(LOGITS_BCV)))
        assert np.asarray(ours).tolist() == sampler.accepted_token_mask.tolist()


class Draws:
    """Random tokens and samples for transformers, as a `Denoiser` draws them."""

    def __init__(self, seed: int, prompt: int, width: int, steps: int):
        self.key, self.rng = jax.random.key(seed), np.random.default_rng(seed)
        self.slot, self.width, self.steps = prompt - width, width, steps
        self.sampled = False

    def keys(self) -> Any:
        return jax.random.split(jax.random.fold_in(jax.random.fold_in(self.key, self.slot), self.left))

    def randint(self, low: int, high: int, size: tuple[int, ...], device: Any = None) -> Any:
        """Those that a canvas begins with, or after samples the ones in place of samples that are not accepted."""
        import torch

        if self.sampled:
            drawn = np.asarray(jax.random.randint(self.keys()[1], size, low, high, jnp.int32))
            self.left, self.sampled = self.left - 1, False
        else:
            drawn = self.rng.integers(low, high, size, np.int32)
            self.left, self.slot = self.steps, self.slot + self.width
        return torch.tensor(drawn.astype(np.int64))

    def multinomial(self, probs: Any, num_samples: int) -> Any:
        import torch

        logits = jnp.log(jnp.asarray(probs.numpy())).reshape(-1, self.width, probs.shape[-1])
        drawn = jax.random.categorical(self.keys()[0], logits)
        self.sampled = True
        return torch.tensor(np.asarray(drawn).astype(np.int64)).reshape(-1, 1)


@pytest.mark.parametrize(
    ("how", "sharp"),
    [
        pytest.param({}, 1.0, id="uncertain", marks=pytest.mark.slow),
        pytest.param({"max_denoising_steps": 5}, 30.0, id="certain"),
        pytest.param({"stability_threshold": 2, "confidence_threshold": 3.0}, 4.0, id="stable", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", one_fast_of_each(cases=CASES))
def test_texts_are_those_of_transformers(
    case: Case, how: dict[str, Any], sharp: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same random numbers, over several canvases, by generation_config.json."""
    import torch

    model = hf_model(case)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(sharp)
        model.model.decoder.embed_tokens.weight.set_(model.get_input_embeddings().weight)
    model.generation_config.update(**how)
    model.save_pretrained(tmp_path)
    denoising = Denoising.from_folder(tmp_path)
    assert denoising.steps == how.get("max_denoising_steps", 48)
    width, new = model.config.canvas_length, 3 * model.config.canvas_length
    drawn = Draws(7, IDS_BT.shape[1], width, denoising.steps)
    monkeypatch.setattr(torch, "randint", drawn.randint)
    monkeypatch.setattr(torch, "multinomial", drawn.multinomial)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)  # imports a compiler
    model.forward = model.denoise
    wanted = model.generate(torch.tensor(IDS_BT), max_new_tokens=new, eos_token_id=None)
    write = Denoiser(tpuconv.load(tmp_path, dtype="float32"), denoising)
    ours = np.stack(list(write(IDS_BT.tolist(), new, seed=7)), axis=1)
    assert ours.tolist() == wanted.sequences[:, IDS_BT.shape[1] :].tolist()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny release with a tokenizer, whose canvases have few steps."""
    folder = saved("diffusion_gemma", tmp_path_factory.mktemp("release") / "src")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_denoising_steps": 3, "eos_token_id": [1]}))
    return folder


@pytest.mark.slow
def test_generate_writes_canvases(release: Path) -> None:
    generate = api.generator(release)
    first, again, other = (generate(["Once"], 10, seed=seed)[0].ids for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 10 or first[-1] == 1
    args = ("generate", release, "--prompt", "Once", "--max-new-tokens", "10", "--json")
    assert json.loads(tpuconv_command(*args, "--seed", 1).stdout)["ids"] == list(first)
    refused = tpuconv_command(*args, "--temperature", "0.7", code=2).stderr
    assert "chooses all tokens of a canvas together" in refused


def test_a_comparison_says_what_it_does_not_show(release: Path, tmp_path: Path) -> None:
    """This model has no embedding of a placeholder."""
    api.convert(release, tmp_path / "out")
    found = api.compare(tmp_path / "out", dtype="float32")
    assert found.passed
    assert found.unseen.keys() == {"vision", "canvas"}


@pytest.mark.slow
def test_benchmark_times_steps(release: Path) -> None:
    """14 tokens are two canvases of three steps at most."""
    args = ("benchmark", release, "--prompt-length", "5", "--new-tokens", "14", "--repeats", "1", "--json")
    (row,) = json.loads(tpuconv_command(*args).stdout)["timings"]
    assert 14 / 6 <= row["tokens_per_step"] <= 7
    assert row["accepted_share"] is None


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        ({"max_denoising_steps": 0}, "steps=0.*is invalid"),
        ({"max_denoising_steps": 1 << 31}, "steps=2147483648.*is invalid"),
        ({"t_min": 0.9}, "coldest=0.9.*is invalid"),
        ({"t_max": "hot"}, "t_max"),
        ({"sampler_config": {"entropy_bound": -1.0}}, "entropy_bound=-1.0.*is invalid"),
    ],
    ids=str,
)
def test_steps_that_cannot_be_are_refused(keys: dict[str, Any], answer: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(keys))
    with pytest.raises(TpuconvError, match=answer):
        Denoising.from_folder(tmp_path)


def test_the_decoder_has_no_weights_of_its_own(hf, tmp_path: Path) -> None:
    """What files have twice is compared; without ties the decoder would be another model."""
    folder = shutil.copytree(hf(CASES[0]), tmp_path / "src")
    tensors = load_file(folder / "model.safetensors")
    name = "model.decoder.layers.1.self_attn.q_proj.weight"
    copy = name.replace("decoder", "encoder.language_model")
    save_file(tensors | {copy: tensors[name]}, folder / "model.safetensors")
    api.convert(folder, tmp_path / "out")
    api.export(tmp_path / "out", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()
    save_file(tensors | {copy: 2 * tensors[name]}, folder / "model.safetensors")
    with pytest.raises(TpuconvError, match=copy):
        api.convert(folder, tmp_path / "other")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    with pytest.raises(TpuconvError, match="tie_word_embeddings"):
        api.plan(folder)


def test_other_models_write_no_canvases(orbax) -> None:
    with pytest.raises(UsageError, match="writes no canvases"):
        generator_of(tpuconv.load(orbax(FIRST["llama"])), Denoising())
    with pytest.raises(UsageError, match="of a canvas together"):
        Denoiser(tpuconv.load(orbax(CASES[0])), Sampling(top_k=5))


def test_the_release_has_25_2_billion_parameters() -> None:
    """As its card says, which counts neither the encoder of images nor self-conditioning."""
    text = {
        **{"model_type": "diffusion_gemma_text", "hidden_size": 2816, "intermediate_size": 2112, "vocab_size": 262144},
        **{"num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256},
        **{"global_head_dim": 512, "num_global_key_value_heads": 2, "sliding_window": 1024},
        **{"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        **{"use_bidirectional_attention": "vision", "final_logit_softcapping": 30.0, "max_position_embeddings": 262144},
    }
    raw = {"model_type": "diffusion_gemma", "architectures": ["DiffusionGemmaForBlockDiffusion"], "text_config": text}
    family = find_family(raw)
    config = family.check_config(raw).config
    assert config.canvas_length == 256
    assert config.rope.partial_rotary_factor == 0.25
    bound = family.table.bind(config)
    sizes = {binding.row.jax_names[0].split(".")[0]: 0 for binding in bound}
    for binding in bound:
        sizes[binding.row.jax_names[0].split(".")[0]] += sum(map(prod, binding.src_shapes().values()))
    assert round(sum(sizes.values()) / 1e9, 1) == 25.3
    assert round((sum(sizes.values()) - sizes["self_conditioning"]) / 1e9, 1) == 25.2

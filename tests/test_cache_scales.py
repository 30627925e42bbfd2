"""Static scales of KV caches: of what transformers caches, in checkpoints, loaded models, exports and vLLM."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from flax import nnx
from ml_dtypes import float8_e4m3fn
from transformers import AutoModelForCausalLM, DynamicCache

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.commands import EXAMPLE
from helpers.conversions import Options, assert_same, convert, restore
from helpers.oracles import ask
from helpers.quantizing import ONE_OF_EACH, interrupted, quantize
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.run.building import FOUND_STEP
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.common.cache import KV, StaticKV, append_kv
from tpuconv.models.logits import forward_each, whole_texts
from tpuconv.models.registry import get_family
from tpuconv.names import CACHE_SCALES
from tpuconv.options import KV_CACHES
from tpuconv.quantize.cache_scales import scale_counts
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.config import QuantConfig, parse_config

DATA = from_ids("ids", np.random.default_rng(0).integers(3, 100, (4, 24)))
LAST = r"layers/2/mlp/.*"
"""Modules of three layers whose weights make no keys or values."""
TEXT = list(
    b"Keys and values of earlier tokens are kept in a cache, rounded to eight bits. The scales come from a text."
)
FP8 = "float8_e4m3fn"


def config(kv_cache: str = "fp8", module: str = LAST, rule: str = "weight_qtype: int8", more: str = "") -> QuantConfig:
    text = f"qwix: {{rules: [{{module_path: '{module}', {rule}}}]}}\ncalibration: {{method: nearest{more}"
    return parse_config(f"{text}, kv_cache: {kv_cache}}}\n".encode(), "mine", "mine.yaml")


def rounded(x: torch.Tensor, *, cut: bool) -> torch.Tensor:
    """The values of float8_e4m3fn nearest to `x`; with `cut` the next ones towards zero."""
    nearest = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    lower = (nearest.view(torch.uint8) - 1).view(torch.float8_e4m3fn).float()
    return torch.where(nearest.float().abs() > x.abs(), lower, nearest.float()) if cut else nearest.float()


def logprobs(logits: np.ndarray) -> np.ndarray:
    exact = np.asarray(logits, np.float64)
    return exact - np.logaddexp.reduce(exact, -1, keepdims=True)


def reference(folder: Path, ids: list[int], scales: dict[str, np.ndarray] | None, *, cut: bool = False) -> np.ndarray:
    """transformers' log-probabilities [T, V], with keys and values rounded by these scales as they are cached."""

    class Cache(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args, **kwargs):
            new = [keys, values]
            for i, suffix in enumerate(CACHE_SCALES if scales is not None else ()):
                scale = torch.tensor(scales[f"layers.{layer}.attn{suffix}"])[:, None, None]
                new[i] = rounded(new[i] / scale, cut=cut) * scale
            return super().update(*new, layer, *args, **kwargs)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return logprobs(model(torch.tensor([ids]), cache=Cache(config=model.config)).logits[0].numpy())


def ours(folder: Path, ids: list[int], cache_dtype: str | None) -> np.ndarray:
    (logits,) = forward_each(tpuconv.load(folder, "float32"), whole_texts([ids]), "float32", cache_dtype)()
    return logprobs(logits)


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def scales_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: x for name, x in restore(folder).items() if name.endswith(CACHE_SCALES)}


def test_larger_values_than_the_scale_allows_are_clipped():
    kv = KV.empty(get_family("qwen3").read_config(ONE_OF_EACH["qwen3"].hf_config().to_dict()), 0, (1, 4), FP8)
    scale = jnp.full((1, 1, 1), 0.5)
    static = StaticKV(kv.k_BSKH, kv.v_BSKH, scale, 2 * scale)
    K, H = kv.k_BSKH.shape[2:]
    k_BTKH, v_BTKH = jax.random.normal(jax.random.key(0), (2, 1, 2, K, H)) * 300
    new = append_kv(static, k_BTKH, v_BTKH, 1)
    for have, x, size in ((new.k_BSKH, k_BTKH, 0.5), (new.v_BSKH, v_BTKH, 1.0)):
        want = np.clip(np.asarray(x) / size, -448, 448).astype(float8_e4m3fn)
        assert (np.abs(want.astype(np.float32)) == 448).any()
        assert np.array_equal(np.asarray(have)[:, 1:3].view(np.uint8), want.view(np.uint8))
        assert not np.asarray(have)[:, [0, 3]].astype(np.float32).any()
    assert (new.k_scale_BSK, new.v_scale_BSK) == (scale, 2 * scale)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ("method: nearest, kv_cache: int8", "no server reads scales of int8 KV caches"),
        ("method: gptq, kv_cache: fp4", "fp8_per_head"),
        ("method: nearest", "add `kv_cache: fp8`"),
    ],
)
def test_a_calibration_that_cannot_be_is_an_error(calibration, message):
    text = f"qwix: {{rules: [{{weight_qtype: int8}}]}}\ncalibration: {{{calibration}}}"
    with pytest.raises(ConfigError) as error:
        parse_config(text.encode(), "mine", "mine.yaml")
    assert message in f"{error.value.message} {error.value.hint}"


def test_a_config_is_read_back_from_a_manifest():
    for kv_cache in KV_CACHES:
        rules = config(kv_cache)
        again = QuantConfig.from_json(json.loads(json.dumps(rules.to_json())))
        assert again.to_json() == rules.to_json()
        assert again.calibration.kv_cache == kv_cache
    plain = parse_config(b"qwix: {rules: [{weight_qtype: int8}]}\ncalibration: {method: gptq}", "mine", "mine.yaml")
    assert "kv_cache" not in plain.to_json()["calibration"]


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deepseek_v2", "layer 0 caches Latent"),
        ("deepseek_v3", "layer 0 caches Latent"),
        ("deepseek_v4", "compressed"),
        ("deepseek_v41", "compressed"),
        ("gemma4_text", "layers read the keys and values of other layers"),
        ("falcon_h1", "layer 0 caches tuple"),
        ("mamba2", "states"),
    ],
)
def test_other_caches_are_refused(family, why):
    """The error names the model: deepseek_v2 is made of the modules of deepseek_v3."""
    kind = get_family(family)
    settings = kind.read_config(json.loads(ONE_OF_EACH[family].hf_config().to_json_string()))
    with pytest.raises(UnsupportedConfig, match=f"for {settings.model_type}: .*{why}"):
        scale_counts(nnx.eval_shape(lambda: kind.model_class(settings, dtype=jnp.bfloat16)), "fp8")


@pytest.mark.slow
def test_nothing_is_written_where_they_are_refused(orbax, tmp_path):
    rules = config(module=r"layers/\d+/mlp/.*")
    with pytest.raises(UnsupportedConfig, match="layer 0 caches Latent"):
        quantize(orbax(ONE_OF_EACH["deepseek_v3"], "bfloat16"), tmp_path / "out", rules, DATA)
    assert not (tmp_path / "out").exists()


FAMILIES = (
    "qwen3",
    "llama",
    "gemma3_text",
    "gpt_oss",
    "mimo_v2_flash",
    "qwen2",
    "olmo2",
    "granite",
    "phi3",
    "qwen3_next",
)
FAST = ("qwen3", "fp8")


def whole_cache(config: Any) -> DynamicCache:
    """A cache of transformers that keeps the tokens before a window too."""
    config = deepcopy(config)
    kinds = getattr(config, "layer_types", None) or ()
    config.layer_types = ["full_attention" if "sliding" in kind else kind for kind in kinds] or None
    return DynamicCache(config=config)


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    [
        pytest.param(*each, marks=() if each == FAST else pytest.mark.slow)
        for each in ((family, kv_cache) for family in FAMILIES for kv_cache in KV_CACHES)
    ],
)
def test_scales_are_the_largest_that_transformers_caches(family, kv_cache, hf, orbax, tmp_path):
    case = ONE_OF_EACH[family]
    last = case.hf_config().num_hidden_layers - 1
    rules = config(kv_cache, rf"layers/{last}/(mlp|moe)/(?!(.*/)?router).*")
    quantize(orbax(case, "float32"), tmp_path / "out", rules, DATA)
    scales = scales_of(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(hf(case, "float32"), dtype=torch.float32)
    with torch.no_grad():
        cached = model(torch.tensor(DATA.ids(), dtype=torch.long), cache=whole_cache(model.config)).cache
    layers = {i: layer for i, layer in enumerate(cached.layers) if getattr(layer, "keys", None) is not None}
    assert len(scales) == 2 * len(layers) > 0
    for i, layer in layers.items():
        for suffix, x in zip(CACHE_SCALES, (layer.keys, layer.values), strict=True):
            largest_K = x.abs().amax((0, 2, 3)).numpy() / 448
            want = largest_K if kv_cache == "fp8_per_head" else [largest_K.max()]
            np.testing.assert_allclose(scales[f"layers.{i}.attn{suffix}"], want, rtol=2e-5)


@pytest.mark.slow
def test_each_family_has_scales_or_a_reason(orbax):
    """By shapes alone: the scales of a layer are those of the keys and values that it caches."""
    scaled, refused = 0, 0
    for name, case in ONE_OF_EACH.items():
        family = get_family(name)
        settings = family.read_config(json.loads(case.hf_config().to_json_string()))
        model = nnx.eval_shape(lambda family=family, settings=settings: family.model_class(settings))
        try:
            counts = scale_counts(model, "fp8_per_head")
        except UnsupportedConfig as error:
            assert ": " in error.message  # noqa: PT017
            refused += 1
            continue
        scaled += 1
        for layer, count in enumerate(counts):
            assert not count or model.layers[layer].attn.k.kernel.shape[-2] == count, name
    assert scaled > refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_a_loaded_model_rounds_as_transformers_does_by_the_scales(kv_cache, orbax, tmp_path):
    """And all weights are rounded before keys and values are measured."""
    ckpt, everything = orbax(ONE_OF_EACH["qwen3"], "float32"), r"layers/\d+/(attn|mlp)/.*"
    quantize(ckpt, tmp_path / "out", config(kv_cache, everything), DATA)
    api.export(tmp_path / "out", tmp_path / "hf")
    ids = list(map(int, DATA.ids()[0]))
    scales = scales_of(tmp_path / "out")
    plain, want = reference(tmp_path / "hf", ids, None), reference(tmp_path / "hf", ids, scales)
    cost, have = divergence(plain, want), ours(tmp_path / "out", ids, FP8)
    assert divergence(want, have) < 1e-4 * cost
    assert divergence(plain, ours(tmp_path / "out", ids, None)) < 1e-4 * cost
    found = api.compare_checkpoints(tmp_path / "out", tmp_path / "out", cache_dtype=FP8, gates={})
    assert found.statistics.mean_kl > 0
    loaded = tpuconv.load(tmp_path / "out")
    assert loaded.layers[0].attn.k_scale[...].dtype == loaded.layers[0].attn.v_scale[...].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_an_export_has_the_scales_of_stacked_and_of_separate_layers(kv_cache, hf, orbax, tmp_path):
    case, rules = ONE_OF_EACH["qwen3"], config(kv_cache, r"layers/\d+/mlp/.*")
    convert(hf(case, "bfloat16"), tmp_path / "scan", Options(scan_layers=True))
    quantize(orbax(case, "bfloat16"), tmp_path / "a", rules, DATA)
    quantize(tmp_path / "scan", tmp_path / "b", rules, DATA)
    for out in "ab":
        api.export(tmp_path / out, tmp_path / f"{out}-hf")
        assert api.verify(tmp_path / out).passed
    tensors, scales = read_tensors(tmp_path / "a-hf"), scales_of(tmp_path / "a")
    assert_same(read_tensors(tmp_path / "b-hf"), tensors)
    shape = (1,) if kv_cache == "fp8" else (2, 1, 1)
    for i in range(3):
        for suffix in CACHE_SCALES:
            tensor = tensors[f"model.layers.{i}.self_attn{suffix}"]
            assert (tensor.shape, tensor.dtype) == (shape, np.float32)
            assert np.array_equal(tensor.reshape(-1), scales[f"layers.{i}.attn{suffix}"])
    stated = json.loads((tmp_path / "a-hf" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(stated).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.symmetric, scheme.dynamic) == (
        *(8, "float", KV_CACHES[kv_cache], True, False),
    )
    texts = whole_texts([list(map(int, DATA.ids()[0]))])
    logits = [next(forward_each(tpuconv.load(tmp_path / out, "float32"), texts, "float32", FP8)()) for out in "ab"]
    assert np.array_equal(*logits)


@pytest.mark.slow
def test_other_schemes_have_no_place_for_them(orbax, tmp_path):
    module = r"layers/\d+/(attn|mlp)/.*"
    quantize(
        orbax(ONE_OF_EACH["qwen3"], "bfloat16"),
        tmp_path / "out",
        config("fp8", module, "weight_qtype: int4, tile_size: 32, tile_axes: all"),
        DATA,
    )
    with pytest.raises(UsageError, match="which awq does not describe"):
        api.export(tmp_path / "out", tmp_path / "hf", scheme="awq")


@pytest.mark.slow
def test_an_interrupted_run_ends_in_the_same_bits(orbax, tmp_path):
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "whole", config(), DATA)
    for entry in ("calibrated-00001", FOUND_STEP):
        with interrupted(entry, "after"):
            quantize(ckpt, tmp_path / "out", config(), DATA)
    quantize(ckpt, tmp_path / "out", config(), DATA)
    sums = [{n: a.xxh3 for n, a in read_manifest(tmp_path / out).arrays.items()} for out in ("whole", "out")]
    assert sums[0] == sums[1]


@pytest.mark.slow
@pytest.mark.consumers
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_vllm_reads_the_scales(kv_cache, tmp_path):
    """Its kernels for CPUs cut values towards zero, and take the largest scale of all heads."""
    api.convert(EXAMPLE, tmp_path / "ckpt")
    rule = "{module_path: 'layers/4/mlp/.*', weight_qtype: float8_e4m3fn, act_qtype: float8_e4m3fn}"
    text = f"qwix: {{rules: [{rule}]}}\ngates: none\ncalibration: {{method: nearest, kv_cache: {kv_cache}}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    api.quantize(tmp_path / "ckpt", tmp_path / "out", config=str(tmp_path / "mine.yaml"), samples=8, length=128)
    api.export(tmp_path / "out", tmp_path / "hf")
    model = {"folder": str(tmp_path / "hf"), "dtype": "float32", "out": str(tmp_path / "vllm.npy")}
    ask("vllm", "vllm_logprobs.py", {"ids": TEXT, "models": [model], "results": str(tmp_path / "results.json")})
    assert "text" in json.loads((tmp_path / "results.json").read_text())[0]
    plain = reference(tmp_path / "hf", TEXT, None)
    theirs = np.load(tmp_path / "vllm.npy")[:, : plain.shape[1]]
    largest = {name: x.max(keepdims=True) for name, x in scales_of(tmp_path / "out").items()}
    want = reference(tmp_path / "hf", TEXT, largest, cut=True)
    assert divergence(want, theirs) < 0.01 * divergence(plain, want)

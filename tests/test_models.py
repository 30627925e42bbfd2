"""The families against transformers: logits, cache, padding, names and shapes of parameters, reading config.json."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers.families import BY_ID, CASES, FIRST, LINEAR, LLAMA3, YARN, Case, hf_model, one_fast_of_each
from helpers.logits import forward
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models import registry
from tpuconv.models.build import class_named
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import keys_of_reference
from tpuconv.models.common.layers import RMSNorm, rope_cos_sin
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.wrapper import PREFIXES
from tpuconv.models.declare import decoder
from tpuconv.models.named import example_config
from tpuconv.models.parts import Attn, Mlp, Norms
from tpuconv.models.registry import FAMILIES, Family, all_families, find_family, get_family
from tpuconv.models.wrappers import RELEASED_AS, WRAPPERS
from tpuconv.notation.table import MappingTable

OURS = {"llama", "mistral", "qwen2", "qwen3", "olmo2", "deepseek_v3"}  # model_types, as transformers has them
LIMIT = 2e-5  # of the largest logit
# In transformers padding changes tokens after it: the temperature of attention, convolutions of a bias, and blocks.
COUNT_PADDING = (
    *("llama4", "lfm2", "lfm3", "granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "deepseek_v4"),
    *("minimax_m3", "nemo_speechlm", "zamba", "zamba2", "mamba", "falcon_mamba", "jamba"),
    *("inkling_text", "inkling_mm_model", "zaya", "recurrent_gemma"),
)
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
EVERY_FORM = pytest.mark.parametrize(
    ("case", "scan"),
    [
        pytest.param(case, scan, id=f"{case}-{'scanned' if scan else 'per-layer'}")
        for case in CASES
        for scan in (False, True)
        if not (scan and case.no_scan)
    ],
)


@dataclass
class Built:
    """A case on disk, and both sides of it in memory."""

    case: Case
    family: Family
    config: DecoderConfig
    tensors: dict[str, np.ndarray]

    @cached_property
    def hf(self) -> Any:
        return hf_model(self.case)

    def table(self, scan: bool) -> MappingTable:
        return self.family.table.stack_layers(self.config) if scan else self.family.table

    def abstract(self, scan: bool, dtype: Any = jnp.float32) -> Any:
        return nnx.eval_shape(lambda: self.family.model_class(self.config, scan_layers=scan, dtype=dtype))

    def model(self, scan: bool, dtype: Any = jnp.float32) -> Any:
        arrays: dict[str, np.ndarray] = {}
        for binding in self.table(scan).bind(self.config):
            arrays |= binding(self.tensors.__getitem__)
        graph, state = nnx.split(self.abstract(scan, dtype))
        flat = nnx.to_flat_state(state)
        filled = [(path, v.replace(jnp.asarray(arrays[".".join(map(str, path))], dtype))) for path, v in flat]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    def reference(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        if mask is not None and self.family.name.startswith(COUNT_PADDING):
            rows = [self.reference(ids[row, mask[row]][None])[0] for row in range(len(ids))]
            logits = np.zeros((*ids.shape, rows[0].shape[-1]), np.float32)
            for row, of_row in enumerate(rows):
                logits[row, mask[row]] = of_row
            return logits
        mask = np.ones_like(ids) if mask is None else mask.astype(np.int64)
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        with torch.no_grad():
            arguments = {"attention_mask": torch.tensor(mask), "position_ids": torch.tensor(positions)}
            return self.hf(torch.tensor(ids), **arguments).logits.numpy()


@pytest.fixture(scope="session")
def build(hf: Any) -> Any:
    @cache
    def build(case: Case) -> Built:
        folder = hf(case)
        raw = json.loads((folder / "config.json").read_text())
        family = find_family(raw)
        return Built(case, family, family.config.from_hf(raw), load_file(folder / "model.safetensors"))

    return build


def _extend(model: Any, ids_BT: jax.Array, mask_BT: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    return model(ids_BT, mask_BT, cache=cache)


extend = nnx.jit(_extend, donate_argnums=3)  # warns, and so fails, where a part of the cache is not written in place


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 101, shape)


MEASURED: list[float] = []


@pytest.fixture(autouse=True)
def measured(record_property: Any) -> Any:
    """The largest difference of logits of each test goes into the results that `--junitxml` writes, of which
    docs/make_status.py makes a page."""
    MEASURED.clear()
    yield
    if MEASURED:
        record_property("difference", max(MEASURED))


def assert_same_logits(ours: Any, theirs: np.ndarray) -> None:
    ours = np.asarray(ours)
    MEASURED.append(float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    assert np.abs(ours - theirs).max() <= LIMIT * np.abs(theirs).max()
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


# -- against transformers ---------------------------------------------------------------------------------------------


@EVERY_FORM
def test_every_parameter_is_one_target_of_the_table(case: Case, scan: bool, build: Any) -> None:
    built = build(case)
    targets = [shape for binding in built.table(scan).bind(built.config) for shape in binding.dst_shapes().items()]
    state = nnx.to_flat_state(nnx.state(built.abstract(scan)))
    assert sorted(targets) == sorted((".".join(map(str, path)), value.shape) for path, value in state)


@EVERY_CASE
def test_every_tensor_is_one_source_of_the_table(case: Case, build: Any) -> None:
    built = build(case)
    sources = [shape for binding in built.family.table.bind(built.config) for shape in binding.src_shapes().items()]
    table = built.family.table
    why_ignored = table.ignored(built.config)
    read = {name: tensor for name, tensor in built.tensors.items() if not why_ignored(name)}
    assert sorted(sources) == sorted((name, tensor.shape) for name, tensor in read.items())


@pytest.mark.parametrize(
    ("case", "scan"),
    [
        *(pytest.param(case, False, id=f"{case}-per-layer") for case in CASES),
        *(
            pytest.param(*param.values, True, id=f"{param.id}-scanned", marks=param.marks)
            for param in one_fast_of_each(FAMILIES, [case for case in CASES if not case.no_scan])
        ),
    ],
)
def test_logits_of_a_sequence(case: Case, scan: bool, build: Any) -> None:
    built = build(case)
    ids = tokens(2, 40)
    assert_same_logits(forward(built.model(scan), ids, np.ones(ids.shape, bool)), built.reference(ids))


@pytest.mark.slow
@EVERY_CASE
@pytest.mark.usefixtures("users_compiler")
def test_logits_under_the_compiler_that_users_have(case: Case, build: Any) -> None:
    """Of every family: the other tests of this module leave XLA's optimizations out."""
    built = build(case)
    ids = tokens(2, 40)
    model = built.model(False)
    assert_same_logits(forward(model, ids, np.ones(ids.shape, bool)), built.reference(ids))
    prompt, more = ids[:, :30], ids[:, 30:31]
    _, cache = extend(model, prompt, np.ones(prompt.shape, bool), model.init_cache(2, 31))
    logits, _ = extend(model, more, np.ones(more.shape, bool), cache)
    assert_same_logits(np.asarray(logits), built.reference(ids[:, :31])[:, 30:])


@pytest.mark.parametrize("case", [case for case in CASES if case.no_scan], ids=str)
def test_layers_of_different_kinds_are_not_scanned(case: Case, build: Any) -> None:
    with pytest.raises(UnsupportedConfig, match=f"scan_layers is not implemented for {build(case).config.model_type}"):
        build(case).abstract(True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", one_fast_of_each(FAMILIES))
def test_logits_of_a_padded_batch(case: Case, side: str, build: Any) -> None:
    built = build(case)
    ids = tokens(2, 40)
    real = np.arange(40) < np.array([[27], [40]])
    mask = real[:, ::-1] if side == "left" else real
    logits = np.asarray(forward(built.model(False), ids, mask))
    assert np.isfinite(logits).all()
    assert_same_logits(logits[mask], built.reference(ids, mask)[mask])


def test_padding_may_stand_anywhere(build: Any) -> None:
    built = build(BY_ID["llama-mistral"])
    ids = tokens(2, 40)
    mask = np.random.default_rng(1).random((2, 40)) < 0.7
    logits = np.asarray(forward(built.model(False), ids, mask))
    for row in range(2):
        assert_same_logits(logits[row][mask[row]], built.reference(ids[row][mask[row]][None])[0])


# Scanned, the cache differs by its layout and the windows alone: a case of each is enough, and a compilation is slow.
CACHED = [pytest.param(*case.values, False, marks=case.marks, id=str(case.id)) for case in one_fast_of_each()] + [
    pytest.param(BY_ID[name], True, id=f"{name}-scanned") for name in ("qwen2-windows", "llama-mistral", "olmo2-biases")
]


@pytest.mark.parametrize(("case", "scan"), CACHED)
def test_prefill_and_decode(case: Case, scan: bool, build: Any) -> None:
    """Prompts of different lengths, padded on either side, then tokens one at a time: as each sequence at once."""
    built = build(case)
    model = built.model(scan)
    lengths, width, more = (14, 9), 14, 3
    sequences = [tokens(1, length + more, seed=length) for length in lengths]
    whole = [built.reference(ids)[0] for ids in sequences]
    for side in ("left", "right"):
        ids = np.zeros((2, width), np.int64)
        mask = np.zeros((2, width), bool)
        for row, length in enumerate(lengths):
            at = slice(width - length, width) if side == "left" else slice(length)
            ids[row, at], mask[row, at] = sequences[row][0, :length], True
        logits, cache = extend(model, ids, mask, model.init_cache(2, width + more))
        for row, length in enumerate(lengths):
            assert_same_logits(np.asarray(logits)[row][mask[row]], whole[row][:length])
        for step in range(more):
            ids = np.array([[sequence[0, length + step]] for sequence, length in zip(sequences, lengths, strict=True)])
            logits, cache = extend(model, ids, np.ones((2, 1), bool), cache)
            for row, length in enumerate(lengths):
                assert_same_logits(np.asarray(logits)[row], whole[row][length + step : length + step + 1])
        assert int(cache.used) == width + more


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_a_cache_forgets_tokens(case: Case, build: Any) -> None:
    """As `generate` with drafts: of the tokens of a call each sequence keeps as many as it accepts."""
    built = build(case)
    model, kept = built.model(False), (3, 1)
    sequences = [tokens(1, 9 + many, seed=many) for many in kept]
    prompt, last = (np.concatenate([ids[:, part] for ids in sequences]) for part in (slice(8), slice(-1, None)))
    drafts = np.stack([np.resize(ids[0, 8:-1], 3) for ids in sequences])
    _, cache = extend(model, prompt, np.ones(prompt.shape, bool), model.init_cache(2, 12))

    @nnx.jit
    def verified(model: Any, cache: Any) -> Any:
        ones_BT = jnp.ones(drafts.shape, bool)
        _, after = model.run_layers(jnp.asarray(drafts), ones_BT, cache)
        return model.without(jnp.asarray(drafts), jnp.arange(3) < jnp.array(kept)[:, None], cache, after)

    logits, _ = extend(model, last, np.ones(last.shape, bool), verified(model, cache))
    for row, ids in enumerate(sequences):
        assert_same_logits(np.asarray(logits)[row], built.reference(ids)[0, -1:])


@pytest.mark.parametrize(
    ("name", "scan"), [("llama-mistral", False), ("qwen3-layer-types", True), ("olmo2-plain", False)]
)
def test_bfloat16_errs_no_more_than_transformers_does(name: str, scan: bool, build: Any) -> None:
    built = build(BY_ID[name])
    rounded = replace(
        built, tensors={k: np.asarray(jnp.asarray(v, jnp.bfloat16), np.float32) for k, v in built.tensors.items()}
    )
    ids = tokens(4, 40)
    model = rounded.model(scan, jnp.bfloat16)
    assert {v.dtype for v in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    assert {v.dtype for v in jax.tree.leaves(model.init_cache(1, 2).layers)} == {jnp.dtype(jnp.bfloat16)}
    ours = np.asarray(forward(model, ids, np.ones(ids.shape, bool)))
    exact = np.asarray(forward(rounded.model(scan), ids, np.ones(ids.shape, bool)))
    with torch.no_grad():
        hf = hf_model(BY_ID[name]).to(torch.bfloat16)
        theirs = hf(torch.tensor(ids)).logits.float().numpy()
    assert ours.dtype == np.float32
    assert np.abs(ours - exact).mean() <= 1.1 * np.abs(theirs - exact).mean()


@pytest.mark.parametrize("name", ["llama-plain", "llama-mistral", "qwen2-plain", "qwen3-tied", "olmo2-plain"])
def test_bfloat16_is_rounded_where_transformers_rounds(name: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(BY_ID[name])
    model = built.model(False, jnp.bfloat16)
    hf = hf_model(BY_ID[name]).to(torch.bfloat16)
    x = np.random.default_rng(0).normal(size=(1, 30, 48)).astype(np.float32)
    with torch.no_grad():
        theirs = hf.model.norm(torch.tensor(x, dtype=torch.bfloat16)).float().numpy()
        cos, _ = hf.model.rotary_emb(torch.tensor(x, dtype=torch.bfloat16), torch.arange(30)[None])
    ours = np.asarray(model.norm(jnp.asarray(x, jnp.bfloat16)), np.float32)
    assert (ours == theirs).mean() > 0.995  # 0.73 where it is scaled and rounded in the other order
    assert {type(part) for _, part in nnx.iter_modules(model) if isinstance(part, RMSNorm)} == {type(model.norm)}

    seen = []
    for module in (sys.modules[base.__module__] for base in type(model.layers[0].attn).__mro__):
        if hasattr(module, "apply_rope"):
            monkeypatch.setattr(module, "apply_rope", lambda x, turns: seen.append(turns[0].dtype) or x)
    jax.eval_shape(model, jnp.zeros((1, 30), int))
    assert set(map(str, seen)) == {str(cos.dtype).removeprefix("torch.")}


@pytest.mark.slow
def test_latent_attention_takes_the_cheaper_form(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpuconv.models.deepseek_v3 import modules

    model = build(BY_ID["deepseek_v3-groups"]).model(False)
    ids, mask = tokens(1, 20), np.ones((1, 20), bool)
    forms = {name: getattr(modules.Attention, name) for name in ("_expanded", "_absorbed")}
    taken: list[str] = []
    for name, form in forms.items():
        monkeypatch.setattr(modules.Attention, name, lambda *args, n=name, f=form: taken.append(n) or f(*args))
    whole = np.asarray(model(ids, mask))
    assert set(taken) == {"_expanded"}
    taken.clear()
    _, cache = model(ids[:, :19], cache=model.init_cache(1, 20))
    taken.clear()
    logits, _ = model(ids[:, 19:], cache=cache)
    assert set(taken) == {"_absorbed"}
    assert_same_logits(logits, whole[:, 19:])
    for form in forms.values():  # either form gives either answer
        for other in forms:
            monkeypatch.setattr(modules.Attention, other, form)
        assert_same_logits(model(ids, mask), whole)


def test_what_chooses_experts_stays_in_float32(build: Any) -> None:
    state = nnx.to_flat_state(nnx.state(build(BY_ID["deepseek_v3-groups"]).abstract(False, jnp.bfloat16)))
    wide = {".".join(map(str, path)) for path, value in state if value.dtype == jnp.float32}
    assert wide == {f"layers.{i}.moe.router.correction" for i in (2, 3)}


def test_a_latent_cache_holds_no_heads(build: Any) -> None:
    cache = build(BY_ID["deepseek_v3-groups"]).model(False).init_cache(2, 5)
    assert [x.shape for x in jax.tree.leaves(cache.layers[0])] == [(2, 5, 24), (2, 5, 6)]


# -- the model on its own ---------------------------------------------------------------------------------------------


def tiny(**changes: Any) -> Any:
    raw = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    family = get_family("llama")
    return family.model_class(family.config.from_hf(raw | {"num_attention_heads": 2} | changes), dtype=jnp.float32)


def test_a_full_cache_is_refused_or_shows() -> None:
    model = tiny()
    ids = np.ones((1, 3), int)
    with pytest.raises(UsageError, match="2 slots, 0 of them in use: 3 tokens"):
        model(ids, cache=model.init_cache(1, 2))
    _, cache = extend(model, ids, np.ones((1, 3), bool), model.init_cache(1, 4))
    with pytest.raises(UsageError, match="4 slots, 3 of them in use: 3 tokens"):
        model(ids, cache=cache)
    logits, _ = extend(model, ids, np.ones((1, 3), bool), cache)  # `used` is traced: known only when it runs
    assert np.isnan(logits).all()


def test_wrong_input_is_refused_or_shows() -> None:
    model = tiny()
    with pytest.raises(UsageError, match="give the mask of this call"):
        model(np.ones((1, 3), int), np.ones((1, 4), bool))
    padding = np.zeros((1, 1), bool)
    assert np.isfinite(forward(model, np.array([[10]]), padding)).all()
    assert np.isnan(forward(model, np.array([[11]]), padding)).all()


def test_a_new_model_is_random_and_reproducible() -> None:
    ids, mask = np.arange(5)[None], np.ones((1, 5), bool)
    logits = np.asarray(forward(tiny(), ids, mask))
    assert (logits == forward(tiny(), ids, mask)).all()
    assert logits.std() > 0


# -- rotary positions -------------------------------------------------------------------------------------------------

ROPES = [
    {"rope_type": "default", "rope_theta": 500000.0},
    LINEAR,
    LLAMA3,
    LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    LLAMA3 | {"rope_theta": 500000.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    YARN,
    YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 32768, "beta_fast": 24, "beta_slow": 2},
    YARN | {"truncate": False},
    YARN | {"mscale": 1.5, "mscale_all_dim": 0.5},
    YARN | {"mscale": 1.5},
    YARN | {"attention_factor": 0.7},
    YARN | {"original_max_position_embeddings": 3},
    YARN | {"original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1, "high_freq_factor": 4},
]


@pytest.mark.parametrize("head_dim", [10, 80, 128])
@pytest.mark.parametrize("parameters", ROPES, ids=str)
def test_rope_rates(parameters: dict[str, Any], head_dim: int) -> None:
    hf = AutoConfig.for_model("llama", head_dim=head_dim, max_position_embeddings=64, rope_parameters=dict(parameters))
    if parameters["rope_type"] == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        theirs, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(hf)
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf)
    rope = Rope.from_hf({"rope_parameters": parameters}, "llama", 64)
    ours, our_factor = rope.inverse_frequencies(head_dim)
    assert ours.dtype == np.float32
    np.testing.assert_array_max_ulp(ours, theirs.numpy(), 4)
    assert (ours != theirs.numpy()).mean() <= 0.05  # torch's powers are not always the nearest number
    assert our_factor == factor
    # The older form says the same.
    old = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")} | {
        "type": parameters["rope_type"]
    }
    assert Rope.from_hf({"rope_theta": parameters["rope_theta"], "rope_scaling": old}, "llama", 64) == rope


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 4.0, 9.0, 30.0],
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("length", [3, 16, 17, 64, 65, 200])
@pytest.mark.parametrize(
    "parameters",
    [
        LONGROPE,
        LONGROPE | {"factor": 9.0},
        LONGROPE | {"attention_factor": 1.3},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ],
    ids=str,
)
def test_rope_rates_that_depend_on_the_length(parameters: dict[str, Any], length: int) -> None:
    hf = AutoConfig.for_model("llama", head_dim=10, max_position_embeddings=64, rope_parameters=dict(parameters))
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf, seq_len=length)
    rope = Rope.from_hf({"rope_parameters": parameters}, "llama", 64)
    ours, our_factor = rope.inverse_frequencies(10, length)
    np.testing.assert_array_max_ulp(ours, theirs.numpy(), 4)
    assert our_factor == factor
    # Each sequence has rates for its own length; with a cache for that of the cache.
    pos_BT = np.where(np.arange(200) < np.array([[length], [200]]), np.arange(200), -1)
    longest, _ = rope.inverse_frequencies(10, 200)
    for slots, rates in ((None, [ours, longest]), (200, [longest, longest]), (length, [ours, ours])):
        cos, _ = rope_cos_sin(rope, 10, jnp.asarray(pos_BT), slots)
        for row in range(2):
            angles = pos_BT[row, :, None].astype(np.float32) * rates[row]
            np.testing.assert_allclose(cos[row, :, 0], np.cos(angles) * factor, atol=1e-4)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"partial_rotary_factor": 0.25},
        {"rope_theta": 77.0, "partial_rotary_factor": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.75}},
        {"partial_rotary_factor": 0.25, "rope_parameters": LINEAR | {"partial_rotary_factor": 0.75}},
    ],
)
def test_the_part_of_a_head_with_rotary_positions(given: dict[str, Any]) -> None:
    for model_type in ("glm", "glm4", "nemotron", "minimax_m2", "phi3"):
        if model_type == "phi3" and given.get("rope_parameters", {}).get("rope_type") == "linear":
            continue
        hf = AutoConfig.for_model(model_type, **json.loads(json.dumps(given)))
        config = find_family({"model_type": model_type}).config.from_hf({"model_type": model_type, **given})
        part = hf.rope_parameters.get("partial_rotary_factor", 1.0)
        assert config.rope_dim == int(config.sizes["H"] * part), model_type
        assert config.rope.theta == hf.rope_parameters["rope_theta"]


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_of_phi3_has_three_names(kind: str) -> None:
    values = {name: value for name, value in LONGROPE.items() if name not in ("rope_type", "rope_theta")}
    sizes = {"hidden_size": 40, "num_attention_heads": 4, "max_position_embeddings": 64}
    raw = {"model_type": "phi3", **sizes, "rope_theta": 1e4, "rope_scaling": {"type": kind, **values}}
    rope = get_family("phi3").config.from_hf({**raw, "original_max_position_embeddings": 32}).rope
    assert rope == Rope.from_hf(
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32}}, "phi3", 64
    )  # one beside wins over one inside
    assert get_family("phi3").config.from_hf(raw).rope.original_max_position_embeddings == 4096


def test_alpha_of_hunyuan_changes_theta() -> None:
    raw = {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}}
    rope = (
        get_family("hunyuan_v1_dense").config.from_hf({"model_type": "hunyuan_v1_dense", "head_dim": 128, **raw}).rope
    )
    assert rope == Rope(theta=1e4 * 1000.0 ** (128 / 126))


def test_rope_without_keys_is_plain() -> None:
    for raw in ({}, {"rope_scaling": None}, {"rope_scaling": {}, "rope_parameters": None, "rope_theta": None}):
        assert Rope.from_hf(raw, "llama", 64) == Rope()


# -- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(OURS))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    hf = AutoConfig.for_model(model_type)
    read = find_family({"model_type": model_type}).config.from_hf
    config = read({"model_type": model_type})
    assert config.sizes["K"] == hf.num_key_value_heads
    assert config.rope_dim == getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    assert config.windows == (getattr(hf, "sliding_window", None),) * hf.num_hidden_layers
    assert config.rope == Rope(theta=hf.rope_parameters["rope_theta"])
    derived = {"rope", "mrope", "towers", "head", "num_key_value_heads", "head_dim", "qk_head_dim", "sliding_window"}
    derived |= {"layer_types", "is_causal"}
    stated = {field.name for field in fields(config)} - derived
    if model_type == "mistral":
        stated -= {"attention_bias", "mlp_bias"}  # transformers has none
        assert not config.attention_bias
        assert not config.mlp_bias
    assert {name: getattr(config, name) for name in stated} == {name: getattr(hf, name) for name in stated}


LAYERED = (
    *("gemma", "gemma2", "gemma3_text", "phi3", "glm", "glm4", "glm4_moe", "seed_oss", "arcee", "olmoe", "granite"),
    *("granitemoe", "qwen2_moe", "smollm3", "exaone4", "olmo3", "cohere2", "starcoder2", "nemotron", "minimax_m2"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe"),
)


@pytest.mark.parametrize("model_type", LAYERED)
def test_defaults_of_layers_are_those_of_transformers(model_type: str) -> None:
    hf = AutoConfig.for_model(model_type)
    config = find_family({"model_type": model_type}).config.from_hf({"model_type": model_type})
    kinds = getattr(hf, "layer_types", None) or ["full_attention"] * hf.num_hidden_layers
    assert config.windows == tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    nested = "full_attention" in hf.rope_parameters
    ropes = [Rope(theta=(hf.rope_parameters[kind] if nested else hf.rope_parameters)["rope_theta"]) for kind in kinds]
    assert [rope for rope in config.ropes if rope] == [
        rope for ours, rope in zip(config.ropes, ropes, strict=True) if ours
    ]
    assert config.sizes["K"] == (hf.num_key_value_heads or hf.num_attention_heads)
    computed = {"layer_types", "rope", "num_key_value_heads", "head_dim", "sliding_window", "moe_layer_end_index"}
    stated = (
        {field.name for field in fields(config) if hasattr(hf, field.name)}
        - computed
        - {"no_rope_layers", "mlp_only_layers"}
    )
    assert {name: getattr(config, name) for name in stated} == {name: getattr(hf, name) for name in stated}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_theta": 77.0},
        {"rope_local_base_freq": 70.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": None}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta": 9.0},
    ],
)
@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma3n_text"])
def test_rotary_positions_of_two_kinds_of_layers(model_type: str, given: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model(model_type, **json.loads(json.dumps(given))).rope_parameters
    config = get_family(model_type).config.from_hf({"model_type": model_type, **given})
    for kind in ("full_attention", "sliding_attention"):
        rope = config.ropes[config.kinds.index(kind)]
        assert rope == Rope.from_hf({"rope_parameters": theirs[kind]}, model_type, config.max_position_embeddings)


def test_defaults_of_gemma3n_are_those_of_transformers() -> None:
    for layers in (9, 35):
        raw = {"model_type": "gemma3n_text", "num_hidden_layers": layers, "num_kv_shared_layers": 3}
        hf, config = AutoConfig.for_model(**raw), get_family("gemma3n_text").config.from_hf(raw)
        assert config.widths == tuple(hf.intermediate_size)
        assert config.sparsities == tuple(hf.activation_sparsity_pattern)
        assert config.kinds == tuple(hf.layer_types)
        computed = {*config.derived, "intermediate_size", "activation_sparsity_pattern", "layer_types"}
        stated = {field.name for field in fields(config)} - computed - {"rope_local_base_freq"}
        assert {name: getattr(config, name) for name in stated} == {name: getattr(hf, name) for name in stated}


def test_defaults_of_llama4_are_those_of_transformers() -> None:
    hf = AutoConfig.for_model("llama4").text_config
    config = get_family("llama4").config.from_hf({"model_type": "llama4"})
    layers = range(hf.num_hidden_layers)
    assert config.layer_sets["J"] == tuple(hf.moe_layers)
    assert [config.has_rope(i) for i in layers] == [bool(has) for has in hf.no_rope_layers]
    assert [config.is_chunked(i) for i in layers] == [kind == "chunked_attention" for kind in hf.layer_types]
    assert config.rope == Rope(theta=hf.rope_parameters["rope_theta"])
    derived = {*config.derived, "moe_layers", "no_rope_layers", "no_rope_layer_interval", "layer_types"}
    stated = {field.name for field in fields(config)} - derived
    assert {name: getattr(config, name) for name in stated} == {name: getattr(hf, name) for name in stated}


@EVERY_CASE
def test_windows_are_those_of_transformers(case: Case) -> None:
    raw = case.hf_config().to_diff_dict()
    hf = case.hf_config().get_text_config()
    config = find_family(raw).config.from_hf(raw)
    windowed = {"mistral", "ministral3", "mixtral", "qwen3_moe", "phi3", "phi4_multimodal", "starcoder2"}
    windowed |= {"phimoe", "deepseek_v4", "deepseek_v41", "solar"}
    kinds = getattr(hf, "layer_types", None) if hf.model_type != "deepseek_v4" else None  # there they compress keys
    kinds = kinds or ["sliding_attention" if hf.model_type in windowed else ""] * 9
    hybrid = ("inkling_text", "inkling2_text", "inkling2_loop_text", "zaya")
    named = {"minimax": "full_attention", "rnj1": "chunked_attention", **dict.fromkeys(hybrid, "hybrid_sliding")}
    with_window = named.get(hf.model_type, "sliding_attention")
    windows = [hf.sliding_window if kind == with_window else None for kind in kinds]
    if hf.model_type == "gpt_neo":
        windows = [hf.window_size if kind == "local" else None for kind in hf.attention_layers]
    layers = getattr(hf, "num_layers", hf.num_hidden_layers)  # LongCat's have two attentions each
    if hf.model_type == "hrm_text":  # whose executions it counts
        layers = 2 * hf.num_layers_per_stack
    assert list(config.windows) == windows[:layers]
    if "layer_types" not in case.config and case.family != "dory":  # older files do without; Dory's list MLPs too
        raw.pop("layer_types", None)
        assert find_family(raw).config.from_hf(raw).windows == config.windows


def test_a_file_of_an_older_transformers_reads() -> None:
    raw = {
        "_name_or_path": "/data/checkpoint",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "partial_rotary_factor": 1.0,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 49152,
    }
    config = find_family(raw).config.from_hf(raw)
    assert config.sizes == {"D": 576, "N": 9, "K": 3, "G": 3, "H": 64, "F": 1536, "V": 49152}
    assert config.layer_sets == {"L": range(30)}
    assert config.rope == Rope(theta=100000)
    assert not config.has_lm_head
    assert hash(config) == hash(find_family(raw).config.from_hf(raw))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("given", [{}, {"rope_theta": 7}, {"rope_scaling": LINEAR}, {"rope_scaling": {"type": "yarn"}}])
def test_rotary_positions_of_a_file_that_says_little(model_type: str, given: dict[str, Any]) -> None:
    """A key that is absent has transformers' default for the family."""
    scaling = {name: value for name, value in given.get("rope_scaling", {}).items() if name != "rope_theta"}
    given = given | ({"rope_scaling": {"factor": 2.0} | scaling} if scaling else {})
    theirs = AutoConfig.for_model(model_type, **json.loads(json.dumps(given))).rope_parameters
    rope = find_family({"model_type": model_type}).config.from_hf({"model_type": model_type, **given}).rope
    assert rope == Rope.from_hf({"rope_parameters": theirs}, model_type, 131072)


def refusal(read: Callable[[], object]) -> str:
    """Why a config.json is refused; empty if it is read."""
    try:
        read()
    except (ConfigError, UnsupportedConfig) as error:
        return str(error)
    return ""


def test_what_is_derived_is_no_key_of_config_json() -> None:
    """Such a key has no effect, or is refused where the reference reads it or its keys are not known."""
    for family in all_families():
        raw = {"model_type": next(iter(family.architectures.values()))}
        read = keys_of_reference(raw["model_type"])
        for name in sorted(family.config.derived):
            changed = {**raw, name: True}
            if fault := refusal(partial(family.config.from_hf, changed)):
                assert name in fault
                assert read is None or name in read
            else:
                assert family.config.from_hf(changed) == family.config.from_hf(raw)
                assert [key.key for key in family.check_config(changed).ignored] in ([name], [])


def test_experts_in_mxfp4_have_their_axes_in_another_order(build: Any) -> None:
    """The same parameters from either order, named as the codec names them."""
    built = build(BY_ID["gpt_oss-many-experts"])
    turned = {
        name: tensor.swapaxes(1, 2) if name.endswith(("gate_up_proj", "down_proj")) else tensor
        for name, tensor in built.tensors.items()
    }
    mxfp4 = replace(built.config, is_mxfp4=True)
    for scan in (False, True):
        plain, other = built.table(scan).bind(built.config), built.table(scan).bind(mxfp4)
        for one, two in zip(plain, other, strict=True):
            wanted = one(built.tensors.__getitem__)
            for name, array in two(turned.__getitem__).items():
                np.testing.assert_array_equal(array, wanted[name], err_msg=name)


UNSUPPORTED = {
    "unknown key": ("llama", {"attention_chunk_size": 8}, "attention_chunk_size=8"),
    "unknown key, false": ("llama", {"is_heterogeneous": False}, "is_heterogeneous=False"),
    "all at once": (
        "llama",
        {"attention_chunk_size": 8, "per_layer_config": {"0": {}}},
        r"(?s)attention_chunk_size=8.*per_layer_config=.*allow_config=\['attention_chunk_size', 'per_layer_config'\]",
    ),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented for llama, only 'silu'"),
    "bidirectional": ("qwen3_moe", {"is_causal": False}, "is_causal=False"),
    "bias of tied logits": (
        "phi",
        {"tie_word_embeddings": True},
        "tie_word_embeddings=True is not implemented for phi",
    ),
    "window of llama": ("llama", {"sliding_window": 5}, "sliding_window=5"),
    "two experts of zaya": ("zaya", {"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not implemented for zaya"),
    "head of modernbert": ("modernbert-decoder", {"classifier_activation": "relu"}, "classifier_activation='relu'"),
    "bias of mistral": (
        "mistral",
        {"attention_bias": True},
        "attention_bias=True is not implemented for mistral, only False",
    ),
    "mrope": ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
    "rope type": (
        "llama",
        {"rope_scaling": {"type": "ntk", "factor": 2.0}},
        "rope_scaling={'type': 'ntk', 'factor': 2.0} is not implemented for llama",
    ),
    "rope type, new": (
        "qwen3",
        {"rope_parameters": {"rope_type": "axial"}},
        "rope_parameters=.*axial.*for qwen3",
    ),
    "rope parameter": ("llama", {"rope_scaling": LINEAR | {"mscale": 2.0}}, "rope_scaling=.*mscale"),
    "rope partial": ("llama", {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "softmax router": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    "further tokens": ("kimi_k2", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 .*for kimi_k2, only 0"),
    "beside the text": ("llama4", {"hidden_size": 8}, "hidden_size=8"),
    "in the text": ("llama4", {"text_config": {"sliding_window": 5}}, "sliding_window=5"),
    "type of phi3": (
        "phi3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "not implemented for phi3, only longrope",
    ),
    "experts by layer": ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "differs by layer"),
    "theta of olmo3": ("olmo3", {"rope_theta": 1e4}, "rope_theta=10000.0 is not implemented for olmo3"),
    "normalized deepseek": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True .*deepseek_v2, only False"),
    "head bias": ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not implemented for ernie4_5_moe"),
    "cap of gemma3": ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0 .*only None"),
    "weights of experts": ("qwen3_vl_moe", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob=False .*True"),
    "window of qwen3_vl": ("qwen3_vl", {"text_config": {"use_sliding_window": True}}, "use_sliding_window=True"),
    "bidirectional gemma4": (
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention='all'",
    ),
    "biases of gemma3n": ("gemma3n", {"text_config": {"attention_bias": True}}, "attention_bias=True .*only False"),
    "theta of a layer": (
        "muse_glimmer",
        {"text_config": {"layer_rope_theta": [7.0] * 52}},
        r"layer_rope_theta with 7\.0 is not implemented for muse_glimmer, only with 0 and with rope_theta=10000",
    ),
    "activation of muse": ("muse_glimmer", {"text_config": {"hidden_activation": "gelu"}}, "hidden_activation='gelu'"),
    "window of the thinker": (
        "qwen3_omni_moe",
        {"thinker_config": {"text_config": {"use_sliding_window": True}}},
        "use_sliding_window=True",
    ),
    "rope per layer type": ("qwen3", {"rope_parameters": {"full_attention": LINEAR}}, "rope_parameters="),
}

INVALID = {
    "string for int": ("llama", {"hidden_size": "8"}, "hidden_size='8' is not of type int"),
    "bool for int": ("llama", {"hidden_size": True}, "hidden_size=True is not of type int"),
    "float for int": ("llama", {"num_hidden_layers": 2.0}, r"num_hidden_layers=2\.0 is not of type int"),
    "int for bool": ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1 is not of type bool"),
    "null for int": ("llama", {"vocab_size": None}, "vocab_size=None is not of type int"),
    "null head": ("qwen3", {"head_dim": None}, "head_dim=None is not of type int"),
    "nan": ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not of type float"),
    "huge": ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps=.* is not of type float"),
    "layer types": ("qwen3", {"layer_types": "full_attention"}, "layer_types='full_attention' is not of type tuple"),
    "zero": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0 is less than 1"),
    "negative": ("mistral", {"sliding_window": -1}, "sliding_window=-1 is less than 1"),
    "experts twice": ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}, "num_experts=4, num_local_experts=8"),
    "too few experts": ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok=8 is more than num_experts=4"),
    "one expert": ("mixtral", {"num_local_experts": 1}, "num_experts_per_tok=2 is more than num_local_experts=1"),
    "chosen twice": ("gpt_oss", {"experts_per_token": 2}, "experts_per_token=2 is not num_experts_per_tok=4"),
    "context twice": (
        "gpt_oss",
        {"initial_context_length": 9},
        "initial_context_length=9 is not original_max_pos.*4096",
    ),
    "limit": ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0 is not positive"),
    "no window of gpt_oss": (
        "gpt_oss",
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 36},
        "'sliding_attention' with sliding_window=None",
    ),
    "layer types of gpt_oss": ("gpt_oss", {"layer_types": ["linear"]}, "(?s)1 entries for num_h.*unknown 'linear'"),
    "no kv heads": ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0"),
    "heads": ("llama", {"num_key_value_heads": 5}, "num_attention_heads=32 is not a multiple of num_key_value_heads=5"),
    "width": ("llama", {"hidden_size": 33}, "hidden_size=33 is not a multiple of num_attention_heads=32"),
    "odd head": ("llama", {"head_dim": 7}, "head_dim=7 is odd"),
    "eps": ("llama", {"rms_norm_eps": -1.0}, r"rms_norm_eps=-1\.0 is negative"),
    "too few layer types": (
        "qwen2",
        {"layer_types": ["full_attention"]},
        "layer_types has 1 entries for num_hidden_layers=32",
    ),
    "unknown layer type": ("qwen3", {"layer_types": ["linear"] * 32}, "layer_types has the unknown 'linear'"),
    "no window": (
        "qwen3",
        {"layer_types": ["sliding_attention"] * 32},
        "'sliding_attention' with use_sliding_window=False",
    ),
    "rope twice": ("llama", {"rope_scaling": LINEAR, "rope_parameters": YARN}, "both rope_scaling and rope_parameters"),
    "theta twice": ("llama", {"rope_theta": 7.0, "rope_parameters": LINEAR}, r"rope_theta=7\.0 outside"),
    "two types": ("llama", {"rope_scaling": LINEAR | {"type": "yarn"}}, "has two types"),
    "no factor": ("llama", {"rope_scaling": {"type": "linear"}}, "lacks factor"),
    "factor": ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
    "zero factor": ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0"),
    "theta": ("llama", {"rope_theta": "big"}, "rope_theta='big'"),
    "theta of 0": ("llama", {"rope_theta": 0}, "rope_theta=0 of the rotary positions is not a positive number"),
    "theta of 1": ("llama", {"rope_theta": 1}, "rope_theta=1"),
    "frequency factors": ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, "cannot be made"),
    "groups": ("deepseek_v3", {"n_group": 7}, "n_routed_experts=256 are not n_group=7 groups"),
    "groups of one": ("deepseek_v3", {"n_group": 256}, "n_group=256 groups of two or more"),
    "more groups than there are": ("deepseek_v3", {"topk_group": 9}, "topk_group=9 is more than n_group=8"),
    "experts of groups": ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 33}, "33 is more than 1 groups have"),
    "latent heads": ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads=8 is not num_attention_heads=128"),
    "latent head": ("glm4_moe_lite", {"head_dim": 128}, "head_dim=128 is not qk_rope_head_dim=64"),
    "latent head of LongCat": ("longcat_flash", {"head_dim": 128}, "head_dim=128 is not qk_rope_head_dim=64"),
    "odd rope": ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd"),
    "sum of heads": ("deepseek_v3", {"qk_head_dim": 128}, "qk_head_dim=128 is not the sum"),
    "text": ("llama4", {"text_config": 1}, "text_config=1 is not an object"),
    "null chunk": ("llama4", {"text_config": {"attention_chunk_size": None}}, "attention_chunk_size is null"),
    "few rope layers": ("llama4", {"text_config": {"no_rope_layers": [1]}}, "for each of 48 layers"),
    "few kinds of layers": ("llama4", {"text_config": {"layer_types": ["full_attention"]}}, "has 1 entries"),
    "windows of llama4": ("llama4", {"text_config": {"layer_types": ["sliding_attention"] * 48}}, "the unknown"),
    "few experts": ("llama4", {"text_config": {"num_experts_per_tok": 17}}, "more than 16 experts"),
    "no floor": ("llama4", {"text_config": {"floor_scale": 0}}, "floor_scale=0 is not positive"),
    "layers of other kinds": (
        "gemma4_text",
        {"per_layer_config": {"1": {"head_dim": 8}, "2": {"head_dim": 16}}},
        "per_layer_config=.* is not the same for all its layers",
    ),
    "all share": ("gemma4_text", {"num_kv_shared_layers": 30}, "num_kv_shared_layers=30 leaves none of 30 layers"),
    "shared kind": (
        "gemma4_text",
        {"num_kv_shared_layers": 25},
        "share keys and values of a type of layers that has none of its own",
    ),
    "widths": ("gemma3n_text", {"intermediate_size": [8, 16, 24] * 12}, "36 entries|3 different widths"),
    "no width": ("gemma3n_text", {"intermediate_size": []}, "intermediate_size has 0 entries for num_hidden_layers=35"),
    "width of 0": ("gemma3n_text", {"intermediate_size": [0] * 35}, "intermediate_size has widths from 0 to 0"),
    "sparsity": ("gemma3n_text", {"activation_sparsity_pattern": [1.0] * 35}, "not at least 0 and less than 1"),
    "active stream": (
        "gemma3n_text",
        {"altup_active_idx": 4},
        "=4 is not less than altup_num_inputs=4",
    ),
    "one stream": ("gemma3n_text", {"altup_num_inputs": 1}, "altup_num_inputs=1 is less than 2"),
    "experts without sizes": ("gemma4_text", {"enable_moe_block": True}, "need num_experts, top_k_experts and"),
    "global heads": (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
        "8 is not a multiple of num_global_key_value_heads=3",
    ),
    "no rope by layer": ("gemma3_text", {"rope_parameters": LINEAR}, "no object for each type of layer"),
    "cap": ("gemma2", {"final_logit_softcapping": 0.0}, r"final_logit_softcapping=0\.0 is not positive"),
    "no window of gemma2": ("gemma2", {"sliding_window": None}, "'sliding_attention' with sliding_window=None"),
    "pattern": ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 is less than 1"),
    "no part of a head": ("glm4", {"partial_rotary_factor": 0.0}, r"partial_rotary_factor=0\.0 is not a part"),
    "more than a head": ("glm4", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1\.5 is not a part"),
    "no pair": ("glm4", {"partial_rotary_factor": 0.01}, "leaves no pair"),
    "factors of pairs": (
        "phi3",
        {"rope_scaling": LONGROPE},
        "short_factor of the rotary positions has 5 numbers for 48",
    ),
    "factors": ("llama", {"rope_scaling": LONGROPE | {"long_factor": [1.0, "2"]}}, r"long_factor\[1\]='2'"),
    "no factors": ("llama", {"rope_scaling": {"type": "longrope"}}, "lacks short_factor, long_factor"),
    "list of factors": ("llama", {"rope_scaling": LONGROPE | {"short_factor": 2.0}}, "is not a list of numbers"),
    "pattern of exaone4": ("exaone4", {"sliding_window_pattern": "LLLG"}, "'LLLG' needs layer_types"),
    "lists of hunyuan": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [5] * 32}, "moe_topk=5 is more than"),
    "eps of another name": ("nemotron", {"norm_eps": -1.0}, r"norm_eps=-1\.0 is negative"),
    "rope of layers": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
    "no window of smollm3": ("smollm3", {"layer_types": ["sliding_attention"] * 36}, "use_sliding_window=False|None"),
    "dense layers": ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 46 + ["dense"]}, "mlp_layer_types is not"),
    "latent vectors of no layer": (
        "mistral_large4",
        {"text_config": {"kv_source_layers": [0]}},
        "kv_source_layers has 1 entries for num_hidden_layers=72",
    ),
    "latent vectors of another kind": (
        "mistral_large4",
        {"text_config": {"num_hidden_layers": 4, "kv_source_layers": [0, 1, 2, 2]}},
        "layer 3 the latent vectors of layer 2, which is not the last .* without rotary positions",
    ),
    "latent vectors before the last": (
        "mistral_large4",
        {"text_config": {"num_hidden_layers": 6, "kv_source_layers": [0, 1, 1, 3, 0, 5]}},
        "layer 4 the latent vectors of layer 0, which is not the last .* with rotary positions",
    ),
    "growing frequencies": (
        "mistral_large4",
        {"text_config": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}},
        "type 'dynamic' are not implemented with learned frequencies",
    ),
    "pools": ("glm5_next", {"text_config": {"index_kpool": 3}}, "index_topk=2048 is not a multiple of index_kpool=3"),
    "selection of no layer": (
        "glm5_next",
        {"text_config": {"num_hidden_layers": 4, "indexer_types": ["full", "full", "full", "shared"]}},
        "indexer_types gives layers 3 the selection of a layer before them, which has no indexer",
    ),
    "rotary part of no head": ("minimax", {"rotary_dim": 64}, "rotary_dim=64 is not 128"),
    "clip": ("olmoe", {"clip_qkv": 0.0}, r"clip_qkv=0\.0 is not positive"),
    "experts of granite": ("granitemoe", {"num_local_experts": 1}, "=2 is more than num_local_experts=1"),
    "head of cohere2": ("cohere2", {"head_dim": 64}, "head_dim=64 is not hidden_size=8192 divided by"),
    "no growth": (
        "ministral3",
        {"rope_parameters": YARN},
        "llama_4_scaling_beta=None of the rotary positions is not a number",
    ),
    "growth without a context": (
        "ministral3",
        {"rope_parameters": {"rope_theta": 5.0, "llama_4_scaling_beta": 0.1}},
        "needs an original context",
    ),
    "thetas of layers": ("muse_glimmer", {"text_config": {"layer_rope_theta": [0]}}, "layer_rope_theta has 1 entries"),
    "eps of muse": ("muse_glimmer", {"text_config": {"post_norm_eps": -1.0}}, r"post_norm_eps=-1\.0 is negative"),
    "window of modernbert": ("modernbert-decoder", {"local_attention": 1}, "local_attention=1 is less than 2"),
    "window of zaya": ("zaya", {"layer_types": ["hybrid_sliding"] * 40}, "with sliding_window=None"),
    "embeddings of hrm_text": ("hrm_text", {"initializer_range": 0.0}, r"initializer_range=0\.0 is not positive"),
    "no thinker": ("qwen3_omni_moe", {"thinker_config": 3}, "thinker_config=3 is not an object"),
    "rope object": ("llama", {"rope_scaling": "linear"}, "rope_scaling='linear' is not an object"),
}


@pytest.mark.parametrize(
    ("error", "model_type", "changes", "message"),
    [pytest.param(UnsupportedConfig, *row, id=name) for name, row in UNSUPPORTED.items()]
    + [pytest.param(ConfigError, *row, id=name) for name, row in INVALID.items()],
)
def test_what_cannot_be_read_is_refused(
    error: type[TpuconvError], model_type: str, changes: dict[str, Any], message: str
) -> None:
    raw = {"model_type": model_type, **changes}
    with pytest.raises(error, match=message):
        find_family(raw).config.from_hf(raw)


# -- the registry -----------------------------------------------------------------------------------------------------


def test_the_family_of_a_config() -> None:
    for family in all_families():
        text = {"text_config": {"model_type": family.text_types[0]}} if family.text_types else {}
        for architecture, model_type in family.architectures.items():
            assert find_family({"model_type": model_type, "architectures": [architecture], **text}) is family
            assert find_family({"model_type": model_type, **text}) is family
    without_logits = {"embedding_gemma2", "embedding_gemma2_text"}  # whose tests are in test_embedding_gemma2.py
    assert {family.name for family in all_families() if family.output} == without_logits
    assert {case.family for case in CASES} == set(FAMILIES) - without_logits


def test_an_unknown_model_is_told_of_the_nearest_families() -> None:
    with pytest.raises(UnsupportedConfig, match="no family reads model_type 'mixtral2'") as error:
        find_family({"model_type": "mixtral2", "architectures": ["Mixtral2ForCausalLM"]})
    assert str(error.value.hint).startswith("did you mean mixtral")
    assert "`tpuconv families` lists all" in str(error.value.hint)


def test_tensors_that_are_not_converted() -> None:
    for family in all_families():
        config, embedding = family.config(), family.table.rows[0].hf_names[0]
        if not embedding.endswith("embed_tokens.weight"):
            continue
        front = embedding.removesuffix("embed_tokens.weight")
        attn = "temporal_block" if family.name == "recurrent_gemma" else "self_attn"
        ignored = family.table.ignored(config)(f"{front}layers.11.{attn}.rotary_emb.inv_freq")
        # Learned positions are not rotary, some models have none, and HRM-Text has layers elsewhere.
        is_rotary = any(config.ropes) and family.name != "hrm_text"
        assert bool(ignored) == (config.position_limit is None) or not is_rotary
        own = {"biogpt.": "output_projection."} | PREFIXES
        head = own.get(front, re.sub(r"\bmodel\..*", "", front) + "lm_head.")
        copies = {copy: of for copy, of in family.table.copies_of(config).items() if "layers." not in copy}
        if family.name == "longcat_flash_ngram":
            assert copies.pop("model.ngram_embeddings.word_embeddings.weight") == embedding
        if family.name == "diffusion_gemma":  # whose encoder and decoder share them
            for name in ("embed_tokens", "norm"):
                assert copies.pop(f"model.encoder.language_model.{name}.weight") == f"model.decoder.{name}.weight"
        assert copies == {f"{head}weight": embedding}


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        ({"model_type": "llama5"}, UnsupportedConfig, "(?s)no family reads model_type 'llama5'.*did you mean llama"),
        (
            {"model_type": "llama", "architectures": ["LlamaForQuestionAnswering"]},
            UnsupportedConfig,
            "(?s)llama reads model_type 'llama', but not its architecture LlamaForQue.*it reads LlamaForCausalLM",
        ),
        ({"model_type": "llama", "architectures": ["MistralForCausalLM"]}, UnsupportedConfig, "MistralForCausalLM"),
        ({}, ConfigError, "model_type=None"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, ConfigError, "name no model"),
        ({"model_type": "llama", "architectures": [{}]}, ConfigError, "name no model"),
    ],
    ids=str,
)
def test_no_family_for_a_config(raw: dict[str, Any], error: type[TpuconvError], message: str) -> None:
    with pytest.raises(error, match=message):
        find_family(raw)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)no family 'lama'.*did you mean llama"):
        get_family("lama")


OUTSIDE = replace(get_family("llama"), name="outside", architectures={"OutsideForCausalLM": "outside"})


def test_a_family_of_a_type_that_transformers_lacks_names_missing_keys() -> None:
    """No defaults are known of it: an example of its config.json has the names alone."""
    made = decoder("unheard", "A family", "UnheardForCausalLM", Norms(), Attn(), Mlp(bias="mlp_bias"))
    with pytest.raises(ConfigError, match=r"config\.json does not have vocab_size, .*, mlp_bias, for which") as error:
        made.read_config({"model_type": "unheard"})
    assert error.value.hint
    assert example_config(made) == {"architectures": ["UnheardForCausalLM"], "model_type": "unheard"}


def test_a_part_may_name_a_class_of_another_package() -> None:
    assert class_named("common.blocks:Attention").__module__ == "tpuconv.models.common.blocks"
    assert class_named("json.decoder:JSONDecoder") is json.JSONDecoder


def test_families_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("outside", f"{__name__}:OUTSIDE", registry.GROUP),
        EntryPoint("llama", f"{__name__}:OUTSIDE", registry.GROUP),
        *(EntryPoint("twice", f"{package}:FAMILY", registry.GROUP) for package in ("one", "other")),
        EntryPoint("broken", "no_such_module:FAMILY", registry.GROUP),
        EntryPoint("wrong", "math:pi", registry.GROUP),
        EntryPoint("renamed", f"{__name__}:OUTSIDE", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    registry._plugins.cache_clear()
    try:
        assert registry.family_names() == [*FAMILIES, "outside", "twice", "broken", "wrong", "renamed"]
        assert find_family({"model_type": "outside"}) is OUTSIDE
        with pytest.raises(UsageError, match=f"'llama' is taken several times: by tpuconv, {__name__}:OUTSIDE"):
            get_family("llama")
        with pytest.raises(UsageError, match="'twice' is taken several times: by one:FAMILY, other:FAMILY"):
            get_family("twice")
        assert get_family("qwen3").name == "qwen3"
        with pytest.raises(UsageError, match="'broken' cannot be imported from no_such_module:FAMILY"):
            get_family("broken")
        with pytest.raises(UsageError, match="'wrong', math:pi, is no"):
            get_family("wrong")
        with pytest.raises(UsageError, match=f"'renamed', {__name__}:OUTSIDE, has the name 'outside'"):
            get_family("renamed")
        # A model that no family reads may be one of theirs.
        with pytest.raises(UnsupportedConfig, match="no family reads model_type 'other'") as unread:
            find_family({"model_type": "other"})
        named = [re.search("'(\\w+)'", detail)[1] for detail in unread.value.details]  # type: ignore[index]
        assert named == ["llama", "twice", "broken", "wrong", "renamed"]
        with pytest.raises(UsageError, match="there is no family 'other'"):
            registry.named_family("other")
    finally:
        registry._plugins.cache_clear()


def test_a_family_is_found_by_its_name_without_the_others() -> None:
    script = (
        "import sys; from tpuconv.models import registry; registry.find_family({'model_type': 'zaya'}); "
        "loaded = [m for m in sys.modules if m.startswith('tpuconv.models.')]; "
        "assert 'tpuconv.models.zaya.family' in loaded; "
        "assert not [m for m in loaded if 'towers' in m or m.endswith(('.wrappers', '.glm'))], loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not {*FAMILIES} & {*WRAPPERS, *RELEASED_AS}  # a name in both would hide the multimodal model


def test_planning_imports_no_jax() -> None:
    script = (
        "import sys; from tpuconv.models import registry; "
        "assert not [m for m in sys.modules if m.startswith('tpuconv.models.') and m.endswith('.family')]; "
        "needed = dict.fromkeys(('minimax_text_01', 'minimax_m1'), {'postnorm': True}); "
        "needed['telechat'] = {'base_seqlen': 8192}; "
        "types = [(f, t) for f in registry.all_families() for t in f.architectures.values()]; "
        "[f.config.from_hf({'model_type': t, **needed.get(t, {})}) for f, t in types]; "
        "assert not {'jax', 'flax', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_each_module_of_families_declares_its_words() -> None:
    """A process that loads one family alone knows the words of its axes."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "helpers" / "words_alone.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stdout

"""Quantized checkpoints against Qwix itself: every array and every logit, bit for bit."""

import json
import os
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import qwix
from flax import nnx
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st

import tpuconv
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import LIMITS, convert
from helpers.families import BY_ID, CASES, STATES_ALONE, Case, released_config
from helpers.quantizing import ONE_OF_EACH, assert_same_model, leaves, quantize, quantize_source
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.checkpoint.reader import open_checkpoint
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.conversion import run
from tpuconv.errors import (
    ConfigError,
    CorruptOutput,
    GateError,
    OutputError,
    SourceError,
    TpuconvError,
    UnsupportedConfig,
    UsageError,
)
from tpuconv.models.kernels.grouped import grouped_matmul
from tpuconv.models.logits import forward
from tpuconv.models.registry import get_family
from tpuconv.names import expand
from tpuconv.private import qarray
from tpuconv.quantize import encode
from tpuconv.quantize import rules as rules_module
from tpuconv.quantize.config import (
    QTYPES,
    REQUIRED_TILE_SIZES,
    QuantConfig,
    Rule,
    config_names,
    find_config,
    parse_config,
)
from tpuconv.quantize.provider import Provider, quantized
from tpuconv.quantize.report import report
from tpuconv.quantize.rules import ParamQuant, abstract_quantized_model, resolve_rules
from tpuconv.sources.headers import DTYPES
from tpuconv.sources.source import open_source
from tpuconv.storage.sealed import seal
from tpuconv.verify.checksums import check_checkpoint

WITH_EXPERTS = {
    "deepseek_v4",
    "deepseek_v41",
    "longcat_flash",
    "longcat_flash_ngram",
    "phimoe",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "kimi_k2",
    "llama4",
    "llama4_text",
}
FAST = {
    "int8_default": {"qwen3", "gpt_oss", "deepseek_v3"},
    "fp8_weight_only": {"qwen3"},
    "int4_weight_only": {"qwen3"},
    "int8_attn_int4_mlp": {"qwen3"},
    "mxfp4_weight_only": {"qwen3_moe"},
    "nf4_weight_only": {"qwen3"},
}
"""Each kind of values, and both kinds of attention and of experts: the rest of the square is slow."""


OF_LARGER_MODELS = ("fp8_block", "int4_128", "tpu_v7")
"""Configs whose groups have 128 weights or more, which tiny models have not; and Qwix has no blocks."""


def pairs():
    """Every config with every family that it is for."""
    for name in config_names():
        if name in OF_LARGER_MODELS or find_config(name).calibration is not None:  # GPTQ does not round as Qwix does
            continue
        for family, case in ONE_OF_EACH.items():
            if name == "mxfp4_weight_only" and family not in WITH_EXPERTS:
                continue
            if name == "int8_attn_int4_mlp" and family in STATES_ALONE:  # a rule that matches nothing is refused
                continue
            if name == "int4_ends_int8" and family == "zamba":  # whose only block of attention is in one layer
                continue
            marks = [] if family in FAST.get(name, ()) else [pytest.mark.slow]
            yield pytest.param(name, case, id=f"{name}-{family}", marks=marks)


@pytest.fixture
def small_cuts(monkeypatch):
    """Chunks, pieces and units so small that tiny tensors are cut as large ones are."""
    monkeypatch.setattr(sizes, "CHUNK_BYTES", 8000)
    monkeypatch.setattr(sizes, "SLAB_BYTES", 20_000)
    monkeypatch.setattr(sizes, "UNIT_BYTES", 100_000)


def assert_same(have: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert set(have) == set(want)
    assert not [n for n in want if have[n].dtype != want[n].dtype or have[n].tobytes() != want[n].tobytes()]


@pytest.fixture(scope="module")
def converted(hf, tmp_path_factory):
    """The checkpoint of a case, converted once."""
    done: dict[str, Path] = {}

    def get(case: Case) -> Path:
        if case.id not in done:
            done[case.id] = tmp_path_factory.mktemp(case.id) / "ckpt"
            convert(hf(case, "bfloat16"), done[case.id])
        return done[case.id]

    return get


# -- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), list(pairs()))
def test_every_family_is_quantized_to_what_qwix_makes_of_it(name, case, converted, tmp_path, small_cuts):
    rules, ckpt = find_config(name), converted(case)
    quantize(ckpt, tmp_path / "out", rules)
    assert not [array for array in check_checkpoint(read_manifest(tmp_path / "out")) if array.fault]
    theirs = quantized(tpuconv.load(ckpt), Provider(rules))
    ours = tpuconv.load(tmp_path / "out")
    assert_same(leaves(ours), leaves(theirs))
    (own,), (want,) = (forward(model, [[3, 1, 4, 1, 5, 9, 2]], "bfloat16")() for model in (ours, theirs))
    assert np.array_equal(own, want)
    stored = {n for n in leaves(ours) if n.endswith("qvalue")}
    assert len(stored) == len(read_manifest(tmp_path / "out").quantization["parameters"]) > 0


def test_grouped_products_are_quantized_as_the_einsum_that_they_are():
    """Qwix does not see grouped products; our provider does, and quantizes the kernel as Qwix does for an einsum."""

    class Grouped(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jax.random.normal(jax.random.key(0), (4, 64, 32), jnp.bfloat16))

        def __call__(self, x):
            return grouped_matmul(x, self.kernel[...], jnp.asarray([3, 0, 4, 1]), groups=4)

    class Einsum(Grouped):
        def __call__(self, x):
            return jnp.einsum("TD,EDM->TEM", x, self.kernel[...])

    x = jax.random.normal(jax.random.key(1), (8, 64), jnp.bfloat16)
    for text in (
        "int8",
        "int4",
        "float8_e4m3fn",
        "int8, act_qtype: int8",
        "int4, tile_size: 32",
        "mxfp4, tile_size: 32",
    ):
        rules = parse_config(f"qwix: {{rules: [{{weight_qtype: {text}}}]}}".encode(), "c", "c.yaml")
        ours = qwix.quantize_model(Grouped(), Provider(rules), x)
        theirs = qwix.quantize_model(
            Einsum(), qwix.PtqProvider([qwix.QuantizationRule(**rule.to_json()) for rule in rules.rules]), x
        )
        assert_same(leaves(ours), leaves(theirs))
        chosen = np.repeat(np.arange(4), [3, 0, 4, 1])
        want = np.asarray(theirs(x)).astype(np.float32)[np.arange(8), chosen]
        assert np.abs(np.asarray(ours(x)).astype(np.float32) - want).max() <= 2**-7 * np.abs(want).max()


SHAPES = [
    ((12, 64), (1, 64)),
    ((12, 64), (1, 32)),
    ((64, 6, 4), (32, 1, 1)),
    ((6, 32, 8), (1, 32, 1)),
    ((96, 64), (32, 32)),
]
KINDS = ["normal", "any bits", "mostly zeros"]


def values_of(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if kind == "normal":
        return (rng.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16)
    bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    if kind == "any bits":
        return np.where((bits >> 7) & 0xFF == 0xFF, bits & 0x807F, bits).astype(np.uint16).view(ml_dtypes.bfloat16)
    return np.where(rng.random(shape) < 0.97, bits & 0x8000, bits & 0xBFFF).astype(np.uint16).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("qtype", QTYPES)
@settings(max_examples=25)
@given(
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(KINDS),
    method=st.sampled_from(["absmax", "absmax,0.8"]),
    seed=st.integers(0, 1000),
    turn=st.booleans(),
)
def test_tables_give_what_qwix_gives(qtype, shape, kind, method, seed, turn):
    (size, tiles) = shape
    if qtype in REQUIRED_TILE_SIZES:
        tile = REQUIRED_TILE_SIZES[qtype]
        tiles = tuple(tile if t > 1 else 1 for t in tiles)
    x = values_of(kind, size, np.random.default_rng(seed))
    if turn:  # as a layout gives it: a view of other strides
        x = np.ascontiguousarray(x.T).T
    how = encode.QuantKind(qtype, method, tiles).in_qwix(size)
    want = qarray.quantize(jnp.asarray(x), how)
    encoder = encode.QwixEncoder("w", ParamQuant(size, tiles, 0, how), encode.BF16, encode.BF16)
    if not np.asarray(want.scale).all():
        with pytest.raises(UnsupportedConfig, match="underflows to 0"):
            encoder(x)
        return
    (codes, scales), figures = encoder(x)
    assert np.array_equal(codes.view(np.uint8), encode.as_bytes(np.asarray(want.qvalue)))
    assert np.array_equal(scales.view(np.uint16), np.asarray(want.scale).view(np.uint16))
    assert figures["count"] == x.size


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", pytest.param("float32", marks=pytest.mark.slow), pytest.param("float16", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "rule",
    [
        "weight_qtype: int8, weight_calibration_method: minmax",
        "weight_qtype: int8, weight_calibration_method: 'rms,3'",
        "weight_qtype: int4, tile_size: 32, weight_calibration_method: 'absmax,0.9'",
        "weight_qtype: int8, weight_calibration_method: 'fixed,-1,1'",
        "weight_qtype: float8_e4m3fn, tile_size: 0.5",
    ],
)
def test_other_methods_and_types_are_qwixs_too(rule, dtype, tmp_path, small_cuts):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 1}
    convert(random_checkpoint(tmp_path / "hf", qwen3_config(**sizes), dtype), tmp_path / "ckpt")
    rules = parse_config(f"qwix: {{rules: [{{module_path: 'layers/.*/.*', {rule}}}]}}".encode(), "c", "c.yaml")
    quantize(tmp_path / "ckpt", tmp_path / "out", rules)
    is_widened = dtype == "float16"  # whose scales Qwix takes for too small
    plain = tpuconv.load(tmp_path / "ckpt", **({"dtype": "float32"} if is_widened else {}))
    theirs = leaves(quantized(plain, Provider(rules)))
    if is_widened:
        theirs = {name: x.astype(np.float16) if x.dtype == np.float32 else x for name, x in theirs.items()}
    assert_same(leaves(tpuconv.load(tmp_path / "out")), theirs)


@pytest.mark.parametrize(("rule", "decibels"), [("int8", 40), ("float8_e4m3fn", 30), ("int4", 16)])
def test_weights_in_float16_are_quantized_as_well_as_others(rule, decibels):
    """By Qwix itself their scales would be 1."""
    x = (0.02 * np.random.default_rng(0).standard_normal((64, 32))).astype(np.float16)
    how = encode.QuantKind(rule, "absmax", (64, 1)).in_qwix(x.shape)
    encoder = encode.QwixEncoder("w", ParamQuant(x.shape, (64, 1), 0, how), x.dtype, x.dtype)
    parts, figures = encoder(x)
    assert parts[1].dtype == np.float16
    assert 10 * np.log10(figures["signal"] / figures["noise"]) > decibels
    lost = encoder.decoded([encode.as_bytes(parts[0]), parts[1]]) - x.astype(np.float32)
    assert np.square(lost).sum() == pytest.approx(figures["noise"], rel=0.02)


def test_inputs_in_float16_are_not_quantized(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(), "float16")
    with pytest.raises(ConfigError, match="act_qtype of int8_default, line 6, cannot be used with a model in float16"):
        quantize_source(folder, tmp_path / "out", find_config("int8_default"))
    quantize_source(folder, tmp_path / "bfloat16", find_config("int8_default"), Options(dtype="bfloat16"))
    api.convert(folder, tmp_path / "served", target="huggingface", quantize="int8_default")


def test_another_config_of_the_same_name_is_named(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    for qtype in ("int8", "float8_e4m3fn"):
        rules = f"qwix: {{rules: [{{module_path: 'layers/.*/.*', weight_qtype: {qtype}}}]}}"
        (tmp_path / "mine.yaml").write_text(rules)
        if qtype == "int8":
            api.convert(folder, tmp_path / "out", quantize=tmp_path / "mine.yaml")
    with pytest.raises(OutputError, match="would write another output") as info:
        api.convert(folder, tmp_path / "out", quantize=tmp_path / "mine.yaml")
    assert info.value.details == ("source, its quantization config or the text: not the same contents as before",)


def test_one_pass_from_the_source_gives_the_same_as_two(tmp_path, small_cuts):
    rules = find_config("int4_ends_int8")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(**sizes))
    convert(folder, tmp_path / "ckpt")
    quantize(tmp_path / "ckpt", tmp_path / "two", rules)
    quantize_source(folder, tmp_path / "one", rules)
    one, two = (read_manifest(tmp_path / name) for name in ("one", "two"))
    assert {n: (a.shape, a.dtype, a.axes) for n, a in one.arrays.items()} == {
        n: (a.shape, a.dtype, a.axes) for n, a in two.arrays.items()
    }
    assert_same(leaves(tpuconv.load(tmp_path / "one")), leaves(tpuconv.load(tmp_path / "two")))


def test_a_plan_shows_layers_of_several_types_apart(tmp_path):
    folder = random_checkpoint(
        tmp_path / "hf", qwen3_config(num_hidden_layers=6, hidden_size=64, intermediate_size=96, head_dim=32)
    )
    plan = api.plan(folder, quantize="int4_ends_int8")
    shown = plan.to_json()["arrays"]
    assert shown["layers.{0,1}.mlp.up.kernel.array.qvalue"]["dtype"] == "int8"
    for pattern, facts in shown.items():
        arrays = [plan.plan.arrays[name] for name in expand(pattern)]
        assert {(array.shape, array.dtype.name) for array in arrays} == {(facts["shape"], facts["dtype"])}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_values_that_are_not_finite_are_not_quantized(value, method):
    """By tables, and by Qwix itself."""
    x = values_of(KINDS[0], (64, 32), np.random.default_rng(0)).copy()
    encoder = encode.QwixEncoder(
        "w",
        ParamQuant(x.shape, (64, 1), 0, encode.QuantKind("int8", method, (64, 1)).in_qwix(x.shape)),
        encode.BF16,
        encode.BF16,
    )
    encoder(x)
    x[7, 9] = value
    with pytest.raises(FloatingPointError):
        encoder(x)


def test_a_source_that_is_not_finite_is_not_quantized(tmp_path, small_cuts):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    tensors = {name: x.copy() for name, x in read_tensors(folder).items()}
    tensors["model.layers.2.mlp.up_proj.weight"][7, 9] = np.nan
    write_checkpoint(folder, qwen3_config(), tensors)
    with pytest.raises(SourceError, match=r"(?s)layers\.2\.mlp\.up\.kernel is not finite.*up_proj\.weight"):
        quantize_source(folder, tmp_path / "out", find_config("int8_weight_only"))


def test_scales_are_stored_in_the_dtype_that_is_asked_for(tmp_path):
    text = b"qwix: {scale_dtype: float32, rules: [{module_path: 'layers/.*/.*', weight_qtype: int8}]}"
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "ckpt")
    quantize(tmp_path / "ckpt", tmp_path / "out", parse_config(text, "wide", "wide.yaml"))
    arrays = read_manifest(tmp_path / "out").arrays
    assert {a.dtype for n, a in arrays.items() if n.endswith("scale") and "array" in n} == {"float32"}
    model = tpuconv.load(tmp_path / "out")
    assert model.layers[0].mlp.up.kernel.array.scale[...].dtype == jnp.float32
    assert np.isfinite(np.asarray(model(jnp.asarray([[3, 1, 4]])))).all()


def test_quantizing_goes_on_where_it_was_stopped(tmp_path, small_cuts, monkeypatch):
    monkeypatch.setattr(sizes, "UNIT_BYTES", 4000)
    rules = find_config("int8_weight_only")
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "ckpt")
    plan = quantize(tmp_path / "ckpt", tmp_path / "whole", rules)
    work = run(plan, tmp_path / "out", LIMITS)
    while next(work).done == 0:
        pass
    work.close()
    assert not (tmp_path / "out").exists()
    resumed = [at.resumed for at in run(plan, tmp_path / "out", LIMITS)]
    assert max(resumed) > 0
    whole, out = (json.loads((tmp_path / name / "tpuconv.json").read_text()) for name in ("whole", "out"))
    assert whole == out


def test_the_report_is_that_of_the_whole_tensors(tmp_path, small_cuts):
    rules = find_config("int8_attn_int4_mlp")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 1}
    convert(random_checkpoint(tmp_path / "hf", qwen3_config(**sizes)), tmp_path / "ckpt")
    quantize(tmp_path / "ckpt", tmp_path / "out", rules)
    plain, quantized = leaves(tpuconv.load(tmp_path / "ckpt")), tpuconv.load(tmp_path / "out")
    own = report(read_manifest(tmp_path / "out").raw)
    assert [row.snr_db for row in own.rows] == sorted(row.snr_db for row in own.rows)
    kernels = dict(nnx.iter_graph(quantized))
    for row in own.rows:
        x = plain[row.name].astype(np.float64)
        path = tuple(int(part) if part.isdigit() else part for part in row.name.split("."))
        array = kernels[path].array
        exact = qarray.QArray(array.qvalue[...], array.scale[...].astype(jnp.float32), None, array.qtype)
        noise = np.square(np.asarray(qarray.dequantize(exact)).astype(np.float64) - x).sum()
        assert row.snr_db == pytest.approx(10 * np.log10(np.square(x).sum() / noise), abs=1e-3)
        assert (row.count, row.clipped) == (x.size, 0)
        assert row.bits == {"int8": 8, "int4": 4}[row.qtype] + 16 * array.scale[...].size / x.size
    assert own.parameters == sum(x.size for x in plain.values())
    page = (tmp_path / "out" / REPORT).read_text()
    assert all(row.name in page for row in own.rows)


def test_a_scale_that_is_not_qwixs_stops_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "_compared", {})
    real = encode._scale_table("int8", "absmax").result()
    wrong: Future[np.ndarray] = Future()
    wrong.set_result(np.nextafter(real, np.inf).astype(np.float32) * 1.01)
    monkeypatch.setattr(encode, "_scale_table", lambda *_: wrong)
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "ckpt")
    with pytest.raises(GateError, match="differs from what Qwix makes of it"):
        quantize(tmp_path / "ckpt", tmp_path / "out", find_config("int8_weight_only"))
    assert not (tmp_path / "out").exists()
    entries = [json.loads(path.read_text()) for path in (tmp_path / ".out.tpuconv").glob("*.done")]
    assert entries
    assert not [entry for entry in entries if entry.get("figures")]  # what is wrong does not count as done


def test_a_damaged_checkpoint_is_not_quantized(tmp_path):
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt/params/layers.1.mlp.up.kernel").glob("c*")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptOutput, match=r"layers\.1\.mlp\.up\.kernel cannot be read"):
        quantize(tmp_path / "ckpt", tmp_path / "out", find_config("int8_weight_only"))


@pytest.mark.parametrize(
    ("change", "says"),
    [({"tiles": [1]}, r"has the tiles \[1\] for values of shape \("), ({"rule": 7}, "has rule 7 of ")],
)
def test_a_manifest_whose_parts_contradict_each_other_is_refused(change, says, tmp_path):
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "ckpt")
    quantize(tmp_path / "ckpt", tmp_path / "out", find_config("int8_weight_only"))
    facts = json.loads((tmp_path / "out" / "tpuconv.json").read_text())
    next(iter(facts["quantization"]["parameters"].values())).update(change)
    (tmp_path / "out" / "tpuconv.json").write_bytes(seal(facts))
    with pytest.raises(CorruptOutput, match=says):
        read_manifest(tmp_path / "out")


def test_what_cannot_be_quantized_is_refused(tmp_path):
    folder, rules = random_checkpoint(tmp_path / "hf", qwen3_config()), find_config("int8_weight_only")
    convert(folder, tmp_path / "ckpt")
    quantize(tmp_path / "ckpt", tmp_path / "out", rules)
    with pytest.raises(UsageError, match="is quantized already, with int8_weight_only"):
        quantize(tmp_path / "out", tmp_path / "twice", rules)


# -- layers stacked in one array --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("int8_default", "qwen3"),
        pytest.param("mxfp4_weight_only", "mixtral", marks=pytest.mark.slow),
        pytest.param("int8_default", "mixtral", marks=pytest.mark.slow),
        pytest.param("int4_weight_only", "qwen3", marks=pytest.mark.slow),
        pytest.param("nf4_weight_only", "gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_stacked_layers_are_quantized_as_separate_ones_are(name, family, converted, hf, tmp_path, small_cuts):
    rules, separate = find_config(name), converted(ONE_OF_EACH[family])
    convert(hf(ONE_OF_EACH[family], "bfloat16"), tmp_path / "scan", Options(scan_layers=True))
    quantize(tmp_path / "scan", tmp_path / "out", rules)
    quantize(separate, tmp_path / "separate", rules)
    assert not [array for array in check_checkpoint(read_manifest(tmp_path / "out")) if array.fault]
    assert_same_model(tmp_path / "out", tmp_path / "separate")


@settings(max_examples=20)
@given(data=st.data())
def test_both_readers_read_bytes_and_boxes(converted, hf, data):
    """Of a source and of a checkpoint: what a reader gives is that part of the whole array."""
    case = BY_ID["llama-plain"]
    source = data.draw(st.sampled_from([open_checkpoint(converted(case)), open_source(hf(case, "bfloat16"))]))
    info = data.draw(st.sampled_from(list(source.tensors.values())))
    with closing(source.open()) as reader:
        whole = np.empty(info.nbytes, np.uint8)
        reader.read(info, 0, whole.data)
        array = whole.view(DTYPES[info.dtype]).reshape(info.shape)
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in info.shape]
        box = tuple(slice(start, stop) for start, stop in ends)
        out = np.empty([stop - start for start, stop in ends], array.dtype)
        reader.read_box(info, box, out)
        assert out.tobytes() == array[box].tobytes()
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, info.nbytes)] * 2)))
        part = np.empty(stop - start, np.uint8)
        reader.read(info, start, part.data)
        assert part.tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("method", ["rms,3", *(pytest.param(m, marks=pytest.mark.slow) for m in ("absmax", "minmax"))])
def test_stacked_layers_of_the_source_are_calibrated_each_for_itself(method, tmp_path, small_cuts):
    """In one pass, by every way to find scales."""
    rule = f"{{module_path: 'layers/\\d+/mlp/.*', weight_qtype: int8, weight_calibration_method: '{method}'}}"
    rules = parse_config(f"qwix: {{rules: [{rule}]}}".encode(), "c", "c.yaml")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(**sizes))
    quantize_source(folder, tmp_path / "scan", rules, Options(scan_layers=True))
    quantize_source(folder, tmp_path / "separate", rules)
    assert read_manifest(tmp_path / "scan").arrays["layers.mlp.up.kernel.array.scale"].shape == (3, 1, 96)
    assert_same_model(tmp_path / "scan", tmp_path / "separate")


def test_layers_that_are_not_quantized_alike_are_not_stacked(tmp_path):
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "scan", Options(scan_layers=True))
    for rules, module in (
        ("{module_path: 'layers/(0|1)/.*', weight_qtype: int8}", "layers/0/attn/q and layers/2/attn/q"),
        (
            "{module_path: 'layers/1/mlp/up', weight_qtype: int8, act_qtype: int8}, {weight_qtype: int8}",
            "layers/0/mlp/up and layers/1/mlp/up",
        ),
    ):
        with pytest.raises(UnsupportedConfig, match=f"mine does not quantize {module} alike"):
            quantize(
                tmp_path / "scan", tmp_path / "out", parse_config(f"qwix: {{rules: [{rules}]}}".encode(), "mine", "m")
            )
    alike = "{module_path: 'layers/0/.*', weight_qtype: int8}, {module_path: 'layers/.*', weight_qtype: int8}"
    quantize(tmp_path / "scan", tmp_path / "out", parse_config(f"qwix: {{rules: [{alike}]}}".encode(), "mine", "m"))
    assert len(read_manifest(tmp_path / "out").quantization["parameters"]) == 7


# -- configs ----------------------------------------------------------------------------------------------------------


def qwen3_build(**changes):
    family = get_family("qwen3")
    config = family.config.from_hf(qwen3_config(**changes))
    return lambda: family.model_class(config, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[", "not valid YAML at line 1"),
        ("- a", "line 1, column 1: the file: must be a mapping"),
        ("qwix: {rules: []}", "column 15: rules: quantizes no weights"),
        ("qwix:\n  rules:\n    - weight_qtyp: int8", "line 3, column 7: unknown key 'weight_qtyp'"),
        (
            "qwix:\n  rules:\n    - weight_qtype: int8\n      weight_qtype: int4",
            "line 4, column 7: 'weight_qtype'",
        ),
        ("qwix: {rules: [{weight_qtype: None}]}", "a missing value is written null"),
        ("qwix: {rules: [{weight_qtype: no}]}", "unknown value 'no'"),
        ("qwix: {rules: [{weight_qtype: uint8}]}", "unknown value 'uint8'"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: '32'}]}", "must be a number"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: 1e-3}]}", "must be a number, not '1e-3'"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: [32]}]}", "must be a number, not a list"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: {a: 32}}]}", "must be a number, not a mapping"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: -4}]}", "tile_size is a number of elements"),
        ("qwix: {rules: [{weight_qtype: mxfp4, tile_size: 16}]}", "mxfp4 needs tile_size: 32"),
        ("qwix: {rules: [{act_qtype: int8}, {weight_qtype: int8}]}", "act_qtype does nothing without weight_qtype"),
        ("qwix: {rules: [{tile_size: 32}, {weight_qtype: int8}]}", "tile_size does nothing without weight_qtype"),
        (
            "qwix: {rules: [{weight_qtype: int8, act_calibration_method: minmax}]}",
            "act_calibration_method does nothing without act_qtype",
        ),
        (
            "qwix: {rules: [{weight_qtype: int8, weight_calibration_method: minmax, act_qtype: int8, "
            "act_calibration_method: minmax}]}",
            "only weights or activations can have zero points",
        ),
        ("qwix: {rules: [{weight_qtype: int8, weight_calibration_method: max}]}", "unknown calibration method 'max'"),
        ("qwix: {rules: [{weight_qtype: nf4, weight_calibration_method: minmax}]}", "minmax works with int8 and int4"),
        ("qwix: {rules: [{weight_qtype: int8, act_static_scale: true}]}", "needs a rule with act_qtype"),
        *(
            (
                f"qwix: {{rules: [{{weight_qtype: int8, {which}_calibration_method: '{method}'}}]}}",
                f"line 1, column {len(which) + 58}: {which}_calibration_method: '{method}': the {what}",
            )
            for which in ("weight", "act")
            for method, what in (
                *((f"fixed,{numbers}", "range must go") for numbers in ("1,-1", "0,0", "1,2", "-2,-1", "0", "-1")),
                *((f"fixed,{numbers}", "range must go") for numbers in ("nan", "-inf,inf", "-1,nan", "-1,1e30")),
                *(("absmax,0", "factor"), ("absmax,-1", "factor"), ("minmax,0", "factor"), ("rms,0", "factor")),
                *(("rms,nan", "factor"), ("absmax,inf", "factor"), ("absmax,1e-30", "factor"), ("rms,1e30", "factor")),
            )
        ),
        ("qwix: {rules: [{weight_qtype: nf4, weight_calibration_method: 'fixed,-1,2'}]}", "fixed,-1,2 works with int8"),
        (
            "qwix: {rules: [{weight_qtype: int8, act_qtype: float8_e4m3fn, act_calibration_method: minmax}]}",
            "minmax works with int8 and int4, not with float8_e4m3fn",
        ),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: 1.5}]}", "or a fraction of the axis"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: 10000000000}]}", "must be a number from"),
        (f"qwix: {{rules: [{{weight_qtype: int8, tile_size: {'9' * 5000}}}]}}", "must be a number, not '999"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: 0}]}", "tile_size is a number of elements"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: 010}]}", "must be a number, not '010'"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: .nan}]}", "must be a number, not '.nan'"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: .inf}]}", "must be a number, not '.inf'"),
        ("qwix: {rules: [{weight_qtype: int8}]}\ngates: {top1: .nan}", "line 2, column 15: top1: must be a number"),
        ("qwix: {rules: [{weight_qtype: int8}]}\ngates: {top1: 1.5}", "top1: must be a number from 0 to 1, not 1.5"),
        ("qwix: {rules: [{weight_qtype: int8}]}\ngates: {mean_kl: -0.1}", "mean_kl: must be a number from 0"),
        ("qwix: {scale_dtype: float16, rules: [{weight_qtype: int8}]}", "unknown value 'float16'"),
        ("qwix: &a {rules: [*a]}", "anchors and aliases"),
        ("qwix: !!python/name:os.system {}", "tags are not allowed"),
        ("qwix: " + 50 * "[" + 50 * "]", "nested too deep"),
        ("x" * (2 << 20), "more than a config can have"),
    ],
)
def test_a_bad_config_is_refused_where_it_is_bad(text, message):
    with pytest.raises(ConfigError) as info:
        parse_config(text.encode(), "c", "c.yaml")
    assert message in str(info.value)
    assert "c.yaml" in info.value.message


def test_a_config_that_is_no_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml is not a regular file but a FIFO"):
        find_config("a.yaml")
    Path("b.yaml").write_bytes(b"x" * (2 << 20))
    with pytest.raises(ConfigError, match=r"b\.yaml has 2097152 bytes, the limit is"):
        find_config("b.yaml")
    Path("int8_default").mkdir()
    assert find_config("int8_default").rules
    with pytest.raises(UsageError, match="there is no quantization config"):
        find_config("x" * 5000)


def test_files_of_serving_on_tpu_work_as_they_are():
    text = b"""
qwix:
  use_abstract_model: True
  scale_dtype: bfloat16
  rules:
    # NOTE: each entry corresponds to a qwix.QuantizationRule
    - module_path: '.*lm_head'
      weight_qtype: null
    - module_path: '.*'
      weight_qtype: 'float8_e4m3fn'
      act_qtype: 'float8_e4m3fn'
"""
    rules = parse_config(text, "fp8_all", "fp8_all.yaml")
    quants = resolve_rules(qwen3_build(), rules)
    assert {how.qtype for how in quants.values()} == {"float8_e4m3fn"}
    assert "lm_head.kernel" not in quants
    assert len(quants) == 3 * 7
    assert QuantConfig.from_json(json.loads(json.dumps(rules.to_json()))).to_json() == json.loads(
        json.dumps(rules.to_json())
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("[{module_path: 'blocks/.*', weight_qtype: int8}]", "'blocks/.*' matches no module with a product"),
        ("[{weight_qtype: int8}, {module_path: 'lm_head', weight_qtype: int4}]", "already matches these modules"),
        ("[{module_path: 'layers/.*/attn', weight_qtype: int8}]", "matches no product with a weight"),
        ("[{module_path: '(', weight_qtype: int8}]", "is not a regular expression"),
        ("[{module_path: '(((.+)+)+)+!', weight_qtype: int8}]", "takes too long"),
        ("[{module_path: 'layers/.*/.*', weight_qtype: int4, tile_size: 48}]", "line 1, does not divide axis 0, of"),
        ("[{module_path: 'layers/.*/mlp/.*', weight_qtype: int4, tile_size: 0.3}]", "tile_size 0.3 of c, line 1"),
        ("[{module_path: 'embed', weight_qtype: int8}]", "'embed' matches the embedding alone, which stays as it is"),
        (
            "[{module_path: '.*mlp.*', weight_qtype: int8, op_names: [dot]}]",
            "'.*mlp.*' matches no module with the op_names dot",
        ),
    ],
)
def test_a_rule_that_cannot_be_meant_is_an_error(rules, message):
    with pytest.raises(ConfigError) as info:
        resolve_rules(qwen3_build(), parse_config(f"qwix: {{rules: {rules}}}".encode(), "c", "c.yaml"))
    assert message in str(info.value)


def test_a_head_that_is_the_embedding_is_told():
    rules = parse_config(b"qwix: {rules: [{module_path: lm_head, weight_qtype: int8}]}", "c", "c.yaml")
    with pytest.raises(ConfigError, match="'lm_head' matches no module with a product") as error:
        resolve_rules(qwen3_build(tie_word_embeddings=True), rules)
    assert (error.value.hint or "").startswith("the head is the embedding, which stays as it is; modules have names")
    assert (error.value.hint or "").endswith("layers/0/mlp/down")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("qwix:\n\trules: []", "indent with spaces"),
        ("qwix: {}\n---\nqwix: {}", "write one config in a file, without ---"),
        ("qwix: &a {}", "write the value out"),
        ("qwix: !!map {}", "leave it out"),
        ("- a", "write {qwix: ...}"),
        ("qwix: {rules: 1}", "write [...], or a line with a dash for each item"),
        ("qwix: {rules: [{weight_qtype: int8, tile_size: '32'}]}", "leave out the quotes"),
    ],
)
def test_what_to_do_about_a_bad_config(text, hint):
    with pytest.raises(ConfigError) as info:
        parse_config(text.encode(), "c", "c.yaml")
    assert info.value.hint == hint


def test_rules_of_a_manifest_are_not_matched_for_ever_either():
    rules = [{"module_path": "(((.+)+)+)+!", "weight_qtype": "int8"}]
    facts = {"name": "mine", "summary": "", "rules": rules, "scale_dtype": None, "gates": {}, "parameters": {}}
    with pytest.raises(ConfigError, match=r"mine, line 1: matching .* takes too long"):
        abstract_quantized_model(qwen3_build(), facts)


MIXED = """
qwix:
  rules:
    - {module_path: 'layers/0/.*', weight_qtype: int4}
    - {module_path: 'layers/2/attn/.*', weight_qtype: null}
    - {module_path: '.*', weight_qtype: int8}
"""
"""The first layer is unlike the next ones, and one in the midst unlike the rest by some of its modules."""


def resolutions():
    """Every config with every family, and the mixed one with every case."""
    fast = {
        case.family: case for case in reversed(CASES) if case.family in ("qwen3", "gpt_oss", "deepseek_v3", "llama4")
    }
    for case in CASES:
        marks = [] if case in fast.values() else [pytest.mark.slow]
        yield pytest.param("mixed", case, id=f"mixed-{case}", marks=marks)
    for name in config_names():
        for case in ONE_OF_EACH.values():
            yield pytest.param(name, case, id=f"{name}-{case}", marks=pytest.mark.slow)


def family_and_config(case: Case):
    family = get_family(case.family)
    return family, family.config.from_hf(released_config(case))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=[] if case.family == "deepseek_v32" else [pytest.mark.slow])
        for case in ONE_OF_EACH.values()
    ],
)
def test_a_model_runs_with_every_product_quantized(case):
    """With routers and indexers too, whose products are in float32 and which no config of this package quantizes."""
    family, config = family_and_config(case)
    rules = QuantConfig("all", "", (Rule(1, module_path=".*", weight_qtype="int8"),))

    def logits():
        model = quantized(family.model_class(config, dtype=jnp.bfloat16), Provider(rules))
        return model(jnp.zeros((1, 8), jnp.int32))

    assert jax.eval_shape(logits).shape == (1, 8, config.sizes["V"])


@pytest.mark.parametrize(("name", "case"), list(resolutions()))
def test_layers_that_are_alike_resolve_alike(name, case, monkeypatch):
    """Tracing the first layer of each kind gives what tracing each layer does."""
    rules = parse_config(MIXED.encode(), "mixed", "mixed.yaml") if name == "mixed" else find_config(name)
    family, config = with_twice_the_layers(case)
    skipped = counted_skips(monkeypatch)
    found = resolved(family, config, rules)
    assert skipped[0] or case.id not in ("qwen3-tied", "deepseek_v3-groups")
    monkeypatch.setattr(rules_module, "_skip_repeated", lambda *_: None)
    assert found == resolved(family, config, rules)


def with_twice_the_layers(case: Case):
    """The family and the config of a case, with lists that have an entry for each layer twice as long; as it is where
    other keys depend on the number of layers."""
    family, config = family_and_config(case)
    layers = config.num_hidden_layers
    lists = {k: 2 * each for k, each in case.config.items() if isinstance(each, list | str) and len(each) == layers}
    with suppress(ConfigError, StrictDataclassError):
        return family_and_config(replace(case, config={**case.config, **lists, "num_hidden_layers": 2 * layers}))
    return family, config


def counted_skips(monkeypatch) -> list[int]:
    real, counts = rules_module._skip_repeated, []

    def skip(model, config):
        real(model, config)
        counts.append(sum(isinstance(layer, rules_module.Skipped) for layer in model.layers))

    monkeypatch.setattr(rules_module, "_skip_repeated", skip)
    return counts


def resolved(family, config, rules):
    """How each parameter is quantized, in order, or why none can be."""
    try:
        return list(resolve_rules(lambda: family.model_class(config, dtype=jnp.bfloat16), rules).items())
    except ConfigError as e:
        return e.message, e.details


@pytest.mark.parametrize("name", config_names())
def test_the_configs_of_the_package_say_what_they_are_and_hold(name):
    config = find_config(f"{name}.yaml")
    assert config.summary
    assert config.summary != name
    assert config.gates is None
    assert find_config(name) == config


@pytest.mark.parametrize("head_dim", [64, 128])
def test_int4_in_groups_of_128_is_for_heads_of_64_too(head_dim):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": head_dim}
    family, config = family_and_config(replace(ONE_OF_EACH["qwen3"], config=sizes))
    found = dict(resolved(family, config, find_config("int4_128")))
    assert found["layers.0.attn.o.kernel"].group_shape == (1, 64, 1)
    assert found["layers.0.attn.q.kernel"].group_shape == (128, 1, 1)
    assert found["layers.0.mlp.down.kernel"].group_shape == (128, 1)


RULE = "qwix: {rules: [{weight_qtype: int8}, %s]}\n"


def test_a_config_has_the_gates_that_it_names():
    config = parse_config((RULE % "{module_path: x}").encode(), "x", "x.yaml")
    assert config.gates is None  # what another rounding changes
    assert QuantConfig.from_json(config.to_json()).gates is None  # as a manifest has it
    assert parse_config((RULE % "{module_path: x}" + "gates: {top1: 0.5}").encode(), "x", "x.yaml").gates == {
        "top1": 0.5
    }
    for none in ("gates: none", "gates: {}"):
        without = parse_config((RULE % "{module_path: x}" + none).encode(), "x", "x.yaml")
        assert without.gates == {}
        assert QuantConfig.from_json(without.to_json()).gates == {}


def test_an_unknown_config_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean int8_default"):
        find_config("int8_defualt")
    with pytest.raises(UsageError) as error:
        find_config(".")
    assert (error.value.hint or "").startswith("`tpuconv quantize --list`")


def test_errors_are_ours(tmp_path):
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TpuconvError):
        find_config(str(tmp_path / "bad.yaml"))


def test_a_tile_size_that_does_not_divide_says_how_to_change_the_config():
    family, config = family_and_config(ONE_OF_EACH["qwen3"])
    with pytest.raises(ConfigError, match="does not divide") as error:
        resolve_rules(lambda: family.model_class(config, dtype=jnp.bfloat16), find_config("int4_128"))
    assert "`tpuconv quantize --show int4_128` prints it" in str(error.value.hint)


@pytest.mark.parametrize("config", ["mxfp4_weight_only", "tpu_v7"])
def test_rules_for_experts_say_so_of_a_model_without(config, tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    with pytest.raises(ConfigError, match="has no effect") as info:
        api.convert(source, tmp_path / "out", quantize=config)
    assert str(info.value.hint).startswith("the rules are for models with experts, and this one has none")


def test_rules_for_experts_among_others_do_not_say_so(tmp_path):
    """Of two layers the first rule of `int4_ends_int8` takes both."""
    source = random_checkpoint(tmp_path / "hf", qwen3_config(num_hidden_layers=2))
    with pytest.raises(ConfigError, match="has no effect") as info:
        api.convert(source, tmp_path / "out", quantize="int4_ends_int8")
    assert "the first rule that matches counts" in str(info.value.hint)

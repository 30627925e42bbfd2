"""`--encoding keep`: quantized values and scales after their layouts, against the dequantized values."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpuconv
from helpers import quantizing
from helpers.checkpoints import json_headers, read_tensors, write_checkpoint
from helpers.commands import LISTINGS, every_name, forked
from helpers.conversions import assert_same, convert, plan_for, restore, same_bits
from helpers.drafts import drafted
from helpers.encoded import (
    ENCODINGS,
    GPT_OSS,
    NVFP4,
    assert_came_back,
    awq,
    decoded,
    dequantized,
    encoded,
    exported,
    fp8,
    fp8_channel,
    fp8_tensor,
    gptq,
    gptq_asymmetric,
    int4,
    int4_asymmetric,
    int8,
    mxfp4,
    quantized,
    write_encoded,
)
from helpers.families import CASES, CORE, FIRST, Case
from helpers.logits import forward
from helpers.schemes import BF16, FP8, MODELOPT, compressed_config, fp8_config, modelopt
from helpers.times import ProcessorTime
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.export import files as export_files
from tpuconv.convert.export.export import file_names
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.sizes import SLAB_BYTES
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.sizing import BASE_MEMORY, planned_memory
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.passthrough import QValues, Scales
from tpuconv.encodings.passthrough_rows import pass_through
from tpuconv.encodings.schemes import schemes
from tpuconv.errors import CorruptOutput, MappingError, OutputError, SourceError, UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.models.registry import FAMILIES, find_family, get_family
from tpuconv.names import MANIFEST, QVALUE, SCALE
from tpuconv.notation.table import Binding, Map, MappingTable, row_axes, row_indices
from tpuconv.quantize.report import report
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.hub import fetch_config
from tpuconv.storage.local_file import READ_BYTES, room_for
from tpuconv.storage.sealed import seal
from tpuconv.verify.checksums import check_checkpoint
from tpuconv.verify.topology import request as tpu

CODES = {dtype: code for code, dtype in DTYPES.items()}


# -- every row of every family, in memory ------------------------------------------------------------------------------


def rows() -> list[Any]:
    """The rows that can be encoded: matrices, with layers stacked or not. The same layout is tried once; those that no
    family of the core has are slow."""
    out: dict[tuple[str, bool], Any] = {}
    seen: set[tuple[str, str]] = set()
    for name in sorted(FAMILIES, key=lambda name: name not in CORE):
        marks = [pytest.mark.slow] * (name not in CORE)
        table = get_family(name).table
        layers = [x for row in table for x in row_indices(row)[0] if f"layers.{{{x}}}." in row.jax_names[0]]
        stacked = table.stack_layers(SimpleNamespace(sizes={}, layer_sets=dict.fromkeys(("L", *layers), range(2))))
        for each in (table, stacked):
            for row in each:
                alike = row.layout, str(row_indices(row))
                if alike in seen:
                    continue
                seen.add(alike)
                binding = bind(row, dict.fromkeys(row_axes(row), 2))
                if min(len(shape) for shape in binding.src_shapes().values()) > 1:
                    tried = str(binding.layout), bool(binding.src[0].depth)
                    out.setdefault(tried, pytest.param(row, id=f"{name}-{row.layout}", marks=marks))
    return list(out.values())


def bind(row: Map, sizes: dict[str, int]) -> Binding:
    config = SimpleNamespace(sizes=sizes, layer_sets={})
    return MappingTable((replace(row, when=None),)).bind(config, include_mtp=True)[0]


class Memory:
    """A reader of arrays in memory."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays

    def info(self, name: str) -> TensorInfo:
        array = self.arrays[name]
        return TensorInfo(name, CODES[array.dtype], array.shape, "", 0, array.nbytes)

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        data = np.ascontiguousarray(self.arrays[info.name]).reshape(-1).view(np.uint8)
        out[:] = data[start : start + len(out)].data


def whole(tensor: Tensor, memory: Memory, at: tuple[int, ...] = ()) -> np.ndarray:
    """A tensor, read in parts that begin at the numbers `at`."""
    out = np.empty(tensor.size, tensor.dtype)
    for start, stop in zip((0, *at), (*at, tensor.size), strict=True):
        tensor.read(memory, start, np.empty(4 * tensor.size, np.uint8), out[start:stop])
    return out.reshape(tensor.shape)


@pytest.mark.parametrize("row", rows())
@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 2)
def test_what_is_kept_stands_for_what_is_dequantized_at_once(row, data):
    sizes = data.draw(st.fixed_dictionaries({name: st.integers(1, 6) for name in row_axes(row)}))
    binding = bind(row, sizes)
    rank = min(len(shape) for shape in binding.src_shapes().values())
    kinds = ["blocks"] if rank > 2 else ["blocks", "channel", "tensor"]
    kind = data.draw(st.sampled_from(kinds))
    block = data.draw(st.tuples(st.integers(1, 9) if rank == 2 else st.just(1), st.integers(1, 9)))
    if kind == "blocks":
        scheme = schemes(fp8_config(*block))[0]
    else:
        (scheme,) = schemes(compressed_config(type="float", num_bits=8, strategy=kind))
    over = kind == "blocks" and data.draw(st.booleans())
    scheme = replace(scheme, values="_codes", scales="_scales", name="", tensor_scale="_over" if over else "")
    scheme = replace(scheme, divided=data.draw(st.booleans()))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype = data.draw(st.sampled_from(["f4", BF16, ml_dtypes.float8_e8m0fnu]))
    arrays: dict[str, np.ndarray] = {}
    for name, shape in binding.src_shapes().items():
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        arrays[f"{name}_codes"] = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8).view(FP8)
        grid = scheme.scale_shape(shape, (1,) if kind == "tensor" else (*shape[:-1], 1))
        scales = rng.uniform(0.1, 3, grid)
        arrays[f"{name}_scales"] = (2.0 ** np.round(scales) if dtype == DTYPES["F8_E8M0"] else scales).astype(dtype)
        arrays[f"{name}_over"] = rng.uniform(0.1, 3, 1).astype("f4")
    memory = Memory(arrays)
    tensors = {
        name: Tensor(
            name,
            shape,
            memory.info(f"{name}_codes"),
            memory.info(f"{name}_scales"),
            scheme=scheme,
            tensor_scale=memory.info(f"{name}_over") if over else None,
        )
        for name, shape in binding.src_shapes().items()
    }
    kept_tensors, (codes, scales), kept, faults = pass_through(tensors, [binding], [binding])
    assert not faults
    at = data.draw(st.lists(st.integers(0, min(t.size for t in kept_tensors.values())), max_size=3).map(sorted))
    at_once = binding(lambda name: whole(tensors[name], memory))
    targets = [
        part(lambda name: whole(kept_tensors[name], memory, tuple(at)))
        for part in (codes, scales)
    ]  # fmt: skip
    for name, want in at_once.items():
        own, scale = targets[0][name + QVALUE], targets[1][name + SCALE]
        assert own.dtype == FP8
        assert kept[name].group_shape == tuple(n // s for n, s in zip(own.shape, scale.shape, strict=True))
        assert same_bits(decoded(own, scale), want)


# -- whole checkpoints of every family ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(hf):
    """The checkpoint of a case, written once."""
    return lambda case: hf(case, "bfloat16")


# Each gives the stored tensors of a matrix, and the values in float32 that they stand for.


ODD_OUTPUTS = ("mamba2-one-head", "mamba-narrow")
"""Cases without a matrix whose number of outputs is a multiple of 8, which AWQ's words hold."""
ODD = (
    *ODD_OUTPUTS,
    *("llama-linear", "gpt_oss-many-experts", "qwen3_moe-many-experts", "deepseek_v3-all-experts"),
    *("minimax_m2-many-experts", "granitemoe_swa-many-experts", "muse_spark-plain", "dots1-windows"),
    *("dots3_note-window", "beam-all-experts", "inkling2_loop_text-plain"),
    *("gpt_neox_japanese-one-layer", "ctrl-odd-heads", "ctrl-one-head"),
)
"""Cases without a matrix whose sizes are both multiples of 8, which GPTQ's words hold."""


ODD_INPUTS = ("mamba-two-taps", "mamba-deep", "recurrent_gemma-one-head")
"""Cases without a matrix whose number of inputs is a multiple of 8, which the words of compressed-tensors hold."""
NO_FOURS = ("mamba-wide-state",)
"""Cases without a matrix whose number of inputs is a multiple of 4, which words of 8 bits hold without filling."""
LEFT_OUT = {
    awq: ODD_OUTPUTS,
    int8: NO_FOURS,
    **dict.fromkeys((gptq, gptq_asymmetric), ODD),
    **dict.fromkeys((int4, int4_asymmetric), ODD_INPUTS),
}


def is_held(case: Case, encoding: Any) -> bool:
    """Whether an encoding holds a matrix of the case."""
    return case.id not in LEFT_OUT.get(encoding, ())


def is_tried(case: Case, encoding: Any) -> bool:
    """Every case is tried in FP8 and in one more encoding, which its name chooses: a new case changes no other."""
    chosen = list(ENCODINGS)[crc32(case.id.encode()) % len(ENCODINGS)]
    more = (chosen, awq, gptq, gptq_asymmetric) if case.family in CORE else (chosen,)
    return encoding is fp8 or (encoding in more and is_held(case, encoding))


FORMS = [
    pytest.param(case, encoding, id=f"{case}-{encoding.__name__}")
    for case in CASES
    for encoding in ENCODINGS
    if is_tried(case, encoding)
] + [pytest.param(case, mxfp4, id=f"{case}-mxfp4") for case in GPT_OSS]


SLOW = ("llama4-maverick", "deepseek_v3-plain-queries", "qwen3_moe-few-experts")
LOADED = [
    pytest.param(case, encoding, id=f"{case}-{encoding.__name__}", marks=[pytest.mark.slow] * (case.id in SLOW))
    for case, encoding in (
        *((case, fp8) for case in CASES if case.id in ("llama-biases", "llama4-maverick", "deepseek_v3-groups")),
        *((case, int4) for case in CASES if case.id in ("deepseek_v3-plain-queries", "mixtral-plain")),
        *((case, fp8_channel) for case in CASES if case.id in ("qwen3-tied", "qwen3_moe-few-experts")),
        *((case, fp8_tensor) for case in CASES if case.id == "olmo2-plain"),
        *((case, int8) for case in CASES if case.id == "llama-plain"),
        *((case, gptq) for case in CASES if case.id == "llama-plain"),
        *((case, awq) for case in CASES if case.id in ("qwen3-tied", "mixtral-plain", "deepseek_v3-groups")),
        *((case, int4_asymmetric) for case in CASES if case.id == "qwen2-plain"),
        (GPT_OSS[0], mxfp4),
    )
]


FULL_SIZE = {
    "deepseek-ai/DeepSeek-R1": 1,
    "Qwen/Qwen3-30B-A3B-FP8": 1,
    "moonshotai/Kimi-K2-Thinking": 2,
    "openai/gpt-oss-20b": 2,
}
"""QValues in a byte of the source."""

STACKED = ("gpt_oss", "llama4", "llama4_text", "nemo_speechlm")
"""Families whose plain experts are tensors of a layer, which no release has in FP8."""

DESCRIBED = [
    *(pytest.param(FIRST[name], fp8, id=f"{name}-fp8") for name in FIRST if name not in STACKED),
    pytest.param(FIRST["llama4"], fp8_channel, id="llama4-fp8_channel"),
    *(pytest.param(case, int4, id="mixtral-int4") for case in CASES if case.id == "mixtral-plain"),
    *(pytest.param(case, awq, id="mixtral-awq") for case in CASES if case.id == "mixtral-plain"),
    *(pytest.param(case, gptq, id="llama-gptq") for case in CASES if case.id == "llama-plain"),
    pytest.param(GPT_OSS[0], mxfp4, id="gpt_oss-mxfp4"),
]


def by_the_table(folder: Path, values: dict[str, np.ndarray], *, scan_layers: bool) -> dict[str, np.ndarray]:
    raw, out = json.loads((folder / "config.json").read_text()), {}
    family = find_family(raw)
    config = family.config.from_hf(raw)
    table = family.table.stack_layers(config) if scan_layers else family.table
    for binding in table.bind(config):
        out |= binding(values.__getitem__)
    return out


def small_pieces(case: Case, monkeypatch) -> None:
    """Pieces and chunks so small that most matrices are cut, along rows of codes too, or those of many experts are."""
    experts = max(case.config.get(f"{key}_experts") or 1 for key in ("num", "num_local", "n_routed"))
    monkeypatch.setattr(sizes, "CHUNK_BYTES", 300 * max(1, experts // 4))
    monkeypatch.setattr(sizes, "SLAB_BYTES", 1500 * max(1, experts // 4))
    monkeypatch.setattr(sizes, "UNIT_BYTES", 20_000)


@pytest.mark.parametrize(("case", "encoding"), FORMS)
def test_every_family_is_kept_in_every_encoding(case, encoding, saved, tmp_path, monkeypatch):
    small_pieces(case, monkeypatch)
    values = write_encoded(case, encoding, saved, tmp_path / "hf")
    scan_layers = not case.no_scan and encoding is not fp8
    plan = convert(tmp_path / "hf", tmp_path / "out", Options(scan_layers=scan_layers, encoding="keep"))
    arrays, want = restore(tmp_path / "out"), by_the_table(tmp_path / "hf", values, scan_layers=scan_layers)
    have = dequantized(arrays)
    assert set(have) == set(want)
    assert len(have) < len(arrays)
    assert not [name for name in want if not same_bits(have[name], want[name])]
    buffers = {name for binding in plan.bindings if binding.row.buffer for name in binding.dst_shapes()}
    assert plan.parameters == sum(x.size for name, x in want.items() if name not in buffers)
    assert plan.mapped == len(plan.source.tensors) - sum(skip.count for skip in plan.skipped)
    manifest = read_manifest(tmp_path / "out")
    assert {name.removesuffix(QVALUE) for name in arrays if name.endswith(QVALUE)} == set(manifest.passthrough)
    for name, facts in manifest.passthrough.items():
        codes, scales = (manifest.arrays[name + part] for part in (QVALUE, SCALE))
        assert tuple(facts["tiles"]) == tuple(n // s for n, s in zip(codes.shape, scales.shape, strict=True))
        assert codes.dtype == facts["qtype"]
    assert not [array for array in check_checkpoint(manifest) if array.fault]
    assert_came_back(tmp_path / "hf", tmp_path / "out", plan)


def test_experts_of_llama4_are_the_same_one_by_one(saved, tmp_path):
    case = next(case for case in CASES if case.id == "llama4_text-plain")
    values = encoded(saved(case), tmp_path / "hf", fp8_channel)
    plain = {name: x for name, x in values.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in values.keys() - plain.keys()}:
        gate, up, down = (
            [values[f"{layer}.experts.{e}.{part}_proj.weight"].T for e in range(case.config["num_local_experts"])]
            for part in ("gate", "up", "down")
        )
        plain[f"{layer}.experts.gate_up_proj"] = np.concatenate([np.stack(gate), np.stack(up)], axis=2)
        plain[f"{layer}.experts.down_proj"] = np.stack(down)
    assert plain.keys() == read_tensors(saved(case)).keys()
    write_checkpoint(tmp_path / "plain", json.loads((saved(case) / "config.json").read_text()), plain)
    for name in ("hf", "plain"):
        convert(tmp_path / name, tmp_path / f"{name}-orbax")
    assert_same(restore(tmp_path / "hf-orbax"), restore(tmp_path / "plain-orbax"))
    assert read_tensors(saved(case)).keys() == exported(tmp_path / "hf-orbax", tmp_path / "back").keys()


# -- and back ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_family_comes_back_as_it_was(case, saved, tmp_path):
    options = Options(scan_layers=not case.no_scan)
    assert_came_back(saved(case), tmp_path / "out", convert(saved(case), tmp_path / "out", options))


def test_what_was_dequantized_comes_back_as_a_plain_checkpoint(saved, tmp_path):
    """gpt-oss' in the plain form, whose matrices are transposed: transformers reads it."""
    import torch
    from transformers import AutoModelForCausalLM

    values = mxfp4(saved(GPT_OSS[0]), tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    back = exported(tmp_path / "out", tmp_path / "back")
    assert not any("quantization" in key for key in json.loads((tmp_path / "back" / "config.json").read_text()))
    for name, x in values.items():
        want = x.swapaxes(1, 2) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else x
        assert same_bits(back[name], want), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(3, 100, (2, 9))
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids)).logits.numpy()
    ours = np.asarray(forward(tpuconv.load(tmp_path / "out", "float32"), ids))
    assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()


@pytest.mark.filterwarnings("ignore:.*not loaded, since the model does not use them. mtp:UserWarning")
def test_layers_that_predict_further_tokens_come_back_too(with_mtp, tmp_path):
    encoded(with_mtp, tmp_path / "hf", fp8)
    plan = convert(tmp_path / "hf", tmp_path / "out", Options(include_mtp=True, encoding="keep"))
    assert any(name.startswith("mtp.") for name in plan.passthrough)
    assert_came_back(tmp_path / "hf", tmp_path / "out", plan)
    ids = np.arange(3, 23)[None]
    convert(tmp_path / "hf", tmp_path / "plain", Options(include_mtp=True, dtype="float32"))
    plain, kept = (tpuconv.load(tmp_path / name, "float32", mtp=True) for name in ("plain", "out"))
    assert same_bits(forward(kept, ids), forward(tpuconv.load(tmp_path / "out", "float32"), ids))
    want, got = (drafted(model) for model in (plain, kept))
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def test_files_are_cut_and_indexed(saved, tmp_path, monkeypatch):
    case = next(case for case in CASES if case.id == "deepseek_v3-groups")
    monkeypatch.setattr(export_files, "SHARD_BYTES", 50_000)
    plan = convert(saved(case), tmp_path / "out")
    assert_came_back(saved(case), tmp_path / "out", plan)
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert files == file_names(len(files))
    assert len(files) > 3
    assert all((tmp_path / "back" / name).stat().st_size < 60_000 for name in files)


@pytest.mark.parametrize(("case", "encoding"), DESCRIBED)
def test_what_is_kept_can_be_said_of_config_json_alone(case, encoding, saved, tmp_path):
    write_encoded(case, encoding, saved, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"ignore": ["re:.*lm_head"], "format": "pack-quantized"}
    told = tpu.source_passthrough(str(tmp_path), config)["parameters"]
    kept = plan_for(tmp_path, Options(encoding="keep")).passthrough
    facts = {name: own.to_json() for name, own in kept.items()}
    for key in ("qtype", "kept", "tiles"):
        assert {name: own[key] for name, own in told.items()} == {name: own[key] for name, own in facts.items()}


def test_stacked_experts_are_kept_by_config_json_alone():
    config = json.loads(FIRST["step3p7"].hf_config().to_json_string()) | {"quantization_config": fp8_config(5, 7)}
    told = tpu.source_passthrough("name", config)["parameters"]
    assert {name for name in told if ".moe." in name and ".shared." not in name} == {
        f"layers.{layer}.moe.{part}.kernel" for layer in (1, 3) for part in ("gate", "up", "down")
    }


@pytest.mark.parametrize("algorithm", MODELOPT)
def test_what_modelopt_describes_beside_the_config_is_kept(algorithm, tmp_path):
    modelopt(algorithm, tmp_path / "hf")
    kept = convert(tmp_path / "hf", tmp_path / "kept", Options(encoding="keep"))
    convert(tmp_path / "hf", tmp_path / "plain")
    assert_same(dequantized(restore(tmp_path / "kept")), restore(tmp_path / "plain"))
    told = tpu.source_passthrough("name", fetch_config(str(tmp_path / "hf")))["parameters"]
    own = {name: facts.to_json() for name, facts in kept.passthrough.items()}
    for key in ("kept", "tiles", "bits"):
        assert {name: facts[key] for name, facts in told.items()} == {name: facts[key] for name, facts in own.items()}
    config = (tmp_path / "hf" / "config.json").read_bytes()
    exported(tmp_path / "plain", tmp_path / "plain-hf")
    assert (tmp_path / "plain-hf" / "config.json").read_bytes() == config
    assert not (tmp_path / "plain-hf" / "hf_quant_config.json").exists()
    assert_came_back(tmp_path / "hf", tmp_path / "kept", kept)
    exported(tmp_path / "kept", tmp_path / "kept-hf")
    assert (tmp_path / "kept-hf" / "config.json").read_bytes() == config
    assert (tmp_path / "kept-hf" / "hf_quant_config.json").exists()


IN_16S = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
JOINED = [
    replace(FIRST["llama"], id="llama-16s", config=IN_16S | {"intermediate_size": 96}),
    replace(
        FIRST["qwen3_moe"],
        id="qwen3_moe-16s",
        config={**FIRST["qwen3_moe"].config, **IN_16S, "moe_intermediate_size": 32},
    ),
]


@pytest.mark.parametrize("scan_layers", [False, True], ids=["layers", "scan"])
@pytest.mark.parametrize("encoding", NVFP4, ids=lambda encoding: encoding.__name__)
@pytest.mark.parametrize("case", JOINED, ids=str)
def test_matrices_that_servers_join_keep_the_scale_that_they_share(
    case, encoding, scan_layers, saved, tmp_path, small_cuts
):
    encoded(saved(case), tmp_path / "hf", encoding)
    want = read_tensors(tmp_path / "hf")
    for index in range(2):
        options = Options(encoding="keep", scan_layers=scan_layers)
        convert(tmp_path / "hf", tmp_path / "kept", options, part=ProcessPart(index, 2))
    api.reshard(tmp_path / "kept", tmp_path / "resharded", mesh={"fsdp": 2})
    api.convert(tmp_path / "hf", tmp_path / "at-once", encoding="keep", target="huggingface")
    api.export(tmp_path / "kept", tmp_path / "back")
    api.export(tmp_path / "resharded", tmp_path / "resharded-back")
    for out in ("back", "resharded-back", "at-once"):
        have = read_tensors(tmp_path / out)
        assert have.keys() == want.keys()
        assert not [name for name in want if not same_bits(have[name], want[name])]
    told = read_manifest(tmp_path / "kept").quantization["tensor_scales"]
    names = {name for name in want if name.endswith(("weight_scale_2", "weight_global_scale"))}
    assert told == {name: float(want[name].reshape(())) for name in names}
    assert any(".experts." in name for name in names) == (case.family == "qwen3_moe")


def test_a_manifest_without_the_scales_of_tensors_gives_others_with_the_same_products(tmp_path):
    """As an older tpuconv wrote it."""
    modelopt("NVFP4", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "kept", Options(encoding="keep"))
    manifest = read_manifest(tmp_path / "kept")
    raw = {key: value for key, value in manifest.raw.items() if key != "seal"}
    raw["quantization"] = {key: value for key, value in raw["quantization"].items() if key != "tensor_scales"}
    (tmp_path / "kept" / MANIFEST).write_bytes(seal(raw))
    exported(tmp_path / "kept", tmp_path / "back")
    for name in ("hf", "back"):
        convert(tmp_path / name, tmp_path / f"{name}-plain")
    assert_same(restore(tmp_path / "back-plain"), restore(tmp_path / "hf-plain"))


def test_two_scales_that_became_one_make_the_same_model(tmp_path):
    modelopt("MIXED_PRECISION", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "kept", Options(encoding="keep"))
    convert(tmp_path / "hf", tmp_path / "plain", Options(dtype="float32"))
    ids = np.random.default_rng(0).integers(3, 90, (2, 9))
    have, want = (np.asarray(forward(tpuconv.load(tmp_path / name, "float32"), ids)) for name in ("kept", "plain"))
    assert np.abs(have - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("model", FULL_SIZE)
def test_a_release_has_the_tensors_that_its_config_describes(model):
    listing = LISTINGS[model]
    real = {n: (dtype, tuple(shape)) for names, dtype, shape in listing["tensors"] for n in every_name(names)}
    family = find_family(listing["config"])
    config = family.config.from_hf(listing["config"])
    described = source_from_config(model, listing["config"], family.table, config).tensors
    if model == "Qwen/Qwen3-30B-A3B-FP8":  # scales in bfloat16, of which the config says nothing
        real |= {name: ("F32", shape) for name, (_, shape) in real.items() if name.endswith("_scale_inv")}
    assert not [info for name, info in described.items() if (info.dtype, info.shape) != real.get(name)]
    why_ignored = family.table.ignored(config)
    assert all(why_ignored(name) for name in real.keys() - described.keys())


# -- as models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "encoding"), LOADED)
def test_a_kept_model_computes_what_the_dequantized_one_does(case, encoding, saved, tmp_path):
    """In float32, where both have the same weights to the bit."""
    write_encoded(case, encoding, saved, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "kept", Options(encoding="keep"))
    convert(tmp_path / "hf", tmp_path / "plain", Options(dtype="float32"))
    ids = np.random.default_rng(0).integers(3, 100, (2, 9))
    model = tpuconv.load(tmp_path / "kept", "float32")
    have, want = (np.asarray(m(ids)) for m in (model, tpuconv.load(tmp_path / "plain", "float32")))
    assert np.abs(have - want).max() < 1e-5 * np.abs(want).max()
    in_bfloat16 = tpuconv.load(tmp_path / "kept")
    assert in_bfloat16.norm.scale.dtype == jnp.bfloat16
    # A router that rounds otherwise chooses other experts for some tokens, so that the largest difference says little.
    assert np.median(np.abs(np.asarray(in_bfloat16(ids)) - want)) < 0.03 * np.abs(want).max()


@pytest.mark.parametrize(
    ("case", "encoding"),
    [
        pytest.param(GPT_OSS[0], mxfp4, id="gpt_oss-mxfp4"),
        *(
            pytest.param(case, int4, id="qwen3_moe-int4", marks=pytest.mark.slow)
            for case in CASES
            if case.id == "qwen3_moe-few-experts"
        ),
    ],
)
def test_stacked_layers_that_are_kept_are_a_model_too(case, encoding, saved, tmp_path):
    write_encoded(case, encoding, saved, tmp_path / "hf")
    for name, scan_layers in (("scan", True), ("separate", False)):
        convert(tmp_path / "hf", tmp_path / name, Options(scan_layers=scan_layers, encoding="keep"))
    quantizing.assert_same_model(tmp_path / "scan", tmp_path / "separate")


# -- with a config that asks for some of it ----------------------------------------------------------------------------


SOME = """
qwix:
  rules:
    - {module_path: 'layers/0/attn/v_b', weight_qtype: int8}
    - {module_path: 'layers/.*/attn/.*', weight_qtype: float8_e4m3fn, act_qtype: float8_e4m3fn}
    - {module_path: 'layers/.*/moe/(?!router).*', weight_qtype: int8}
"""


def test_what_has_the_type_that_is_asked_for_is_kept(saved, tmp_path):
    case = next(case for case in CASES if case.id == "deepseek_v3-groups")
    encoded(saved(case), tmp_path / "hf", fp8)
    rules = quantized(tmp_path / "hf", tmp_path / "out", SOME)
    convert(tmp_path / "hf", tmp_path / "kept", Options(encoding="keep"))
    convert(tmp_path / "hf", tmp_path / "plain")
    quantizing.quantize(tmp_path / "plain", tmp_path / "requantized", rules)
    have, kept, others = (restore(tmp_path / name) for name in ("out", "kept", "requantized"))
    how = {row.name: row.source for row in report(read_manifest(tmp_path / "out").raw).rows}
    assert set(have) == set(others)
    for name, x in have.items():
        parameter = name.partition(".array.")[0]
        assert same_bits(x, (kept if how.get(parameter) == "kept" else others)[name]), name
    # A row is kept as a whole or not at all: of the first layer's kv_b the config wants two types.
    wanted = {
        name: "kept" if ".attn." in name and not name.startswith(("layers.0.attn.k_b", "layers.0.attn.v_b")) else ""
        for name in how
    }
    assert how == {name: own or "requantized" for name, own in wanted.items()}
    assert sorted(set(how.values())) == ["kept", "requantized"]
    assert np.isfinite(np.asarray(forward(tpuconv.load(tmp_path / "out"), np.array([[3, 1, 4, 1, 5]])))).all()
    with pytest.raises(UsageError, match="cannot be exported as quantized safetensors"):
        exported(tmp_path / "out", tmp_path / "back")


@pytest.mark.parametrize("scan_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_mxfp4_is_kept_where_mxfp4_is_asked_for(scan_layers, saved, tmp_path):
    mxfp4(saved(GPT_OSS[0]), tmp_path / "hf")
    rule = "qwix: {rules: [{module_path: 'layers/.*/moe/(?!router).*', weight_qtype: mxfp4, tile_size: 32}]}"
    quantized(tmp_path / "hf", tmp_path / "out", rule, Options(scan_layers=scan_layers))
    convert(tmp_path / "hf", tmp_path / "kept", Options(scan_layers=scan_layers, encoding="keep"))
    have, want = restore(tmp_path / "out"), restore(tmp_path / "kept")
    assert have.keys() == want.keys()
    assert not [name for name in want if not same_bits(have[name], want[name])]
    ids = np.array([[3, 1, 4, 1, 5]])
    logits = [np.asarray(forward(tpuconv.load(tmp_path / name, "float32"), ids)) for name in ("out", "kept")]
    np.testing.assert_array_equal(*logits)


# -- faults ------------------------------------------------------------------------------------------------------------


LLAMA = next(case for case in CASES if case.id == "llama-plain")
UP = "model.layers.1.mlp.up_proj"


def spoil_code(tensors):
    tensors[f"{UP}.weight"].view(np.uint8)[3, 5] = 0xFF


def spoil_scale(tensors):
    tensors[f"{UP}.weight_scale_inv"][1, 1] = np.inf


@pytest.mark.parametrize(
    ("spoil", "name"), [(spoil_code, "mlp.up.kernel.array.qvalue"), (spoil_scale, "mlp.up.kernel.array.scale")]
)
def test_codes_and_scales_that_are_not_finite_are_refused(spoil, name, saved, tmp_path):
    encoded(saved(LLAMA), tmp_path / "hf", fp8, shards=1)
    tensors = {name: x.copy() for name, x in read_tensors(tmp_path / "hf").items()}
    spoil(tensors)
    write_checkpoint(tmp_path / "hf", json.loads((tmp_path / "hf" / "config.json").read_text()), tensors)
    with pytest.raises(SourceError, match=rf"(?s){name} is not finite.*the first is {UP}"):
        convert(tmp_path / "hf", tmp_path / "out", Options(encoding="keep"))


def test_a_shape_that_is_not_that_of_the_values_is_refused(saved, tmp_path):
    encoded(saved(LLAMA), tmp_path / "hf", int4, shards=1)
    tensors = read_tensors(tmp_path / "hf") | {f"{UP}.weight_shape": np.array([56, 47])}
    write_checkpoint(tmp_path / "hf", json.loads((tmp_path / "hf" / "config.json").read_text()), tensors)
    with pytest.raises(SourceError, match=rf"{UP}.weight_shape says \[56, 47\], but the values are \[56, 48\]"):
        convert(tmp_path / "hf", tmp_path / "out", Options(encoding="keep"))


@pytest.mark.parametrize("changed", ["dtype", "plain"])
def test_tensors_of_one_parameter_are_encoded_alike(changed, saved, tmp_path):
    encoded(saved(LLAMA), tmp_path / "hf", fp8, shards=1)
    tensors = read_tensors(tmp_path / "hf")
    if changed == "dtype":
        tensors[f"{UP}.weight_scale_inv"] = tensors[f"{UP}.weight_scale_inv"].astype(BF16)
    else:
        tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].astype(BF16)
        del tensors[f"{UP}.weight_scale_inv"]
    write_checkpoint(tmp_path / "hf", json.loads((tmp_path / "hf" / "config.json").read_text()), tensors)
    with pytest.raises(
        MappingError, match=r"mlp\.up_proj.weight  has (other scales|another dtype) than the tensors it is joined"
    ):
        plan_for(tmp_path / "hf", Options(scan_layers=True, encoding="keep")).check()
    plan_for(tmp_path / "hf", Options(encoding="keep")).check()  # as arrays of their own they may differ


def test_where_nothing_is_encoded_nothing_is_kept(saved):
    with pytest.raises(UsageError, match="is not encoded"):
        plan_for(saved(LLAMA), Options(encoding="keep"))


def test_where_every_scale_is_wrong_the_scales_are_named(saved, tmp_path):
    """And not an error that nothing is encoded."""
    encoded(saved(LLAMA), tmp_path / "hf", fp8)
    tensors = read_tensors(tmp_path / "hf")
    cut = {name: x[:-1] for name, x in tensors.items() if name.endswith("_scale_inv")}
    write_checkpoint(tmp_path / "hf", json.loads((tmp_path / "hf" / "config.json").read_text()), tensors | cut)
    plan = plan_for(tmp_path / "hf", Options(encoding="keep"))
    assert not plan.ignored_config
    with pytest.raises(MappingError, match=r"weight_scale_inv  F32 .* by the block size"):
        plan.check()


def test_what_cannot_be_loaded_or_exported_is_refused(saved, tmp_path):
    encoded(saved(LLAMA), tmp_path / "hf", fp8)
    convert(tmp_path / "hf", tmp_path / "scan", Options(scan_layers=True, encoding="keep"))
    convert(tmp_path / "hf", tmp_path / "part", Options(layers=range(1, 2), encoding="keep"))
    with pytest.raises(UsageError, match="a trial, not a complete model"):
        exported(tmp_path / "part", tmp_path / "back")
    with pytest.raises(OutputError, match="exists already"):
        exported(tmp_path / "scan", tmp_path / "hf")
    with pytest.raises(UsageError, match="is quantized already, as its release is"):
        api.quantize(tmp_path / "scan", config="int8_weight_only")
    facts = json.loads((tmp_path / "scan" / "tpuconv.json").read_text())
    facts["quantization"] = {"name": "int8_default", "summary": "", "rules": [], "parameters": {}}
    (tmp_path / "scan" / "tpuconv.json").write_bytes(seal(facts))
    with pytest.raises(CorruptOutput, match="has no array"):
        exported(tmp_path / "scan", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_the_commands(saved, tmp_path):
    encoded(saved(LLAMA), tmp_path / "hf", fp8)
    run = partial(forked, cwd=tmp_path)
    both = run(["convert", "hf", "--encoding", "keep", "--quantize", "int8_default"])
    assert (both.returncode, "exclude each other" in both.stderr) == (2, True)
    done = run(["convert", "hf", "--encoding", "keep", "--json"])
    assert done.returncode == 0, done.stderr
    assert "codes and scales as released: FP8, blocks of 5x7" in (tmp_path / "hf-orbax" / "README.md").read_text()
    looked = run(["inspect", "hf-orbax", "--json"])
    dtypes = {facts["pattern"]: facts["dtype"] for facts in json.loads(looked.stdout)["patterns"]}
    assert dtypes["layers.{0,1}.mlp.up.kernel.array.qvalue"] == "float8_e4m3fn"
    assert run(["verify", "hf-orbax"]).returncode == 0
    back = run(["export", "hf-orbax", "back", "--json"])
    assert back.returncode == 0, back.stderr
    assert json.loads(back.stdout)["bytes"] == sum(x.nbytes for x in read_tensors(tmp_path / "hf").values())
    assert read_tensors(tmp_path / "back").keys() == read_tensors(tmp_path / "hf").keys()
    again = run(["export", "hf-orbax", "back"])
    assert (again.returncode, "exists already" in again.stdout) == (0, True)
    assert run(["export", "hf-orbax", "hf"]).returncode == 9


# -- full size ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[pytest.mark.slow] * (m == "moonshotai/Kimi-K2-Thinking")) for m in FULL_SIZE]
)
def test_real_models_are_planned_whole_as_they_are_kept(model, tmp_path):
    """Every code of the source is one of the output; what scales are repeated adds little to them."""
    listing = LISTINGS[model]
    tensors = {n: (dtype, tuple(shape)) for names, dtype, shape in listing["tensors"] for n in every_name(names)}
    write_checkpoint(tmp_path, listing["config"], tensors, shards=7)
    with ProcessorTime() as reading:
        json_headers(tmp_path)
    with ProcessorTime() as planning:
        plan = plan_for(tmp_path, Options(encoding="keep"))
    assert planning.seconds < 5 + 100 * reading.seconds  # 15 times for a large one, a tenth of a second for a small one
    plan.check()
    assert plan.parameters == listing["parameters"]
    peak = planned_memory(plan, 2)  # by its name in an error the whole plan would be written out
    job = 4 * SLAB_BYTES + room_for(READ_BYTES)
    assert peak < BASE_MEMORY + 2 * job, "values, their bytes, two shards and a piece to read, for each of two jobs"
    used = {name for array in plan.arrays.values() for name in array.sources}
    codes = sum(plan.tensors[name].values.nbytes for name in used if isinstance(plan.tensors[name], QValues))
    scales = sum(plan.tensors[name].values.nbytes for name in used if isinstance(plan.tensors[name], Scales))
    own = {part: sum(a.nbytes for n, a in plan.arrays.items() if n.endswith(part)) for part in (QVALUE, SCALE)}
    assert own[QVALUE] == codes * FULL_SIZE[model]
    wider = 2 if model == "openai/gpt-oss-20b" else 1  # powers of two, a byte each, in bfloat16
    assert scales * wider <= own[SCALE] <= 1.1 * scales * wider

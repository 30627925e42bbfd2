"""Conversions of real checkpoints, read back by Orbax alone."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from helpers.checkpoints import hollow_checkpoint, qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import LIMITS, assert_same, convert, flatten, plan_for, restore
from helpers.families import BY_ID, CASES
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.checkpoint.reader import open_checkpoint
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run import conversion as run_module
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.engine import WORKING
from tpuconv.convert.run.sizing import Limits
from tpuconv.convert.run.strided import copy_strided
from tpuconv.convert.run.workers import _end
from tpuconv.encodings.casts import all_finite
from tpuconv.errors import (
    MappingError,
    OutputError,
    ResourceError,
    SourceError,
    UnsupportedConfig,
    UsageError,
)
from tpuconv.models.registry import find_family, get_family
from tpuconv.notation.table import Map, MappingTable
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import Source, open_source
from tpuconv.storage.journal import Journal
from tpuconv.verify.checksums import check_checkpoint

FLOATS = ("float32", "float16", "bfloat16")


def expected(folder: Path, options: Options) -> dict[str, np.ndarray]:
    """The table applied to whole tensors in memory."""
    tensors = read_tensors(folder)
    raw = json.loads((folder / "config.json").read_text())
    family = find_family(raw)
    config = family.config.from_hf(raw)
    table = family.table.stack_layers(config) if options.scan_layers else family.table
    out = {}
    for binding in table.bind(config):
        out |= binding(tensors.__getitem__)
    return out if options.dtype == "auto" else {n: x.astype(np.dtype(options.dtype)) for n, x in out.items()}


# -- what comes out ---------------------------------------------------------------------------------------------------


FIRST = {case.family: case for case in reversed(CASES) if not case.no_scan}
MANY_EXPERTS = ("mixtral-window", "gpt_oss-many-experts")
"""Second cases of their families, with some thousand tensors or chunks: five times as long as the others."""

FORMS = [
    pytest.param(
        *(case, scan),
        id=f"{case}-{'scan' if scan else 'layers'}",
        marks=[pytest.mark.slow] * (case.id in MANY_EXPERTS or (scan and case != FIRST[case.family])),
    )
    for case in CASES
    for scan in (False, True)
    if not (scan and case.no_scan)
]


@pytest.mark.parametrize(("case", "scan_layers"), FORMS)
def test_every_family_is_restored_by_orbax_as_the_table_says(case, scan_layers, hf, tmp_path, small_cuts):
    """And back: the inverse table gives the tensors of the source, as `save_pretrained` wrote them."""
    folder = hf(case, "bfloat16")
    options = Options(scan_layers=scan_layers)
    plan = convert(folder, tmp_path / "out", options)
    assert len(plan.units) > 1
    for slab in (slab for unit in plan.units for slab in unit.slabs):
        assert list(slab.names) == list(dict.fromkeys(name for parts in slab.reads() for name, _, _ in parts))
    arrays = restore(tmp_path / "out")
    assert_same(arrays, expected(folder, options))
    checked = list(check_checkpoint(read_manifest(tmp_path / "out")))
    assert not [array for array in checked if array.fault]
    assert {array.name for array in checked} > set(plan.arrays)
    source, back = read_tensors(folder), {}
    for binding in plan.table.bind(find_family(plan.source.config).config.from_hf(plan.source.config)):
        back |= binding.inverse(arrays.__getitem__)
    assert len(set(source) - set(back)) == sum(skip.count for skip in plan.skipped)
    assert_same(back, {name: source[name] for name in back})


def test_compressed_arrays_are_restored_by_orbax(hf, tmp_path, small_cuts):
    folder = hf(BY_ID["llama-plain"], "bfloat16")
    plain, plan = convert(folder, tmp_path / "plain"), convert(folder, tmp_path / "out", Options(compress=True))
    assert plain.fingerprint != plan.fingerprint
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "plain"))
    manifest = read_manifest(tmp_path / "out")
    assert not [array for array in check_checkpoint(manifest) if array.fault]
    sums = [{a.name: a.xxh3 for a in read_manifest(tmp_path / out).arrays.values()} for out in ("out", "plain")]
    assert sums[0] == sums[1]
    files = sorted(file for name in plan.arrays for file in (tmp_path / "out" / "params" / name).glob("c*"))
    assert manifest.raw["stored_bytes"] == sum(file.stat().st_size for file in files)
    files[0].write_bytes(files[0].read_bytes()[:-1])
    assert [path for path, _ in manifest.size_faults()] == [f"params/{files[0].parent.name}/{files[0].name}"]


@pytest.mark.parametrize("case", [case for case in CASES if case.no_scan], ids=str)
def test_layers_that_differ_are_not_stacked(case, hf):
    folder = hf(case, "bfloat16")
    with pytest.raises(UnsupportedConfig, match="`scan_layers=True` cannot stack"):
        plan_for(folder, Options(scan_layers=True))


def test_both_apis_of_orbax_restore_it(tmp_path):
    from orbax.checkpoint import v1

    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    convert(folder, tmp_path / "out")
    want = expected(folder, Options())
    assert_same(restore(tmp_path / "out"), want)
    assert_same(dict(flatten(v1.load(tmp_path / "out" / "params"))), want)


SIZES = {
    "hidden_size": st.sampled_from([4, 6, 12, 34]),
    "head_dim": st.sampled_from([2, 6, 10]),
    "intermediate_size": st.integers(1, 50),
    "vocab_size": st.integers(1, 70),
    "num_hidden_layers": st.integers(1, 3),
    "tie_word_embeddings": st.booleans(),
}
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2)])
MODEL_TYPES = {
    "llama": {"attention_bias": st.booleans(), "mlp_bias": st.booleans()},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"attention_bias": st.booleans()},
    "olmo2": {"attention_bias": st.booleans()},
    "qwen3_moe": {
        "num_experts": st.integers(2, 5),
        "num_experts_per_tok": st.just(2),
        "moe_intermediate_size": st.integers(1, 20),
        "decoder_sparse_step": st.integers(1, 3),
        "attention_bias": st.booleans(),
    },
    "mixtral": {"num_local_experts": st.integers(2, 5)},
    "gpt_oss": {"num_local_experts": st.integers(4, 6)},
    "deepseek_v3": {
        "moe_intermediate_size": st.integers(1, 20),
        "n_shared_experts": st.sampled_from([None, 0, 1, 2]),
        "n_routed_experts": st.sampled_from([4, 8]),
        "n_group": st.just(2),
        "topk_group": st.just(2),
        "num_experts_per_tok": st.just(2),
        "q_lora_rank": st.sampled_from([None, 3, 8]),
        "kv_lora_rank": st.integers(1, 9),
        "qk_nope_head_dim": st.integers(1, 6),
        "qk_rope_head_dim": st.sampled_from([2, 4]),
        "v_head_dim": st.integers(1, 6),
        "first_k_dense_replace": st.integers(0, 3),
        "attention_bias": st.booleans(),
    },
    "llama4_text": {
        "intermediate_size_mlp": st.integers(1, 20),
        "num_local_experts": st.integers(1, 4),
        "interleave_moe_layer_step": st.integers(1, 3),
        "attention_bias": st.booleans(),
    },
}
ALIKE = {"deepseek_v3": ["deepseek_v3", "kimi_k2"], "llama4_text": ["llama4_text", "llama4"]}


def test_gpt2_as_it_is_released(hf, tmp_path):
    """Without the prefix that transformers writes, and with the masks that it no longer does."""
    folder = hf(next(case for case in CASES if case.id == "gpt2-plain"))
    tensors = {name.removeprefix("transformer."): x for name, x in read_tensors(folder).items()}
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 64, 64), "f4") for i in range(2)}
    raw = json.loads((folder / "config.json").read_text())
    written = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 64, "summary_use_proj": True}
    config = written | {key: raw[key] for key in ("n_embd", "n_head", "n_layer", "n_positions", "vocab_size")}
    plan = convert(
        write_checkpoint(tmp_path / "released", config, tensors | masks), tmp_path / "out", Options(dtype="float32")
    )
    convert(folder, tmp_path / "want", Options(dtype="float32"))
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "want"))
    assert [(skip.pattern, skip.reason) for skip in plan.skipped] == [("h.{0,1}.attn.bias", "the causal mask")]


INVERSES = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@given(data=st.data())
@settings(max_examples=4, deadline=None, **INVERSES)
def test_the_inverse_table_gives_the_bytes_of_the_source(model_type, data, tmp_path_factory, small_cuts):
    check_inverse(model_type, data, tmp_path_factory.mktemp("inverse"))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@given(data=st.data())
@settings(max_examples=60, deadline=None, **INVERSES)
def test_the_inverse_table_gives_the_bytes_of_many_sources(model_type, data, tmp_path_factory, small_cuts):
    check_inverse(model_type, data, tmp_path_factory.mktemp("inverse"))


def check_inverse(model_type, data, folder) -> None:
    config = data.draw(st.fixed_dictionaries(SIZES | MODEL_TYPES[model_type]))
    model_type = data.draw(st.sampled_from(ALIKE.get(model_type, [model_type])))
    heads, kv_heads = data.draw(HEADS)
    config |= {"model_type": model_type, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if model_type in ("qwen2", "olmo2"):  # their heads divide the width
        config["hidden_size"] = heads * config.pop("head_dim")
    if model_type in ("deepseek_v3", "kimi_k2"):  # what a head is made of has sizes of its own
        del config["head_dim"]
        config["num_key_value_heads"] = heads
    if model_type == "llama4":
        config = {"model_type": "llama4", "text_config": config | {"model_type": "llama4_text"}}
    dtype = data.draw(st.sampled_from(FLOATS))
    random_checkpoint(folder / "hf", config, dtype, shards=data.draw(st.integers(1, 2)))
    family = find_family(config)
    own_config = family.config.from_hf(config)
    options = Options(scan_layers=not own_config.unscannable and data.draw(st.booleans()))
    convert(folder / "hf", folder / "out", options)
    arrays = restore(folder / "out")
    table = family.table.stack_layers(own_config) if options.scan_layers else family.table
    back = {}
    for binding in table.bind(own_config):
        back |= binding.inverse(arrays.__getitem__)
    assert_same(back, read_tensors(folder / "hf"))


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_are_converted_by_rounding_to_nearest(stored, dtype, tmp_path, small_cuts):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(), stored)
    convert(folder, tmp_path / "out", Options(dtype=dtype))
    assert_same(restore(tmp_path / "out"), expected(folder, Options(dtype=dtype)))


def test_the_manifest_tells_where_everything_comes_from(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(), shards=2)
    for name in ("tokenizer.json", "LICENSE", "generation_config.json", "chat_template.jinja", "modeling_x.py"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("the original's card")
    plan = convert(folder, tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    for name, facts in manifest.raw["source"]["shards"].items():
        assert facts["xxh3_128"] == xxhash.xxh3_128_hexdigest((folder / name).read_bytes())
    arrays = restore(tmp_path / "out")
    assert set(manifest.arrays) == set(arrays)
    for name, array in manifest.arrays.items():
        assert (array.shape, array.dtype) == (arrays[name].shape, arrays[name].dtype.name)
        assert array.xxh3 == xxhash.xxh3_64_hexdigest(arrays[name].tobytes())  # one chunk each at this size
    assert manifest.arrays["layers.1.attn.q.kernel"].axes == "D N H"
    assert manifest.arrays["layers.1.attn.q.kernel"].sources == ("model.layers.1.self_attn.q_proj.weight",)
    assert manifest.raw["fingerprint"] == plan.fingerprint
    copied = {p.name for p in (tmp_path / "out").iterdir() if p.is_file()}
    assert copied == {
        "README.md", "README.source.md", "tpuconv.json", "config.json", "tokenizer.json", "LICENSE",
        "generation_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert (tmp_path / "out" / "README.source.md").read_text() == "the original's card"
    assert "qwen3" in (tmp_path / "out" / "README.md").read_text()


def test_a_part_of_the_layers(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    plan = convert(folder, tmp_path / "out", Options(layers=range(1, 3)))
    whole = expected(folder, Options())
    assert_same(restore(tmp_path / "out"), {n: x for n, x in whole.items() if not n.startswith("layers.0.")})
    assert {skip.reason for skip in plan.skipped} == {"outside `layers=` 1-2"}
    shards = read_manifest(tmp_path / "out").raw["source"]["shards"]
    assert [shard["sha256"] for shard in shards.values()] == [None]  # not read as a whole
    assert not plan.unmapped
    with pytest.raises(UsageError, match="not a part of the model's layers 0-2"):
        plan_for(folder, Options(layers=range(1, 4)))


def test_a_tied_head_on_disk_is_compared_and_dropped(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(tie_word_embeddings=True))
    tensors = read_tensors(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_checkpoint(folder, qwen3_config(tie_word_embeddings=True), tensors)
    plan = convert(folder, tmp_path / "out")
    assert [(s.pattern, s.reason) for s in plan.skipped] == [("lm_head.weight", "a copy of model.embed_tokens.weight")]
    assert plan.parameters == sum(x.size for n, x in tensors.items() if n != "lm_head.weight")

    tensors["lm_head.weight"][5, 3] = -tensors["lm_head.weight"][5, 3]
    write_checkpoint(folder, qwen3_config(tie_word_embeddings=True), tensors)
    with pytest.raises(SourceError, match="should be a copy"):
        convert(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()

    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:]
    write_checkpoint(folder, qwen3_config(tie_word_embeddings=True), tensors)
    with pytest.raises(MappingError, match="another shape or dtype"):
        plan_for(folder).check()


@pytest.mark.parametrize("shard_size", [10**9, 20_000], ids=["one file", "shards"])
def test_an_embedding_that_is_saved_once_as_its_tied_head(shard_size, tmp_path):
    """As `save_model` of safetensors and of huggingface_hub do: metadata has the name that was left out."""
    import torch
    from huggingface_hub import save_torch_state_dict

    config = qwen3_config(tie_word_embeddings=True)
    folder = random_checkpoint(tmp_path / "hf", config, "float32")
    tensors = {name: torch.from_numpy(x.copy()) for name, x in read_tensors(folder).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_checkpoint(tmp_path / "saved", config, {})
    save_torch_state_dict(tensors, tmp_path / "saved", max_shard_size=shard_size)
    files = [load_file(path) for path in (tmp_path / "saved").glob("*.safetensors")]
    assert (len(files) > 1) == (shard_size < 10**9)
    assert not any("model.embed_tokens.weight" in file for file in files)
    plan = convert(tmp_path / "saved", tmp_path / "out")
    assert [(s.pattern, s.reason) for s in plan.skipped] == [("lm_head.weight", "a copy of model.embed_tokens.weight")]
    assert_same(restore(tmp_path / "out"), expected(folder, Options()))
    assert api.verify(tmp_path / "out").passed
    api.export(tmp_path / "out", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(folder))


# -- the parts ---------------------------------------------------------------------------------------------------------


@example([29, 48, 48], [0, 2, 1], True, 1, 2)
@example([29, 48, 48], [0, 2, 1], False, 1, 2)
@example([5, 160, 96], [2, 0, 1], False, 4, 1)
@example([2, 800, 96], [0, 2, 1], False, 3, 4)
@example([2, 1600, 48], [0, 2, 1], False, 5, 8)
@example([2, 1600, 48], [0, 2, 1], False, 2, 8)
@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    order=st.permutations(range(3)),
    reverse=st.booleans(),
    parts=st.integers(1, 5),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_strided_copies_are_copies(shape, order, reverse, parts, itemsize):
    """In chunks that lie as in a shard: 4 bytes apart."""
    x = np.arange(np.prod(shape)).astype(f"u{itemsize}").reshape(shape)
    x = x.transpose([i for i in order if i < len(shape)])
    views = np.array_split(x[..., ::-1] if reverse else x, parts, axis=-1)
    ends = np.cumsum([view.nbytes + 4 for view in views])
    buffer = np.zeros(ends[-1], np.uint8)
    chunks = [buffer[end - view.nbytes - 4 : end - 4] for view, end in zip(views, ends, strict=True)]
    outs = [chunk.view(x.dtype).reshape(view.shape) for chunk, view in zip(chunks, views, strict=True)]
    copy_strided(zip(outs, views, strict=True))
    for out, view in zip(outs, views, strict=True):
        np.testing.assert_array_equal(out, view)
    assert not any(buffer[end - 4 : end].any() for end in ends), "nothing else is touched"


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize(("order", "aligned"), [((1, 0, 2), True), ((2, 0, 1), True), ((2, 1, 0), False)])
def test_strided_copies_into_a_part_of_an_array(order, aligned, itemsize):
    """A shard of a device has more rows and columns than a slab."""
    x = np.arange(24 * 64 * 96).astype(f"u{itemsize}").reshape(24, 64, 96).transpose(order)
    whole = np.zeros([n + 24 for n in x.shape], x.dtype)
    first = 8 if aligned else 3
    part = tuple(slice(first, first + n) for n in x.shape)
    copy_strided([(whole[part], x)])
    np.testing.assert_array_equal(whole[part], x)
    whole[part] = 0
    assert not whole.any(), "nothing else is touched"


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
@given(data=st.data())
def test_what_is_not_finite_is_found_wherever_it_is(dtype, data):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    bits = np.dtype(f"u{dtype.itemsize}")
    x = np.array(data.draw(st.lists(st.integers(0, 2 ** (8 * dtype.itemsize) - 1), max_size=20)), bits)
    with np.errstate(invalid="ignore"):  # numpy's word on casting a signalling NaN
        finite = bool(np.isfinite(x.view(dtype).astype(np.float64)).all())
    assert all_finite(x, dtype) == finite


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        ("V D", {"V": 151_936, "D": 4096}),
        ("V D -> D V", {"V": 50_257, "D": 768}),  # a prime factor that is too large: uneven chunks
        ("F D -> D F", {"F": 28_672, "D": 8192}),
        ("(N H) D -> D N H", {"N": 28, "H": 128, "D": 3584}),
        ("D (N H) -> N H D", {"N": 64, "H": 128, "D": 8192}),
        ("((N H) + (K H) + (K H)) D -> D N H, D K H, D K H", {"N": 40, "K": 10, "H": 128, "D": 5120}),
    ],
)
def test_full_size_tensors_are_cut_in_slabs_that_cover_them_once(layout, lengths):
    table = MappingTable((Map("w", tuple("abc"[: layout.count(",") + 1]), layout),))
    (binding,) = table.bind(SimpleNamespace(sizes=lengths, layer_sets={}))
    (shape,) = binding.src_shapes().values()
    info = TensorInfo("w", "BF16", shape, "shard", 0, 2 * prod(shape))
    source = Source(Path(), {}, {"w": info}, (SourceShard("shard", 0),))
    plan = make_plan(source, "test", table, SimpleNamespace(sizes=lengths, layer_sets={}), Options())
    plan.check()
    slabs = [slab for unit in plan.units for slab in unit.slabs]
    assert max(plan.stored_bytes(slab) for slab in slabs) <= sizes.SLAB_BYTES
    for i, array in enumerate(plan.arrays.values()):
        assert all(s % c == 0 for s, c in zip(array.shards, array.chunks, strict=True))
        assert prod(array.chunks) * 2 <= sizes.CHUNK_BYTES
        shards = [tuple(s.start // n for s, n in zip(slab.boxes()[i], array.shards, strict=True)) for slab in slabs]
        assert sorted(shards) == list(np.ndindex(array.grid))
        assert sum(prod(s.stop - s.start for s in slab.boxes()[i]) for slab in slabs) == prod(array.shape)


def test_memory_stays_within_the_budget_for_a_tensor_larger_than_it(tmp_path):
    """1 GB of embedding in 350 MB, interpreter and all; in a process of its own, whose peak the system tells."""
    config = qwen3_config(vocab_size=256_000, hidden_size=2048, tie_word_embeddings=True, num_hidden_layers=1)
    folder = hollow_checkpoint(tmp_path / "hf", config)
    command = [sys.executable, "-m", "tpuconv", "convert", str(folder), str(tmp_path / "out"), "--json"]
    done = subprocess.run([*command, "--max-memory", "350MB"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["output_bytes"] > 1e9
    assert facts["peak_memory_bytes"] < 350e6
    refused = subprocess.run(
        [*command, "--max-memory", "100MB", "--overwrite"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 8
    assert "--max-memory must be at least" in json.loads(refused.stdout)["error"]["hint"]


# -- faults ------------------------------------------------------------------------------------------------------------


def test_all_mapping_faults_are_named_at_once_and_nothing_is_written(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    tensors = read_tensors(folder)
    for i in range(3):
        tensors[f"model.layers.{i}.mlp.extra.weight"] = tensors["model.norm.weight"]
        tensors.pop(f"model.layers.{i}.self_attn.q_norm.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].view(np.int16)
    write_checkpoint(folder, qwen3_config(), tensors)
    with pytest.raises(MappingError) as info:
        convert(folder, tmp_path / "out")
    text = str(info.value)
    for part in (
        "model.layers.{0...2}.mlp.extra.weight  BF16 [32] (3 tensors) has no row",
        "model.layers.{0...2}.self_attn.q_norm.weight  is missing (3 tensors)",
        "model.norm.weight  BF16 [31] (1 tensor) should be [32] by config.json",
        "lm_head.weight  I16 [96, 32] (1 tensor) is not a plain float",
        "->",
    ):
        assert part in text
    assert info.value.exit_code == 5
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stop_the_conversion(value, tmp_path, small_cuts):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    tensors = {name: x.copy() for name, x in read_tensors(folder).items()}
    tensors["model.layers.2.mlp.up_proj.weight"][7, 9] = value
    write_checkpoint(folder, qwen3_config(), tensors)
    with pytest.raises(SourceError, match=r"layers\.2\.mlp\.up\.kernel is not finite") as info:
        convert(folder, tmp_path / "out")
    assert info.value.exit_code == 4
    assert "model.layers.2.mlp.up_proj.weight" in str(info.value)
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    plan = plan_for(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(SourceError, match="changed while"):
        for _ in run(plan, tmp_path / "out", LIMITS):
            pass
    assert not (tmp_path / "out").exists()


def test_wrong_bytes_of_the_right_size_are_found_by_their_hash(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    promised = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    source = open_source(folder, repo="org/name", commit="c" * 40, sha256={"model.safetensors": promised})
    family = find_family(source.config)
    plan = make_plan(source, family.name, family.table, family.config.from_hf(source.config), Options())
    with pytest.raises(SourceError, match="safetensors"):
        for _ in run(plan, tmp_path / "out", LIMITS):
            pass
    assert not (tmp_path / "out").exists()


def test_an_output_below_a_file_is_refused(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: Not a directory") as info:
        convert(folder, tmp_path / "file" / "out")
    assert info.value.hint == "a part of this path is a file: choose another OUT"


def test_one_converter_per_output(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    with (
        Journal(tmp_path / "out", "of another process"),
        pytest.raises(OutputError, match="written by another") as info,
    ):
        convert(folder, tmp_path / "out")
    assert info.value.exit_code == 9


def test_an_output_is_replaced_only_on_request_and_only_if_it_is_ours(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    out = tmp_path / "out"
    convert(folder, out)
    inode = out.stat().st_ino
    convert(folder, out)  # of this very plan: nothing to do
    assert out.stat().st_ino == inode
    with pytest.raises(OutputError, match="exists already, and this command would write another output") as info:
        convert(folder, out, Options(dtype="float32"))
    assert info.value.details == ("options.dtype: made with 'auto', now 'float32'",)
    assert_same(restore(out), expected(folder, Options()))
    convert(folder, out, Options(dtype="float32"), overwrite=True)
    assert_same(restore(out), expected(folder, Options(dtype="float32")))

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("ten years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="that tpuconv did not write") as info:
            convert(folder, theirs, overwrite=overwrite)
        assert "give `overwrite=True`" not in info.value.hint
    assert (theirs / "thesis.txt").read_text() == "ten years of work"
    with pytest.raises(UsageError, match="source folder"):
        convert(folder, folder / "out")


def test_an_unfinished_conversion_of_another_plan_is_kept(tmp_path, small_cuts):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    out = tmp_path / "out"
    began = run(plan_for(folder), out, LIMITS)
    assert [next(began).stage for _ in range(3)][-1] == WORKING
    began.close()
    with pytest.raises(OutputError, match="unfinished conversion"):
        convert(folder, out, Options(dtype="float32"))
    for read in (api.verify, api.inspect, api.recipe, partial(api.quantize, config="int8_weight_only")):
        with pytest.raises(UsageError, match=r"out is not finished: the work on it is in .*\.out\.tpuconv\n") as info:
            read(str(out))
        assert info.value.hint == "wait for the command that makes it, or run it again: it continues"
    convert(folder, out)
    assert_same(restore(out), expected(folder, Options()))
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]


def test_a_disk_that_is_too_small_is_noticed_before_the_first_byte(tmp_path, monkeypatch):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ResourceError, match="the conversion needs") as info:
        convert(folder, tmp_path / "out")
    assert info.value.exit_code == 8
    assert "has 1 kB free, the conversion needs 16.9 MB" in info.value.message
    assert os.listdir(tmp_path) == ["hf"]


def test_a_disk_that_fills_up_loses_nothing(tmp_path, monkeypatch, small_cuts):
    """Every write fails once in turn, as on a full disk; the rerun after each goes on to the same result."""
    monkeypatch.setattr(sizes, "SLAB_BYTES", 700)
    monkeypatch.setattr(sizes, "UNIT_BYTES", 5000)
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(num_hidden_layers=1))
    out, real, calls = tmp_path / "out", os.write, [0]

    def write(fd, data):
        calls[0] += 1
        if calls[0] == failing:
            real(fd, bytes(data[: len(data) // 2]))
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    failing, failed = 1, 0
    while not out.exists():
        calls[0] = 0
        try:
            convert(folder, out, limits=Limits(1, 2**30))
        except ResourceError:
            assert not out.exists()
            failed += 1
        failing += 3
    assert failed > 5  # units that are complete count, how many were it depends on the moment
    assert_same(restore(out), expected(folder, Options()))


def test_a_second_signal_does_not_end_the_end_of_the_threads():
    """They would write on without the lock of the journal."""
    done = []

    def interrupted() -> None:
        done.append("threads")
        if len(done) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _end([interrupted, lambda: done.append("reader")])
    assert done == ["threads", "threads", "reader"]


# -- corrupt outputs ---------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_found(tmp_path):
    """By Orbax itself when it restores, and by `verify`, which names the array."""
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(num_hidden_layers=1))
    convert(folder, tmp_path / "out")
    rng = np.random.default_rng(0)
    shards = sorted((tmp_path / "out" / "params").glob("*/c.*"))
    for i in range(24):
        path = shards[i % len(shards)]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        assert path.parent.name in {a.name for a in check_checkpoint(read_manifest(tmp_path / "out")) if a.fault}
        if i % 12 == 0:  # in a process of its own: what Orbax leaves behind when it fails makes noise later
            code = "import sys, tpuconv; tpuconv.load(sys.argv[1])"
            command = [sys.executable, "-c", code, str(tmp_path / "out")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert "tpuconv.errors.CorruptOutput" in done.stderr
        path.write_bytes(good)
    shards[0].unlink()
    assert [a.name for a in check_checkpoint(read_manifest(tmp_path / "out")) if a.fault] == [shards[0].parent.name]


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_ordinary_ones(refused, tmp_path, monkeypatch):
    """As tmpfs refuses O_DIRECT when a file is opened, and others when it is written."""
    folder = hollow_checkpoint(tmp_path / "hf", qwen3_config(vocab_size=2000, hidden_size=1024))
    real_open, real_write, direct, refusals = os.open, os.write, set(), []

    def refuse():
        refusals.append(refused)
        raise OSError(errno.EINVAL, "Invalid argument")

    def open_(path, flags, mode=0o777):
        if flags & os.O_DIRECT and refused == "open":
            refuse()
        fd = real_open(path, flags, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "write", lambda fd, data: refuse() if fd in direct else real_write(fd, data))
    convert(folder, tmp_path / "out", limits=Limits(1, 2**30))
    monkeypatch.undo()
    assert refusals
    assert not [array.name for array in check_checkpoint(read_manifest(tmp_path / "out")) if array.fault]


@pytest.mark.parametrize("converted", [False, True])
def test_what_is_read_ahead_is_what_is_read_first(converted, tmp_path, monkeypatch):
    """Of a source and of a converted one: whole tensors in the order of the units, and no more than is wanted."""
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    source = open_source(folder)
    if converted:
        convert(folder, tmp_path / "ckpt")
        source = open_checkpoint(tmp_path / "ckpt")
    family = get_family("qwen3")
    table = source.table() if converted else family.table
    plan = make_plan(source, "qwen3", table, family.config.from_hf(source.config), Options())
    asked: list[tuple[str, int, int]] = []

    def advise(fd: int, start: int, size: int, _: int) -> None:
        asked.append((os.readlink(f"/proc/self/fd/{fd}"), start, size))

    if converted:
        source.contents_checked.result()  # which reads too
    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(run_module, "AHEAD_BYTES", 10_000)
    monkeypatch.setattr(threading, "Thread", lambda target, daemon: SimpleNamespace(start=target))
    run_module.read_ahead(plan)
    assert sum(size for *_, size in asked) == 10_000
    first = plan.units[0].slabs[0].names[0]
    path, start, size = plan.source.files(plan.tensors[first].stored[0])[0]
    assert asked[0] == (str(path), start, min(size, 10_000))

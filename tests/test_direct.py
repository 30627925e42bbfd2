"""`tpuconv.load` of a release: the model that `convert` and `load` give, bit for bit, and the faults that `convert`
names."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.buckets import ROOT, in_memory
from helpers.checkpoints import (
    hollow_checkpoint,
    qwen3_config,
    random_checkpoint,
    read_tensors,
    write_checkpoint,
    write_safetensors,
)
from helpers.commands import EXAMPLE
from helpers.commands import tpuconv as command
from helpers.conversions import plan_for, same_bits
from helpers.drafts import WITH_MODULE, save_with_drafts
from helpers.encoded import ENCODINGS, GPT_OSS, fp8, fp8_channel, gptq, int4_asymmetric, mxfp4, write_encoded
from helpers.fake_gcs import environment, fake_gcs
from helpers.families import BY_ID, CASES, FIRST, VISION
from helpers.joined import joined
from helpers.ranks import write_ranked
from helpers.sights import SIGHTS
from tpuconv import api, buckets, direct, needed
from tpuconv.api.quantizers import quantizer_by
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.options import Options
from tpuconv.convert.plan.planning import planned_loading
from tpuconv.convert.run.slab_arrays import SlabArrays
from tpuconv.errors import SourceError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.location import to_location
from tpuconv.notation.sharding import partition
from tpuconv.quantize.config import parse_config
from tpuconv.sources import reader
from tpuconv.sources.hub import resolve
from tpuconv.sources.reader import BUCKET_READS, SafetensorsReader


def arrays_of(model: nnx.Module) -> dict[str, jax.Array]:
    """The arrays of a model by name, those of a QArray each."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model))
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def assert_same_model(have: nnx.Module, want: nnx.Module) -> None:
    mine, others = arrays_of(have), arrays_of(want)
    assert mine.keys() == others.keys()
    assert not [name for name, x in others.items() if not same_bits(np.asarray(mine[name]), np.asarray(x))]
    assert not [name for name, x in others.items() if mine[name].sharding != x.sharding]


def assert_as_converted(
    source: Any, out: Any, how: dict[str, Any] | None = None, mtp: bool = False, **options: Any
) -> nnx.Module:
    """Compares the model of a release with the model of its checkpoint, which is written to `out`; returns it."""
    mtp_options = {"include_mtp": True} if mtp else {}
    api.convert(source, out, **options, **mtp_options)
    model = tpuconv.load(source, mtp=mtp, **options, **(how or {}))
    assert_same_model(model, tpuconv.load(out, mtp=mtp, **(how or {})))
    return model


FORMS = [
    pytest.param(case, scan, id=f"{case}-{'scan' if scan else 'layers'}")
    for case in CASES
    for scan in (False, True)
    if not (scan and case.no_scan)
]


@pytest.mark.parametrize(("case", "scan_layers"), FORMS)
def test_every_family_is_loaded_as_it_is_converted(case, scan_layers, hf, tmp_path, small_cuts):
    """Of multimodal ones the text model: encoders of these tiny cases are too small for some; `SIGHTS` has others."""
    text_only = case.family in VISION
    assert_as_converted(hf(case, "bfloat16"), tmp_path / "out", scan_layers=scan_layers, text_only=text_only)


ENCODED = [
    *((BY_ID["deepseek_v3-groups"], fp8), (BY_ID["qwen3-tied"], fp8_channel), (BY_ID["llama-plain"], gptq)),
    *((BY_ID["qwen2-plain"], int4_asymmetric), (GPT_OSS[0], mxfp4)),
    *((BY_ID["mixtral-plain"], encoding) for encoding in ENCODINGS),
]


@pytest.mark.parametrize("keep", [False, True], ids=["dequantize", "keep"])
@pytest.mark.parametrize(
    ("case", "encoding"),
    [pytest.param(case, encoding, id=f"{case}-{encoding.__name__}") for case, encoding in ENCODED],
)
def test_encoded_weights_are_loaded_as_they_are_converted(case, encoding, keep, hf, tmp_path, small_cuts):
    write_encoded(case, encoding, lambda case: hf(case, "bfloat16"), tmp_path / "hf")
    options = {"encoding": "keep"} if keep else {}
    assert_as_converted(tmp_path / "hf", tmp_path / "out", **options)


ON_MESHES = """
import json, sys
import jax, numpy as np, tpuconv
from flax import nnx

def arrays_of(model):
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model))
    return {jax.tree_util.keystr(path): x for path, x in leaves}

def bits(x):
    return [(shard.device.id, str(shard.index), np.asarray(shard.data).tobytes()) for shard in x.addressable_shards]

cut = []
for source, out, options in json.loads(sys.argv[1]):
    for axes in json.loads(sys.argv[2]):
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
        have, want = arrays_of(tpuconv.load(source, mesh=mesh, **options)), arrays_of(tpuconv.load(out, mesh=mesh))
        assert have.keys() == want.keys()
        for name, x in want.items():
            assert have[name].dtype == x.dtype and have[name].sharding == x.sharding, (source, axes, name)
            assert bits(have[name]) == bits(x), (source, axes, name)
        cut.append(sum(not x.is_fully_replicated for x in want.values()) / len(want))
assert max(cut) > 0.4, cut
"""
MESHES = ({"tensor": 4, "data": 2}, {"tensor": 2, "expert": 4}, {"tensor": 8}, {"data": 8}, {"expert": 8})


def compare_on_meshes(cases: list[tuple[Path, Path, dict[str, Any]]], meshes: Sequence[dict[str, int]]) -> None:
    """Compares models on 8 devices, in a process of its own: their number is fixed when jax starts."""
    words = [json.dumps([[str(source), str(out), options] for source, out, options in cases]), json.dumps(meshes)]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", ON_MESHES, *words], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "meshes", [MESHES[:2], pytest.param(MESHES[2:], marks=pytest.mark.slow)], ids=["several", "one"]
)
def test_on_a_mesh_each_device_has_its_shards(meshes, hf, tmp_path):
    fp8_source, plain = tmp_path / "fp8", tmp_path / "plain"
    write_encoded(BY_ID["deepseek_v3-groups"], fp8, lambda case: hf(case, "bfloat16"), fp8_source)
    config = qwen3_config(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2)
    random_checkpoint(plain, config, "bfloat16", shards=2)
    forms: list[tuple[Path, dict[str, Any]]] = [
        (fp8_source, {}),
        (plain, {"scan_layers": True}),
        (plain, {"quantize": "int8_weight_only"}),
        (hf(BY_ID["qwen3_moe-few-experts"], "bfloat16"), {}),
        (write_ranked(hf(BY_ID["grok-plain"]), tmp_path / "ranked"), {}),
    ]
    cases = []
    for number, (source, options) in enumerate(forms):
        api.convert(source, tmp_path / f"out{number}", **options)
        cases.append((source, tmp_path / f"out{number}", options))
    compare_on_meshes(cases, meshes)


@pytest.mark.slow
@pytest.mark.parametrize("case", [FIRST[family] for family in FIRST], ids=str)
def test_every_family_is_loaded_onto_meshes(case, hf, tmp_path):
    source, options = hf(case, "bfloat16"), {"text_only": case.family in VISION}
    api.convert(source, tmp_path / "out", **options)
    compare_on_meshes([(source, tmp_path / "out", options)], MESHES)


# -- options -----------------------------------------------------------------------------------------------------------


def test_dtypes_are_cast_as_those_of_a_checkpoint(hf, tmp_path):
    source = tmp_path / "hf"
    write_encoded(BY_ID["deepseek_v3-groups"], fp8, lambda case: hf(case, "bfloat16"), source)
    api.convert(source, tmp_path / "out")
    for dtype in ("float32", "bfloat16"):
        assert_same_model(tpuconv.load(source, dtype), tpuconv.load(tmp_path / "out", dtype))
    random_checkpoint(tmp_path / "plain", qwen3_config(), "float32")
    tensors = {name: x.copy() for name, x in read_tensors(tmp_path / "plain").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e5
    write_checkpoint(tmp_path / "large", qwen3_config(), tensors)
    with pytest.raises(UsageError, match="has values that float16 cannot hold") as error:
        tpuconv.load(tmp_path / "large", "float16")
    assert error.value.details == ("layers.1.mlp.up.kernel (1 array)",)


def test_the_module_for_further_tokens(with_mtp, tmp_path):
    model = assert_as_converted(with_mtp, tmp_path / "out", mtp=True)
    assert any(".mtp" in name or "'mtp'" in name for name in arrays_of(model))
    plain = tpuconv.load(with_mtp)
    assert not any("mtp" in name for name in arrays_of(plain))
    random_checkpoint(tmp_path / "hf", qwen3_config())
    with pytest.raises(UsageError, match="no layers that predict further tokens"):
        tpuconv.load(tmp_path / "hf", mtp=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys(WITH_MODULE))
def test_modules_of_every_family(name, tmp_path, small_cuts):
    source, scan = save_with_drafts(BY_ID[name], tmp_path / "hf"), not BY_ID[name].no_scan
    assert_as_converted(source, tmp_path / "out", mtp=True, text_only=True, scan_layers=scan)


@pytest.mark.parametrize("name", [*(["gemma3"]), *(pytest.param(n, marks=pytest.mark.slow) for n in list(SIGHTS)[1:])])
def test_multimodal_models(name, tmp_path):
    SIGHTS[name]().save(tmp_path / "hf")
    whole = assert_as_converted(tmp_path / "hf", tmp_path / "out")
    text = assert_as_converted(tmp_path / "hf", tmp_path / "text", text_only=True)
    assert len(arrays_of(text)) < len(arrays_of(whole))


def test_adapters_are_merged(tmp_path, small_cuts):
    random_checkpoint(tmp_path / "hf", qwen3_config(), "bfloat16")
    rng, lora = np.random.default_rng(1), {}
    for layer, (module, inputs, outputs) in product((0, 2), (("q_proj", 32, 64), ("o_proj", 64, 32))):
        front = f"base_model.model.model.layers.{layer}.self_attn.{module}"
        lora[f"{front}.lora_A.weight"] = rng.normal(size=(4, inputs)).astype(np.float32)
        lora[f"{front}.lora_B.weight"] = rng.normal(size=(outputs, 4)).astype(np.float32)
    (tmp_path / "lora").mkdir()
    write_safetensors(tmp_path / "lora" / "adapter_model.safetensors", lora)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    adapter = str(tmp_path / "lora")
    merged = assert_as_converted(tmp_path / "hf", tmp_path / "out", adapter=[adapter])
    plain = arrays_of(tpuconv.load(tmp_path / "hf"))
    changed = [name for name, x in arrays_of(merged).items() if not np.array_equal(x, plain[name])]
    assert len(changed) == 4


def test_weights_are_quantized_on_the_way(tmp_path, small_cuts):
    random_checkpoint(tmp_path / "hf", qwen3_config(hidden_size=64, intermediate_size=128), "bfloat16")
    assert_as_converted(tmp_path / "hf", tmp_path / "out", quantize="int8_weight_only")
    rules = tmp_path / "int4.yaml"
    rules.write_text("qwix: {rules: [{module_path: 'layers/.*/mlp/.*', weight_qtype: int4, tile_size: 32}]}")
    assert_as_converted(tmp_path / "hf", tmp_path / "int4", quantize=str(rules))
    rules = tmp_path / "gptq.yaml"
    text = "qwix: {rules: [{module_path: 'layers/.*/mlp/.*', weight_qtype: int4}]}\ncalibration: {method: gptq}\n"
    rules.write_text(text)
    with pytest.raises(UsageError, match=r"gptq\.?.* a calibration") as error:
        tpuconv.load(tmp_path / "hf", quantize=str(rules))
    assert "tpuconv quantize" in (error.value.hint or "")


def test_a_checkpoint_has_the_form_that_it_has(tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    api.convert(source, tmp_path / "out")
    with pytest.raises(UsageError, match="has the form that it was written in") as error:
        tpuconv.load(tmp_path / "out", scan_layers=True, quantize="int8_weight_only")
    assert error.value.hint == "leave out `quantize=`, `scan_layers=`, or give the release"
    api.export(tmp_path / "out", tmp_path / "back")
    assert_same_model(tpuconv.load(tmp_path / "back"), tpuconv.load(tmp_path / "out"))


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bytes_read(monkeypatch) -> Counter:
    """How often each byte of a file is read after its header."""
    found: Counter = Counter()
    read = SafetensorsReader._bytes

    def counted(self, shard, name, start, stop, *args, **kwargs):
        found.update((name, at) for at in range(start, stop))
        return read(self, shard, name, start, stop, *args, **kwargs)

    monkeypatch.setattr(SafetensorsReader, "_bytes", counted)
    return found


@pytest.mark.parametrize("scan_layers", [False, True])
def test_each_byte_is_read_once(scan_layers, hf, tmp_path, small_cuts, bytes_read):
    source = hf(BY_ID["qwen3_moe-few-experts"], "bfloat16")
    tpuconv.load(source, scan_layers=scan_layers)
    total = sum(x.nbytes for x in read_tensors(source).values())
    assert len(bytes_read) == total
    assert sum(bytes_read.values()) <= 1.05 * total


def test_of_an_encoded_release_too(hf, tmp_path, bytes_read):
    write_encoded(BY_ID["mixtral-plain"], fp8, lambda case: hf(case, "bfloat16"), tmp_path / "hf")
    tpuconv.load(tmp_path / "hf")
    total = sum(x.nbytes for x in read_tensors(tmp_path / "hf").values())
    assert sum(bytes_read.values()) <= 1.05 * total


def box_on(device: int, axes: str, shape: tuple[int, ...], mesh: dict[str, int]) -> needed.LetterBox:
    """The box of an array that a device of a mesh holds."""
    place = dict(zip(mesh, np.unravel_index(device, tuple(mesh.values())), strict=True))
    box = []
    for n, part in zip(shape, partition(axes, shape, mesh), strict=True):
        names = (part,) if isinstance(part, str) else part or ()
        count = prod(mesh[name] for name in names)
        number = int(np.ravel_multi_index([place[x] for x in names], [mesh[x] for x in names])) if names else 0
        box.append((number * n // count, (number + 1) * n // count))
    return tuple(box)


def loaded_for(
    device: int, plan: Any, mesh: dict[str, int], gap: int
) -> dict[str, tuple[needed.LetterBox, np.ndarray]]:
    """The shards of one device of a mesh, read for it alone."""
    found: dict[str, tuple[needed.LetterBox, np.ndarray]] = {}
    need, reader = plan.buffers, plan.source.open(hashes=())
    slabs: dict[int, list[Any]] = {}
    for slab in (slab for unit in plan.units for slab in unit.slabs):
        slabs.setdefault(id(slab.binding), []).append(slab)
    for each in slabs.values():
        names = [name for stack in each[0].binding.dst for name in plan.stored_names(stack.names[0])]
        boxes = {name: [box_on(device, plan.arrays[name].axes, plan.arrays[name].shape, mesh)] for name in names}
        ranges = needed.needed_ranges(plan, each[0].binding, boxes)
        pieces = [piece for slab in each for piece in needed.narrowed(plan, slab, ranges, gap)]

        def place(name, values_of, boxes=boxes):
            found[name] = boxes[name][0], values_of(tuple(slice(*ends) for ends in boxes[name][0]))

        shards = direct.BindingShards(plan, place, boxes, pieces, {})
        for piece in pieces:
            shards.fill(piece, SlabArrays(plan, need, reader))
    reader.close()
    return found


@pytest.mark.parametrize("mesh", [{"tensor": 2, "data": 2}, {"tensor": 2, "expert": 2}], ids=["data", "expert"])
@pytest.mark.parametrize(
    ("case", "encoding"),
    [("qwen3_moe-few-experts", None), ("deepseek_v3-groups", fp8), ("llama-plain", gptq), ("gpt_oss", mxfp4)],
    ids=["plain", "fp8", "gptq", "mxfp4"],
)
def test_a_device_gets_its_shards_alone(case, encoding, mesh, hf, tmp_path, small_cuts):
    source = hf(BY_ID[case], "bfloat16") if encoding is None else tmp_path / "hf"
    if encoding is not None:
        write_encoded(BY_ID.get(case, GPT_OSS[0]), encoding, lambda case: hf(case, "bfloat16"), source)
    assert_shards_alone(plan_for(source), mesh)


@pytest.mark.parametrize("tile", ["", ", tile_size: 32"], ids=["channels", "groups"])
def test_what_is_quantized_together_stays_together(tile, tmp_path, small_cuts):
    config = qwen3_config(hidden_size=64, intermediate_size=256, num_hidden_layers=1)
    source = random_checkpoint(tmp_path / "hf", config, "bfloat16")
    text = f"qwix: {{rules: [{{module_path: 'layers/.*/mlp/.*', weight_qtype: int8{tile}}}]}}"
    quantizer = quantizer_by(parse_config(text.encode(), "rules", "rules.yaml"))
    with planned_loading(str(source), Options(), quantizer) as plan:
        for mesh in ({"tensor": 4}, {"data": 4}, {"tensor": 2, "data": 2}):
            assert_shards_alone(plan, mesh)


def assert_shards_alone(plan: Any, mesh: dict[str, int]) -> None:
    """With every gap skipped, and with all read over."""
    whole = loaded_for(0, plan, {"data": 1}, 0)
    for device, gap in product(range(4), (0, direct.GAP_BYTES)):
        found = loaded_for(device, plan, mesh, gap)
        assert found.keys() == whole.keys()
        for name, (box, values) in found.items():
            assert same_bits(values, whole[name][1][tuple(slice(*ends) for ends in box)]), (device, gap, name)


def test_alone_a_device_reads_little_more_than_its_shards(tmp_path, bytes_read, monkeypatch):
    monkeypatch.setattr(direct, "GAP_BYTES", 64)  # beside the rows of a tiny model as 64 KiB beside real ones
    config = qwen3_config(hidden_size=64, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4)
    source = random_checkpoint(tmp_path / "hf", config)
    plan = plan_for(source)
    for mesh, most in (({"tensor": 4}, 1.05), ({"tensor": 2, "data": 2}, 2.1)):
        bytes_read.clear()
        found = loaded_for(1, plan, mesh, direct.GAP_BYTES)
        assert sum(bytes_read.values()) <= most * sum(values.nbytes for _, values in found.values())


def test_small_gaps_are_read_over(tmp_path):
    """Of the matrix after attention a device needs a part of each row, 64 of 128 bytes."""
    plan = plan_for(random_checkpoint(tmp_path / "hf", qwen3_config()))
    slabs = [slab for unit in plan.units for slab in unit.slabs]
    slab = next(slab for slab in slabs if slab.binding.src[0].names[0].endswith("0.self_attn.o_proj.weight"))
    (piece,) = needed.narrowed(plan, slab, {"N": [(0, 2)]}, gap=63)
    assert [count for parts in piece.reads() for _, _, count in parts] == [32] * 32
    assert needed.narrowed(plan, slab, {"N": [(0, 2)]}, gap=64) == [slab]
    assert needed.narrowed(plan, slab, {"N": [(4, 4)]}, gap=0) == []
    (rows,) = needed.narrowed(plan, slab, {"D": [(3, 5)]}, gap=1 << 20)
    assert [parts for parts in rows.reads()] == [[(slab.binding.src[0].names[0], 3 * 64, 2 * 64)]]


JOINED = """
import json, sys
import jax, numpy as np
from tpuconv.api.models import join_processes, leave_processes
join_processes()
import tpuconv, tpuconv.exchange
from flax import nnx
from tpuconv.sources.reader import BUCKET_READS, SafetensorsReader

tpuconv.exchange.LEAST_SHARED, tpuconv.exchange.SLOW_DEVICES = 0, ()
axes, options, folder, converted = json.loads(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:]
taken, read = [0], SafetensorsReader._bytes
def counted(self, shard, name, start, stop, *args, **kwargs):
    taken[0] += stop - start
    return read(self, shard, name, start, stop, *args, **kwargs)
SafetensorsReader._bytes = counted

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, 2), axes)
models = [tpuconv.load(folder, mesh=mesh, **options), tpuconv.load(converted, mesh=mesh)]
have, want = (jax.tree.leaves(nnx.state(model)) for model in models)
for a, b in zip(have, want, strict=True):
    assert a.format == b.format and a.dtype == b.dtype
    for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
        assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
print(f"\\ntaken {taken[0]}", flush=True)  # Gloo prints lines of its own
leave_processes()
"""


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("expert", "tensor"), ("data", "tensor"), ("tensor", "data")], ids="-".join)
@pytest.mark.parametrize(
    ("encoding", "options"),
    [(None, {}), (None, {"quantize": "int8_weight_only"}), (fp8, {}), (fp8, {"encoding": "keep"}), (gptq, {})],
    ids=["plain", "quantized", "fp8", "kept", "gptq"],
)
def test_processes_read_each_byte_once(axes, encoding, options, hf, tmp_path):
    """Of matrices whose rows are cut, and of those that several processes have, each reads a part of whole rows."""
    case = BY_ID["deepseek_v3-groups" if encoding is fp8 else "llama-plain"]
    if encoding is None:
        config = qwen3_config(
            vocab_size=4096, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, head_dim=64,
            num_attention_heads=8, num_key_value_heads=8,
        )  # fmt: skip
        source = random_checkpoint(tmp_path / "hf", config, "bfloat16")
    else:
        source = tmp_path / "hf"
        write_encoded(case, encoding, lambda case: hf(case, "bfloat16"), source)
    api.convert(source, tmp_path / "out", **options)
    words = ["-c", JOINED, json.dumps(axes), json.dumps(options), source, tmp_path / "out"]
    taken = [int(re.search(r"^taken (\d+)$", out, re.MULTILINE)[1]) for out in joined(words, 2, 2)]
    if encoding is None:  # the others are so small that gaps between their rows are read over
        size = sum(path.stat().st_size for path in Path(source).glob("*.safetensors"))
        assert sum(taken) <= 1.05 * size
        assert max(taken) <= 0.6 * size


ONE_FAILS = """
import sys
import jax, numpy as np
from tpuconv.api.models import join_processes, leave_processes
join_processes()
import tpuconv, tpuconv.exchange
from tpuconv.errors import SourceError
from tpuconv.sources.reader import BUCKET_READS, SafetensorsReader

tpuconv.exchange.LEAST_SHARED, tpuconv.exchange.SLOW_DEVICES = 0, ()

def broken(*args, **kwargs):
    raise SourceError("the disk is broken")
if jax.process_index() == 1:
    SafetensorsReader._bytes = broken
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "tensor"))
try:
    tpuconv.load(sys.argv[1], mesh=mesh)
except SourceError as error:
    print(error)
leave_processes()
"""


@pytest.mark.slow
def test_a_process_that_cannot_read_lets_the_others_end(tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config(hidden_size=256, num_hidden_layers=1))
    first, second = joined(["-c", ONE_FAILS, source], 2, 2)
    assert "process 1 could not read its part of hf" in first
    assert "the disk is broken" in second


MEMORY = """
import resource, sys
import jax, tpuconv, tpuconv.direct, tpuconv.convert.run.transpose
from tpuconv import api
jax.numpy.zeros(1)
tpuconv.load(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = tpuconv.load(sys.argv[2])
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
def test_memory_holds_the_model_and_a_few_slabs(tmp_path):
    random_checkpoint(tmp_path / "tiny", qwen3_config())
    config = qwen3_config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, head_dim=128, vocab_size=16384)
    source = hollow_checkpoint(tmp_path / "hf", config)
    total = (source / "model.safetensors").stat().st_size
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "tiny"), str(source)]
    grown = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert grown <= total + 4 * 3 * sizes.SLAB_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "auto:4.5"])
def test_memory_of_a_load_from_a_bucket(quantize, tmp_path):
    """The model and 1 GB at most: slabs are read side by side, and quantizing them takes little beside."""
    config = qwen3_config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, head_dim=128, vocab_size=16384)
    source = hollow_checkpoint(tmp_path / "hf", config)
    script = MEMORY.replace("])", f"], quantize={quantize!r})") + "print(sum(x.nbytes for x in jax.live_arrays()))"
    with fake_gcs() as (url, held):
        for number, path in enumerate(source.iterdir(), 1):
            held.contents[f"bkt/hf/{path.name}"] = number, time.time(), path.read_bytes()
        words = [sys.executable, "-c", script, str(EXAMPLE), "gs://bkt/hf"]
        done = subprocess.run(words, env=os.environ | environment(url), capture_output=True, text=True, check=True)
    grown, model = map(int, done.stdout.split())
    assert grown <= model + 10**9


# -- faults ------------------------------------------------------------------------------------------------------------


def both_refuse(source: Any, out: Path, **options: Any) -> TpuconvError:
    """The error of a release that neither `convert` nor `load` takes, for the same reason."""
    errors = []
    for work in (lambda: api.convert(source, out, **options), lambda: tpuconv.load(source, **options)):
        with pytest.raises(TpuconvError) as info:
            work()
        errors.append(info.value)
    assert [str(error) for error in errors[1:]] == [str(errors[0])]
    assert type(errors[0]) is type(errors[1])
    return errors[0]


def unsupported(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_sliding_window": "yes"}))


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])


def another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


def without_a_tensor(folder: Path) -> None:
    tensors = read_tensors(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_checkpoint(folder, json.loads((folder / "config.json").read_text()), tensors)


def without_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize("spoil", [unsupported, truncated, another_size, without_a_tensor, without_config])
def test_headers_are_checked_before_weights_are_read(spoil, tmp_path, monkeypatch):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    spoil(source)

    def never(*args, **kwargs):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsReader, "_bytes", never)
    both_refuse(source, tmp_path / "out")


def test_values_are_checked(tmp_path, small_cuts):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    tensors = {name: x.copy() for name, x in read_tensors(source).items()}
    tensors["model.layers.2.self_attn.q_proj.weight"][13, 5] = np.nan
    write_checkpoint(source, qwen3_config(), tensors)
    error = both_refuse(source, tmp_path / "out")
    assert isinstance(error, SourceError)
    assert "q_proj.weight[13, 5], which is nan" in "".join(error.details)
    assert_as_converted(source, tmp_path / "infinite", allow_nonfinite=True)
    tensors = read_tensors(random_checkpoint(tmp_path / "tied", qwen3_config()))
    write_checkpoint(tmp_path / "tied", qwen3_config(tie_word_embeddings=True), tensors)
    assert "should be a copy" in str(both_refuse(tmp_path / "tied", tmp_path / "untied"))


def test_a_source_that_changes_is_an_error(tmp_path, monkeypatch):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    boxes = SlabArrays.boxes

    def changed(*args):
        yield from boxes(*args)
        os.utime(source / "model.safetensors", (1, 1))  # which was opened before

    monkeypatch.setattr(SlabArrays, "boxes", changed)
    with pytest.raises(SourceError, match="changed while it was converted"):
        tpuconv.load(source)


def test_a_family_that_is_not_known(tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    (source / "config.json").write_text(json.dumps(qwen3_config(model_type="unheard_of")))
    assert isinstance(both_refuse(source, tmp_path / "out"), UnsupportedConfig)


def test_what_cannot_be_found(tmp_path):
    for place in (tmp_path / "nothing", "a/b/c", tmp_path / "out.bin"):
        with pytest.raises(UsageError, match="there is no folder"):
            tpuconv.load(place)
    with pytest.raises(UsageError, match=r"src cannot be the path .*: File name too long"):
        tpuconv.load("a" * 300)
    for address in ("https://huggingface.co/Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B"):
        with pytest.raises(UsageError, match="is an address") as error:
            tpuconv.load(address)
        assert error.value.hint == "give the id alone: Qwen/Qwen3-8B"


def adapter_alone(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def orbax_alone(folder: Path) -> None:
    adapter_alone(folder)
    (folder / "adapter_config.json").rename(folder / "_METADATA")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "fault", "hint"),
    [
        (adapter_alone, "an adapter", "tpuconv convert org/base --adapter"),
        (no_config, "config.json is missing", "a folder that holds all files"),
    ],
)
def test_a_folder_that_is_no_release_is_named(spoil, fault, hint, tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    spoil(source)
    error = both_refuse(source, tmp_path / "out")
    assert fault in error.message
    assert hint in (error.hint or "")


def test_a_checkpoint_of_a_trainer_is_named(tmp_path):
    """Each by what the function can do: `load` takes the model that was trained, `convert` does not."""
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    orbax_alone(source)
    with pytest.raises(UsageError, match="a checkpoint of Orbax") as error:
        api.convert(source, tmp_path / "out")
    assert "`tpuconv reshard FOLDER OUT --config SRC` makes" in (error.value.hint or "")
    with pytest.raises(UsageError, match="a checkpoint of Orbax") as error:
        tpuconv.load(source)
    assert "give `config=SRC`" in (error.value.hint or "")


def test_a_part_of_a_checkpoint_is_named(tmp_path):
    api.convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "out")
    with pytest.raises(UsageError, match="is a part of a checkpoint of tpuconv"):
        tpuconv.load(tmp_path / "out" / "params")


def test_checksums_of_a_release_are_refused_with_what_can_be_done(tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    with pytest.raises(UsageError, match="is a release: it has no checksums") as error:
        api.verify(source)
    assert f"`tpuconv verify {source} --compare-hf`" in (error.value.hint or "")


def test_a_hub_id_is_told_how_it_becomes_a_folder(tmp_path, monkeypatch):
    """Checksums, exports and cuts are of folders and buckets."""
    monkeypatch.chdir(tmp_path)
    for work in (lambda: api.verify("org/tiny"), lambda: api.export("org/tiny", "out")):
        with pytest.raises(UsageError, match="org/tiny does not exist") as error:
            work()
        assert "`tpuconv convert org/tiny`" in (error.value.hint or "")
        assert "`hf download org/tiny --local-dir tiny`" in (error.value.hint or "")


# -- places ------------------------------------------------------------------------------------------------------------


def test_a_release_in_a_bucket_is_read_by_ranges(tmp_path, monkeypatch, small_cuts):
    bucket = in_memory(monkeypatch)
    source = random_checkpoint(tmp_path / "hf", qwen3_config(), shards=2)
    for path in source.iterdir():
        bucket.put(f"hf/{path.name}", path.read_bytes())
    have = tpuconv.load(f"{ROOT}/hf")
    assert_same_model(have, tpuconv.load(source))
    assert_same_model(tpuconv.load(to_location(f"{ROOT}/hf"), scan_layers=True), tpuconv.load(source, scan_layers=True))


def test_jobs_of_a_bucket_are_as_many_as_their_memory_allows(tmp_path, monkeypatch):
    """A release in bfloat16 is read by 16 jobs, and by fewer if it is quantized."""
    bucket, counts = in_memory(monkeypatch), []
    config = qwen3_config(hidden_size=2048, intermediate_size=8192)
    for path in hollow_checkpoint(tmp_path / "hf", config).iterdir():
        bucket.put(f"hf/{path.name}", path.read_bytes())

    class Counted(ThreadPoolExecutor):
        def __init__(self, count: int):
            counts.append(count)
            super().__init__(count)

    monkeypatch.setattr(direct, "ThreadPoolExecutor", Counted)
    for quantize in (None, "auto:4.5"):
        tpuconv.load(f"{ROOT}/hf", quantize=quantize)
    plain, quantized = counts
    assert plain == direct.BUCKET_JOBS
    assert 2 * sizes.SLAB_BYTES * quantized <= direct.BUCKET_JOB_BYTES  # their values, and the quantized ones


def reads_at_a_time(folder, monkeypatch) -> int:
    """How many requests one job makes at a time for a release in a bucket, which is loaded as from a disk."""
    bucket = in_memory(monkeypatch)
    for path in folder.iterdir():
        bucket.put(f"hf/{path.name}", path.read_bytes())
    read, running, most, lock = buckets.read, [], [], threading.Lock()

    def slow(*args):
        with lock:
            running.append(args)
            most.append(len(running))
        time.sleep(0.001)
        with lock:
            running.remove(args)
        return read(*args)

    monkeypatch.setattr(buckets, "read", slow)
    monkeypatch.setattr(direct, "jobs", lambda *_: 1)
    assert_same_model(tpuconv.load(f"{ROOT}/hf"), tpuconv.load(folder))
    return max(most)


@pytest.mark.parametrize("encoding", [None, fp8])
def test_experts_of_a_bucket_are_read_side_by_side(encoding, hf, tmp_path, monkeypatch):
    """Of the slab of one job too, since a request of a small tensor waits most of its time."""
    folder = hf(FIRST["qwen3_moe"], "bfloat16")
    if encoding:
        write_encoded(FIRST["qwen3_moe"], encoding, lambda _: folder, tmp_path / "hf")
    folder = tmp_path / "hf" if encoding else folder
    assert reads_at_a_time(folder, monkeypatch) == BUCKET_READS


def test_a_large_tensor_of_a_bucket_is_read_in_pieces(hf, monkeypatch):
    monkeypatch.setattr(reader, "PIECE_BYTES", 512)
    assert reads_at_a_time(hf(FIRST["qwen3"], "bfloat16"), monkeypatch) == BUCKET_READS


def test_a_release_on_the_hub(tmp_path, hub_cache, serve_hub):
    source = random_checkpoint(tmp_path / "hf", qwen3_config(), shards=2)
    hub = serve_hub({"org/tiny": source})
    assert_same_model(tpuconv.load("org/tiny"), tpuconv.load(source))
    blob = next(hub_cache.rglob("model-00001*")).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1  # the sign of a number
    blob.write_bytes(data)
    asked = len(hub.requests)
    assert_same_model(tpuconv.load("org/tiny"), tpuconv.load(source))  # fetched again
    assert any("model-00001" in request.file and request.sent for request in hub.requests[asked:])


@pytest.mark.parametrize(
    "name", ["generator", "benchmark", "compare_checkpoints", "compare", "layerwise", "sensitivity", "inspect"]
)
def test_whatever_reads_a_release_fetches_a_damaged_file_again(name, hub_cache, serve_hub, tmp_path):
    serve_hub({"org/tiny": EXAMPLE})
    resolve("org/tiny")
    blob = next(hub_cache.rglob("model.safetensors")).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    few = {"prompts": ["Once upon a time"]}
    whatever = {
        "generator": lambda: api.generator("org/tiny"),
        "benchmark": lambda: api.benchmark("org/tiny", prompt_length=[4], new_tokens=[2], repeats=1),
        "compare_checkpoints": lambda: api.compare_checkpoints("org/tiny", EXAMPLE, **few),
        "compare": lambda: api.compare("org/tiny", **few),
        "layerwise": lambda: api.compare("org/tiny", layerwise=True, **few),
        "inspect": lambda: api.inspect("org/tiny", html=tmp_path / "page.html"),
        "sensitivity": lambda: api.sensitivity("org/tiny", method="nearest", **few),
    }
    whatever[name]()
    if name == "inspect":  # streams from the Hub what is not in the cache
        assert not blob.exists()
    else:
        assert blob.read_bytes() == (EXAMPLE / "model.safetensors").read_bytes()


def test_of_the_hub_a_release_with_faults_is_not_downloaded(tmp_path, serve_hub):
    source = random_checkpoint(tmp_path / "hf", qwen3_config(vocab_size=8192))  # larger than what is asked for at first
    unsupported(source)
    hub = serve_hub({"org/tiny": source})
    with pytest.raises(TpuconvError):
        tpuconv.load("org/tiny")
    size = (source / "model.safetensors").stat().st_size
    assert max((request.sent for request in hub.requests), default=0) < size


# -- commands ----------------------------------------------------------------------------------------------------------


def test_commands_take_a_release(converted):
    (ckpt,) = converted.iterdir()
    words = ["--prompt", "Once upon a time", "--max-new-tokens", 4, "--json"]
    texts = [json.loads(command("generate", place, *words).stdout)["text"] for place in (EXAMPLE, ckpt)]
    assert texts[0] == texts[1]
    found = api.benchmark(EXAMPLE, prompt_length=[4], new_tokens=[2], repeats=1)
    assert found.checkpoint == EXAMPLE
    prompts = ckpt.parent.parent / "prompts.txt"
    prompts.write_text("Once upon a time")
    words = ["--compare-hf", "--prompts", prompts, "--json"]
    assert json.loads(command("verify", EXAMPLE, *words).stdout)["passed"]
    exported = ckpt.parent.parent / "exported"
    api.export(ckpt, exported)
    compared = api.compare(exported, prompts=["Once upon a time"])
    assert (compared.passed, compared.source, compared.source_changed) == (True, str(exported), ())
    assert api.compare(exported, layerwise=True, prompts=["Once upon a time"]).passed

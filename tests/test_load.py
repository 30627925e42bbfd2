"""`tpuconv.load`: the model with its weights, on one device and on a mesh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import nnx

import tpuconv.api
from helpers.checkpoints import hollow_checkpoint, qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import convert
from helpers.quantizing import quantize
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.types import Options
from tpuconv.errors import CorruptOutput, SourceError, UsageError
from tpuconv.notation.sharding import partition
from tpuconv.quantize.config import parse_config
from tpuconv.storage.disk import HUGE_PAGE, aligned_array
from tpuconv.storage.sealed import write_listed

# On several devices, in a process of its own: their number is fixed when jax starts.
ON_A_MESH = """
import json, sys
from pathlib import Path
import jax, numpy as np, tensorstore as ts, tpuconv
from tpuconv.checkpoint.device_layouts import DeviceLayout, write_layouts
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.models.generate import Generator

def bytes_read():
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])

def written(model):
    return np.stack(list(Generator(model)([[3, 1, 4], [5, 6]], 4))).tolist()

out, ids = sys.argv[1], np.array([[3, 1, 4, 1, 5]])
alone = tpuconv.load(out)
whole = np.asarray(alone(ids))
facts = [written(alone)]
for shape, axes in (
    ((8,), ("tensor",)), ((2, 4), ("data", "tensor")), ((8,), ("data",)), ((8, 1), ("tensor", "other"))
):
    mesh = jax.make_mesh(shape, axes)
    before = bytes_read()
    model = tpuconv.load(out, mesh=mesh)
    read = (bytes_read() - before) / read_manifest(Path(out)).raw["bytes"]
    gate = model.layers[0].mlp.gate.kernel[...]
    difference = float(np.abs(np.asarray(model(ids)) - whole).max() / np.abs(whole).max())
    spec, shape = [str(axis) for axis in gate.sharding.spec], gate.addressable_shards[0].data.shape
    facts.append([read, spec, shape, difference, written(model) if len(axes) == 1 else facts[0]])

mesh = jax.make_mesh((2, 4), ("data", "tensor"))
write_layouts(Path(out), "cpu", dict(mesh.shape), {"layers.0.mlp.gate.kernel": DeviceLayout("float32", (1, 0), ())})
model = tpuconv.load(out, mesh=mesh)
lies = [layer.mlp.gate.kernel[...].format for layer in model.layers[:2]]
facts.append([[x.layout.major_to_minor for x in lies], lies[0].sharding == lies[1].sharding, written(model)])
with jax.default_device(jax.devices()[3]):
    assert tpuconv.load(out).norm.scale[...].devices() == {jax.devices()[3]}
print(json.dumps(facts))
"""


def test_a_model_is_loaded_onto_any_mesh(tmp_path):
    config = qwen3_config(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=8)
    convert(random_checkpoint(tmp_path / "hf", config, "float32"), tmp_path / "out")
    code = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n" + ON_A_MESH
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tokens, *facts, (axes, alike, laid_out) = json.loads(done.stdout)
    assert [spec for _, spec, *_ in facts] == [
        ["None", "tensor"],
        ["data", "tensor"],
        ["data", "None"],
        ["None", "tensor"],
    ]
    assert [shape for _, _, shape, *_ in facts] == [[1024, 512], [512, 1024], [128, 4096], [1024, 512]]
    # All devices are on this host: together they read the whole once, but for chunks of which two read a part at once.
    # If each read all, it would be 8 times.
    assert max(read for read, *_ in facts) < 1.5
    assert max(difference for *_, difference, _ in facts) < 1e-5
    assert all(own == tokens for *_, own in facts)
    assert (axes, alike, laid_out) == ([[1, 0], [0, 1]], True, tokens)


TRAINED_ON_A_MESH = """
import json, sys
import jax, numpy as np, optax, tpuconv
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tpuconv.models.generate import Generator

def loss_of(model, batch_BT):
    logits_BTV = model(batch_BT[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch_BT[:, 1:]).mean()

@nnx.jit
def step(model, optimizer, batch_BT):
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch_BT)
    optimizer.update(model, gradients)
    return loss

def trained(model, batch_BT):
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return [float(step(model, optimizer, batch_BT)) for _ in range(2)]

ids = np.random.default_rng(0).integers(0, 96, (4, 5)).astype(np.int32)
alone = tpuconv.load(sys.argv[1])
whole = np.asarray(alone(ids))
facts = [[0.0, 0.0, "", trained(alone, ids)]]
for types in (None, (jax.sharding.AxisType.Auto,) * 2):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), *([types] if types else []))
    model = tpuconv.load(sys.argv[1], mesh=mesh)
    batch = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
    logits = model(batch)
    cached, _ = model(batch, cache=model.init_cache(4, 8))
    errors = [float(np.abs(np.asarray(x) - whole).max() / np.abs(whole).max()) for x in (logits, cached)]
    with jax.sharding.set_mesh(mesh):
        facts.append([*errors, str(logits.sharding.spec[0]), trained(model, batch)])
    assert len(list(Generator(model)([[3, 1, 4], [5, 6]], 2))) == 2
print(json.dumps(facts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "quantized", "experts"])
def test_a_batch_on_the_mesh_as_it_was_given(kind, tmp_path):
    """Of explicit axes, which `jax.make_mesh` makes, and of automatic ones: logits, a cache, training, generation."""
    config = qwen3_config(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1)
    if kind == "experts":
        config |= {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    convert(random_checkpoint(tmp_path / "hf", config, "float32"), tmp_path / "out")
    folder, code = tmp_path / "out", TRAINED_ON_A_MESH
    if kind == "quantized":  # which is not trained
        folder = tpuconv.api.quantize(tmp_path / "out", tmp_path / "int8", config="int8_weight_only").out
        code = code.replace("trained(model, batch)]", "0]").replace("trained(alone, ids)]", "0]")
    code = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n" + code
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    words = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=quick)
    assert done.returncode == 0, done.stderr
    (*_, alone), *facts = json.loads(done.stdout)
    assert facts[0][2] == "data"
    for plain, cached, _, losses in facts:
        assert max(plain, cached) < 1e-5
        assert losses == pytest.approx(alone, rel=1e-4)


LOW_BITS_ON_A_MESH = """
import json, sys
import jax, numpy as np, tpuconv
from tpuconv.models.generate import Generator

mesh = jax.make_mesh((2, 2), ("data", "tensor"))
for model in (tpuconv.load(sys.argv[1]), tpuconv.load(sys.argv[1], mesh=mesh)):
    print(json.dumps(np.stack(list(Generator(model)([[3, 1, 4], [5, 6]], 4))).tolist()))
"""


@pytest.mark.slow
def test_int4_generates_on_a_mesh(tmp_path):
    config = qwen3_config(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=8)
    convert(random_checkpoint(tmp_path / "hf", config, "float32"), tmp_path / "plain")
    rules = b"qwix: {rules: [{module_path: 'layers/.*/mlp/.*', weight_qtype: int4, tile_size: 32}]}"
    quantize(tmp_path / "plain", tmp_path / "out", parse_config(rules, "int4", "int4.yaml"))
    code = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'\n" + LOW_BITS_ON_A_MESH
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    alone, divided = done.stdout.splitlines()
    assert alone == divided


@pytest.fixture(scope="module")
def full_size_layer(tmp_path_factory) -> Path:
    """One layer of the shape of Llama 3.1 8B."""
    folder = tmp_path_factory.mktemp("layer")
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = qwen3_config(**shape, head_dim=128, num_hidden_layers=1)
    convert(hollow_checkpoint(folder / "hf", config), folder / "out")
    return folder / "out"


@pytest.mark.parametrize("mesh", [{"tensor": 8}, {"data": 8}, {"data": 2, "tensor": 4}], ids=str)
def test_a_device_reads_little_more_than_its_part(mesh, full_size_layer):
    """Bytes that TensorStore reads for one device's part of every array that is larger than a chunk, by its count."""
    read = need = 0
    for array in read_manifest(full_size_layer).arrays.values():
        if array.chunks == array.shape:
            continue
        part = partition(array.axes, array.shape, mesh)
        shape = [n // mesh[axis] if axis else n for n, axis in zip(array.shape, part, strict=True)]
        path = str(full_size_layer / "params" / array.name)
        stored = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()
        before = bytes_read()
        need += stored[tuple(map(slice, shape))].read().result().nbytes
        read += bytes_read() - before
    assert need > 5e7
    assert read / need < 1.15


def bytes_read() -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_dtype_is_that_of_the_checkpoint_or_the_one_asked_for(scan_layers, tmp_path):
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "out", Options(scan_layers=scan_layers))
    ids = np.array([[3, 1, 4]])
    for dtype, stored in ((None, jnp.bfloat16), ("float32", jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        model = tpuconv.load(tmp_path / "out", dtype)
        assert model.norm.scale.dtype == stored
        logits = model(ids)
        assert (logits.shape, logits.dtype) == ((1, 3, 96), jnp.float32)


def with_a_large_value(folder: Path, value: float) -> Path:
    """A checkpoint in bfloat16 with one value beyond the others."""
    random_checkpoint(folder / "plain", qwen3_config(), "bfloat16")
    tensors = {name: x.copy() for name, x in read_tensors(folder / "plain").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    return write_checkpoint(folder / "hf", json.loads((folder / "plain/config.json").read_text()), tensors)


def test_values_that_a_dtype_cannot_hold_are_named(tmp_path):
    """A finite value never becomes infinite in silence; what was infinite stays so."""
    convert(with_a_large_value(tmp_path / "a", 1e5), tmp_path / "out")
    with pytest.raises(UsageError, match="has values that float16 cannot hold: its largest number is 65504") as error:
        tpuconv.load(tmp_path / "out", dtype="float16")
    assert error.value.details == ("layers.1.mlp.up.kernel (1 array)",)
    assert tpuconv.load(tmp_path / "out", dtype="float32").layers[1].mlp.up.kernel[5, 3] > 9e4
    convert(with_a_large_value(tmp_path / "b", np.inf), tmp_path / "inf", Options(allow_nonfinite=True))
    assert np.isinf(tpuconv.load(tmp_path / "inf", dtype="float16").layers[1].mlp.up.kernel[5, 3])


def test_a_cast_of_a_source_never_overflows_in_silence(tmp_path):
    random_checkpoint(tmp_path / "plain", qwen3_config(), "float32")
    tensors = {name: x.copy() for name, x in read_tensors(tmp_path / "plain").items()}
    tensors["model.norm.weight"][3] = 3.4e38  # finite, and beyond bfloat16
    source = write_checkpoint(tmp_path / "hf", json.loads((tmp_path / "plain/config.json").read_text()), tensors)
    for options, message in (
        ({}, "norm.scale is not finite"),
        ({"allow_nonfinite": True}, "model.norm.weight has finite values that bfloat16 cannot hold"),
    ):
        for target in ("tpuconv", "huggingface"):
            with pytest.raises(SourceError, match=message):
                api.convert(source, tmp_path / target, dtype="bfloat16", target=target, overwrite=True, **options)


def test_what_is_no_model_is_refused(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    convert(folder, tmp_path / "part", Options(layers=range(1, 2)))
    with pytest.raises(UsageError, match="only layers 1 to 1"):
        tpuconv.load(tmp_path / "part")
    with pytest.raises(UsageError, match=r"holds no model\.safetensors, .* and no tpuconv\.json"):
        tpuconv.load(tmp_path)
    convert(folder, tmp_path / "out")
    for dtype in ("float64", "float8_e4m3fn", "int8", jnp.complex64, "bfloat"):
        with pytest.raises(UsageError, match="cannot have the dtype"):
            tpuconv.load(tmp_path / "out", dtype)
    config = tmp_path / "out" / "config.json"
    changed = json.dumps(json.loads(config.read_text()) | {"vocab_size": 97})
    config.write_text(changed)
    with pytest.raises(CorruptOutput, match=r"config\.json was changed"):
        tpuconv.load(str(tmp_path / "out"))
    write_listed(tmp_path / "out", "config.json", changed.encode())
    with pytest.raises(CorruptOutput, match=r"do not match a qwen3 model"):
        tpuconv.load(str(tmp_path / "out"))


def test_a_mesh_that_would_divide_nothing_is_refused(tmp_path):
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "out")
    with pytest.raises(UsageError, match="nothing is sharded over the axes rows, model") as error:
        tpuconv.load(tmp_path / "out", mesh=jax.make_mesh((1, 1), ("rows", "model")))
    assert error.value.hint == "use one or more of the axes data, tensor, group, expert"
    tpuconv.load(tmp_path / "out", mesh=jax.make_mesh((1, 1), ("tensor", "model")))


def test_a_damaged_array_is_named(tmp_path):
    convert(random_checkpoint(tmp_path / "hf", qwen3_config()), tmp_path / "out")
    shard = next((tmp_path / "out/params/layers.1.mlp.up.kernel").glob("c.*"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptOutput, match=r"1\.mlp\.up\.kernel cannot be read: .* does not hold its checksum"):
        tpuconv.load(tmp_path / "out")


def test_importing_the_package_imports_no_jax():
    modules = "tpuconv, tpuconv.cli, tpuconv.convert.run.conversion, tpuconv.models.registry"
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_package_has_no_other_attributes():
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        tpuconv.lode  # noqa: B018
    assert Path(tpuconv.__file__).name == "__init__.py"


def test_a_cpu_takes_a_large_array_without_a_copy():
    values = aligned_array([3, 1 << 20], np.dtype(np.float32))
    values[:] = 1
    place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    array = jax.make_array_from_callback(values.shape, place, lambda _: values)
    assert array.unsafe_buffer_pointer() == values.ctypes.data
    changed = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert (values == 1).all()
    assert (np.asarray(changed) == 2).all()


def test_values_that_are_cast_are_copied_once(tmp_path):
    """A CPU takes the cast values as they are: else each array would be in memory three times while it is loaded."""
    config = qwen3_config(hidden_size=512, intermediate_size=4096, num_hidden_layers=2)
    source = random_checkpoint(tmp_path / "hf", config)
    convert(source, tmp_path / "out")
    for place in (source, tmp_path / "out"):
        for array in jax.tree.leaves(nnx.state(tpuconv.load(place, "float32"))):
            if array.nbytes >= HUGE_PAGE:
                assert array.dtype == jnp.float32
                assert array.unsafe_buffer_pointer() % HUGE_PAGE == 0

"""Device layouts: written by the TPU compiler, used when a model is loaded."""

import json
import shutil
from contextlib import suppress

import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import tpuconv
from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.commands import tpuconv as command
from helpers.conversions import convert
from helpers.encoded import encoded, fp8
from helpers.tpu_compiler import compiler
from tpuconv.checkpoint.device_layouts import DeviceLayout, layouts_of, write_layouts
from tpuconv.convert.plan.types import Options
from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.models.generate import Generator
from tpuconv.names import LAYOUTS, MANIFEST, QVALUE, collapse, expand
from tpuconv.storage import sealed
from tpuconv.storage.sealed import seal

TURNED = DeviceLayout("bfloat16", (1, 0), ())


def read_layouts(folder, device, mesh):
    return layouts_of(folder / LAYOUTS, (folder / LAYOUTS).read_bytes(), device, mesh)


@given(
    st.sampled_from(["layers.", "params.decoder.layers_"]),
    st.sets(st.integers(0, 12), min_size=1),
    st.sets(st.integers(0, 5), min_size=1),
)
def test_a_pattern_stands_for_its_names(before, layers, experts):
    names = [f"{before}{i}.experts.{j}.wi_0.kernel" for i in layers for j in experts]
    (pattern,) = collapse(names)
    assert sorted(expand(pattern)) == sorted(names)
    assert list(expand("lm_head.kernel")) == ["lm_head.kernel"]


@given(kinds=st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.sampled_from("ab")))
def test_names_of_a_pattern_are_of_one_kind_and_none_is_lost(kinds):
    named = {f"layers.{layer}.experts.{expert}.up": kind for (layer, expert), kind in kinds.items()}
    groups = collapse(named, named.__getitem__)
    assert sorted(name for names in groups.values() for name in names) == sorted(named)
    for pattern, names in groups.items():
        assert len({named[name] for name in names}) == 1
        assert set(names) <= set(expand(pattern))


def test_layouts_are_found_by_device_and_mesh(tmp_path):
    (tmp_path / MANIFEST).write_bytes(seal({"format": 2, "fingerprint": "", "files": {}}))
    own = {f"layers.{i}.mlp.gate.kernel": TURNED for i in range(80)}
    write_layouts(tmp_path, "TPU v5 lite", {"tensor": 8, "group": 2}, own)
    assert (tmp_path / LAYOUTS).read_text().count("kernel") == 1
    # Layers 1 and 2 differ in one matrix each: no pattern stands for these two alone.
    uneven = {"layers.1.experts.2.kernel": TURNED, "layers.2.experts.1.kernel": TURNED}
    write_layouts(tmp_path, "TPU v5 lite", {"tensor": 16}, uneven)
    write_layouts(tmp_path, "TPU v6 lite", {"tensor": 8, "group": 2}, {})
    assert read_layouts(tmp_path, "TPU v5 lite", {"group": 2, "data": 1, "tensor": 8}) == own
    assert read_layouts(tmp_path, "TPU v5 lite", {"tensor": 16}) == uneven
    assert read_layouts(tmp_path, "TPU v5 lite", {"tensor": 4}) == {}
    write_layouts(tmp_path, "TPU v5 lite", {"tensor": 16}, {"norm.scale": TURNED})
    assert read_layouts(tmp_path, "TPU v5 lite", {"tensor": 16}) == {"norm.scale": TURNED}
    assert read_layouts(tmp_path, "TPU v5 lite", {"group": 2, "tensor": 8}) == own


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "layouts": [{"device": "cpu", "mesh": {}, "arrays": {"a": {}}}]}',
        '{"format": "1", "layouts": []}',
        '{"format": 1, "layouts": {}}',
        '{"format": 1, "layouts": [5]}',
        '{"format": 1, "layouts": [{"device": "cpu", "mesh": {"tensor": "8"}, "arrays": {}}]}',
        '{"format": 1, "layouts": [{"device": ["cpu"], "mesh": {}, "arrays": {}}]}',
        '{"format": 1, "layouts": [{"device": "cpu", "mesh": {}, "arrays": []}]}',
        "[" * 100_000,
        '{"format": 1, "layouts": ' + "[" * 100_000,
        '{"format": 1, "layouts": [{"device": "cpu", "mesh": {}, "arrays": {"a": {"dtype": "x", "tiling": [], '
        '"major_to_minor": [-1]}}}]}',
        *(
            f'{{"format": 1, "layouts": [{{"device": "cpu", "mesh": {{}}, "arrays": {{"{pattern}": '
            '{"dtype": "bfloat16", "major_to_minor": [0], "tiling": []}}}]}'
            for pattern in (
                "layers.{0...99999999999}.kernel",
                "layers.{0...999}.{0...999}.kernel",
                "{0...9}" * 400,
                "layers.{5...0}.kernel",
                "layers.{.,}.kernel",
                "layers.{" + "9" * 5000 + "}.kernel",
            )
        ),
    ],
    ids=range(20),
)
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / LAYOUTS).write_text(text)
    with pytest.raises(CorruptOutput, match=r"layouts\.json is not a valid file of layouts"):
        read_layouts(tmp_path, "cpu", {})
    (tmp_path / LAYOUTS).write_text('{"format": 2}')
    with pytest.raises(UsageError, match="newer tpuconv"):
        read_layouts(tmp_path, "cpu", {})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    convert(random_checkpoint(folder / "hf", qwen3_config()), folder / "out")
    return folder / "out"


def written(generator: Generator) -> list[list[int]]:
    return np.stack(list(generator([[3, 1, 4], [5, 6, 7]], 4))).tolist()


def test_a_model_is_loaded_as_its_layouts_say(checkpoint):
    """And runs so: no step lays its weights out anew."""
    want = written(Generator(tpuconv.load(checkpoint)))
    write_layouts(
        checkpoint, "cpu", {}, {f"layers.{i}.mlp.{part}.kernel": TURNED for i in range(3) for part in ("gate", "down")}
    )
    model = tpuconv.load(checkpoint)
    lies = [
        x.format.layout.major_to_minor
        for layer in model.layers
        for x in (layer.mlp.gate.kernel[...], layer.mlp.up.kernel[...])
    ]
    assert lies == [(1, 0), (0, 1)] * 3
    generator = Generator(model)
    for step in (generator.decode(2, 7), generator.prefill(2, 3, 7)):
        formats = [x.layout.major_to_minor for x in step.input_formats[0][0]]
        assert formats == [x.format.layout.major_to_minor for x in generator.weights]
        assert formats.count((1, 0)) == 6
    assert written(generator) == want
    # In another dtype tiles would be others.
    assert tpuconv.load(checkpoint, "float32").layers[0].mlp.gate.kernel[...].format.layout.major_to_minor == (0, 1)
    write_layouts(checkpoint, "cpu", {}, {"norm.scale": TURNED})
    with pytest.raises(CorruptOutput, match=r"has the axes \(1, 0\) for norm.scale, which is \(32,\)"):
        tpuconv.load(checkpoint)


def test_a_kill_while_layouts_are_written_leaves_a_checkpoint_that_loads(checkpoint, tmp_path, monkeypatch):
    """The manifest of a new file and of a replaced one, until both are there, and a file that its user deletes."""
    folder = tmp_path / "out"
    shutil.copytree(checkpoint, folder)
    (folder / LAYOUTS).unlink(missing_ok=True)
    tpuconv.load(folder)
    write, kernel = sealed.write_whole, "layers.0.mlp.gate.kernel"
    for writes in (1, 2, 3, 1, 2, 3):
        left = iter(range(writes))

        def killed(path, data, left=left):
            write(path, data)
            next(left)

        monkeypatch.setattr(sealed, "write_whole", killed)
        with suppress(StopIteration):
            write_layouts(folder, "cpu", {}, {kernel: DeviceLayout("bfloat16", (writes % 2, 1 - writes % 2), ())})
        monkeypatch.setattr(sealed, "write_whole", write)
        tpuconv.load(folder)
    layout = tpuconv.load(folder).layers[0].mlp.gate.kernel[...].format.layout
    assert layout.major_to_minor == (1, 0)
    (folder / LAYOUTS).unlink()
    tpuconv.load(folder)


def codes(folder):
    state = nnx.to_flat_state(nnx.state(tpuconv.load(folder)))
    return next(x.get_value() for path, x in state if ".".join(map(str, path)) == f"layers.0.mlp.gate.kernel{QVALUE}")


def test_codes_that_are_stored_as_bytes_lie_so_too(checkpoint, tmp_path):
    (tmp_path / "nf4.yaml").write_text("qwix: {rules: [{module_path: '.*/mlp/.*', weight_qtype: nf4}]}")
    command("quantize", checkpoint, tmp_path / "out", "--config", tmp_path / "nf4.yaml")
    plain = codes(tmp_path / "out")
    assert plain.dtype == "uint4"
    layouts = {f"layers.{i}.mlp.gate.kernel{QVALUE}": DeviceLayout(plain.dtype.name, (1, 0), ()) for i in range(3)}
    write_layouts(tmp_path / "out", "cpu", {}, layouts)
    turned = codes(tmp_path / "out")
    assert turned.format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(turned))


@compiler
def test_the_compiler_writes_them_for_every_slice_that_fits(tmp_path):
    """Of a checkpoint that is kept in FP8: its codes and scales lie as a step of it would have them."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 1024}
    encoded(random_checkpoint(tmp_path / "hf", qwen3_config(**wide)), tmp_path / "fp8", fp8)
    convert(tmp_path / "fp8", tmp_path / "out", Options(encoding="keep"))
    done = command(
        "fit", tmp_path / "out", "--topology", "v5e:2x2,v5e:1x1", "--write-layouts", "--context", 64, "--json"
    )
    facts = json.loads(done.stdout)
    assert (facts["layouts"], facts["quantization"]) == (str(tmp_path / "out" / LAYOUTS), "as released")
    for mesh in ({"tensor": 2, "group": 2}, {}):
        layouts = read_layouts(tmp_path / "out", "TPU v5 lite", mesh)
        assert len(layouts) == 2 * 18 + 3
        codes = layouts["layers.0.mlp.down.kernel.array.qvalue"]
        assert (codes.dtype, codes.tiling) == ("float8_e4m3fn", ((32, 128), (4, 1)))
    for one in facts["slices"]:
        assert one["programs"]["decode"]["copies"] == []
    # The manifest holds its hash; and it says nothing of other devices.
    assert json.loads(command("verify", tmp_path / "out", "--json").stdout)["passed"]
    assert not read_layouts(tmp_path / "out", "cpu", {})


def test_layouts_that_cannot_be_written_say_why(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config()))
    for args, answer in (
        ((checkpoint, "--write-layouts"), "Missing option '--topology'"),
        ((tmp_path, "--topology", "v5e:1x1", "--write-layouts"), "is not a checkpoint with the names of tpuconv"),
        (
            (checkpoint, "--topology", "v5e:1x1", "--write-layouts", "--quantize", "int8_default"),
            "is not quantized yet",
        ),
    ):
        assert answer in command("fit", *args, code=2).stderr

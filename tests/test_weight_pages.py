"""Pages about weights: statistics in one pass, differences of two checkpoints, and the HTML."""

import html.parser
import json
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from math import inf, prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import schemes
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint, write_safetensors
from helpers.commands import tpuconv as command
from helpers.hub_server import HubServer
from helpers.schemes_packed import PACKED
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.checkpoint.reader import read_array
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import CorruptOutput, OutputError, UsageError
from tpuconv.names import layer_module
from tpuconv.quantize.values import decoded_values
from tpuconv.sources.source import open_source
from tpuconv.storage import reports
from tpuconv.verify.weights import measuring, page, statistics, stored
from tpuconv.verify.weights.measuring import measured_trees
from tpuconv.verify.weights.statistics import TensorDifference, difference_sums, merged_statistics, statistics_of
from tpuconv.verify.weights.stored import boxes_of

DTYPES = ("f2", "f4", "f8", "i1", "u1", "i4", "i8", "?", *map(np.dtype, ("bfloat16", "float8_e4m3fn", "int4")))


def ignore(done: int, total: int) -> None:
    pass


# -- statistics --------------------------------------------------------------------------------------------------------


def expected_bins(values: np.ndarray) -> dict[int, tuple[int, int]]:
    """By numpy's own histogram, with edges at powers of two."""
    numbers = values.astype(np.float64).ravel()
    numbers = numbers[np.isfinite(numbers) & (numbers != 0)]
    edges = 2.0 ** np.arange(-160, 161)
    negative, positive = (np.histogram(side, edges)[0] for side in (-numbers[numbers < 0], numbers[numbers > 0]))
    return {e - 160: (int(n), int(p)) for e, (n, p) in enumerate(zip(negative, positive, strict=True)) if n or p}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_numpy(dtype, monkeypatch):
    monkeypatch.setattr(statistics, "PART_ELEMENTS", 1000)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(7, 501)) * 2.0 ** rng.integers(-6, 6, (7, 501))
    values[rng.random(values.shape) < 0.1] = 0
    kind = np.dtype(dtype)
    values = (values % 100 if kind.kind == "u" else values.clip(-7, 7)).astype(kind)
    if kind.name in ("float16", "float32", "float64", "bfloat16"):
        values[0, :3] = np.nan, np.inf, -np.inf
    found, exact = statistics_of(values), values.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    assert (found.count, found.nonfinite, found.zeros) == (exact.size, exact.size - finite.size, (exact == 0).sum())
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-15)
    assert found.deviation == pytest.approx(finite.std(), rel=1e-12)
    assert found.bins == expected_bins(values)


@given(st.lists(st.floats(width=32), max_size=60), st.data())
def test_merged_statistics_are_those_of_the_whole(numbers, data):
    values = np.array(numbers, np.float32)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=4)))
    parts = [statistics_of(part) for part in np.split(values, cuts)]
    merged, whole = merged_statistics(data.draw(st.permutations(parts))), statistics_of(values)
    assert merged.bins == whole.bins
    same = ("count", "zeros", "nonfinite", "minimum", "maximum")
    assert [getattr(merged, name) for name in same] == [getattr(whole, name) for name in same]
    tolerance = 1e-12 * whole.largest
    assert merged.mean == pytest.approx(whole.mean, rel=1e-9, abs=tolerance)
    assert merged.deviation == pytest.approx(whole.deviation, rel=1e-6, abs=tolerance)


def test_subnormal_numbers_have_bins_of_their_own():
    tiny = np.array([2.0**-149, -(2.0**-140), 2.0**-126], np.float32)
    assert statistics_of(tiny).bins == {-149: (0, 1), -140: (1, 0), -126: (0, 1)}
    assert statistics_of(tiny.astype(ml_dtypes.bfloat16)).bins == {-126: (0, 1)}


def test_nothing_has_statistics():
    empty = statistics_of(np.zeros((0, 3), np.float32))
    assert (empty.count, empty.deviation, empty.largest, empty.bins) == (0, 0, 0, {})
    assert empty.to_json()["minimum"] is None
    assert statistics_of(np.full(3, np.nan, np.float32)).to_json()["mean"] is None


def test_differences_count_what_is_not_finite():
    x = np.array([1.0, -4.0, np.nan, np.inf, 2.0], np.float32)
    y = np.array([1.5, -4.0, np.nan, np.inf, 2.0], np.float32)
    sums = difference_sums(x, y)
    assert (sums.largest, sums.scale, sums.noise) == (0.5, 4.0, 0.25)
    assert TensorDifference.of("x", sums).relative == 0.125
    worse = TensorDifference.of("x", difference_sums(x, np.array([1, 2, 3, 4, np.nan], np.float32)))
    assert (worse.relative, worse.to_json()["largest"]) == (inf, None)
    assert TensorDifference.of("x", difference_sums(np.zeros(3), np.zeros(3))).relative == 0


# -- boxes -------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_boxes_divide_a_shape(data):
    groups = data.draw(st.lists(st.sampled_from([1, 2, 4]), max_size=4))
    shape = tuple(group * data.draw(st.integers(0, 5)) for group in groups)
    chunks = tuple(data.draw(st.integers(1, max(1, n))) for n in shape)
    most = data.draw(st.integers(1, 60))
    seen = np.zeros(shape, int)
    for box in boxes_of(shape, tuple(groups), chunks, most):
        seen[box] += 1
        assert all(s.start % group == 0 and s.stop % group == 0 for s, group in zip(box, groups, strict=True))
        assert seen[box].size <= max(stored.MOST_GROWTH * most, prod(groups))
    assert (seen == 1).all()


def test_boxes_of_complete_chunks_read_each_once():
    chunks = (1, 64, 96)
    boxes = list(boxes_of((6, 100, 200), (1, 1, 1), chunks, 1 << 13))
    places = {tuple(s.start // c for s, c in zip(box, chunks, strict=True)) for box in boxes}
    assert len(places) == len(boxes)
    assert all(s.start % c == 0 for box in boxes for s, c in zip(box, chunks, strict=True))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 40))
def test_boxes_of_safetensors_are_contiguous(shape, most):
    ones, numbers, at = (1,) * len(shape), np.arange(prod(shape)).reshape(shape), 0
    for box in boxes_of(tuple(shape), ones, ones, most):
        found = numbers[box].ravel()
        assert found.tolist() == list(range(at, at + found.size))
        at += found.size


def test_memory_is_bounded(tmp_path):
    """Also of experts in one array, each of which would fit."""
    size = 1 << 28
    write_safetensors(tmp_path / "x.safetensors", {"w": ("F32", (4, size // 64, 4)), "v": ("BF16", (size // 16, 2))})
    tracemalloc.start()
    try:
        found = measured_trees([(tmp_path / "x.safetensors", None)], ignore)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(each.values.zeros for each in found.trees[0].weights) == size // 4 + size // 8
    assert peak < 64 << 20


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example(converted: Path) -> Path:
    (folder,) = (path for path in converted.iterdir() if path.is_dir() and (path / "tpuconv.json").exists())
    return folder


INT4 = r"""
qwix:
  rules:
    - {module_path: 'layers/\d+/(attn|mlp)/.*', weight_qtype: int4, tile_size: 32}
"""


@pytest.fixture(scope="module")
def int4(example: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("int4")
    (folder / "groups.yaml").write_text(INT4)
    api.quantize(example, folder / "int4", config=folder / "groups.yaml")
    return folder / "int4"


def exact_bytes(values: np.ndarray) -> dict[str, object]:
    return statistics_of(values).to_json() | {"mean": None, "deviation": None}


def of_json(facts: dict[str, object]) -> dict[str, object]:
    return facts | {"mean": None, "deviation": None}


def test_quantized_values_are_stored_integers_and_decoded(int4, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "BOX_ELEMENTS", 3000)
    found = api.inspect(int4, html=tmp_path / "page.html").to_json()
    manifest, weights = read_manifest(int4), {each["name"]: each for each in found["weights"]}
    assert list(weights) == list(manifest.arrays)
    for name, facts in manifest.quantization["parameters"].items():
        parts = [read_array(manifest, f"{name}.array.{part}", None) for part in ("qvalue", "scale")]
        each = weights[f"{name}.array.qvalue"]
        values = decoded_values(facts["qtype"], [parts[0].view(np.uint8), parts[1]])
        assert of_json(each["statistics"]) == exact_bytes(values)
        assert of_json(each["stored"]) == exact_bytes(parts[0])
        assert each["stored"]["minimum"] >= -8
        assert each["statistics"]["deviation"] == pytest.approx(values.std(), rel=1e-4)
        assert each["dtype"] == "int4"
    plain = weights["norm.scale"]
    assert "stored" not in plain
    assert "stored: -8 to 7, " in (tmp_path / "page.html").read_text()


ENCODINGS = [schemes.fp8_blocks, schemes.fp8_bf16_scales, schemes.fp8_channel, schemes.fp8_tensor, schemes.int4_groups]
ENCODINGS += [schemes.awq, schemes.gptq, schemes.gptq_any_order, schemes.gptq_3_bits, schemes.int4_asymmetric]
ENCODINGS += [schemes.int8_packed, schemes.int8_tensor, schemes.mxfp8, schemes.nvfp4_modelopt, schemes.nvfp4_awq]
ENCODINGS += [schemes.modelopt_awq, schemes.bitsandbytes, schemes.int4_short_rows, schemes.nf4_nested, schemes.llm_int8]
ENCODINGS += PACKED


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.__name__)
def test_encoded_releases_are_decoded(encoding, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "BOX_ELEMENTS", 3000)
    tensors, config, values = encoding(np.random.default_rng(0), 96, 128)
    write_checkpoint(tmp_path / "hf", {"quantization_config": config}, tensors)
    found = measured_trees([(tmp_path / "hf", None)], ignore).trees[0]
    assert not found.notes
    (weight,) = (each for each in found.weights if each.weight.is_quantized)
    exact = statistics_of(np.asarray(values, np.float32))
    assert weight.values.bins == exact.bins
    assert (weight.values.minimum, weight.values.maximum) == (exact.minimum, exact.maximum)
    assert weight.values.mean == pytest.approx(exact.mean, abs=1e-9 * exact.largest)
    numbers = weight.numbers
    assert numbers is not None
    assert numbers.count == exact.count
    assert np.log2(numbers.largest) <= (8.9 if "fp8" in encoding.__name__ else 8)
    assert numbers.largest > 0.9
    assert sum(each.weight.parameter != "" for each in found.weights) == 1


def test_experts_with_scales_by_matrix_are_decoded_one_by_one(tmp_path, monkeypatch):
    """As gpt-oss stores them: [E, rows, groups, bytes]."""
    monkeypatch.setattr(measuring, "BOX_ELEMENTS", 100)
    rng = np.random.default_rng(0)
    tensors = {
        "w_blocks": rng.integers(0, 256, (3, 4, 2, 16), np.uint8),
        "w_scales": rng.integers(120, 130, (3, 4, 2), np.uint8),
    }
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    source = open_source(write_checkpoint(tmp_path / "hf", config, tensors))
    (tensor,) = (each for each in decode_names(source.tensors, source.encoding)[0].values() if each.scheme)
    values = np.empty(tensor.size, np.float32)
    with closing(source.open()) as reader:
        tensor.read(reader, 0, np.empty(tensor.size, np.uint8), values)
    found = measured_trees([(tmp_path / "hf", None)], ignore).trees[0].weights[0]
    assert of_json(found.values.to_json()) == exact_bytes(values)
    assert found.numbers is not None
    assert (found.numbers.count, found.numbers.maximum) == (tensor.size, 6)


def test_an_encoding_that_is_not_known_is_shown_as_stored(tmp_path):
    config = qwen3_config(quantization_config={"quant_method": "<b>other</b>"})
    write_checkpoint(tmp_path / "hf", config, {"a.weight": np.ones(3, "i1")})
    api.inspect(tmp_path / "hf", html=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "quantized tensors are shown as stored: " in text
    assert "<b>other" not in text


def changed(folder: Path, out: Path, **changes: np.ndarray) -> Path:
    tensors = read_tensors(folder)
    config = json.loads((folder / "config.json").read_text())
    return write_checkpoint(out, config, {name: changes.get(name, value) for name, value in tensors.items()})


def test_the_parameter_that_changed_is_first(tmp_path):
    hf = random_checkpoint(tmp_path / "hf", qwen3_config())
    name, small = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    tensors = read_tensors(hf)
    worse, slightly = tensors[name].copy(), tensors[small].copy()
    worse[3, 5] = 2 * np.abs(worse.astype("f4")).max()
    slightly[0, 0] *= 1.5
    changed(hf, tmp_path / "changed", **{name: worse, small: slightly})
    api.convert(hf, tmp_path / "a"), api.convert(tmp_path / "changed", tmp_path / "b")
    for one, other, names in (
        ("hf", "changed", [name, small]),
        ("a", "b", ["layers.1.mlp.up.kernel", "layers.0.mlp.up.kernel"]),
    ):
        html = tmp_path / f"{one}.html"
        found = api.inspect(tmp_path / one, html=html, beside=tmp_path / other).comparison
        assert [each.name for each in found.differences if each.largest] == names
        worst = found.differences[0]
        exact = tensors[name].astype("f8"), worse.astype("f8")
        largest = np.abs(exact[0] - exact[1]).max()
        assert worst.largest == largest
        assert worst.relative == pytest.approx(largest / np.abs(exact[0]).max())
        noise = ((exact[0] - exact[1]) ** 2).sum()
        assert worst.snr_db == pytest.approx(10 * np.log10((exact[0] ** 2).sum() / noise), rel=1e-6)
        text = html.read_text()
        first = text.index("<details>", text.index("<h2>Differences"))
        assert "mlp.up" in text[first : text.index("</details>", first)]
        assert [*found.only_reference, *found.only_other, *found.reshaped] == []


def test_parameters_that_one_has_are_named(tmp_path):
    one = {"a.weight": np.ones(3, "f4"), "b.weight": np.ones((2, 3), "f4"), "c.0.weight": np.ones(3, "f4")}
    other = {"a.weight": np.ones(3, "f4"), "b.weight": np.ones((3, 2), "f4"), "d.weight": np.ones(3, "f4")}
    places = []
    for name, tensors in (("one", one), ("other", other)):
        places.append(tmp_path / f"{name}.safetensors")
        write_safetensors(places[-1], tensors)
    found = api.inspect(places[0], html=tmp_path / "x.html", beside=places[1]).to_json()["comparison"]
    assert found["only_reference"] == ["c.0.weight"]
    assert found["only_other"] == ["d.weight"]
    assert found["reshaped"] == ["b.weight"]
    assert found["differences"] == [{"name": "a.weight", "count": 3, "snr_db": None, "largest": 0.0, "relative": 0.0}]
    text = (tmp_path / "x.html").read_text()
    assert "<td>c.0.weight</td>" in text
    assert "<td>d.weight</td>" in text


def test_quantized_values_are_compared_with_what_they_were(example, int4, tmp_path):
    found = api.inspect(example, html=tmp_path / "x.html", beside=int4).comparison
    quantized = read_manifest(int4).quantization["parameters"]
    assert {each.name for each in found.differences if each.largest} == set(quantized)
    assert not found.only_other
    with pytest.raises(UsageError, match=r"is an Orbax checkpoint and .* is safetensors"):
        api.inspect(example, html=tmp_path / "y.html", beside=Path("examples/tiny-qwen3").resolve())
    assert not (tmp_path / "y.html").exists()


def test_a_checkpoint_for_another_program(tmp_path):
    hf = random_checkpoint(tmp_path / "hf", qwen3_config())
    api.convert(hf, tmp_path / "maxtext", target="maxtext", scan_layers=True)
    found = api.inspect(tmp_path / "maxtext", html=tmp_path / "x.html")
    assert sum(each.values.count for each in found.weights) == sum(value.size for value in read_tensors(hf).values())


def test_weights_on_the_hub_are_fetched_and_dropped(tmp_path, serve_hub: Callable[..., HubServer]):
    """Their shards are read once, in the order of the tensors."""
    hf = random_checkpoint(tmp_path / "hf", qwen3_config(), shards=3)
    serve_hub({"org/model": hf})
    here = api.inspect(hf, html=tmp_path / "here.html").to_json()["weights"]
    assert api.inspect("org/model", html=tmp_path / "there.html").to_json()["weights"] == here
    both = api.inspect("org/model", html=tmp_path / "both.html", beside=hf)
    assert not any(each.largest for each in both.comparison.differences)


def test_a_damaged_checkpoint_leaves_no_page(example, tmp_path):
    shutil.copytree(example, tmp_path / "damaged")
    file = next((tmp_path / "damaged" / "params" / "embed.embedding").glob("c*"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptOutput):
        api.inspect(tmp_path / "damaged", html=tmp_path / "x.html")
    assert not list(tmp_path.glob("x.html*"))


# -- pages -------------------------------------------------------------------------------------------------------------

VOID = {"meta", "rect", "path", "line", "br", "p", "th", "td", "tr", "svg", "h1", "h2", "html"}


class Page(html.parser.HTMLParser):
    """The tags of a page, with their attributes and the text between."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.said = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += data


def test_a_page_is_one_file_that_loads_nothing(example, int4, tmp_path):
    api.inspect(example, html=tmp_path / "x.html", beside=int4)
    text = (tmp_path / "x.html").read_text()
    shown = Page(text)
    assert not {"script", "img", "link", "iframe", "object", "image", "use"} & set(shown.tags)
    assert not {"src", "href", "style", "xlink:href"} & shown.attributes
    assert "url(" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "layers.{0...4}.mlp.up.kernel" in shown.said
    assert "layers.3.mlp.up.kernel" in shown.said
    assert shown.tags.count("details") == shown.tags.count("summary") > 20
    assert shown.tags.count("svg") > 100
    for word in ("prefers-color-scheme:dark", "width=device-width", "default-src 'none'"):
        assert word in text
    assert len(text) < 1 << 20


HOSTILE = ("<script>alert(1)</script>", "a'onload=x\"", "</details>", "[/x]", "&lt;")


def test_names_of_others_are_escaped(tmp_path):
    config = {"model_type": "<img src=x>"}
    for name in ("<b>one", "two"):
        write_checkpoint(tmp_path / name, config, {each: np.ones(3, "f4") for each in (*HOSTILE, f"{name}.w")})
    api.inspect(tmp_path / "<b>one", html=tmp_path / "x.html", beside=tmp_path / "two")
    text = (tmp_path / "x.html").read_text()
    shown = Page(text)
    assert not {"script", "img", "onload"} & (set(shown.tags) | shown.attributes)
    assert all(each in shown.said for each in HOSTILE)
    assert "<b>one.w" in shown.said
    assert "<b>one" not in text


def test_of_many_tensors_the_largest_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_TENSORS_LISTED", 5)
    tensors = {f"experts.{i}.w": np.full(4, i + 1, "f4") for i in range(40)}
    tensors["experts.7.w"][0] = np.nan
    write_safetensors(tmp_path / "x.safetensors", tensors)
    api.inspect(tmp_path / "x.safetensors", html=tmp_path / "x.html", beside=tmp_path / "x.safetensors")
    said = Page((tmp_path / "x.html").read_text()).said
    tail = said[said.index("The 5 of 40 with the largest absolute values.") :]
    assert [i for i in range(40) if f"experts.{i}.w" in tail.partition("Modules")[0]] == [7, 36, 37, 38, 39]
    assert "1 non-finite" in tail or "1 non-finite" in said


def test_an_existing_file_stays_unless_it_may_be_replaced(example, tmp_path):
    out = tmp_path / "x.html"
    out.write_text("mine")
    for refused in (OutputError, UsageError):
        where = out if refused is OutputError else tmp_path
        with pytest.raises(refused):
            api.inspect(example, html=where)
    with pytest.raises(OutputError, match="is neither a page nor a recipe of tpuconv"):
        api.inspect(example, html=out, overwrite=True)
    assert out.read_text() == "mine"
    out.unlink()
    for overwrite in (False, True):
        api.inspect(example, html=out, overwrite=overwrite)
        assert out.read_text().startswith("<!doctype html>")
    for alone in ({"beside": example}, {"overwrite": True}):
        with pytest.raises(UsageError, match="need a page"):
            api.inspect(example, **alone)


def test_an_interruption_leaves_no_part_of_a_page(example, tmp_path, monkeypatch):
    def interrupted(path, data, partial):
        partial.write_bytes(data[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(reports, "replace_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.inspect(example, html=tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


def test_a_page_touches_no_file_beside_it(example, tmp_path):
    """A file of its user has the name that an unfinished file of ours has in our own folders; or a link has it."""
    page, beside, other = tmp_path / "x.html", tmp_path / "x.html.partial", tmp_path / "other"
    other.write_text("precious")
    for make in (lambda: beside.write_text("mine"), lambda: beside.symlink_to(other)):
        beside.unlink(missing_ok=True)
        make()
        api.inspect(example, html=page, overwrite=page.exists())
        assert (beside.read_text(), other.read_text()) in (("mine", "precious"), ("precious", "precious"))
    assert {path.name for path in tmp_path.iterdir()} == {"x.html", "x.html.partial", "other"}


def test_an_interruption_ends_the_threads(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"w": ("F32", (1 << 24, 4))})
    seen = []

    def interrupt(done: int, total: int) -> None:
        seen.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured_trees([(tmp_path / "x.safetensors", None)], interrupt)
    assert seen[0] < 1 << 28


def test_the_command_shows_its_progress_and_writes_a_page(converted, tmp_path):
    done = command("inspect", "tiny-qwen3-orbax", "--html", tmp_path / "x.html", cwd=converted)
    assert f"written: {tmp_path / 'x.html'}" in done.stdout.replace("\n", "")
    again = command("inspect", "tiny-qwen3-orbax", "--html", tmp_path / "x.html", cwd=converted, code=9)
    assert "--overwrite" in again.stderr
    seen: list[api.Progress] = []
    api.inspect(converted / "tiny-qwen3-orbax", html=tmp_path / "y.html", progress=seen.append)
    assert seen[-1].done == seen[-1].total == api.inspect(converted / "tiny-qwen3-orbax").bytes


def test_modules_are_named_up_to_the_word_behind_the_layer():
    assert layer_module("model.layers.3.self_attn.q_proj.weight") == "model.layers.3.self_attn"
    assert layer_module("layers.0.mlp.experts.7.up.kernel") == "layers.0.mlp"
    assert layer_module("layers.0.norm") == "layers.0"
    assert layer_module("params.decoder.layers_2.mlp.wi.kernel") == "params.decoder.layers_2.mlp"
    assert layer_module("model.embed_tokens.weight") == "model.embed_tokens"
    assert layer_module("bias") == "bias"


@pytest.mark.parametrize("name", ["page.html", "params/page.html", "config.json", "link/page.html"])
def test_a_page_in_an_output_is_refused(example, tmp_path, name):
    """The output would not be as its manifest says: `verify` fails, `push` and `--overwrite` refuse it."""
    out = tmp_path / "out"
    shutil.copytree(example, out)
    (tmp_path / "link").symlink_to(out / "params")
    page = tmp_path / name if name.startswith("link") else out / name
    with pytest.raises(OutputError, match="lies in an output of tpuconv"):
        api.inspect(out, html=page, overwrite=True)
    assert api.verify(out).passed

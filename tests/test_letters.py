"""Names of axes: letters that mean one thing everywhere, and words that families declare."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from helpers.families import FIRST, save
from tpuconv import api
from tpuconv.checkpoint.manifest import MANIFEST, read_manifest
from tpuconv.errors import CorruptOutput, LayoutError
from tpuconv.models.families import FAMILIES
from tpuconv.models.registry import get_family
from tpuconv.notation.letters import LETTERS, Word, declare, meaning, with_letters
from tpuconv.notation.release import Release
from tpuconv.notation.sharding import partition, undivided
from tpuconv.notation.table import Map, MappingTable, row_axes
from tpuconv.storage.sealed import seal
from tpuconv.targets.registry import get_target, target_names


def test_families_declare_the_words_of_their_tables() -> None:
    tables = {name: get_family(name).table for name in FAMILIES}
    used = {(name, axis) for name, table in tables.items() for row in table for axis in row_axes(row)}
    assert [pair for pair in used if not meaning(pair[1])] == []
    assert {axis for _, axis in used if axis.isupper()} <= set(LETTERS)
    assert list(map(get_target, target_names()))
    assert meaning("half_head")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("x", Word("one letter")),
        ("Groups", Word("a capital")),
        ("widths", Word("as_ is no letter", as_="x")),
        ("groups", Word("other groups")),
    ],
)
def test_a_declaration_is_refused(name: str, word: Word) -> None:
    """Also that of another meaning, in a family that is loaded."""
    get_family("llama")
    with pytest.raises(LayoutError):
        declare(**{name: word})


def test_a_word_is_sharded_as_its_letter() -> None:
    get_family("laguna")
    mesh = {"tensor": 2, "group": 2}
    assert partition("D full_heads H", (8, 4, 3), mesh) == partition("D N H", (8, 4, 3), mesh)
    assert partition("D taps", (8, 4), mesh) == (None, None)
    assert undivided("D full_heads H", (8, 5, 3), mesh) == {"full_heads": 5}
    with pytest.raises(LayoutError, match="declares the axis 'no_such_word'"):
        partition("D no_such_word", (8, 4), mesh)


def test_a_module_has_letters_of_its_own() -> None:
    sizes = {"D": 8, "N": 2, "taps": 3, "full_heads": 4}
    assert with_letters(sizes, {"c": "taps", "N": "full_heads"}) == {**sizes, "c": 3, "N": 4}


def test_a_row_with_an_axis_that_the_config_lacks_is_named() -> None:
    with pytest.raises(LayoutError, match=r"attn\.a.*taps"):
        MappingTable((Map("a", "attn.a", "D taps"),)).bind(SimpleNamespace(sizes={"D": 2}, layer_sets={}))


FORMER = {"full_heads": "q", "positions": "v", "groups": "n", "key_dim": "k", "value_dim": "w", "taps": "c"}
"""The letters of before in place of words."""


@pytest.mark.parametrize("family", ["gpt2", pytest.param("laguna", marks=pytest.mark.slow)])
def test_checkpoints_with_former_letters_are_read_as_before(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sharded, exported, in slabs too, and quantized."""
    monkeypatch.setattr("tpuconv.convert.plan.sizes.SLAB_BYTES", 1024)
    source = save(FIRST[family], tmp_path / "hf", "bfloat16")
    api.convert(source, now := tmp_path / "now")
    api.convert(source, before := tmp_path / "before")
    text = (before / MANIFEST).read_text()
    raw = json.loads(text)
    for array in raw["arrays"].values():
        array["axes"] = " ".join(FORMER.get(axis, axis) for axis in array["axes"].split())
    assert raw["arrays"] != json.loads(text)["arrays"]
    (before / MANIFEST).write_bytes(seal(raw))
    mesh = {"tensor": 2, "group": 2}
    parts = [[each["partition"] for each in api.inspect(ckpt, mesh=mesh).patterns] for ckpt in (now, before)]
    assert parts[0] == parts[1]
    (rules := tmp_path / "int8.yaml").write_text("qwix: {rules: [{module_path: '.*', weight_qtype: int8}]}")
    for ckpt in (now, before):
        api.export(ckpt, tmp_path / f"{ckpt.name}-back")
        api.quantize(ckpt, tmp_path / f"{ckpt.name}-int8", config=rules)
    backs = [(tmp_path / f"{ckpt.name}-back" / "model.safetensors").read_bytes() for ckpt in (now, before)]
    assert backs[0] == backs[1]
    arrays = [read_manifest(tmp_path / f"{ckpt.name}-int8").arrays for ckpt in (now, before)]
    assert {n: replace(a, crc32c=None) for n, a in arrays[0].items()} == {
        n: replace(a, crc32c=None) for n, a in arrays[1].items()
    }


def test_a_word_that_no_family_has_is_corrupt(tmp_path: Path) -> None:
    """The campaign found one in a manifest with a valid seal."""
    api.convert(save(FIRST["qwen3"], tmp_path / "hf"), ckpt := tmp_path / "ckpt")
    raw = json.loads((ckpt / MANIFEST).read_text())
    raw["arrays"]["embed.embedding"]["axes"] = "V absmax"
    (ckpt / MANIFEST).write_bytes(seal(raw))
    mesh = jax.make_mesh((1,), ("tensor",))
    for work in (
        lambda: api.inspect(ckpt, mesh={"tensor": 2}),
        lambda: api.load(ckpt, mesh=mesh),
        lambda: api.reshard(ckpt, tmp_path / "out", mesh={"tensor": 2}),
    ):
        with pytest.raises(CorruptOutput, match=r"embed\.embedding has the axis 'absmax'"):
            work()


def test_forms_under_former_letters_are_found() -> None:
    """A manifest names the places of forms by the letters of layers."""
    family = get_family("olmo_hybrid")
    config = family.read_config(FIRST["olmo_hybrid"].hf_config().to_dict())
    tables = [
        family.table_of(Release(forms={f"model.layers.{{{layers}}}.linear_attn.conv1d.": "transformers"}), config)
        for layers in ("state_layers", "l")
    ]
    assert tables[0].fingerprint == tables[1].fingerprint != family.table.fingerprint

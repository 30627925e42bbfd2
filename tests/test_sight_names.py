"""Multimodal models with the names of transformers' own modules, which `save_pretrained(save_original_format=False)`
writes and adapters have."""

import re
from pathlib import Path

import pytest

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same, restore
from helpers.sights import OF_OTHER_TYPES, SIGHTS
from helpers.whole_sights import made
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import MappingError
from tpuconv.models import registry

FAST = ("kimi_k25",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in SIGHTS if n not in OF_OTHER_TYPES],
)
def test_names_of_modules_are_read_and_come_back(name: str, tmp_path: Path) -> None:
    case = made(name)
    case.save(tmp_path / "release")
    case.save_modules(tmp_path / "modules")
    for source in ("release", "modules"):
        api.convert(tmp_path / source, tmp_path / f"{source}-out")
        api.convert(tmp_path / source, tmp_path / f"{source}-text", text_only=True)
    for kind in ("out", "text"):
        assert_same(restore(tmp_path / f"modules-{kind}"), restore(tmp_path / f"release-{kind}"))
    manifest = read_manifest(tmp_path / "modules-out")
    assert sorted(manifest.parts) == sorted(case.parts)
    for source, form in (("modules", None), ("modules", "released"), ("release", "transformers")):
        if form == "transformers" and name.endswith("_thinker"):  # a part of the model whose names are known
            continue
        api.export(tmp_path / f"{source}-out", tmp_path / f"{form}", form=form)
        if form != "released":
            want = read_tensors(tmp_path / "modules")
            want = {each: tensor for each, tensor in want.items() if not re.search(case.derived, each)}
            assert_same(read_tensors(tmp_path / f"{form}"), want)
        api.convert(tmp_path / f"{form}", tmp_path / f"{form}-out")
        assert_same(restore(tmp_path / f"{form}-out"), restore(tmp_path / "release-out"))


def test_an_encoder_whose_names_are_not_known_is_refused_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`text_only=True` leaves it out."""
    known = registry.saved_names
    monkeypatch.setattr(
        registry, "saved_names", lambda family: {a: b for a, b in known(family).items() if "vision" not in a}
    )
    made("molmo2").model.save_pretrained(tmp_path / "hf", save_original_format=False)
    with pytest.raises(MappingError, match="do not match"):
        api.plan(tmp_path / "hf").check()
    api.plan(tmp_path / "hf", text_only=True).check()

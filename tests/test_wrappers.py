"""Text models inside multimodal ones: the prefixes of every release of transformers, tying, and what is skipped."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, restore
from helpers.encoded import assert_came_back, same_bits
from helpers.families import CASES, VISION, Case
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models.common.wrapper import PREFIXES
from tpuconv.models.registry import all_families, find_family, get_family
from tpuconv.verify.layerwise import compare_layers
from tpuconv.verify.logits import model_logits, reference_logits

WRAPPERS = [family for family in all_families() if family.variants]
OWN_HEAD = next(case for case in CASES if case.id == "gemma3-own-head")
FIRST = [next(case for case in CASES if case.family == name) for name in VISION]
IDS = [[5, 17, 99, 3, 42, 8, 77], [9, 4, 31]]


def renamed(folder: Path, out: Path, released: str, prefix: str) -> Path:
    """A wrapper's checkpoint with the text model under another prefix."""
    tensors = {}
    for name, x in read_tensors(folder).items():
        if name.startswith(head := PREFIXES[released]):
            name = PREFIXES[prefix] + name.removeprefix(head)
        elif name.startswith(released):
            name = prefix + name.removeprefix(released)
        tensors[name] = x
    return write_checkpoint(out, json.loads((folder / "config.json").read_text()), tensors)


def released_prefix(name: str) -> str:
    return next(prefix for prefix in PREFIXES if get_family(name).table.rows[0].hf_names[0].startswith(prefix))


@pytest.mark.parametrize("family", WRAPPERS, ids=lambda family: family.name)
def test_the_names_choose_the_table(family: Any) -> None:
    config = family.config()
    for table in (family.table, *family.variants):
        names = [name for binding in table.bind(config)[:40] for name in binding.src_shapes()]
        encoded = [name.replace(".weight", ".weight_packed") for name in names]
        assert family.table_for(names) is family.table_for(encoded) is table
        assert family.table_of(table.variant) is table
    assert family.table_for(["other"]) is family.table
    assert len({table.fingerprint for table in (family.table, *family.variants)}) == 3
    with pytest.raises(UsageError, match="no variant 'x'"):
        family.table_of("x")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_every_release_convert_and_come_back(prefix: str, hf: Any, tmp_path: Path) -> None:
    plain = hf(OWN_HEAD, "bfloat16")
    folder = renamed(plain, tmp_path / "hf", released_prefix("gemma3"), prefix)
    plan = convert(folder, tmp_path / "out")
    assert_came_back(folder, tmp_path / "out", plan)
    convert(plain, tmp_path / "plain")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "plain"))
    assert read_manifest(tmp_path / "out").variant == ("" if prefix == released_prefix("gemma3") else prefix)
    assert {skip.reason.partition(" ")[0] for skip in plan.skipped} == {"sees", "brings"}
    # What is saved or quantized from a checkpoint keeps the names of its source.
    tpuconv.save(tpuconv.load(tmp_path / "out"), tmp_path / "saved", like=tmp_path / "out")
    source = read_tensors(folder)
    for name in ("out", "saved"):
        api.export(tmp_path / name, tmp_path / f"{name}-back")
        back = read_tensors(tmp_path / f"{name}-back")
        assert len(source) - len(back) == sum(skip.count for skip in plan.skipped)
        assert all(same_bits(x, source[tensor]) for tensor, x in back.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_the_text_is_compared_with_the_class_of_the_whole(case: Case, hf: Any, orbax: Any) -> None:
    theirs, ours = reference_logits(hf(case), IDS, "float32"), model_logits(orbax(case), IDS, "float32")
    errors, _, _ = compare_layers(read_manifest(orbax(case)), hf(case), IDS, "float32")
    for want, have in zip(theirs, ours, strict=True):
        assert np.abs(want - have).max() <= 2e-5 * np.abs(want).max()
    assert max(error.own_error for error in errors) < 1e-4


def gemma3(inside: dict[str, Any] | None = None, **outside: Any) -> dict[str, Any]:
    return {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **(inside or {})}, **outside}


@pytest.mark.parametrize(
    ("raw", "tensors", "tied"),
    [
        (gemma3(), [], True),
        (gemma3(), ["language_model.model.norm.weight"], True),
        (gemma3(), ["language_model.lm_head.weight"], False),
        (gemma3(), ["lm_head.kernel"], False),
        (gemma3({"tie_word_embeddings": False}), ["norm.scale"], False),
        (gemma3({"tie_word_embeddings": False}, tie_word_embeddings=True), ["lm_head.kernel"], True),
        (gemma3(tie_word_embeddings=True), ["lm_head.weight"], True),
        (gemma3(tie_word_embeddings=False), [], False),
        ({"model_type": "llama4"}, [], False),
        ({"model_type": "llama4"}, ["norm.scale"], True),
    ],
)
def test_what_says_whether_the_head_is_tied(raw: dict[str, Any], tensors: list[str], tied: bool) -> None:
    assert find_family(raw).read_config(raw, tensors=tensors).tie_word_embeddings == tied


@pytest.mark.slow
def test_an_own_head_converts_without_the_key(hf: Any, tmp_path: Path) -> None:
    """The index says that the head is not tied, where the default is another."""
    folder = hf(OWN_HEAD)
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config["text_config"]):
        place.pop("tie_word_embeddings", None)
    write_checkpoint(tmp_path / "hf", config, read_tensors(folder))
    convert(tmp_path / "hf", tmp_path / "out")
    model = tpuconv.load(tmp_path / "out")
    assert model.lm_head is not None
    api.export(tmp_path / "out", tmp_path / "back")
    assert "language_model.lm_head.weight" in read_tensors(tmp_path / "back")


def test_where_an_encoding_is_described() -> None:
    from tpuconv.sources.config import encoding_of, without_encoding

    how = {"quant_method": "fp8"}
    for raw in (gemma3(quantization_config=how), gemma3({"quantization_config": how})):
        assert encoding_of(raw) == how
        assert get_family("gemma3").config.from_hf(raw) == get_family("gemma3").config.from_hf(gemma3())
        assert without_encoding(raw) == gemma3()


@pytest.mark.parametrize(
    ("error", "raw", "message"),
    [
        (UnsupportedConfig, gemma3({"mystery_of_text": 1} | {"use_bidirectional_attention": True}), "use_bidir"),
        (UnsupportedConfig, gemma3(hidden_size=8), "hidden_size=8"),
        (ConfigError, gemma3() | {"text_config": 3}, "text_config=3 is not an object"),
    ],
)
def test_what_cannot_be_read_is_refused(error: type[TpuconvError], raw: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        find_family(raw).config.from_hf(raw)


def test_keys_that_nobody_reads_are_listed() -> None:
    raw = gemma3({"mystery_of_text": 1}, mystery=2, vision_mystery=3, image_token_index=4)
    assert {key.key for key in get_family("gemma3").check_config(raw).ignored} == {"mystery_of_text", "mystery"}

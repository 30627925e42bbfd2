"""Families by any of their names: a family, a model_type, an architecture; the reasons of those that are left out."""

import json
import re
import runpy
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from helpers.commands import tpuconv
from tpuconv.commands.families import _all
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models import registry
from tpuconv.models.left_out import MODELS_LEFT_OUT
from tpuconv.models.named import example_config, families_named, left_out
from tpuconv.models.registry import all_families, find_family, near_names
from tpuconv.models.wrappers import WRAPPERS
from tpuconv.targets.listing import targets_of
from tpuconv.targets.registry import target_names

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "families.md"


def test_every_name_of_a_family_finds_it() -> None:
    for family in all_families():
        for name in (family.name, *family.architectures, *family.architectures.values()):
            chosen, around = families_named(name)
            assert family in chosen or name in {w for each in around for w in (each.model_type, each.architecture)}
    for wrapper in WRAPPERS.values():
        assert families_named(wrapper.architecture)[1]


def test_an_example_is_read_by_its_family() -> None:
    sized = 0
    for family in all_families():
        for model_type in set(family.architectures.values()):
            example = example_config(family, model_type)
            assert example["model_type"] == model_type
            assert find_family(example) is family
            if "hidden_size" in example:
                family.check_config(example)
                sized += 1
    assert sized > 100


def test_models_that_return_no_logits_are_of_the_same_family() -> None:
    assert families_named("LlamaForSequenceClassification")[0][0].name == "llama"
    assert "qwen3" in [family.name for family in families_named("Qwen3Model")[0]]


def test_each_model_that_is_left_out_has_the_reason_of_the_page() -> None:
    rows = dict.fromkeys(re.findall(r"^\| (`.*) \| (.*) \|$", PAGE.read_text().partition("that are left out")[2], re.M))
    listed = {name: reason for names, reason in rows for name in re.findall(r"`([^`]*)`", names)}
    assert listed == dict(MODELS_LEFT_OUT)
    known = {kind for family in all_families() for kind in family.architectures.values()}
    assert not known & set(MODELS_LEFT_OUT)


def test_each_type_of_transformers_is_read_or_has_its_reason() -> None:
    """A new release of transformers fails here: `python tools/refused_types.py` shows what is new in each type."""
    refused = runpy.run_path(str(ROOT / "tools" / "refused_types.py"), run_name="refused_types")["refused_types"]
    assert set(refused()) <= set(MODELS_LEFT_OUT)


def test_the_reason_of_a_refused_model_is_told() -> None:
    assert "masks that are made of values" in left_out("DogeForCausalLM")
    with pytest.raises(UnsupportedConfig, match="recurrent networks without attention"):
        families_named("rwkv")
    with pytest.raises(UnsupportedConfig, match="bytes that are joined to patches") as caught:
        find_family({"model_type": "blt", "architectures": ["BltForCausalLM"]})
    assert "did you mean" not in caught.value.hint


def test_names_are_alike_beside_the_ending_that_most_share():
    known = {"BeamForCausalLM", "SmolLM3ForCausalLM", "Ministral3ForCausalLM", "Qwen3ForCausalLM", "qwen3"}
    assert near_names("Moondream3ForCausalLM", known) == []
    assert near_names("Qwen3forcausalLM", known) == ["Qwen3ForCausalLM", "qwen3"]
    assert near_names("qwn3", known) == ["qwen3", "Qwen3ForCausalLM"]


@pytest.mark.parametrize(("name", "near"), [("Qwen3ForCausalML", "Qwen3ForCausalLM"), ("QWEN3_MOE", "qwen3_moe")])
def test_similar_names_are_suggested(name: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        families_named(name)
    assert near in caught.value.hint


def test_targets_have_what_their_tables_say() -> None:
    (qwen3,), _ = families_named("qwen3")
    (gpt_oss,), _ = families_named("gpt_oss")
    (seeing,), _ = families_named("qwen3_vl")
    assert [each.target for each in targets_of(qwen3)][: len(target_names())] == target_names()
    assert {each.target for each in targets_of(qwen3) if not each.supported} == {"gemma"}
    assert "tunix" in {each.target for each in targets_of(gpt_oss) if not each.supported}
    assert {each.target: each.parts for each in targets_of(seeing)}["maxtext"] == ("vision",)


def test_the_command_shows_one_family() -> None:
    facts = json.loads(tpuconv("families", "Qwen3ForCausalLM", "--json").stdout)
    (family,) = facts["families"]
    assert family["name"] == "qwen3"
    assert family["example"]["architectures"] == ["Qwen3ForCausalLM"]
    assert {each["target"] for each in family["targets"]} >= {"maxtext", "tunix", "huggingface"}
    said = tpuconv("families", "qwen3").stdout
    assert "jax-llm-examples" in said
    assert '"model_type": "qwen3"' in said
    assert "recurrent networks" in tpuconv("families", "xlstm", code=5).stderr


def test_a_family_that_two_packages_have_is_noted_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_plugins", lambda: {"llama": [EntryPoint("llama", "x:LLAMA", registry.GROUP)]})
    families, _ = _all()
    assert "qwen3" in {family.name for family in families}
    assert (
        capsys.readouterr().err == "note: the name of the family 'llama' is taken several times: by tpuconv, x:LLAMA\n"
    )

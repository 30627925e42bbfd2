"""Weight maps of configs that nobody chose: what `convert` writes for one target becomes what it writes for another,
and what `export` writes of it."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same
from helpers.families import FIRST, Case, save
from helpers.random_configs import CHOICES, changed_cases
from helpers.released import GEMMA4
from helpers.trainers import arrays_of
from tpuconv import api
from tpuconv.errors import TpuconvError
from tpuconv.names import OWN_TARGET

pytest.importorskip("torch")

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
SOME = {family: FIRST[family] for family in FAMILIES} | {
    "gemma2": Case("gemma2", "gemma2", "gemma2", GEMMA | {"num_hidden_layers": 4}),
    "gemma3_text": Case("gemma3", "gemma3_text", "gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "gemma4_text": Case("gemma4", "gemma4_text", "gemma4_text", GEMMA4),
}
"""Models that several targets have, by family. Tests get the name: most tests of a case of Gemma are slow."""
TREES = (
    *((name, scan) for name in (OWN_TARGET, "maxtext") for scan in (False, True)),
    *((name, False) for name in ("tunix", "gemma", "jax-llm-examples")),
)
"""The trees of targets, and whether their layers are stacked."""


def check_maps(case: Case) -> set[str]:
    """Maps all trees of a model from ours, and back to the release. Returns the targets that have the model."""
    with tempfile.TemporaryDirectory() as name:
        folder, trees = Path(name), {}
        try:
            save(case, folder / "hf")
        except Exception:  # whatever transformers says of a config that makes no model
            assume(False)
        for target, scan in TREES:
            out = folder / f"{target}-{scan}"
            try:
                api.convert(folder / "hf", out, target=target, scan_layers=scan)
            except TpuconvError:
                continue
            trees[target, scan] = arrays_of(out)
            back = api.weight_map(folder / "hf", target, "huggingface", scan_layers=scan)
            api.export(out, folder / "back", overwrite=True)
            assert_same(on_host(back.stream(trees[target, scan])), read_tensors(folder / "back"))
        for (target, scan), wanted in trees.items():
            there = api.weight_map(folder / "hf", OWN_TARGET, target, scan_layers=scan)
            assert there.target.form.scan_layers == scan
            ours = trees[OWN_TARGET, there.source.form.scan_layers]
            assert_same(on_host(there.stream(ours)), wanted)
    return {target for target, _ in trees}


def on_host(tree: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in tree.items()}


RANDOM = settings(
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


@st.composite
def resized(draw: st.DrawFn, case: Case) -> Case:
    """The case with other sizes, which targets take, and the head tied or not."""
    changed = {key: draw(st.sampled_from(CHOICES[key])) for key in SIZES}
    changed["intermediate_size"] = draw(st.sampled_from((20, 56)))
    if not case.family.startswith("gemma"):  # whose targets have no other head than the embedding
        changed["tie_word_embeddings"] = draw(st.booleans())
    if "kv_lora_rank" in case.hf_config().to_dict():
        changed["num_key_value_heads"] = changed["num_attention_heads"]
    return replace(case, id=f"{case.id}-resized", config=dict(case.config) | changed)


@pytest.mark.parametrize("family", ["llama"])
@given(data=st.data())
@settings(RANDOM, max_examples=1)
def test_maps_of_random_sizes(family: str, data: st.DataObject) -> None:
    assert check_maps(data.draw(resized(SOME[family]))) > {OWN_TARGET}


@pytest.mark.slow
@pytest.mark.parametrize("family", SOME)
@given(data=st.data())
@settings(RANDOM, max_examples=10)
def test_maps_of_more_random_sizes(family: str, data: st.DataObject) -> None:
    assert check_maps(data.draw(resized(SOME[family]))) > {OWN_TARGET}


@pytest.mark.slow
@pytest.mark.parametrize("family", SOME)
@given(data=st.data())
@settings(RANDOM, max_examples=10)
def test_maps_of_random_configs(family: str, data: st.DataObject) -> None:
    check_maps(data.draw(changed_cases(family)))

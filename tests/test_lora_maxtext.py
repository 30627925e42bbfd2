"""LoRA between PEFT and MaxText: the tree of an adapter that is kept, and the alpha that MaxText records."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same
from helpers.families import FIRST
from helpers.peft_models import adapter_of_peft
from helpers.trainers import changed_leaf, save_standard, trained_tree
from tpuconv import api
from tpuconv.errors import SourceError, UsageError

QWEN3 = FIRST["qwen3"]
RANK, ALPHA = 4, 8.0
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MATRICES = (
    *("mlp.wi_0", "mlp.wi_1", "mlp.wo"),
    *(f"self_attention.{name}" for name in ("key", "out", "query", "value")),
)


@pytest.fixture
def kept(hf, tmp_path: Path) -> Path:
    """The folder of an adapter that is kept for MaxText, with scanned layers."""
    adapter_of_peft(QWEN3, tmp_path / "lora", r=RANK, lora_alpha=ALPHA, target_modules=MODULES)
    options = {"target": "maxtext", "scan_layers": True, "adapter": [str(tmp_path / "lora")]}
    api.convert(hf(QWEN3), tmp_path / "kept", keep_adapter=True, **options)
    return tmp_path / "kept"


def weights(adapter: Path) -> dict[str, np.ndarray]:
    return load_file(adapter / "adapter_model.safetensors")


def step_of(run: Path, tree: dict[str, Any], custom_metadata: object) -> None:
    """A step as MaxText's `save_checkpoint` writes it, whose metadata are beside its item."""
    save_standard(run / "1" / "items", tree)
    (run / "1" / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": custom_metadata}))


def test_a_kept_adapter_has_the_names_and_the_metadata_that_maxtext_reads(kept: Path) -> None:
    """As its `restore_lora_from_path` and `sync_lora_metadata` look for them."""
    tree = trained_tree(kept)
    for matrix in MATRICES:
        for end in ("lora_a", "lora_b"):
            pair = reduce(getitem, f"decoder.layers.{matrix}.kernel_{end}".split("."), tree)
            assert pair.keys() == {"value"}
    metadata = json.loads((kept / "0" / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    assert metadata == {"scan_layers": True, "lora": {"lora_rank": RANK, "lora_alpha": ALPHA}}
    assert "lora.lora_restore_path=OUT/0/items" in (kept / "README.md").read_text()


def test_both_forms_of_names_come_back(kept: Path, hf, tmp_path: Path) -> None:
    """As in the state of a model, which MaxText restores, and as its `save_checkpoint` writes them."""
    tree: dict[str, Any] = {}
    for matrix in MATRICES:
        for end in ("lora_a", "lora_b"):
            name = f"decoder.layers.{matrix}.kernel_{end}"
            values = reduce(getitem, name.split("."), trained_tree(kept))["value"]
            tree = changed_leaf(tree, f"params.params.{name}", values)
            tree = changed_leaf(tree, f"opt_state.mu.params.{name}", np.zeros_like(values))  # of adam_pax
    step_of(tmp_path / "run", tree | {"step": np.int32(3)}, {"lora": {"lora_alpha": ALPHA}})
    for run in (kept, tmp_path / "run"):
        done = api.export(run, tmp_path / "back", config=hf(QWEN3), adapter=True, overwrite=True)
        assert done.target == "maxtext"
        assert_same(weights(tmp_path / "back"), weights(tmp_path / "lora"))
        config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)


def test_pairs_of_several_ranks_get_the_one_that_maxtext_has(hf, tmp_path: Path) -> None:
    """Its settings have one rank, and changes stay what they are."""
    ranks = {
        "rank_pattern": {"o_proj": 2, "layers.1.mlp.up_proj": 3},
        "target_modules": ["q_proj", "o_proj", "up_proj"],
    }
    adapter_of_peft(QWEN3, tmp_path / "lora", r=RANK, lora_alpha=ALPHA, **ranks)
    adapter = {"adapter": [str(tmp_path / "lora")]}
    api.convert(hf(QWEN3), tmp_path / "kept", target="maxtext", keep_adapter=True, **adapter)
    pairs = trained_tree(tmp_path / "kept")["decoder"]["layers_1"]
    found = [
        (pair["kernel_lora_a"]["value"].shape[-1], pair["kernel_lora_b"]["value"].shape[0])
        for pair in (pairs["self_attention"]["out"], pairs["mlp"]["wi_1"])
    ]
    assert found == [(RANK, RANK)] * 2
    api.export(tmp_path / "kept", tmp_path / "back", config=hf(QWEN3), adapter=True)
    merged = []
    for name in ("lora", "back"):
        out = tmp_path / f"{name}-merged"
        api.convert(hf(QWEN3), out, target="huggingface", adapter=[str(tmp_path / name)])
        merged.append(read_tensors(out))
    for name, values in merged[0].items():
        np.testing.assert_allclose(merged[1][name], values, rtol=1e-5, atol=1e-6)


def test_an_adapter_of_some_layers_comes_back_with_pairs_for_all_that_are_scanned(hf, tmp_path: Path) -> None:
    """They are one array: the other layers get pairs of zeros."""
    adapter_of_peft(QWEN3, tmp_path / "lora", r=RANK, target_modules=["q_proj"], layers_to_transform=[1])
    options = {"target": "maxtext", "scan_layers": True, "adapter": [str(tmp_path / "lora")]}
    api.convert(hf(QWEN3), tmp_path / "kept", keep_adapter=True, **options)
    api.export(tmp_path / "kept", tmp_path / "back", config=hf(QWEN3), adapter=True)
    before, after = weights(tmp_path / "lora"), weights(tmp_path / "back")
    assert_same({name: after[name] for name in before}, before)
    others = after.keys() - before.keys()
    assert {name.partition(".self_attn")[0].rpartition(".")[2] for name in others} == {"0"}
    assert not any(np.any(after[name]) for name in others)


@pytest.mark.parametrize("custom_metadata", [None, {}, {"lora": {"lora_rank": 4}}, {"lora": "yes"}], ids=str)
def test_an_alpha_that_is_not_recorded_must_be_given(custom_metadata: object, kept: Path, hf, tmp_path: Path) -> None:
    step_of(tmp_path / "run", trained_tree(kept), custom_metadata)
    with pytest.raises(UsageError, match=r"`adapter=` needs `lora_alpha=`, which .*/run/1/items does not record"):
        api.export(tmp_path / "run", tmp_path / "back", config=hf(QWEN3), adapter=True)
    api.export(tmp_path / "run", tmp_path / "back", config=hf(QWEN3), adapter=True, lora_alpha=ALPHA)
    assert_same(weights(tmp_path / "back"), weights(tmp_path / "lora"))


@pytest.mark.parametrize("option", ["adapter", "merge"])
def test_another_alpha_than_the_recorded_one_is_refused(option: str, kept: Path, hf, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is 16, and .* records 8 as the alpha of its training") as error:
        api.export(kept, tmp_path / "back", config=hf(QWEN3), lora_alpha=2 * ALPHA, **{option: True})
    assert error.value.hint == "leave out `lora_alpha=`"
    api.plan_export(kept, config=hf(QWEN3), adapter=True, lora_alpha=ALPHA)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ('{"custom_metadata": 3}', "custom_metadata must be an object")]
)
def test_damaged_metadata_are_named(text: str, message: str, kept: Path, hf, tmp_path: Path) -> None:
    (kept / "0" / "_CHECKPOINT_METADATA").write_text(text)
    with pytest.raises(SourceError, match=rf"0/_CHECKPOINT_METADATA\S* {message}"):
        api.export(kept, tmp_path / "back", config=hf(QWEN3), adapter=True)

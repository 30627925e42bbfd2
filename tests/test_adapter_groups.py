"""Adapters of modules whose matrices a release joins, splits or orders in another way than transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.adapted import adapted, exported, saved
from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same
from helpers.families import FIRST, hf_model
from helpers.sights import SIGHTS

FAST = ("kimi_k25", "sarvam_moe")
ENCODERS = ("hy_v4_vl", "kimi_k25", "lfm3_vl", "minimax_m3_vl", "mistral_large4", "molmo2", "qianfan_ocr", "step3p7")
TEXTS = {
    "hrm_text": ("gate_proj", "q_proj", "v_proj", "up_proj"),
    "minimax_m3_vl": ("gate_up_proj",),
    "molmo2": ("q_proj", "v_proj", "up_proj"),
    "sarvam_moe": ("q_proj", "k_proj", "v_proj"),
}
"""Modules of text models that lie in other tensors of releases, not always all of a tensor."""


def some(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in names]


def assert_merged(model: Any, folder: Path, **options: Any) -> None:
    """A conversion with a random adapter equals what peft merges."""
    model.to(torch.bfloat16).save_pretrained(folder / "hf")
    theirs = adapted(folder / "hf", folder / "lora", 0, type(model), torch.bfloat16, **options)
    merged, before = saved(theirs, folder / "merged"), read_tensors(folder / "hf")
    ours = exported(folder / "hf", folder, str(folder / "lora"))
    moved = {
        name: tensor
        for name, tensor in merged.items()
        if tensor.shape == before[name].shape and not np.array_equal(tensor, before[name])
    }
    assert len(moved) >= 2
    recut = {name for name in ours if ours[name].shape != before[name].shape}  # of an embedding in two tensors
    want = {**before, **moved}
    assert_same(*({name: x for name, x in tensors.items() if name not in recut} for tensors in (ours, want)))


@pytest.mark.parametrize("name", some(ENCODERS))
def test_an_encoder_of_other_tensors(name: str, tmp_path: Path) -> None:
    model = SIGHTS[name]().model
    linear = [each for each, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    own = [each for each in linear if "language_model" not in each and each != "lm_head"]
    assert_merged(model, tmp_path, target_modules=own)


@pytest.mark.parametrize("with_magnitudes", [False, True])
@pytest.mark.parametrize("family", some(TEXTS))
def test_a_text_model_of_other_tensors(family: str, with_magnitudes: bool, tmp_path: Path) -> None:
    """With DoRA too, which scales the rows of some modules in a tensor."""
    assert_merged(hf_model(FIRST[family]), tmp_path, target_modules=list(TEXTS[family]), use_dora=with_magnitudes)


@pytest.mark.parametrize("family", some(["sarvam_moe"]))
def test_modules_of_other_alphas_and_ranks(family: str, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    assert_merged(hf_model(FIRST[family]), tmp_path, target_modules=list(TEXTS[family]), **patterns)

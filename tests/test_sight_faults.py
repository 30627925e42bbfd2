"""A model that sees or hears is broken in one place at a time: the cases of `helpers.sights` show each fault."""

from collections.abc import Mapping
from typing import Any

import jax
import pytest

import tpuconv
from helpers.sights import SIGHTS
from helpers.tower_faults import of_functions, of_kernels, of_texts
from helpers.whole_sights import made

FOUND = 2e-5
"""Twice the tolerance of features, so that broken ones are farther from the reference's than the tolerance."""

PLACES = "columns of places first: vision"
HIDDEN: Mapping[str, tuple[str, ...]] = {
    # angles or places are computed, and no layer turns its heads
    **dict.fromkeys(("cosmos3_edge", "hy_v4_vl", "hy_v4_vl_with_bicubic_positions"), ("angles: vision", PLACES)),
    # images do not move later tokens
    **dict.fromkeys(("hunyuan_vl", "hunyuan_vl_of_three_axes"), ("angles: vision", PLACES, "no delta in the cache")),
    # images enter behind the first layer
    "granite4_vision_of_means": ("the feature before",),
    **dict.fromkeys(("lfm2_vl", "lfm2_vl_without_norm"), (PLACES,)),
    # a sound fills a chunk; that of qwen3_omni_moe_of_short_sounds does not
    "qwen3_omni_moe": ("no silence behind chunks: audio",),
    # a frame sees those before it alone, and padding is behind the sound
    "gemma3n": ("no mask of keys or frames: audio",),
    # all chunks have the same length
    "qwen3_asr": ("no silence behind chunks: audio",),
    # distances of one axis are interpolated
    **dict.fromkeys(("deepseek_ocr2", "deepseek_ocr2_of_large_images"), ("columns of positions first: vision",)),
    **dict.fromkeys(("deepseek_ocr", "deepseek_ocr_without_tiles"), ("columns of positions first: vision",)),
    # only squares are interpolated, to squares
    **dict.fromkeys(("deepseek_vl_hybrid", "step3p7", "step_robotics"), ("columns of positions first: vision",)),
    "step3p5v": ("columns of positions first: vision",),
}
"""By case the faults that change nothing in its encoder, whichever images it gets."""


def hidden(found: Mapping[str, float]) -> list[str]:
    return sorted(fault for fault, away in found.items() if away <= FOUND)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGHTS)
def test_each_fault_is_found(name: str, whole: Any) -> None:
    case, model = made(name), tpuconv.load(whole(name)[1])
    found = {**of_kernels(case, model), **of_functions(case, model), **of_texts(case, model)}
    jax.clear_caches()  # each operation is a program, and a process has not room for those of all cases
    assert hidden(found) == sorted(HIDDEN.get(name, ()))


@pytest.mark.parametrize(
    "fault", ["columns of patches first", "columns of blocks first", "no mask of images", "tanh in GELU"]
)
def test_a_fault_of_an_encoder_is_found(fault: str, whole: Any) -> None:
    found = of_functions(made("qwen3_vl"), tpuconv.load(whole("qwen3_vl")[1]), [fault])
    assert len(found) == 1
    assert not hidden(found)


@pytest.mark.parametrize("fault", ["no delta in the cache", "no deep features"])
def test_a_fault_of_the_text_is_found(fault: str, whole: Any) -> None:
    found = of_texts(made("qwen3_vl"), tpuconv.load(whole("qwen3_vl")[1]), [fault])
    assert len(found) == 1
    assert not hidden(found)

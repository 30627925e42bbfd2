"""Multimodal models in bfloat16, as far from transformers' float32 as transformers' own bfloat16 is."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import tpuconv
from helpers.sights import SIGHTS, Sight
from helpers.whole_sights import logits, made
from tpuconv.verify.logits import ROUNDINGS, compare_logits
from tpuconv.verify.reference_calls import mended

BATCHES = 32
"""Where experts are chosen, or attention is sharp, one rounding moves the logits of few tokens by much, of ours or of
the reference's: the ratio of single batches is between 0.01 and 16."""


def batches(case: Sight) -> Iterator[Sight]:
    """The case with other words, and with other signs of its images and sounds. Padding, which is 0, stays."""
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        rows = [[token if token >= 90 else int(rng.integers(4, 90)) for token in row] for row in case.rows]
        floats = {name: x for name, x in case.features.items() if x.dtype == np.float32}
        signed = {name: (x * rng.choice([-1, 1], x.shape)).astype(np.float32) for name, x in floats.items()}
        yield replace(case, rows=rows, features={**case.features, **signed})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SIGHTS if name != "kimi_k3"])  # whose reference is in float64
def test_bfloat16_errs_no_more_than_twice_as_much_as_transformers_does(name, whole, tmp_path, record_property):
    case, model = made(name), tpuconv.load(whole(name)[1], "bfloat16")
    case.model.save_pretrained(tmp_path)

    def read(dtype: torch.dtype) -> Any:
        # Not by the class's own function: Qwen2.5-Omni's reads voices too.
        ways = {"attn_implementation": "eager", "experts_implementation": "eager", "config": case.model.config}
        return mended(PreTrainedModel.from_pretrained.__func__(type(case.model), tmp_path, dtype=dtype, **ways).eval())

    exact, rounded = read(torch.float32), read(torch.bfloat16)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    texts, expected, theirs, ours = [], [], [], []
    for batch in batches(case):
        mask_BT = batch.mask_BT
        texts += batch.rows
        for found, read_by in ((expected, exact), (theirs, rounded)):
            reference_BTV = replace(batch, model=read_by).reference(batch.ids_BT, mask_BT, batch.features)
            found += [row[mask] for row, mask in zip(reference_BTV, mask_BT, strict=True)]
        seen = logits(batch, model).astype(np.float32)
        ours += np.split(seen, np.cumsum([len(row) for row in batch.rows])[:-1])
    kl, their_kl = (compare_logits(texts, expected, found, "bfloat16", {}).mean_kl for found in (ours, theirs))
    record_property("KL in bfloat16", kl)
    record_property("of transformers", their_kl)
    assert kl <= ROUNDINGS * their_kl

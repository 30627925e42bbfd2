"""The encoders of VibeVoice-ASR: chunks of long sounds, and features that are refused."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.whole_sights import made
from tpuconv.errors import UsageError


@pytest.fixture(scope="module")
def encoder(whole) -> Any:
    model: Any = tpuconv.load(whole("vibevoice_asr")[1])
    return model.audio


def features(encoder: Any, values: np.ndarray) -> np.ndarray:
    prepared = encoder.prepare({"input_values": values})
    return np.asarray(encoder(*prepared.arrays)[0]).reshape(-1, encoder.projector.acoustic.last.kernel.shape[-1])


@pytest.mark.slow
def test_features_of_chunks_are_those_of_whole_sounds(encoder, monkeypatch):
    values = np.random.default_rng(0).standard_normal((1, 1, 12 * 21), np.float32)
    want = features(encoder, values)[:21]
    for chunk in (12, 36, 60):
        monkeypatch.setattr(encoder, "chunk", chunk)
        np.testing.assert_allclose(features(encoder, values)[:21], want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_a_long_sound_needs_the_memory_of_a_chunk(encoder, monkeypatch):
    monkeypatch.setattr(encoder, "chunk", 12 * 256)
    graph, state = nnx.split(encoder)

    def working_bytes(chunks: int) -> int:
        samples = jax.ShapeDtypeStruct((1, chunks * 12 * 256), np.float32)
        compiled = jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0]).lower(state, samples).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert working_bytes(16) < 1.5 * working_bytes(1)


def test_lengths_are_few_and_not_much_longer(encoder, monkeypatch):
    monkeypatch.setattr(encoder, "chunk", 64 * 12)
    lengths = {count: encoder.padded_length(count) for count in range(1, 64 * 64)}
    assert all(length >= 12 * count for count, length in lengths.items())
    assert all(length < 12 * count * 9 / 8 + 64 * 12 for count, length in lengths.items() if count > 64)
    assert len(set(lengths.values())) == 2 + 16 + 2 * 8  # less than a chunk, to 16 chunks, to 32 and to 64


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"input_values": np.ones((2, 1, 30))}, "30 samples, no multiple of 12"),
        ({"input_values": np.ones((2, 2, 24))}, "2 channels, not one"),
        ({"input_values": np.ones((2, 24)), "padding_mask": np.ones((1, 24))}, "padding_mask has shape (1, 24)"),
        ({}, "the feature input_values is missing"),
    ],
)
def test_features_that_do_not_fit_are_refused(encoder, given, fault):
    with pytest.raises(UsageError, match=re.escape(fault)):
        encoder.prepare(given)


def test_random_numbers_of_the_reference_are_left_out():
    case = made("vibevoice_asr")
    first, second = (case.reference(case.ids_BT, case.mask_BT, case.features) for _ in range(2))
    assert (first == second).all()

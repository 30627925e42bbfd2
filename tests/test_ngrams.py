"""Embeddings of n-grams: numbers as transformers computes them with integers of 64 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from helpers.families import BY_ID
from tpuconv.errors import ConfigError
from tpuconv.models.common.hashed_ngrams import ngram_numbers, remainders, wide_product
from tpuconv.models.longcat_flash_ngram.family import Config as LongcatConfig
from tpuconv.models.longcat_flash_ngram.modules import last_tokens, numbers_of_ngrams
from tpuconv.models.qwen4_exp_text.family import Config
from tpuconv.models.registry import find_family

numbers = jax.jit(ngram_numbers, static_argnums=(1, 2))
QWEN_3_8_FLASH_NEXT = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048},
    **{"model_type": "qwen4_exp_text", "hidden_size": 2560, "partial_rotary_factor": 0.25, "ple_layer_ids": [2]},
    **{"indexer_compress_ratio": 4, "split_ngram_parts": 128, "eos_token_id": 248044},
}


def test_products_and_remainders_of_64_bits() -> None:
    rng = np.random.default_rng(0)
    factor, divisors = 0xFEDCBA9876543211, (2, 3, 20_000_003, (1 << 31) - 1)
    x = rng.integers(0, 1 << 32, 50, dtype=np.uint64)
    products = [int(value) * factor % (1 << 64) for value in x]
    words = jax.jit(wide_product, static_argnums=1)(jnp.asarray(x.astype(np.uint32)), factor)
    assert [(int(high) << 32) + int(low) for high, low in zip(*words, strict=True)] == products
    words = tuple(word[:, None] for word in words)
    assert jax.jit(remainders, static_argnums=1)(words, divisors).tolist() == [
        [value % by for by in divisors] for value in products
    ]


@pytest.mark.parametrize("layer", [0, 2])
def test_numbers_are_those_of_transformers(layer: int) -> None:
    """Of a text with several ends, of which one is the last token and two follow one another."""
    hf = BY_ID["qwen4_exp_text-two-tables"].hf_config()
    raw = hf.to_diff_dict()
    config = find_family(raw).config.from_hf(raw)
    module = theirs.Qwen4ExpTextNGramEmbedding(hf, config.ngram_width, layer, config.ngram_layers.index(layer))
    seen: list[torch.Tensor] = []
    module.ngram_embedding.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    ids = np.random.default_rng(1).integers(0, 101, (2, 40))
    ids[0, [7, 8, 20, 39]] = 50
    with torch.no_grad():
        module(torch.tensor(ids), None)
    before = np.full((2, config.ngram_size - 1), 50)
    ours = numbers(jnp.asarray(np.concatenate([before, ids], 1)), config.ngram_hash(layer), 50)
    assert (np.asarray(ours) == seen[0].numpy()).all()
    assert len(module.ngram_embedding.weight) == config.ngram_hash(layer).rows


def test_numbers_of_a_release() -> None:
    """Qwen3.8-Flash-Next: its table has 128 parts of 2,500,012 vectors."""
    config = Config.from_hf(QWEN_3_8_FLASH_NEXT)
    numbering = config.ngram_hash(1)
    assert (config.sizes["part_ngrams"], config.sizes["ngram_dim"], numbering.rows) == (2_500_012, 160, 320_001_536)
    assert list(numbering.multipliers) == theirs._build_layer_multipliers(248320, 3, 0, 1234).tolist()
    assert numbering.sizes[-1] == theirs._find_nth_prime_after(19_999_999, 16)
    ids = [248044, 248044, 248319, 5, 248043]
    (own,) = np.asarray(numbers(jnp.asarray([ids]), numbering, 248044)).tolist()
    for place, (token, last, older) in enumerate(zip(ids[2:], ids[1:], ids, strict=False)):
        words = [x * by for x, by in zip((token, last, older), numbering.multipliers, strict=True)]
        mixed = [words[0] ^ words[1]] * 8 + [words[0] ^ words[1] ^ words[2]] * 8
        sized = zip(mixed, numbering.sizes, numbering.starts, strict=True)
        assert own[place] == [word % size + start for word, size, start in sized]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ple_layer_ids": [4]}, "ple_layer_ids has 4: no layer with linear attention"),
        ({"ple_layer_ids": [41]}, "ple_layer_ids has 41: no layer with linear attention"),
        ({"ple_embed_dim": 100}, "ple_embed_dim=100 is not a multiple of 16"),
        ({"eos_token_id": None}, "needs an eos_token_id in the vocabulary, not None"),
        ({"split_ngram_parts": 3}, "split_ngram_parts=3 does not divide the 320001536 n-grams"),
        ({"ple_layer_ids": [1, 2]}, "layers with tables of 320001536, 320005120 n-grams each are not implemented"),
        ({"ngram_vocab_size_base": 1 << 30}, "gives more than 2147483647 n-grams"),
        ({"heads_per_ngram": 4096, "ngram_vocab_size_base": 2}, "more than 4096 hashes"),
        ({"indexer_budget": 2047}, "indexer_budget=2047 is not a multiple of indexer_compress_ratio=4"),
        ({"indexer_head_dim": 32}, "indexer_head_dim=32 has no room for 64 rotary dimensions"),
        ({"hc_count": 1}, "hc_count=1 is less than 2"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary positions of the type 'dynamic'"),
    ],
)
def test_what_is_no_model_is_refused(given: dict[str, object], message: str) -> None:
    raw = QWEN_3_8_FLASH_NEXT | {"ple_embed_dim": 2560}
    with pytest.raises(ConfigError) as error:
        Config.from_hf(raw | given)
    assert any(message in line for line in error.value.details), error.value.details


LITE = LongcatConfig.from_hf(
    {
        **{"model_type": "longcat_flash_ngram", "vocab_size": 131072, "hidden_size": 3072, "eos_token_id": 2},
        **{"ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4},
    }
)


def longcat_rows(text: list[int], config: Any) -> list[int]:
    """The row of each table, by Python's integers: the n-gram that ends with the last token of a text."""
    seen = [0] * 64 + text
    ended = False
    tokens = [seen[-1]]
    for token in reversed(seen[:-1]):
        ended = ended or token == config.eos_token_id
        tokens.append(0 if ended else token)
    each = zip(config.ngram_rows, config.ngram_lengths, strict=True)
    return [sum(t * config.vocab_size**d for d, t in enumerate(tokens[:length])) % rows for rows, length in each]


def test_rows_of_longcat_flash_lite() -> None:
    """Of a text whose first, last and two middle tokens are ends. Its 4-grams are numbers of 68 bits."""
    text = [2, 130000, 131071, 131071, 131071, 131071, 11, 2, 2, 44, 0, 7, 131000, 2]
    ids_BT = jnp.asarray([text])
    ids_BTn = last_tokens(jnp.arange(len(text))[None], ids_BT, jnp.arange(len(text))[None], 4, 2)
    rows = np.asarray(jax.jit(numbers_of_ngrams, static_argnums=1)(ids_BTn, LITE))[0]
    assert rows.tolist() == [longcat_rows(text[: end + 1], LITE) for end in range(len(text))]


def test_tokens_before_others_are_found_by_their_positions() -> None:
    """Where slots of a cache have padding or drafts that were not accepted between them."""
    slots = [9, 9, 5, 9, 6, 7, 9, 8]
    positions = [-1, -1, 0, -1, 1, 2, -1, 3]
    found = last_tokens(jnp.asarray([[3, -1, 1]]), jnp.asarray([slots]), jnp.asarray([positions]), 3, 6)
    assert found[0, 0].tolist() == [8, 7, 0]  # 6 is an end
    assert found[0, 2].tolist() == [6, 5, 0]  # which sees what is before it

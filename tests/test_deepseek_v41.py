"""DeepSeek V4.1 as it is released: its encodings, what is beside the text model, and the numbers of its tokens."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import restore, same_bits
from helpers.encoded import dequantized, encode_fp8
from helpers.families import BY_ID, Case, hf_model, save
from helpers.released import DEEPSEEK_V41_ENCODING
from helpers.schemes import FP4
from tpuconv import api
from tpuconv.errors import ConfigError, CorruptOutput
from tpuconv.models.deepseek_v41.token_ids import joined_ids
from tpuconv.models.registry import find_family, get_family
from tpuconv.notation.sharding import partition

LIMIT = 2e-5
IDS_BT = np.random.default_rng(1).integers(3, 101, (2, 27))
E8M0 = ml_dtypes.float8_e8m0fnu
PLAIN = BY_ID["deepseek_v41-plain"]
WIDE = replace(
    PLAIN,
    id="deepseek_v41-wide",
    config={
        **PLAIN.config,
        **{"hidden_size": 64, "intermediate_size": 32, "head_dim": 32, "index_head_dim": 32, "q_lora_rank": 48},
        **{"o_lora_rank": 32, "engram_head_dim": 32},
    },
)
"""With groups of 32 inputs, and blocks of 32x32 of which some are cut off."""
OTHERS = {
    **{"vision.patch_embed.proj.weight": (4, 6), "aligner.w1.weight": (4, 4), "image_start": (64,)},
    **{"image_end": (64,), "image_newline": (64,), "image_pad": (64,), "layers.3.ffn.gate.bias_vl": (12,)},
    **{"mtp.0.attn.wq_a.weight": (48, 64), "mtp.2.markov_head.embed.weight": (101, 8)},
}
"""Tensors beside the text model."""


def as_released(plain: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Writes a model in the encodings of the release, inside `text_config`, beside other parts; returns the encoded
    matrices as they are decoded."""
    rng, tensors, values = np.random.default_rng(0), {}, {}
    for name, x in read_tensors(plain).items():
        base, part = name.removesuffix(".weight"), name.split(".")[-2:][0]
        if ".experts." in name:
            codes = rng.integers(0, 16, x.shape).astype(np.uint8)
            scales = (2.0 ** rng.integers(-6, -3, (len(x), x.shape[1] // 32))).astype(E8M0)
            tensors |= {name: (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8), f"{base}.scale": scales}
            values[name] = FP4[codes] * np.repeat(scales.astype("f4"), 32, 1)
        elif part in ("wq_a", "wq_b", "wo_a", "wo_b", "w1", "w2", "w3") or name.endswith(
            ("attn.wkv.weight", "engram.wkv.weight", "engram.embed.weight")
        ):
            block = (1 if "embed" in name else 32, 32)
            tensors[name], tensors[f"{base}.scale"], values[name] = encode_fp8(x, block, E8M0)
        else:
            tensors[name] = x
    tensors |= {name: rng.normal(size=shape).astype("f4") for name, shape in OTHERS.items()}
    text = json.loads((plain / "config.json").read_text())
    config = {
        **{"architectures": text.pop("architectures"), "model_type": text.pop("model_type")},
        **{"text_config": text | {"model_type": "deepseek_v41_text"}, "vision_config": {"num_hidden_layers": 1}},
        **{"image_token_id": 100, "quantization_config": DEEPSEEK_V41_ENCODING},
    }
    write_checkpoint(folder, config, tensors, 3)
    return {name: torch.tensor(np.asarray(x, np.float32)) for name, x in values.items()}


def reference(case: Case, values: dict[str, torch.Tensor], joined: list[int] | None = None) -> np.ndarray:
    """The logits of the model of a case with other matrices, or with tokens that n-grams do not tell apart."""
    model = hf_model(case)
    assert not model.load_state_dict(values, strict=False).unexpected_keys
    model.joined = joined
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor(IDS_BT)).logits.numpy()
    return logits


def assert_same(ckpt: Path, want: np.ndarray) -> None:
    model: Any = tpuconv.load(ckpt, jnp.float32)
    have = np.asarray(model(jnp.asarray(IDS_BT)))
    assert np.abs(have - want).max() < LIMIT * np.abs(want).max()


@pytest.mark.slow
def test_the_encodings_of_the_release(tmp_path: Path) -> None:
    """FP8 in blocks of 32x32, experts in FP4, tables of n-grams in FP8 by groups of 32: the logits of decoded weights,
    the same of kept ones, and every byte back from these."""
    save(WIDE, tmp_path / "saved")
    values = as_released(tmp_path / "saved", tmp_path / "src")
    kinds = [name.split(".", 2)[-1] for name in values]
    assert kinds.count("engram.embed.weight") == 2
    assert len(values) == 6 * (5 + 3 + 12 * 3) + 3 + 2 * 2
    want = reference(WIDE, values)
    api.convert(tmp_path / "src", tmp_path / "plain")
    assert_same(tmp_path / "plain", want)
    api.convert(tmp_path / "src", tmp_path / "kept", encoding="keep")
    assert_same(tmp_path / "kept", want)
    have, plain = dequantized(restore(tmp_path / "kept")), restore(tmp_path / "plain")
    assert not [name for name in plain if not same_bits(have[name], plain[name])]
    api.export(tmp_path / "kept", tmp_path / "back", with_skipped=tmp_path / "src")
    source, back = read_tensors(tmp_path / "src"), read_tensors(tmp_path / "back")
    assert back.keys() == source.keys()
    assert not [name for name in back if not same_bits(back[name], source[name])]


WORDS = ["<pad>", "The", " the", "THÉ", "the ", " ", "  \n", "a b", "A\tB", "", "x", "X\ufffd", "x\ufffd"]
NUMBERS = [0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7]
"""Tokens, and the numbers that n-grams have for them: only white space is no empty text, and parts of characters are
told apart."""


def write_tokenizer(folder: Path) -> list[int]:
    """Writes a tokenizer of 101 tokens; returns their numbers, of which there are 96."""
    words = [*WORDS, *(f"w{i}" for i in range(101 - len(WORDS)))]
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, "<pad>")).save(str(folder / "tokenizer.json"))
    return [*NUMBERS, *range(8, 8 + 101 - len(WORDS))]


def test_tokens_that_ngrams_do_not_tell_apart(tmp_path: Path) -> None:
    numbers = write_tokenizer(tmp_path)
    contents = (tmp_path / "tokenizer.json").read_bytes()
    assert np.frombuffer(joined_ids(contents, 103, 96), np.int32).tolist() == [*numbers, 0, 0]
    with pytest.raises(ConfigError, match=r"has 96 tokens that n-grams tell apart, and config\.json has"):
        joined_ids(contents, 101, 99092)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        joined_ids(b"{}", 101, 96)


@pytest.mark.slow
def test_ngrams_of_joined_tokens(tmp_path: Path) -> None:
    """The checkpoint's tokenizer.json numbers them; without it the model is not loaded."""
    case = replace(PLAIN, config={**PLAIN.config, "engram_compressed_vocab_size": 96, "engram_pad_token_id": 7})
    save(case, tmp_path / "src")
    numbers = write_tokenizer(tmp_path / "src")
    api.convert(tmp_path / "src", tmp_path / "out")
    want = reference(case, {}, numbers)
    assert np.abs(reference(case, {}) - want).max() > 100 * LIMIT * np.abs(want).max()
    assert_same(tmp_path / "out", want)
    (tmp_path / "out" / "tokenizer.json").unlink()
    with pytest.raises(CorruptOutput, match=r"tokenizer\.json"):
        tpuconv.load(tmp_path / "out")


def test_tables_of_ngrams_are_sharded() -> None:
    """By the elements of vectors, whose number has few divisors in the release."""
    (row,) = (row for row in get_family("deepseek_v41").table if row.jax_names[0].endswith("table.embedding"))
    assert partition(row.layout, (384016682, 256), {"data": 2, "tensor": 16}) == (None, "tensor")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compress_ratios": [0, 0, 2, 2, 1]}, "compress_ratios has 5 numbers for 6 layers"),
        ({"compress_ratios": [0, 0, 2, 2, 1, -1]}, "compress_ratios has -1, not 0 to"),
        ({"compress_ratios": [0, 0, 2, 1, 1, 1]}, "layer 3 has no layer of kv_source_layer_ids with the same"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1]}, "layer 1 has no layer of kv_source_layer_ids with the same"),
        ({"compress_ratios": [0, 0, 2, 2, 1, 0]}, "compress_ratios is 0 for layer 5, which makes or selects"),
        ({"kv_source_layer_ids": [4, 2]}, "kv_source_layer_ids are not numbers of layers in their order"),
        ({"index_source_layer_ids": [2, 5]}, "index_source_layer_ids lacks layer 4 of kv_source_layer_ids"),
        ({"candidate_source_layer_id": 3}, "candidate_source_layer_id=3 is not in index_source_layer_ids"),
        ({"candidate_source_layer_id": 2}, "layers after candidate_source_layer_id=2 have other compress_ratios"),
        ({"candidate_topk_blocks": 1}, "candidate_topk_blocks=1 may hold fewer keys than index_topk"),
        ({"engram_num_embeddings": [255]}, "engram_num_embeddings has not one number for each layer"),
        ({"engram_num_embeddings": [251, 410]}, "engram_num_embeddings=251 of layer 1 is less than the 252 hashes"),
        ({"engram_num_embeddings": [255, 1 << 31]}, "engram_num_embeddings=2147483648 is more than"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size=1 is less than 2"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is less than 2"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], why: str) -> None:
    raw = PLAIN.hf_config().to_diff_dict()
    with pytest.raises(ConfigError, match=re.escape(why)):
        find_family(raw).config.from_hf(raw | changes)

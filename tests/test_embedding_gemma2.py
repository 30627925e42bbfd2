"""EmbeddingGemma 2, which returns embeddings of tokens, against transformers."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.conversions import same_bits
from helpers.quantizing import leaves
from helpers.sights import SIGHTS, tiny
from helpers.sights_sounds import GEMMA4_TOKENS, limited
from tpuconv import api
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.quantize.config import find_config
from tpuconv.quantize.provider import Provider, quantized

TEXT = {
    "vocab_size": 103,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 12,
    "num_global_key_value_heads": 1,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 10,
    "embedding_dim": 14,
    "max_position_embeddings": 64,
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"num_global_key_value_heads": 2, "embedding_dim": 30, "sliding_window": 5, "rms_norm_eps": 1e-3},
    {"global_head_dim": 8, "num_global_key_value_heads": 2, "num_hidden_layers": 3, "layer_types": None},
]
"""The last one has layers of one size, which config.json does not describe apart."""
RNG = np.random.default_rng(3)
IDS_BT = RNG.integers(3, 100, (2, 13))


def save_text(folder: Path, **changes: Any) -> Any:
    """Saves a text model; returns that of transformers."""
    from transformers import AutoModel, EmbeddingGemma2TextConfig

    model = tiny(AutoModel, EmbeddingGemma2TextConfig(**{**TEXT, **changes}))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def theirs(model: Any, ids_BT: np.ndarray, mask_BT: np.ndarray, **features: np.ndarray) -> np.ndarray:
    """The embeddings [B, T, sentence_dim] of transformers."""
    import torch

    arrays = {name: torch.tensor(x) for name, x in features.items()}
    with torch.no_grad():
        out = model(input_ids=torch.tensor(ids_BT), attention_mask=torch.tensor(mask_BT.astype(int)), **arrays)
    return out.last_hidden_state.numpy()


def largest_error(ours: Any, reference: np.ndarray, mask_BT: np.ndarray) -> float:
    """The largest error of the embeddings of tokens, by the largest value."""
    return float(np.abs((np.asarray(ours) - reference)[mask_BT]).max() / np.abs(reference).max())


@pytest.mark.parametrize("changes", CHANGES, ids=["plain", "two-heads", "one-size"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_embeddings_of_texts(changes: dict[str, Any], side: str, tmp_path: Path) -> None:
    reference = save_text(tmp_path / "hf", **changes)
    mask_BT = np.ones(IDS_BT.shape, bool)
    if side != "none":
        mask_BT[1, slice(0, 4) if side == "left" else slice(9, None)] = False
    model = tpuconv.load(tmp_path / "hf", dtype="float32")
    ours = model(jnp.asarray(IDS_BT), jnp.asarray(mask_BT))
    assert largest_error(ours, theirs(reference, IDS_BT, mask_BT), mask_BT) <= 1e-5


def test_what_is_made_of_a_checkpoint(tmp_path: Path) -> None:
    """The inverse gives each byte back, it is quantized to what Qwix makes of it, and transformers' model equals it."""
    save_text(tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out")
    api.verify(tmp_path / "out").check()
    api.export(tmp_path / "out", tmp_path / "back")
    back, source = read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf")
    assert back.keys() == source.keys()
    assert not [name for name in source if not same_bits(back[name], source[name])]
    api.compare(tmp_path / "out", dtype="float32").check()
    api.quantize(tmp_path / "out", tmp_path / "int8", config="int8_default")
    ours = leaves(tpuconv.load(tmp_path / "int8"))
    want = leaves(quantized(tpuconv.load(tmp_path / "out"), Provider(find_config("int8_default"))))
    assert ours.keys() == want.keys()
    assert any(name.endswith("qvalue") for name in ours)
    assert not [name for name, x in want.items() if not same_bits(ours[name], x)]
    with pytest.raises(UsageError, match="it has no cache"):
        tpuconv.load(tmp_path / "out", "float32").init_cache(1, 8)


@pytest.mark.parametrize("changes", [{"hidden_size_per_layer_input": 0}, {"hidden_activation": "silu"}], ids=str)
def test_what_no_release_has_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import EmbeddingGemma2TextConfig

    save_text(tmp_path / "hf")
    EmbeddingGemma2TextConfig(**{**TEXT, **changes}).save_pretrained(tmp_path / "hf")
    with pytest.raises(TpuconvError, match=f"(?s).*{next(iter(changes))}"):
        api.plan(tmp_path / "hf")


def test_embeddings_of_images_and_sounds(tmp_path: Path) -> None:
    """Those of Gemma 4's encoders; the checkpoint comes back whole."""
    from transformers import EmbeddingGemma2Config, EmbeddingGemma2Model

    case = SIGHTS["gemma4_with_sound"]()
    parts = {key: getattr(case.model.config, key).to_dict() for key in ("vision_config", "audio_config")}
    parts["vision_config"]["use_clipped_linears"] = False  # limits of random values turn one rounding into many
    config = EmbeddingGemma2Config(text_config={**TEXT, "pad_token_id": 3}, **parts, **GEMMA4_TOKENS)
    reference = limited(tiny(EmbeddingGemma2Model, config))
    reference.save_pretrained(tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out")
    model = tpuconv.load(tmp_path / "out", dtype="float32")
    ids_BT, mask_BT = case.ids_BT, case.mask_BT
    ours = model(jnp.asarray(ids_BT), jnp.asarray(mask_BT), seen=model.see(ids_BT, mask_BT, **case.features))
    assert largest_error(ours, theirs(reference, ids_BT, mask_BT, **case.features), mask_BT) <= 1e-5
    api.export(tmp_path / "out", tmp_path / "back")
    back, source = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "hf"))
    assert back.keys() == source.keys()
    assert all(back[name].tobytes() == source[name].tobytes() for name in source)

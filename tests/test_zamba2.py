"""Zamba 2 in spellings that transformers does not write: shared blocks that each of their layers has on disk, and keys
of older files."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import restore, same_bits
from helpers.families import BY_ID, save
from helpers.peft_models import adapter_of_peft, peft_logits
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, MappingError, TpuconvError, UnsupportedConfig
from tpuconv.models.logits import forward
from tpuconv.models.registry import get_family
from tpuconv.quantize.calibrate.layers import LayerRunner

CASE = BY_ID["zamba2-plain"]  # layers 1 and 2 hold the blocks, which layers 4, 5 and 6 run again
HOLDERS = {4: 1, 5: 2, 6: 1}
SHARED = "shared_transformer"
IDS_BT = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def config_of(**changes: Any) -> Any:
    raw = {**CASE.hf_config().to_dict(), "model_type": "zamba2"}
    return get_family("zamba2").config.from_hf({key: x for key, x in (raw | changes).items() if x != "absent"})


def with_copies(source: Path, folder: Path, noise: float = 0) -> Path:
    """A checkpoint whose layers each have their block on disk. `noise` is added to one of the copies."""
    tensors = read_tensors(source)
    for layer, holder in HOLDERS.items():
        front = f"model.layers.{holder}.{SHARED}."
        copies = {name.replace(f".{holder}.", f".{layer}.", 1): x for name, x in tensors.items() if front in name}
        tensors |= {name: x.copy() for name, x in copies.items()}
    tensors[f"model.layers.6.{SHARED}.self_attn.o_proj.weight"] += np.float32(noise)
    return write_checkpoint(folder, json.loads((source / "config.json").read_text()), tensors)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(CASE, tmp_path_factory.mktemp("zamba2"))


def test_blocks_that_each_layer_has_on_disk_are_compared(source: Path, tmp_path: Path) -> None:
    api.convert(source, tmp_path / "plain")
    api.convert(with_copies(source, tmp_path / "copies"), tmp_path / "out")
    arrays, others = restore(tmp_path / "plain"), restore(tmp_path / "out")
    assert arrays.keys() == others.keys()
    assert all(same_bits(arrays[name], others[name]) for name in arrays)
    with pytest.raises(TpuconvError, match=rf"layers\.6\.{SHARED}\.self_attn\.o_proj\.weight"):
        api.convert(with_copies(source, tmp_path / "other", 1e-3), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_an_adapter_has_the_pair_of_a_shared_matrix_for_each_layer(source: Path, tmp_path: Path) -> None:
    apart = adapter_of_peft(CASE, tmp_path / "apart", r=3, lora_alpha=6, target_modules=["q_proj", "linear"])
    with pytest.raises(MappingError) as caught:
        api.convert(source, tmp_path / "refused", adapter=apart)
    fault = "model.layers.1.shared_transformer.self_attn.q_proj.weight  is one matrix of 3 layers"
    assert fault in "".join(caught.value.details)

    alike = shutil.copytree(apart, tmp_path / "alike")
    pairs = load_file(alike / "adapter_model.safetensors")
    for layer, holder in HOLDERS.items():
        pairs |= {
            name.replace(f".{holder}.", f".{layer}."): x for name, x in pairs.items() if f".{holder}.{SHARED}" in name
        }
    save_file(pairs, alike / "adapter_model.safetensors")
    api.convert(source, tmp_path / "out", adapter=alike)
    have, want = forward(api.load(tmp_path / "out", "float32"), IDS_BT, "float32")(), peft_logits(CASE, alike, IDS_BT)
    assert np.abs(np.asarray(have) - want).max() <= 2e-5 * np.abs(want).max()


def test_layers_that_share_weights_are_not_calibrated(source: Path, tmp_path: Path) -> None:
    api.convert(source, tmp_path / "out")
    with pytest.raises(UnsupportedConfig, match="layers share the weights of attention"):
        LayerRunner(read_manifest(tmp_path / "out"), 8)


def test_older_files_are_read() -> None:
    older = {"linear_attention": "mamba", "hybrid": "hybrid"}
    kinds = [older[kind] for kind in CASE.config["layers_block_type"]]
    computed = dict.fromkeys(("attention_head_dim", "mamba_headdim", "hybrid_layer_ids"), "absent")
    read, whole = config_of(layers_block_type=kinds, layer_types="absent", **computed), config_of()
    assert (read.sizes, read.kinds, read.layer_sets) == (whole.sizes, whole.kinds, whole.layer_sets)
    assert config_of(intermediate_size=None).intermediate_size == 4 * CASE.hf_config().hidden_size


def test_the_layers_of_the_release_are_the_default() -> None:
    from transformers import Zamba2Config

    kinds = get_family("zamba2").config.from_hf({"model_type": "zamba2"}).kinds
    assert list(kinds) == Zamba2Config().layers_block_type


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"use_long_context": True}, UnsupportedConfig, "use_long_context"),
        ({"tie_word_embeddings": False}, UnsupportedConfig, "tie_word_embeddings"),
        ({"num_mem_blocks": 5}, ConfigError, "num_mem_blocks=5 is more than 4"),
        ({"hybrid_layer_ids": [0, 1]}, ConfigError, "hybrid_layer_ids"),
        ({"attention_hidden_size": 48}, ConfigError, "attention_hidden_size=48 is not 96"),
        (
            {"use_shared_attention_adapter": True, "num_key_value_heads": 2},
            ConfigError,
            "needs queries, keys and values",
        ),
        ({"mamba_headdim": 15}, ConfigError, "heads of 15"),
    ],
    ids=str,
)
def test_other_models_are_refused(changes: dict[str, Any], error: type[TpuconvError], text: str) -> None:
    with pytest.raises(error) as caught:
        config_of(**changes)
    assert text in str(caught.value) + str(caught.value.details)

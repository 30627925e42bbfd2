"""Transformers' model of a source: what it is compared as, and when nothing can be compared."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.families import FIRST, save
from tpuconv import api
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.logits import whole_texts
from tpuconv.verify.reference import reference

IDS = [[3, 9, 5, 20, 7]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "hf"
    save(FIRST["llama"], folder, "float32")
    return folder


def test_weights_that_transformers_does_not_find_are_named(source: Path, tmp_path: Path) -> None:
    """It fills in random numbers for them."""
    config, tensors = json.loads((source / "config.json").read_text()), read_tensors(source)
    renamed = {name.replace("model.layers.", "model.decoder.layers."): x for name, x in tensors.items()}
    write_checkpoint(tmp_path / "renamed", config, renamed)
    with pytest.raises(UnsupportedConfig, match=r"did not load \d+ weights of .*: nothing is said") as error:
        reference(tmp_path / "renamed", whole_texts(IDS), "float32")
    text = "\n".join(error.value.details)
    assert "model.decoder.layers.{0,1}.mlp.down_proj.weight: in the source" in text
    assert "model.layers.{0,1}.mlp.down_proj.weight: not found" in text


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "by layer"])
def test_names_with_segments_of_trainers_are_compared(source: Path, tmp_path: Path, *, layerwise: bool) -> None:
    config, tensors = json.loads((source / "config.json").read_text()), read_tensors(source)
    wrapped = {
        f"module._orig_mod.{n}".replace("layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module."): x
        for n, x in tensors.items()
    }
    write_checkpoint(tmp_path / "hf", config, wrapped)
    api.convert(tmp_path / "hf", tmp_path / "out")
    assert api.compare(tmp_path / "out", source=tmp_path / "hf", layerwise=layerwise).passed


def test_a_description_of_an_encoding_that_was_left_does_not_quantize_plain_weights(
    source: Path, tmp_path: Path
) -> None:
    left = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": left}
    write_checkpoint(tmp_path / "hf", config, read_tensors(source))
    found = reference(tmp_path / "hf", whole_texts(IDS), "float32").logits[0]
    np.testing.assert_array_equal(found, reference(source, whole_texts(IDS), "float32").logits[0])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_an_adapter_in_the_folder_is_applied_only_where_one_was_merged(source: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    both = Path(shutil.copytree(source, tmp_path / "both"))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(source), LoraConfig(target_modules=["q_proj"]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.fill_(0.1)
    model.save_pretrained(both)
    plain = reference(source, whole_texts(IDS), "float32").logits[0]
    np.testing.assert_array_equal(reference(both, whole_texts(IDS), "float32").logits[0], plain)
    assert np.abs(reference(both, whole_texts(IDS), "float32", adapted=True).logits[0] - plain).max() > 1e-3


def test_a_source_of_other_sizes_is_refused_before_anything_is_computed(source: Path, tmp_path: Path) -> None:
    api.convert(source, tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    sizes = {"num_hidden_layers": 3, "intermediate_size": 88}
    write_checkpoint(tmp_path / "deep", config | sizes, read_tensors(source))
    with pytest.raises(UsageError, match="deep is another model than the one in") as error:
        api.compare(tmp_path / "out", source=tmp_path / "deep")
    assert error.value.details == ("MLP width: 88 instead of 56", "layers: 3 instead of 2")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match="gpt2 is another model"):
        api.compare(tmp_path / "out", source=tmp_path / "gpt2")


@pytest.mark.slow
def test_weights_are_decoded_where_transformers_would_round_inputs_too(source: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((source / "config.json").read_text()), read_tensors(source)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = np.abs(tensors[name]).max(1, keepdims=True) / 127
        tensors |= {name: np.round(tensors[name] / scale).astype(np.int8), f"{name}_scale": scale}
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = kind | {"strategy": "channel", "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    told = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    write_checkpoint(tmp_path / "w8a8", config | {"quantization_config": told}, tensors)
    api.convert(tmp_path / "w8a8", tmp_path / "out")
    found = api.compare(tmp_path / "out")
    assert found.layers
    assert found.passed
    api.convert(tmp_path / "w8a8", tmp_path / "kept", encoding="keep")
    with pytest.raises(UsageError, match="not compared: transformers rounds the inputs"):
        api.compare(tmp_path / "kept")

"""Adapters of PEFT that change encoders and projectors of multimodal models, kept to be trained further."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file

from helpers.conversions import assert_same
from helpers.trainers import save_standard, trained_tree
from helpers.whole_sights import made
from tpuconv import api
from tpuconv.errors import MappingError, UnsupportedConfig
from tpuconv.models.common.saved import release_of_modules

TEXT = r"language_model\.layers.*\.(q_proj|down_proj)"
CHANGED = {
    "idefics2": r".*((vision_model|perceiver_resampler|text_model).*q_proj|modality_projection\.gate_proj)",
    "nemotron_h_omni": r".*(_patch_projection|language_model.*q_proj)",
    "gemma3": rf".*(vision_tower.*(k_proj|fc2)|{TEXT})",
    "llava": rf".*(vision_tower.*(q_proj|fc1)|multi_modal_projector\.linear_.|{TEXT})",
    "qwen3_vl": rf".*(visual\.blocks.*(qkv|attn\.proj|linear_fc1)|visual\.merger\.linear_fc.|{TEXT})",
}
"""By case, the modules of the encoder, the projector and the text model that its adapter changes."""
WEIGHTS = "adapter_model.safetensors"


def adapter_of(name: str, folder: Path, **options: Any) -> None:
    """Writes the model of a case to `folder / "hf"`, and an adapter of random values to `folder / "lora"`."""
    case = made(name)
    case.model.save_pretrained(folder / "hf")
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(case.model), LoraConfig(r=4, lora_alpha=8, **options))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
        model.save_pretrained(folder / "lora")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("qwen3_vl", "maxtext"),
        ("llava", "tpuconv"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(("qwen3_vl", "tpuconv"), ("llava", "nnx"), ("gemma3", "nnx")),
                *(("idefics2", "tpuconv"), ("nemotron_h_omni", "tpuconv")),  # whose letters E and V are others
            )
        ),
    ],
)
def test_kept_pairs_of_an_encoder_come_back(name: str, target: str, tmp_path: Path) -> None:
    """Bit for bit, and with the names by which peft reads them."""
    adapter_of(name, tmp_path, target_modules=CHANGED[name])
    given = [str(tmp_path / "lora")]
    api.convert(tmp_path / "hf", tmp_path / "tree", adapter=given, keep_adapter=True, target=target)
    api.verify(tmp_path / "tree").check()
    save_standard(tmp_path / "run", trained_tree(tmp_path / "tree"))
    api.export(tmp_path / "run", tmp_path / "back", config=tmp_path / "hf", adapter=True, lora_alpha=8)
    want = load_file(tmp_path / "lora" / WEIGHTS)
    assert len({each.split(".")[3] for each in want}) > 1  # parts of the model
    assert_same(load_file(tmp_path / "back" / WEIGHTS), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of tensors that are missing or not known
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        model = PeftModel.from_pretrained(copy.deepcopy(made(name).model), tmp_path / "back")
    assert sum("lora_" in each for each, _ in model.named_parameters()) == len(want)


def test_an_encoder_that_the_target_lacks_is_named(tmp_path: Path) -> None:
    adapter_of("llava", tmp_path, target_modules=CHANGED["llava"])
    given = {"adapter": [str(tmp_path / "lora")], "keep_adapter": True}
    says = r"maxtext has no place for the vision encoder \(CLIP.*\) of llava.llama, which the adapter .*lora changes"
    with pytest.raises(UnsupportedConfig, match=says):
        api.convert(tmp_path / "hf", tmp_path / "tree", target="maxtext", **given)


@pytest.mark.slow
def test_a_projector_that_was_trained_as_a_whole_has_no_pairs(tmp_path: Path) -> None:
    adapter_of("gemma3", tmp_path, target_modules=rf".*{TEXT}", modules_to_save=["multi_modal_projector"])
    with pytest.raises(MappingError, match="in another way than by pairs") as error:
        api.convert(tmp_path / "hf", tmp_path / "tree", adapter=[str(tmp_path / "lora")], keep_adapter=True)
    assert error.value.details[0] == "model.multi_modal_projector.mm_input_projection_weight"
    assert "to merge it" in (error.value.hint or "")


def test_modules_around_another_text_model_have_the_same_names() -> None:
    spelling = release_of_modules("llava.qwen2").spelling
    assert spelling["vision_tower.vision_model"] == "model.vision_tower"  # of CLIP, with llava.llama
    assert spelling[""] == "model"  # of Pixtral, with llava.mistral
    assert release_of_modules("qwen2").spelling == {}

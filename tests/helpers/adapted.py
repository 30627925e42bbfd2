"""Models with random adapters of peft, and what peft and tpuconv merge."""

import warnings
from pathlib import Path

import numpy as np
import torch

from helpers.checkpoints import read_tensors
from tpuconv import api

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "kv_b_proj"]


def adapted(base: Path, out: Path, seed: int = 0, kind=None, dtype="auto", **options):
    """A model, of a class of transformers, with a random adapter, which is saved; the model that peft merged."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    kind = kind or AutoModelForCausalLM
    model = kind.from_pretrained(base, dtype=dtype)
    found = [name for name in PROJECTIONS if any(module.endswith(name) for module, _ in model.named_modules())]
    if any("experts" in name for name, _ in model.named_parameters()):  # in one tensor to peft
        found = [name for name in found if name != "down_proj"]
    targets = options.pop("target_modules", None) or found
    with warnings.catch_warnings():
        # peft asks for an attribute that transformers renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        wrapped = get_peft_model(model, LoraConfig(target_modules=targets, **{"r": 4, "lora_alpha": 7} | options))
        with torch.no_grad():
            for _, parameter in wrapped.named_parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.3)
        wrapped.save_pretrained(out)
        model = kind.from_pretrained(base, dtype=dtype)
        return PeftModel.from_pretrained(model, out).merge_and_unload()


def exported(src: Path, folder: Path, *adapters: str, **options) -> dict[str, np.ndarray]:
    """The tensors of a conversion with adapters."""
    api.convert(src, folder / "out", adapter=adapters, **options)
    api.verify(folder / "out").check()
    api.export(folder / "out", folder / "back")
    return read_tensors(folder / "back")


def saved(model, folder: Path) -> dict[str, np.ndarray]:
    model.save_pretrained(folder)
    return read_tensors(folder)

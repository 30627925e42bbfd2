"""What peft computes with an adapter."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from helpers.families import Case, hf_model

EXPECTED = (
    "fan_in_fan_out is set to True but the target module is `torch.nn.Linear`",  # the head beside Conv1D: peft mends it
    "`is_gradient_checkpointing` is deprecated",  # peft asks for an attribute that transformers renamed
    r".*ignored: \['\.\*",  # patterns that peft itself adds for experts
    # of parameters
    r".*pattern keys did not match any targeted module and were ignored: \[('[^']*experts[^']*'(, )?)+\]",
)


MERGED = ("dory", "jamba")
"""Families in which peft adds to the wrong product, or none: factors follow Dory's head, and Jamba multiplies by the
matrix of time steps without its module."""


def peft_logits(case: Case, adapter: Path, ids: np.ndarray, model: Any = None) -> np.ndarray:
    """The logits of a case's model, or of this one, with an adapter. Any warning of missing or unexpected tensors is an
    error."""
    import torch
    from peft import PeftModel

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("error", RuntimeWarning)
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message)
        model = PeftModel.from_pretrained(model or hf_model(case), adapter)
        if case.family in MERGED:
            model = model.merge_and_unload()
        return model(torch.from_numpy(np.array(ids))).logits.numpy()


def adapter_of_peft(case: Case, out: Path, **options: Any) -> Path:
    """An adapter of random values, as peft saves it; `options` as `LoraConfig` has them."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = get_peft_model(hf_model(case), LoraConfig(**options))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
        model.save_pretrained(out)
    return out

"""What peft computes with an adapter."""

import warnings
from pathlib import Path

import numpy as np

from helpers.families import Case, hf_model

EXPECTED = (
    "`is_gradient_checkpointing` is deprecated",  # peft asks for an attribute that transformers renamed
    r".*ignored: \['\.\*",  # patterns that peft itself adds for experts
    r".*pattern keys did not match any targeted module and were ignored: \['[^']*experts[^']*'\]",  # of parameters
)


def peft_logits(case: Case, src: Path, adapter: Path, ids: np.ndarray) -> np.ndarray:
    """The logits of a model with an adapter. Any warning of missing or unexpected tensors is an error."""
    import torch
    from peft import PeftModel

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("error", RuntimeWarning)
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message)
        base = type(hf_model(case)).from_pretrained(src, dtype=torch.float32)
        return PeftModel.from_pretrained(base, adapter)(torch.from_numpy(np.array(ids))).logits.numpy()

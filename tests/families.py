"""Tiny models of every family, in shapes that real ones have and in some that show mistakes sooner.

Every parametrised test of the models and of the conversion runs over `CASES`. transformers is imported when it is
needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # 0.02 would leave attention nearly uniform and logits near zero, where mistakes do not show.
    "initializer_range": 0.25,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 12}
MIXED = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Case:
    """One tiny model: `id` names it in test ids, `model_type` and `config` make its transformers config."""

    id: str
    family: str
    model_type: str
    config: Mapping[str, Any] = field(hash=False)

    def hf_config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **SIZES | dict(self.config))

    def __str__(self) -> str:
        return self.id


def _case(name: str, model_type: str = "", /, **config: Any) -> Case:
    family = name.partition("-")[0]
    return Case(name, family, model_type or family, config)


CASES: list[Case] = [
    _case("llama-plain", num_key_value_heads=None),
    _case("llama-biases", attention_bias=True, mlp_bias=True, head_dim=12),
    _case("llama-tied-llama3", tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=10, num_hidden_layers=3),
    _case("llama-linear", rope_parameters=LINEAR, num_attention_heads=3, num_key_value_heads=1, hidden_size=30),
    _case("llama-mistral", "mistral", sliding_window=5, head_dim=14),
    _case("llama-mistral-full", "mistral", sliding_window=None, rms_norm_eps=1e-3),
    _case("qwen2-plain"),
    _case(
        "qwen2-windows",
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        num_hidden_layers=3,
        tie_word_embeddings=True,
    ),
    _case("qwen2-yarn", rope_parameters=YARN, num_attention_heads=4, num_key_value_heads=4, hidden_size=64),
    _case("qwen3-tied", head_dim=20, tie_word_embeddings=True),
    _case("qwen3-biases", head_dim=16, attention_bias=True, num_attention_heads=5, num_key_value_heads=1),
    _case(
        "qwen3-layer-types",
        head_dim=10,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=MIXED,
        num_hidden_layers=4,
    ),
    _case("qwen3-yarn", head_dim=16, rope_parameters=YARN | {"truncate": False, "mscale": 1.5, "mscale_all_dim": 0.5}),
    _case("olmo2-plain", num_key_value_heads=None),
    _case("olmo2-biases", attention_bias=True, tie_word_embeddings=True, rope_parameters=LLAMA3),
]


def hf_model(case: Case, seed: int = 0) -> Any:
    """The transformers model in float32 with random weights. Norms and biases are random too: as ones and zeros, which
    they are when new, they would hide that they are used wrongly or not at all."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(case.hf_config(), attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(0, 0.3)
            elif "embed_tokens" in name:
                parameter.normal_(0, 0.25)  # the padding token's too, which is zero when new
    return model


def save(case: Case, folder: Path, dtype: str = "float32", seed: int = 0) -> Path:
    """Writes the model as `save_pretrained` does, with weights of `dtype`, and gives the folder back."""
    import torch

    hf_model(case, seed).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder

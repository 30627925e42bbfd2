"""Llama Nemotron after `modeling_decilm.py` of nvidia/Llama-3_3-Nemotron-Super-49B-v1_5: Llama, with layers that differ
in key-value heads and widths, or have a matrix in place of attention, or lack a part."""

from copy import copy
from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm


class Config(LlamaConfig):
    model_type = "nemotron-nas"

    block_configs: list[dict[str, Any]] | None = None


class Linear(nn.Module):
    """A matrix in place of attention."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, None]:
        return self.linear_attn(hidden_states), None


class Layer(nn.Module):
    def __init__(self, config: Any, block: dict[str, Any], number: int) -> None:
        super().__init__()
        config, attention, feed = copy(config), block["attention"], block["ffn"]
        if not attention.get("no_op"):
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            if attention.get("replace_with_linear"):
                self.self_attn = Linear(config)
            else:
                config.num_key_value_heads = config.num_attention_heads // attention["n_heads_in_group"]
                self.self_attn = LlamaAttention(config, number)
        if not feed.get("no_op"):
            self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            if feed.get("ffn_mult") is None:
                config.intermediate_size = feed["intermediate_size"]
            else:
                width = int(2 * feed["ffn_mult"] * config.hidden_size / 3)
                config.intermediate_size = width if width % 256 == 0 else width + 256 - width % 256
            self.mlp = LlamaMLP(config)

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        if hasattr(self, "self_attn"):
            hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **inputs)[0]
        if hasattr(self, "mlp"):
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class DeciLMForCausalLM(LlamaForCausalLM):
    config_class = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        blocks = enumerate(config.block_configs)
        self.model.layers = nn.ModuleList(Layer(config, block, number) for number, block in blocks)
        self.post_init()

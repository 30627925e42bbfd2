"""DeepSeekMoE after `modeling_deepseek.py` of deepseek-ai/deepseek-moe-16b-base: Llama, with experts in the layers
after the first ones."""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class Config(LlamaConfig):
    model_type = "deepseek"

    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1407
    first_k_dense_replace: int = 0


def _mlp(config: Any, width: int) -> LlamaMLP:
    config = copy(config)
    config.intermediate_size = width
    return LlamaMLP(config)


class Experts(nn.Module):
    """The most probable experts of each token, with their probabilities, and the shared ones."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.chosen, width = config.num_experts_per_tok, config.moe_intermediate_size
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(_mlp(config, width) for _ in range(config.n_routed_experts))
        self.shared_experts = _mlp(config, width * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        kept = torch.zeros_like(weights).scatter(-1, weights.topk(self.chosen).indices, 1.0) * weights
        routed = torch.stack([expert(x) for expert in self.experts], -1)
        return torch.einsum("btde,bte->btd", routed, kept) + self.shared_experts(x)


class DeepseekForCausalLM(LlamaForCausalLM):
    config_class = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers[config.first_k_dense_replace :]:
            layer.mlp = Experts(config)
        self.post_init()

"""openPangu Ultra MoE after `modeling_openpangu_moe.py` of its release and the code of a server (vLLM): DeepSeek V3
with norms on both sides of attention and MLP, and experts that are chosen by their scores, corrected or not."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP, DeepseekV3RMSNorm


class PanguUltraConfig(DeepseekV3Config):
    model_type = "pangu_ultra_moe"

    router_enable_expert_bias: bool = False
    sandwich_norm: bool = True


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.moe_intermediate_size
        self.config, self.gate = config, nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(
            DeepseekV3MLP(config, intermediate_size=width) for _ in range(config.n_routed_experts)
        )
        if config.router_enable_expert_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        if config.n_shared_experts:
            self.shared_experts = DeepseekV3MLP(config, intermediate_size=width * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x.float()).sigmoid()
        wanted = scores + self.e_score_correction_bias if self.config.router_enable_expert_bias else scores
        kept = torch.zeros_like(scores).scatter(-1, wanted.topk(self.config.num_experts_per_tok).indices, 1.0) * scores
        kept = kept / (kept.sum(-1, keepdim=True) + 1e-20) if self.config.norm_topk_prob else kept
        routed = torch.stack([expert(x) for expert in self.experts], -1)
        y = torch.einsum("btde,bte->btd", routed.float(), kept * self.config.routed_scaling_factor).to(x.dtype)
        return y + self.shared_experts(x) if self.config.n_shared_experts else y


class Layer(nn.Module):
    """Takes the attention and the MLP of a layer of DeepSeek V3."""

    def __init__(self, config: Any, layer: Any, *, has_experts: bool) -> None:
        super().__init__()
        self.self_attn, self.input_layernorm = layer.self_attn, layer.input_layernorm
        self.mlp = Experts(config) if has_experts else layer.mlp
        self.post_attention_layernorm, self.pre_mlp_layernorm, self.post_mlp_layernorm = (
            DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(hidden_states=self.input_layernorm(x), **inputs)[0])
        return x + self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(x)))


class PanguUltraMoEForCausalLM(DeepseekV3ForCausalLM):
    config_class: ClassVar = PanguUltraConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        dense = config.first_k_dense_replace
        layers = enumerate(self.model.layers)
        self.model.layers = nn.ModuleList(Layer(config, each, has_experts=number >= dense) for number, each in layers)
        self.post_init()

"""K2-Horizon after the code of a server (vLLM) and of a proposal for transformers: Qwen3 with norms in groups, gates of
attention, and values that tokens choose among several matrices."""

import math
from copy import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

OF_QWEN = {"layer_types", "max_window_layers"}


class K2HorizonConfig(Qwen3Config):
    model_type = "k2_horizon"

    query_key_norm: bool = True
    layernorm_num_groups: int = 1
    rope_head_dim: int | None = None
    attention_gate_func: str | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    num_shared_experts: int = 0
    moe_intermediate_size: int = 768
    moe_gate_bias: bool = False
    norm_topk_prob: bool = False
    router_score_func: str = "softmax"
    router_scaling_factor: float | None = 1.0
    mova_num_experts: int = 0
    mova_num_experts_per_tok: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in OF_QWEN}

    def has_experts(self, layer: int) -> bool:
        is_step = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and layer not in (self.mlp_only_layers or ()) and is_step


class GroupedNorm(nn.Module):
    """Of the groups of the last axis, or of each head of [B, T, N, H]."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight, self.groups, self.eps = nn.Parameter(torch.ones(size)), groups, eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float().reshape(*x.shape[:2], self.groups, -1)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * y.flatten(2)).to(x.dtype).reshape(x.shape)


class Chooser(nn.Module):
    """Weights and numbers of the chosen experts of each token. No linear layer: it returns two tensors."""

    def __init__(self, config: Any, experts: int, chosen: int, normed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, config.hidden_size) * config.initializer_range)
        self.bias = nn.Parameter(torch.randn(experts) / 4) if config.moe_gate_bias else None
        self.config, self.chosen, self.normed = config, chosen, normed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight).float()
        scores = logits.softmax(-1) if self.config.router_score_func == "softmax" else logits.sigmoid()
        wanted = scores if self.bias is None else scores + self.bias.float()
        numbers = wanted.topk(self.chosen, dim=-1).indices
        weights = scores.gather(-1, numbers)
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * (self.config.router_scaling_factor or 1.0), numbers


def summed(x: Tensor, experts: Any, weights: Tensor, numbers: Tensor) -> Tensor:
    """The weighted sum of what each token's experts return, in float32."""
    y = torch.stack([expert(x) for expert in experts], dim=-2)
    chosen = y.gather(-2, numbers[..., None].expand(*numbers.shape, y.shape[-1]))
    return (chosen.float() * weights[..., None]).sum(-2).to(x.dtype)


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.moe_intermediate_size
        self.gate = Chooser(config, config.num_experts, config.num_experts_per_tok, config.norm_topk_prob)
        self.experts = nn.ModuleList([mlp_of(config, width) for _ in range(config.num_experts)])
        if config.num_shared_experts:
            self.shared_experts = mlp_of(config, width * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        y = summed(x, self.experts, *self.gate(x))
        return y + self.shared_experts(x) if hasattr(self, "shared_experts") else y


def mlp_of(config: Any, width: int) -> nn.Module:
    own = copy(config)
    own.intermediate_size = width
    return Qwen3MLP(own)


class Attention(Qwen3Attention):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        queries, keys, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        self.q_norm = GroupedNorm(queries * self.head_dim, queries, eps) if config.query_key_norm else nn.Identity()
        self.k_norm = GroupedNorm(keys * self.head_dim, keys, eps) if config.query_key_norm else nn.Identity()
        self.gate_of = {"silu": F.silu, "softplus": lambda x: F.softplus(x, beta=math.log(2))}.get(
            config.attention_gate_func
        )
        if self.gate_of:
            self.gate_proj = nn.Linear(config.hidden_size, queries * self.head_dim, bias=False)
        if config.mova_num_experts and config.has_experts(layer):
            del self.v_proj
            chosen, width = config.mova_num_experts_per_tok, keys * self.head_dim
            self.v_router = Chooser(config, config.mova_num_experts, chosen, chosen > 1)
            self.v_experts = nn.ModuleList(
                nn.Linear(config.hidden_size, width, bias=False) for _ in range(config.mova_num_experts)
            )
            self.v_proj = self.chosen_values

    def chosen_values(self, x: Tensor) -> Tensor:
        products = [lambda x, expert=expert: F.silu(expert(x)) for expert in self.v_experts]
        return summed(x, products, *self.v_router(x))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.gate_of:
            return super().forward(hidden_states, *args, **kwargs)
        gate = self.gate_of(self.gate_proj(hidden_states))
        # On the module that is there now, which an adapter may have put in the place of the matrix.
        hook = self.o_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] * gate,))
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            hook.remove()


class K2HorizonForCausalLM(Qwen3ForCausalLM):
    config_class: ClassVar = K2HorizonConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)

        def norm() -> nn.Module:
            return GroupedNorm(config.hidden_size, config.layernorm_num_groups, config.rms_norm_eps)

        for number, layer in enumerate(self.model.layers):
            layer.self_attn = Attention(config, number)
            layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
            if config.has_experts(number):
                layer.mlp = Experts(config)
        self.model.norm = norm()
        self.post_init()

"""Xing 4.0 after ports of the code of its release (mlx-lm, llama.cpp): the attention and the experts of DeepSeek V3
between several residual streams, whose mean the last norm reads."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP, DeepseekV3RMSNorm


class Xing4_0Config(DeepseekV3Config):
    model_type = "xing4_0"

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    mhc_h_res_clamp_min: float = -30.0
    mhc_h_res_clamp_max: float = 30.0


class HyperConnection(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, count = config, config.hc_mult
        weights = count * (2 + count)
        self.hc_fn = nn.Parameter(torch.randn(weights, count * config.hidden_size) * config.initializer_range)
        self.hc_base = nn.Parameter(torch.randn(weights) / 2)
        self.hc_scale = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the input of a part, the weights of its output in each stream, and what the streams become."""
        config, count = self.config, self.config.hc_mult
        flat = streams.flatten(2).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        scale = self.hc_scale.repeat_interleave(torch.tensor([count, count, count * count]))
        read, write, mix = (flat @ self.hc_fn.T * scale + self.hc_base).split([count, count, count * count], -1)
        mix = mix.unflatten(-1, (count, count)).clamp(config.mhc_h_res_clamp_min, config.mhc_h_res_clamp_max)
        mix = (mix - mix.amax(-1, keepdim=True)).exp()
        for _ in range(config.hc_sinkhorn_iters):
            mix = mix / (mix.sum(-1, keepdim=True) + config.hc_eps)
            mix = mix / (mix.sum(-2, keepdim=True) + config.hc_eps)
        return (read.sigmoid()[..., None] * streams).sum(2), 2 * write.sigmoid(), mix @ streams


class Gate(nn.Module):
    """The weights of all experts, which are zero of those not chosen. No linear layer: it knows the experts' number."""

    e_score_correction_bias: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * config.initializer_range)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = nn.functional.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.config.num_experts_per_tok).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores
        kept = kept / (kept.sum(-1, keepdim=True) + 1e-20) if self.config.norm_topk_prob else kept
        return kept * self.config.routed_scaling_factor


class Experts(nn.Module):
    """Under the names of the release: transformers stacks the experts of a layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, shared = config.moe_intermediate_size, config.n_shared_experts
        self.gate = Gate(config)
        self.experts = nn.ModuleList(
            DeepseekV3MLP(config, intermediate_size=width) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = DeepseekV3MLP(config, intermediate_size=width * shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("...ed,...e->...d", torch.stack([expert(x) for expert in self.experts], -2), self.gate(x))
        return y if self.shared_experts is None else y + self.shared_experts(x)


class Layer(nn.Module):
    """Takes the attention and the MLP of a layer of DeepSeek V3."""

    def __init__(self, config: Any, layer: Any, number: int) -> None:
        super().__init__()
        self.self_attn = layer.self_attn
        self.mlp = Experts(config) if number >= config.first_k_dense_replace else layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.attn_hc, self.ffn_hc = HyperConnection(config), HyperConnection(config)
        self.copies = 0 if number else config.hc_mult

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        if self.copies:
            x = x[:, :, None].expand(-1, -1, self.copies, -1)
        y, write, x = self.attn_hc(x)
        x = x + write[..., None] * self.self_attn(hidden_states=self.input_layernorm(y), **inputs)[0][:, :, None]
        y, write, x = self.ffn_hc(x)
        return x + write[..., None] * self.mlp(self.post_attention_layernorm(y))[:, :, None]


class MeanNorm(DeepseekV3RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(2))


class Xing4_0ForCausalLM(DeepseekV3ForCausalLM):
    config_class: ClassVar = Xing4_0Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = enumerate(self.model.layers)
        self.model.layers = nn.ModuleList(Layer(config, layer, number) for number, layer in layers)
        self.model.norm = MeanNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

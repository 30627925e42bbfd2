"""Grok 2 after the code of servers (SGLang, sglang-jax): Llama with norms on both sides, soft limits, scores that grow
behind a position, and experts beside an MLP."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, apply_rotary_pos_emb

OF_LLAMA = {"attention_bias", "mlp_bias", "pretraining_tp", "hidden_act"}


class GrokConfig(LlamaConfig):
    model_type = "grok"

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    residual_moe: bool = False
    attn_temperature_len: int = -1
    attn_logit_softcapping: float = 30.0
    router_logit_softcapping: float = 30.0
    final_logit_softcapping: float | None = None
    embedding_multiplier_scale: float = 1.0
    output_multiplier_scale: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in OF_LLAMA}


def limited(x: Tensor, limit: float | None) -> Tensor:
    return limit * torch.tanh(x / limit) if limit else x


class Attention(LlamaAttention):
    def forward(self, x: Tensor, position_ids: Tensor, attention_mask: Tensor, cache: Any, **inputs: Any) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *inputs["position_embeddings"])
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = (each.repeat_interleave(self.num_key_value_groups, dim=1) for each in (k, v))
        scores = limited(q @ k.mT * self.scaling, self.config.attn_logit_softcapping)
        length = self.config.attn_temperature_len
        if length > 0:
            grown = torch.log2(position_ids.clamp(min=1).float()) / math.log2(length)
            scores = scores * torch.where(position_ids > length, grown, 1.0)[:, None, :, None]
        weights = (scores + attention_mask).softmax(-1, dtype=torch.float32).to(v.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class Expert(nn.Module):
    def __init__(self, config: Any, width: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        gate, up, down = self.names = names
        for name in (gate, up):
            setattr(self, name, nn.Linear(config.hidden_size, width, bias=False))
        setattr(self, down, nn.Linear(width, config.hidden_size, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(nn.functional.gelu(gate(x), approximate="tanh") * up(x))


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, width = config, config.moe_intermediate_size or config.intermediate_size
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config, width, ("w1", "w3", "w2")) for _ in range(config.num_local_experts))

    def forward(self, x: Tensor) -> Tensor:
        probs = limited(self.gate(x).float(), self.config.router_logit_softcapping).softmax(-1)
        weights, numbers = probs.topk(self.config.num_experts_per_tok)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        chosen = outputs.gather(-2, numbers[..., None].expand(*numbers.shape, x.shape[-1]))
        return (chosen.float() * weights[..., None]).sum(-2).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.self_attn, self.block_sparse_moe = Attention(config, number), Experts(config)
        self.mlp = None
        if config.residual_moe:
            self.mlp = Expert(config, config.intermediate_size, ("gate_proj", "up_proj", "down_proj"))
        for name in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        x = x + self.post_attn_norm(self.self_attn(self.pre_attn_norm(x), **inputs))
        y = self.pre_moe_norm(x)
        fed = self.block_sparse_moe(y)
        return x + self.post_moe_norm(fed if self.mlp is None else (self.mlp(y) + fed) / 1.4142135623730951)


class GrokForCausalLM(LlamaForCausalLM):
    config_class: ClassVar = GrokConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.model.embed_tokens.register_forward_hook(lambda _, __, x: x * config.embedding_multiplier_scale)
        self.post_init()

    def forward(self, *args: Any, **inputs: Any) -> Any:
        out = super().forward(*args, **inputs)
        out.logits = limited(out.logits * self.config.output_multiplier_scale, self.config.final_logit_softcapping)
        return out

"""Step-1 and Step-3 after the code of a server (vLLM), with the modules of Llama. Step-1 has scores that are reduced by
the root of the distance; Step-3 has queries made of a normalized latent vector, one head of keys and values, and
experts beside an MLP that all tokens pass."""

from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class Step1Config(LlamaConfig):
    model_type = "step1"

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key != "head_dim"}


class RootedAttention(LlamaAttention):
    """Each head has a slope: 2 to the powers -8/n, -16/n, ... -8 of n heads; where these are not a power of two, of the
    largest one that is smaller, and the others have the slopes halfway before these."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        heads = config.num_attention_heads
        n = 1 << (heads.bit_length() - 1)
        powers = [-8 * (i + 1) / n for i in range(n)] + [-8 * (i + 0.5) / n for i in range(heads - n)]
        self.slopes = [2.0**power for power in powers]

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, **inputs: Any) -> Any:
        queries, keys = attention_mask.shape[-2:]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        reduced = torch.tensor(self.slopes)[:, None, None] * distance.clamp(min=0).sqrt()
        unturned = torch.ones_like(position_embeddings[0])
        return super().forward(hidden_states, (unturned, 0 * unturned), attention_mask - reduced, **inputs)


class Step1ForCausalLM(LlamaForCausalLM):
    config_class: ClassVar = Step1Config

    def __init__(self, config: Any) -> None:
        config._attn_implementation = "eager"  # whose masks are numbers
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = RootedAttention(config, number)
        self.post_init()


class Step3TextConfig(LlamaConfig):
    model_type = "step3_text"
    default_theta = 500_000.0

    rms_norm_eps: float = 1e-5
    share_q_dim: int = 2048
    num_experts: int = 48
    num_experts_per_tok: int = 3
    norm_topk_prob: bool = False
    moe_intermediate_size: int = 5120
    shared_expert_intermediate_size: int = 5120
    moe_layers_enum: list[int] | None = None


class Attention(LlamaAttention):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        latent, heads = config.share_q_dim, config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, latent, bias=False)
        self.inter_norm = LlamaRMSNorm(latent, config.rms_norm_eps)
        self.wq = nn.Linear(latent, heads * self.head_dim, bias=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, cache: Any = None, **_: Any
    ) -> Any:
        queries = self.wq(self.inter_norm(self.q_proj(hidden_states)))
        each = queries, self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in each)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        y, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(y.flatten(-2)), None


class Stack(nn.Module):
    """One matrix of each expert."""

    def __init__(self, config: Any, count: int, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, outputs, inputs) * config.initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...ei,eoi->...eo", x, self.weight)


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count, self.chosen, self.normalized = config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
        wide, narrow = config.hidden_size, config.moe_intermediate_size
        self.gate = nn.Linear(wide, config.num_experts, bias=False)
        self.gate_proj, self.up_proj = (Stack(config, self.count, narrow, wide) for _ in range(2))
        self.down_proj = Stack(config, self.count, wide, narrow)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).float().softmax(-1).topk(self.chosen)
        weights = weights / weights.sum(-1, keepdim=True) if self.normalized else weights
        of_all = torch.zeros(*x.shape[:-1], self.count).scatter(-1, ids, weights)
        x = x.unsqueeze(-2).expand(*x.shape[:-1], self.count, x.shape[-1])
        y = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return torch.einsum("...eo,...e->...o", y, of_all.to(y))


class SparseLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        shared = copy(config)
        shared.intermediate_size = config.shared_expert_intermediate_size
        del self.mlp
        self.moe, self.share_expert = Experts(config), LlamaMLP(shared)

    def mlp(self, x: Tensor) -> Tensor:
        return self.share_expert(x) + self.moe(x)


class Step3TextForCausalLM(LlamaForCausalLM):
    config_class: ClassVar = Step3TextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number in range(config.num_hidden_layers):
            if number in config.moe_layers_enum:
                self.model.layers[number] = SparseLayer(config, number)
            self.model.layers[number].self_attn = Attention(config, number)
        self.post_init()

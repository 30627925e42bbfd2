"""Ling and Ring 2.5 and 2.6 (Bailing) after `modeling_bailing_moe_v2_5.py` of inclusionAI/Ring-V2.5, without cache.
Linear attention is computed as scores with decays, not as a recurrence."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

EPS_OF_LATENTS = 1e-6


class CommonConfig(PreTrainedConfig):
    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    head_dim: int = 128
    partial_rotary_factor: float = 0.5
    layer_group_size: int = 5
    group_norm_size: int = 4
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 0
    routed_scaling_factor: float = 1.0


class Config(CommonConfig):
    model_type = "bailing_moe_v2_5"

    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128


class Norm(nn.Module):
    """RMS norm, of `groups` parts of the vector separately."""

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.float().unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * parts.flatten(-2).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (i, i + half) of the first dimensions of x [B, N, T, H]."""
    cos, sin = (a[:, None] for a in angles)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def slopes(heads: int) -> list[float]:
    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start ** (i + 1) for i in range(n)]

    power = 2 ** math.floor(math.log2(heads))
    return of_power(heads) if power == heads else of_power(power) + slopes(2 * power)[::2][: heads - power]


class LinearAttention(nn.Module):
    def __init__(self, config: CommonConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        width, eps = self.heads * self.head_dim, config.rms_norm_eps
        self.query_key_value = linear(config.hidden_size, 3 * width)
        self.query_layernorm, self.key_layernorm = Norm(self.head_dim, eps), Norm(self.head_dim, eps)
        self.dense, self.g_proj = linear(width, config.hidden_size), linear(config.hidden_size, width)
        self.g_norm = Norm(width, eps, config.group_norm_size)
        factor = 1 - (layer - 1) / (config.num_hidden_layers - 1) + 1e-5
        self.rates = [slope * factor for slope in slopes(self.heads)]

    def forward(self, x: Tensor, seen: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        qkv = self.query_key_value(x).unflatten(-1, (3 * self.heads, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, 1)
        q, k = turned(self.query_layernorm(q), angles), turned(self.key_layernorm(k), angles)
        # The tokens that count between two of them: those seen by the later one and not by the earlier one.
        counts = seen.sum(-1, keepdim=True).float()
        distance = counts - counts.transpose(-1, -2)
        decay = torch.exp(-torch.tensor(self.rates)[:, None, None] * distance.clamp(min=0))
        scores = (q @ k.transpose(-1, -2)) * self.head_dim**-0.5 * decay * seen
        y = self.g_norm((scores @ v).transpose(1, 2).flatten(-2))
        return self.dense(y * torch.sigmoid(self.g_proj(x)))


class LatentAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, heads, width = config, config.num_attention_heads, config.hidden_size
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.scale = (self.nope + self.rope) ** -0.5
        scaling = config.rope_parameters
        if scaling.get("mscale_all_dim"):
            self.scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2
        if config.q_lora_rank is None:
            self.q_proj = linear(width, heads * (self.nope + self.rope))
        else:
            self.q_a_proj = linear(width, config.q_lora_rank)
            self.q_a_layernorm = Norm(config.q_lora_rank, EPS_OF_LATENTS)
            self.q_b_proj = linear(config.q_lora_rank, heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(width, config.kv_lora_rank + self.rope)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, EPS_OF_LATENTS)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (self.nope + config.v_head_dim))
        self.dense = linear(heads * config.v_head_dim, width)

    def forward(self, x: Tensor, seen: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        config, heads = self.config, self.config.num_attention_heads
        q = self.q_proj(x) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
        latents, k_rope = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latents)).unflatten(-1, (heads, -1)).transpose(1, 2)
        k, v = kv.split([self.nope, config.v_head_dim], -1)
        pairs = [t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q[..., self.nope :], k_rope[:, None])]
        q_rope, k_rope = (turned(t, angles) for t in pairs)
        scores = q[..., : self.nope] @ k.transpose(-1, -2) + q_rope @ k_rope.transpose(-1, -2)
        scores = (scores.float() * self.scale).masked_fill(~seen, torch.finfo(torch.float32).min)
        return self.dense((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(-2))


class GroupedAttention(nn.Module):
    """The attention of the models whose keys have no latent vector, with rotary positions as in linear attention."""

    def __init__(self, config: CommonConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, eps = config.hidden_size, config.rms_norm_eps
        self.query_key_value = linear(width, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.query_layernorm, self.key_layernorm = Norm(self.head_dim, eps), Norm(self.head_dim, eps)
        self.dense = linear(self.heads * self.head_dim, width)

    def forward(self, x: Tensor, seen: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = turned(self.query_layernorm(q), angles), turned(self.key_layernorm(k), angles)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * self.head_dim**-0.5
        scores = scores.masked_fill(~seen, torch.finfo(torch.float32).min)
        return self.dense((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(width, hidden),
            linear(width, hidden),
            linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Linear):
    expert_bias: Tensor

    def __init__(self, config: CommonConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.config = config
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config, scores = self.config, torch.sigmoid(nn.functional.linear(x.float(), self.weight.float()))
        wanted = scores + self.expert_bias
        groups = wanted.unflatten(-1, (config.n_group, -1))
        best = groups.topk(2, -1)[0].sum(-1).topk(config.topk_group, -1)[1]
        chosen = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        ids = groups.masked_fill(~chosen[..., None], -math.inf).flatten(-2).topk(config.num_experts_per_tok, -1)[1]
        weights = scores.gather(-1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


class Experts(nn.Module):
    def __init__(self, config: CommonConfig) -> None:
        super().__init__()
        width, hidden = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(width, hidden) for _ in range(config.num_experts))
        self.shared_experts = MLP(width, hidden * config.num_shared_experts) if config.num_shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (ids == number)).sum(-1, keepdim=True)
            if share.any():
                y = y + expert(x) * share.to(x.dtype)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: CommonConfig, layer: int) -> None:
        super().__init__()
        size, width, eps = config.layer_group_size, config.hidden_size, config.rms_norm_eps
        is_linear = (layer + 1) % size and layer < config.num_hidden_layers // size * size
        softmax = LatentAttention if isinstance(config, Config) else GroupedAttention
        self.attention = LinearAttention(config, layer) if is_linear else softmax(config)
        dense = layer < config.first_k_dense_replace
        self.mlp = MLP(width, config.intermediate_size) if dense else Experts(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)

    def forward(self, x: Tensor, seen: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), seen, angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Pretrained(PreTrainedModel):
    config_class = Config
    base_model_prefix = "model"
    _supports_sdpa = True


class BailingMoeV2_5Model(Pretrained):
    def __init__(self, config: CommonConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        tokens = x.shape[1]
        mask = torch.ones(x.shape[:2]) if attention_mask is None else attention_mask
        positions = torch.arange(tokens)[None] if position_ids is None else position_ids
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None] & (mask[:, None, None] > 0)
        kind = self.config.rope_parameters["rope_type"]
        if kind == "default":
            rotary = int(self.config.head_dim * self.config.partial_rotary_factor)
            theta = self.config.rope_parameters["rope_theta"]
            rates, factor = theta ** (-torch.arange(0, rotary, 2).float() / rotary), 1.0
        else:
            rates, factor = ROPE_INIT_FUNCTIONS[kind](self.config, None)
        angles = positions[..., None].float() * rates
        angles = angles.cos() * factor, angles.sin() * factor
        for layer in self.layers:
            x = layer(x, seen, angles)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class BailingMoeV2_5ForCausalLM(Pretrained, GenerationMixin):
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: CommonConfig) -> None:
        super().__init__(config)
        self.model = BailingMoeV2_5Model(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, **inputs).last_hidden_state))

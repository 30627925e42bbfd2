"""The text model of Kimi K3, after the code of servers (vLLM's `kimi_k3`, mlxcel's `kimi_k3.rs`), without cache. Kimi
delta attention is computed token by token; padding is taken out first. All is in float64: in float32 this model departs
from it by 1.7e-5 of the largest logit where a query and the state are nearly orthogonal and a norm follows."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

EPS_OF_LATENTS = 1e-6


class Config(PreTrainedConfig):
    model_type = "kimi_k3"

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int = 96
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    hidden_act: str = "situ"
    tie_word_embeddings: bool = False
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    attn_res_block_size: int = 12
    gate_lower_bound: float | None = -5.0
    layer_types: list[str] | None = None
    linear_head_dim: int = 128
    linear_num_heads: int = 96
    linear_conv_kernel_dim: int = 4
    first_k_dense_replace: int = 1
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    moe_renormalize: bool = True
    routed_expert_hidden_size: int = 3584
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def situ(gate: Tensor, up: Tensor, config: Config) -> Tensor:
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded


class Convolution(nn.Conv1d):
    def __init__(self, width: int, taps: int) -> None:
        super().__init__(width, width, taps, groups=width, padding=taps - 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(super().forward(x.T)[:, : len(x)].T)


def delta(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule, token by token, [T, h, v]: `kept` [T, h, k] is what stays of the state, `beta` [T, h] how
    much of a change enters it. Queries and keys are normalized first."""
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    state, out = v.new_zeros(*k.shape[1:], v.shape[-1]), []
    for t in range(len(q)):
        state = state * kept[t][..., None]
        change = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][..., None] * change[:, None]
        out.append(torch.einsum("hk,hkv->hv", q[t] * q.shape[-1] ** -0.5, state))
    return torch.stack(out)


class DeltaAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.size, self.bound = config.linear_num_heads, config.linear_head_dim, config.gate_lower_bound
        width, hidden, taps = self.heads * self.size, config.hidden_size, config.linear_conv_kernel_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Convolution(width, taps) for _ in range(3))
        self.f_a_proj, self.f_b_proj = linear(hidden, self.size), linear(self.size, width)
        self.b_proj, self.g_proj, self.o_proj = linear(hidden, self.heads), linear(hidden, width), linear(width, hidden)
        self.A_log = nn.Parameter(torch.zeros(-(-self.heads // 128) * 128))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = Norm(self.size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        names = ("q", "k", "v")
        q, k, v = (getattr(self, f"{n}_conv1d")(getattr(self, f"{n}_proj")(x)) for n in names)
        q, k, v = (y.unflatten(-1, (self.heads, self.size)) for y in (q, k, v))
        f = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (self.heads, self.size))
        rate = self.A_log[: self.heads, None].exp()
        g = -rate * nn.functional.softplus(f) if self.bound is None else self.bound * torch.sigmoid(rate * f)
        out = delta(q, k, v, g.exp(), torch.sigmoid(self.b_proj(x)))
        y = self.o_norm(out) * torch.sigmoid(self.g_proj(x)).unflatten(-1, (self.heads, self.size))
        return self.o_proj(y.flatten(-2))


class LatentAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, heads, hidden = config, config.num_attention_heads, config.hidden_size
        self.nope, rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rope = rope
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * (self.nope + rope))
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank)
            self.q_a_layernorm = Norm(config.q_lora_rank, EPS_OF_LATENTS)
            self.q_b_proj = linear(config.q_lora_rank, heads * (self.nope + rope))
        self.kv_a_proj_with_mqa = linear(hidden, config.kv_lora_rank + rope)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, EPS_OF_LATENTS)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (self.nope + self.value))
        self.g_proj, self.o_proj = linear(hidden, heads * self.value), linear(heads * self.value, hidden)

    def forward(self, x: Tensor) -> Tensor:
        config, heads = self.config, self.config.num_attention_heads
        q = self.q_proj(x) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k, v = kv.split([self.nope, self.value], -1)
        k = torch.cat([k, shared[:, None].expand(-1, heads, -1)], -1)
        scores = torch.einsum("thd,shd->hts", q, k) * (self.nope + self.rope) ** -0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        y = torch.einsum("hts,shd->thd", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(-2)
        return self.o_proj(y * torch.sigmoid(self.g_proj(x)))


class MLP(nn.Module):
    def __init__(self, config: Config, hidden: int) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.gate_proj, self.up_proj = linear(width, hidden), linear(width, hidden)
        self.down_proj = linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.config))


class Expert(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, width, hidden = config, config.routed_expert_hidden_size, config.moe_intermediate_size
        self.w1, self.w2, self.w3 = linear(width, hidden), linear(hidden, width), linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(situ(self.w1(x), self.w3(x), self.config))


class Gate(nn.Linear):
    e_score_correction_bias: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.config = config
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config, scores = self.config, torch.sigmoid(super().forward(x))
        groups = (scores + self.e_score_correction_bias).unflatten(-1, (config.num_expert_group, -1))
        best = groups.topk(2, -1)[0].sum(-1).topk(config.topk_group, -1)[1]
        chosen = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        ids = groups.masked_fill(~chosen[..., None], -torch.inf).flatten(-2).topk(config.num_experts_per_token, -1)[1]
        weights = scores.gather(-1, ids)
        if config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * config.routed_scaling_factor


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Gate(config)
        self.routed_expert_down_proj, self.routed_expert_up_proj = linear(width, latent), linear(latent, width)
        self.routed_expert_norm = Norm(latent, config.rms_norm_eps)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))
        shared = config.moe_intermediate_size * config.num_shared_experts
        self.shared_experts = MLP(config, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        (ids, weights), latent = self.gate(x), self.routed_expert_down_proj(x)
        y = torch.zeros_like(latent)
        for number, expert in enumerate(self.experts):
            y = y + expert(latent) * (weights * (ids == number)).sum(-1, keepdim=True)
        y = self.routed_expert_up_proj(self.routed_expert_norm(y))
        return y if self.shared_experts is None else y + self.shared_experts(x)


def mixed(states: list[Tensor], norm: Norm, proj: nn.Linear) -> Tensor:
    """Attention over residuals: the softmax over states of the products with one vector weighs them."""
    stacked = torch.stack(states)
    return (proj(norm(stacked)).softmax(0) * stacked).sum(0)


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.begins_block = layer % config.attn_res_block_size == 0
        is_linear = config.layer_types[layer] == "linear_attention"
        self.self_attn = DeltaAttention(config) if is_linear else LatentAttention(config)
        if layer < config.first_k_dense_replace:
            self.mlp = MLP(config, config.intermediate_size)
        else:
            self.block_sparse_moe = Experts(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        self.self_attention_res_norm, self.mlp_res_norm = Norm(width, eps), Norm(width, eps)
        self.self_attention_res_proj, self.mlp_res_proj = linear(width, 1), linear(width, 1)

    def forward(self, x: Tensor, blocks: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        read = mixed([*blocks, x], self.self_attention_res_norm, self.self_attention_res_proj)
        y = self.self_attn(self.input_layernorm(read))
        x, blocks = (y, [*blocks, x]) if self.begins_block else (x + y, blocks)
        read = self.post_attention_layernorm(mixed([*blocks, x], self.mlp_res_norm, self.mlp_res_proj))
        return x + (self.mlp if hasattr(self, "mlp") else self.block_sparse_moe)(read), blocks


class Body(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.output_attn_res_norm, self.output_attn_res_proj = Norm(width, eps), linear(width, 1)
        self.norm = Norm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        blocks: list[Tensor] = []
        for layer in self.layers:
            x, blocks = layer(x, blocks)
        return self.norm(mixed([*blocks, x], self.output_attn_res_norm, self.output_attn_res_proj))


class Text(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model, self.lm_head = Body(config), linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.model(x))


def widened(module: nn.Module, *inputs: Tensor) -> Any:
    """What a module computes with its weights in float64."""
    return functional_call(module, {name: x.double() for name, x in module.state_dict().items()}, inputs)


class KimiK3ForConditionalGeneration(PreTrainedModel, GenerationMixin):
    config_class = Config
    _supports_sdpa = True
    _tied_weights_keys: ClassVar = {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.language_model = Text(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.model.embed_tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutputWithPast:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        x = self.get_input_embeddings()(input_ids).double()
        for row, kept in enumerate(mask > 0):
            if kept.any():
                logits[row, kept] = widened(self.language_model, x[row, kept]).float()
        return CausalLMOutputWithPast(logits=logits)

"""Alice AI Foundation after the code of a server (vLLM's `alice_ai`), without cache. Kimi delta attention is computed
token by token; padding is taken out first. All is in float64, as in `kimi`."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GenerationMixin, PreTrainedModel, Qwen3NextConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from helpers.released_code.kimi import Convolution, delta
from helpers.released_code.ling import MLP

Angles = tuple[Tensor, Tensor]


class Config(Qwen3NextConfig):
    model_type = "alice_ai"

    linear_num_key_heads: int = 32
    block_attn_res_block_size: int = 4
    router_score_function: str = "sigmoid"
    router_bias_correction: bool = True


class Norm(nn.Module):
    """RMS norm; with an `offset` of 1 the weight is stored less 1."""

    def __init__(self, width: int, eps: float, offset: int = 1) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.full((width,), 1.0 - offset)), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset + self.weight) * normed(x, self.eps)


def normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class DeltaAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.size = config.linear_num_key_heads, config.linear_key_head_dim
        width, hidden, taps = self.heads * self.size, config.hidden_size, config.linear_conv_kernel_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Convolution(width, taps) for _ in range(3))
        self.f_a_proj, self.f_b_proj = linear(hidden, self.size), linear(self.size, width)
        self.g_a_proj, self.g_b_proj = linear(hidden, self.size), linear(self.size, width)
        self.b_proj, self.o_proj = linear(hidden, self.heads), linear(width, hidden)
        self.a_log_bias, self.dt_bias = nn.Parameter(torch.zeros(self.heads)), nn.Parameter(torch.zeros(width))
        self.o_norm = Norm(self.size, config.rms_norm_eps, offset=0)

    def by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.size))

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        q, k, v = (
            self.by_head(getattr(self, f"{name}_conv1d")(getattr(self, f"{name}_proj")(x))) for name in ("q", "k", "v")
        )
        step = nn.functional.softplus(self.by_head(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias))
        kept = torch.exp(-self.a_log_bias.exp()[:, None] * step)
        out = delta(q, k, v, kept, torch.sigmoid(self.b_proj(x)))
        gate = torch.sigmoid(self.by_head(self.g_b_proj(self.g_a_proj(x))))
        return self.o_proj((self.o_norm(out) * gate).flatten(-2))


def turned(x: Tensor, angles: Angles) -> Tensor:
    """Rotates the pairs (i, i + half) of the first dimensions of x [T, N, H]."""
    cos, sin = (y[:, None, : y.shape[-1] // 2] for y in angles)
    a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class FullAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.size, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = linear(hidden, 2 * self.heads * self.size, bias)
        self.k_proj, self.v_proj = (linear(hidden, self.kv_heads * self.size, bias) for _ in range(2))
        self.o_proj = linear(self.heads * self.size, hidden, bias)
        self.q_norm, self.k_norm = (Norm(self.size, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).split(self.size, -1)
        k, v = (proj(x).unflatten(-1, (self.kv_heads, -1)) for proj in (self.k_proj, self.v_proj))
        q, k = turned(self.q_norm(q), angles), turned(self.k_norm(k), angles)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * self.size**-0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        y = torch.einsum("hts,shd->thd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        return self.o_proj((y * torch.sigmoid(gate)).flatten(-2))


class Gate(nn.Linear):
    e_score_correction_bias: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.config = config
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(super().forward(x))
        ids = (scores + self.e_score_correction_bias).topk(self.config.num_experts_per_tok, -1)[1]
        weights = scores.gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) if self.config.norm_topk_prob else weights


class Stacked(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        count, width, hidden = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * hidden, width) * config.initializer_range)
        self.down_proj = nn.Parameter(torch.randn(count, width, hidden) * config.initializer_range)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, up = (x @ gate_up.T).chunk(2, -1)
            y = y + (nn.functional.silu(gate) * up) @ down.T * (weights * (ids == number)).sum(-1, keepdim=True)
        return y


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate, self.experts = Gate(config), Stacked(config)
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = linear(config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x)) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class PlainLayer(nn.Module):
    """A layer with plain residual connections, of the module that predicts further tokens."""

    def __init__(self, config: Config, kind: str = "full_attention") -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        if kind == "linear_attention":
            self.linear_attn = DeltaAttention(config)
        else:
            self.self_attn = FullAttention(config)
        self.mlp = Experts(config)

    def attended(self, x: Tensor, angles: Angles) -> Tensor:
        attention = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        return attention(self.input_layernorm(x), angles)

    def fed(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        x = x + self.attended(x, angles)
        return x + self.fed(x)


def mixed(sources: list[Tensor], norm: Tensor, proj: nn.Linear, eps: float) -> Tensor:
    """Attention over residuals: the softmax over sources of the products with one vector weighs them."""
    stacked = torch.stack(sources)
    return (proj(norm * normed(stacked, eps)).softmax(0) * stacked).sum(0)


class Layer(PlainLayer):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, config.layer_types[layer])
        self.eps, self.begins_block = config.rms_norm_eps, layer % config.block_attn_res_block_size == 0
        self.reads_all = layer > 0
        for part in ("attn_res", "mlp_res")[not self.reads_all :]:
            setattr(self, f"{part}_norm_weight", nn.Parameter(torch.ones(config.hidden_size)))
            setattr(self, f"{part}_proj", linear(config.hidden_size, 1))

    def forward(self, sources: list[Tensor], partial: Tensor, angles: Angles) -> tuple[list[Tensor], Tensor]:
        if self.reads_all:
            x = mixed([*sources, partial], self.attn_res_norm_weight, self.attn_res_proj, self.eps)
        else:
            x = partial
        y = self.attended(x, angles)
        sources, partial = ([*sources, partial], y) if self.begins_block else (sources, partial + y)
        return sources, partial + self.fed(
            mixed([*sources, partial], self.mlp_res_norm_weight, self.mlp_res_proj, self.eps)
        )


class Final(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.res_proj, self.eps = linear(config.hidden_size, 1), config.rms_norm_eps
        self.res_norm_weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, sources: list[Tensor]) -> Tensor:
        return mixed(sources, self.res_norm_weight, self.res_proj, self.eps)


class Body(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.attnres_final = Final(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        sources, partial = [], x
        for layer in self.layers:
            sources, partial = layer(sources, partial, angles)
        return self.norm(self.attnres_final([*sources, partial]))


class Further(nn.Module):
    """The module that predicts further tokens, from the embeddings of the next tokens and the hidden states [T, D] of
    the tokens before them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (Norm(width, eps) for _ in range(3))
        self.fc, self.layers = linear(2 * width, width), nn.ModuleList([PlainLayer(config)])

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Angles) -> Tensor:
        inputs = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1)
        return self.norm(self.layers[0](self.fc(inputs), angles))


def widened(module: nn.Module, *inputs: Any) -> Any:
    """What a module computes with its weights in float64."""
    return functional_call(module, {name: x.double() for name, x in module.state_dict().items()}, inputs)


def angles_of(config: Config, tokens: int) -> Angles:
    cos, sin = Qwen3NextRotaryEmbedding(config)(torch.zeros(1).double(), torch.arange(tokens)[None])
    return cos[0], sin[0]


class AliceAIForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Config
    _supports_sdpa = True
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model, self.lm_head = Body(config), linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutputWithPast:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        x = self.get_input_embeddings()(input_ids).double()
        for row, kept in enumerate(mask > 0):
            if kept.any():
                hidden = widened(self.model, x[row, kept], angles_of(self.config, int(kept.sum())))
                logits[row, kept] = widened(self.lm_head, hidden).float()
        return CausalLMOutputWithPast(logits=logits)

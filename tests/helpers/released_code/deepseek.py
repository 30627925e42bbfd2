"""The text model of DeepSeek V4.1, after the code of its release (`inference/model.py` and `inference/engram.py`),
without cache and in float64: a rounding error may select another key. Each text is computed alone, without its padding.

Two things are not as in the release. Keys are not rounded: there the keys of the window become FP8, compressed keys and
the queries and keys of indexers FP4, as for a cache; ports differ in which of these they round. Keys that are no
candidates are never selected, as in the ports (NeMo Automodel, transformers): the release selects some where there
are fewer candidates than `index_topk`, which its sizes exclude and tpuconv refuses."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad, silu, softplus
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Config(PreTrainedConfig):
    model_type = "deepseek_v41"
    attribute_map: ClassVar = {"intermediate_size": "moe_intermediate_size"}

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-20
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int = 128
    compress_ratios: list[int] | None = None
    kv_source_layer_ids: list[int] | None = None
    index_source_layer_ids: list[int] | None = None
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: list[int] | None = None
    engram_num_embeddings: list[int] | None = None
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def random(*shape: int, low: float = 0.5, high: float = 1.5) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(low, high))


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * unit(x, self.eps)


def unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def angles(config: Config, is_compressed: bool, positions: Tensor) -> Tensor:
    """Of the rotation of each pair, [t, pairs]. Layers with compressed keys have another base, and YaRN."""
    width, base = config.qk_rope_head_dim, config.compress_rope_theta if is_compressed else config.rope_theta
    rates = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if is_compressed and config.rope_scaling:
        scaling = config.rope_scaling

        def dimension(turns: float) -> float:
            length = scaling["original_max_position_embeddings"]
            return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(dimension(scaling.get("beta_fast", 32))), 0)
        high = min(math.ceil(dimension(scaling.get("beta_slow", 1))), width - 1)
        ramp = ((torch.arange(width // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        rates = rates / scaling["factor"] * ramp + rates * (1 - ramp)
    return positions[:, None] * rates


def turned(x: Tensor, by: Tensor) -> Tensor:
    """x [t, ..., width], whose last elements are pairs that are turned by angles [t, pairs]."""
    plain, x = x.split([x.shape[-1] - 2 * by.shape[-1], 2 * by.shape[-1]], -1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    by = by.reshape(len(by), *[1] * (pairs.ndim - 2), -1)
    return torch.cat([plain, torch.view_as_real(pairs * torch.polar(torch.ones_like(by), by)).flatten(-2)], -1)


def best(scores: Tensor, count: int) -> Tensor:
    """The mask of the highest finite scores of each row; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True)[1][..., :count]
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, order, True) & scores.isfinite()


@dataclass
class Shared:
    """What layers leave for later ones."""

    entries: Tensor | None = None
    keys: Tensor | None = None
    selected: Tensor | None = None
    candidates: Tensor | None = None


class Compressor(nn.Module):
    def __init__(self, config: Config, ratio: int) -> None:
        super().__init__()
        self.ratio, self.wkv = ratio, linear(config.hidden_size, config.head_dim)
        if ratio > 1:
            self.wgate = linear(config.hidden_size, config.head_dim)
        self.norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        groups = x[: len(x) // self.ratio * self.ratio].unflatten(0, (-1, self.ratio))
        return self.norm((self.wkv(groups) * self.wgate(groups).softmax(1)).sum(1))


class Indexer(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.config, self.layer, width = config, layer, config.index_head_dim
        self.wq_b = linear(config.q_lora_rank, config.index_n_heads * width)
        self.weights_proj = linear(config.hidden_size, config.index_n_heads)
        if layer in config.kv_source_layer_ids:
            self.wk, self.k_norm = linear(config.head_dim, width), Norm(width, config.rms_norm_eps)

    def forward(self, x: Tensor, latent: Tensor, by: Tensor, reached: Tensor, shared: Shared) -> None:
        config, source = self.config, self.config.candidate_source_layer_id
        q = turned(self.wq_b(latent).unflatten(-1, (config.index_n_heads, -1)), by)
        weights = self.weights_proj(x) * (config.index_head_dim * config.index_n_heads) ** -0.5
        scores = torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", q, shared.keys).relu(), weights)
        scores = scores.masked_fill(~reached, -torch.inf)
        if self.layer == source:
            shared.candidates = self.candidates(scores, reached)
        elif 0 <= source < self.layer:
            scores = scores.masked_fill(~shared.candidates, -torch.inf)
        shared.selected = best(scores, config.index_topk)

    def candidates(self, scores: Tensor, reached: Tensor) -> Tensor:
        size, width = self.config.candidate_block_size, scores.shape[-1]
        blocks = pad(scores, (0, -width % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        newest = (reached.sum(-1, keepdim=True) - 1).div(size, rounding_mode="floor")
        high = torch.finfo(scores.dtype).max
        blocks = blocks.masked_fill(torch.arange(blocks.shape[-1]) == newest, high)
        return best(blocks, self.config.candidate_topk_blocks).repeat_interleave(size, -1)[..., :width]


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.config, self.ratio = config, config.compress_ratios[layer]
        hidden, heads, width, eps = (
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
            config.rms_norm_eps,
        )
        self.wq_a, self.q_norm = linear(hidden, config.q_lora_rank), Norm(config.q_lora_rank, eps)
        self.wq_b = linear(config.q_lora_rank, heads * width)
        self.wkv, self.kv_norm = linear(hidden, width), Norm(width, eps)
        self.wo_a = linear(heads * width // config.o_groups, config.o_groups * config.o_lora_rank)
        self.wo_b = linear(config.o_groups * config.o_lora_rank, hidden)
        self.attn_sink = random(heads, low=-1, high=1)
        self.compressor = Compressor(config, self.ratio) if layer in config.kv_source_layer_ids else None
        self.indexer = Indexer(config, layer) if layer in config.index_source_layer_ids else None

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        config, count = self.config, torch.arange(len(x))
        by = angles(config, self.ratio > 0, count)
        latent = self.q_norm(self.wq_a(x))
        q = turned(self.wq_b(latent).unflatten(-1, (config.num_attention_heads, -1)), by)
        keys = turned(self.kv_norm(self.wkv(x)), by)
        distance = count[:, None] - count
        seen = (distance >= 0) & (distance < config.sliding_window)
        if self.ratio:
            if self.compressor is not None:
                entries = self.compressor(x)
                starts = angles(config, True, torch.arange(len(entries)) * self.ratio)
                shared.keys = turned(self.indexer.k_norm(self.indexer.wk(entries)), starts)
                shared.entries = turned(entries, starts)
            reached = torch.arange(len(shared.entries)) < ((count + 1) // self.ratio)[:, None]
            if self.indexer is not None:
                self.indexer(x, latent, by, reached, shared)
            keys, seen = torch.cat([keys, shared.entries]), torch.cat([seen, shared.selected], -1)
        scores = torch.einsum("thd,sd->hts", q, keys) * config.head_dim**-0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        sink = self.attn_sink[:, None, None].expand(-1, len(x), 1)
        y = torch.einsum("hts,sd->thd", torch.cat([scores, sink], -1).softmax(-1)[..., :-1], keys)
        y = turned(y, -by).flatten(1).unflatten(-1, (config.o_groups, -1))
        groups = self.wo_a.weight.unflatten(0, (config.o_groups, -1))
        return self.wo_b(torch.einsum("tgd,grd->tgr", y, groups).flatten(1))


class Expert(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.limit, hidden, width = config.swiglu_limit, config.hidden_size, config.moe_intermediate_size
        self.w1, self.w2, self.w3 = linear(hidden, width), linear(width, hidden), linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x).clamp(max=self.limit)) * self.w3(x).clamp(-self.limit, self.limit))


class Gate(nn.Linear):
    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, config.n_routed_experts, bias=False)
        self.config, self.bias = config, random(config.n_routed_experts, low=-0.3, high=0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = softplus(x @ self.weight.T).sqrt()
        ids = (scores + self.bias).topk(self.config.num_experts_per_tok, -1)[1]
        weights = scores.gather(-1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.n_routed_experts))
        self.shared_experts = Expert(config)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        y = self.shared_experts(x)
        for number, expert in enumerate(self.experts):
            y = y + expert(x) * (weights * (ids == number)).sum(-1, keepdim=True)
        return y


def numbering(config: Config, layer: int) -> tuple[list[int], list[list[int]]]:
    """The multipliers of the tokens of an n-gram, the newest first, and the sizes of the hashes by the length of
    n-grams: primes of which no two are alike in all layers."""
    taken: set[int] = set()
    for each in config.engram_layer_ids:
        sizes = []
        for _ in range(config.engram_max_ngram_size - 1):
            sizes.append([])
            number = config.engram_vocab_size
            while len(sizes[-1]) < config.engram_n_heads:
                if number not in taken and all(number % n for n in range(2, math.isqrt(number) + 1)):
                    taken.add(number)
                    sizes[-1].append(number)
                number += 1
        if each == layer:
            break
    bound = max(1, np.iinfo(np.int64).max // config.engram_compressed_vocab_size // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, config.engram_max_ngram_size, np.int64)
    return (draws * 2 + 1).tolist(), sizes


class Engram(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.config, hidden, streams = config, config.hidden_size, config.hc_mult
        self.multipliers, self.primes = numbering(config, layer)
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        self.embed = nn.Embedding(rows, config.engram_head_dim)
        hashes = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.wkv = linear(hashes * config.engram_head_dim, hidden * (streams + 1))
        self.q_weight, self.k_weight = random(streams, hidden), random(streams, hidden)

    def rows(self, ids: list[int]) -> Tensor:
        """The numbers of the vectors of each token, by Python's integers. As many tokens as the longest n-gram has
        stand before the text."""
        out = []
        for t in range(self.config.engram_max_ngram_size, len(ids)):
            row, start, mixed = [], 0, ids[t] * self.multipliers[0]
            for back, (multiplier, sizes) in enumerate(zip(self.multipliers[1:], self.primes, strict=True), 1):
                mixed ^= ids[t - back] * multiplier
                for size in sizes:
                    row.append(start + mixed % size)
                    start += size
            out.append(row)
        return torch.tensor(out)

    def forward(self, x: Tensor, ids: list[int]) -> Tensor:
        config = self.config
        key, value = self.wkv(self.embed(self.rows(ids)).flatten(1)).split(
            [config.hc_mult * config.hidden_size, config.hidden_size], -1
        )
        key = unit(key.unflatten(-1, (config.hc_mult, -1)), config.rms_norm_eps) * self.k_weight
        product = (unit(x, config.rms_norm_eps) * self.q_weight * key).sum(-1) * config.hidden_size**-0.5
        gate = torch.sigmoid(torch.copysign(product.abs().clamp(min=1e-6).sqrt(), product))
        return x + gate[..., None] * value[:, None]


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.config, hidden, eps, streams = config, config.hidden_size, config.rms_norm_eps, config.hc_mult
        self.engram = Engram(config, layer) if layer in config.engram_layer_ids else None
        self.attn, self.ffn = Attention(config, layer), Experts(config)
        self.attn_norm, self.ffn_norm = Norm(hidden, eps), Norm(hidden, eps)
        for part in ("attn", "ffn"):
            mixes = (2 + streams) * streams
            setattr(self, f"hc_{part}_fn", random(mixes, streams * hidden, low=-0.2, high=0.2))
            setattr(self, f"hc_{part}_base", random(mixes, low=-0.5, high=0.5))
            setattr(self, f"hc_{part}_scale", random(3))

    def mixes(self, x: Tensor, part: str) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of the streams in the next input, of the output in the streams, and between streams."""
        config, streams = self.config, self.config.hc_mult
        fn, base, scale = (getattr(self, f"hc_{part}_{name}") for name in ("fn", "base", "scale"))
        made = unit(x.flatten(1), config.rms_norm_eps) @ fn.T
        pre, post, mix = made.split([streams, streams, streams**2], -1)
        of_pre, of_post, of_mix = base.split([streams, streams, streams**2])
        mix = (mix * scale[2] + of_mix).unflatten(-1, (streams, streams)).softmax(-1) + config.hc_eps
        mix = mix / (mix.sum(-2, keepdim=True) + config.hc_eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + config.hc_eps)
            mix = mix / (mix.sum(-2, keepdim=True) + config.hc_eps)
        pre = torch.sigmoid(pre * scale[0] + of_pre) + config.hc_eps
        return pre, 2 * torch.sigmoid(post * scale[1] + of_post), mix

    def forward(self, x: Tensor, pre: Tensor, ids: list[int], shared: Shared) -> tuple[Tensor, Tensor]:
        if self.engram is not None:
            x = self.engram(x, ids)
        for part in ("attn", "ffn"):
            read, (pre, post, mix) = (pre[..., None] * x).sum(1), self.mixes(x, part)
            y = self.attn(self.attn_norm(read), shared) if part == "attn" else self.ffn(self.ffn_norm(read))
            x = post[..., None] * y[:, None] + (mix[..., None] * x[:, :, None]).sum(1)
        return x, pre


class DeepseekV41ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Config
    _supports_sdpa = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = linear(config.hidden_size, config.vocab_size)
        self.joined: list[int] | None = None  # the numbers of tokens in n-grams, which a tokenizer gives
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def text(self, ids: Tensor) -> Tensor:
        """The logits of one text without padding."""
        x = self.embed(ids)[:, None].expand(-1, self.config.hc_mult, -1)
        pre, shared = torch.eye(self.config.hc_mult, dtype=x.dtype)[0].expand(len(ids), -1), Shared()
        numbers = self.joined or list(range(self.config.vocab_size))
        known, before = [numbers[i] for i in ids.tolist()], numbers[self.config.engram_pad_token_id]
        for layer in self.layers:
            x, pre = layer(x, pre, [before] * self.config.engram_max_ngram_size + known, shared)
        return self.head(self.norm((pre[..., None] * x).sum(1)))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, wide: bool = False, **_: Any
    ) -> CausalLMOutputWithPast | Tensor:
        if wide:
            return self.text(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        weights = {name: x.double() for name, x in self.state_dict().items()}
        for row, kept in enumerate(mask > 0):
            if kept.any():
                logits[row, kept] = functional_call(self, weights, (input_ids[row, kept],), {"wide": True}).float()
        return CausalLMOutputWithPast(logits=logits)

"""Step-5 Preview after the code of its release, with the modules of Step-3.7: layers that see all tokens have an
indexer that selects regions of tokens, for each group of heads."""

from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7Attention,
    Step3p7CausalLMOutputWithPast,
    Step3p7DecoderLayer,
    Step3p7MLP,
    Step3p7PreTrainedModel,
    Step3p7RMSNorm,
    Step3p7RotaryEmbedding,
    Step3p7TextModel,
)

from helpers.released_code.step import Stack


class Step4Config(Step3p7TextConfig):
    model_type = "step4"

    sparse_config: dict[str, Any] | None = None


def turned(x: Tensor, positions: Tensor, rates: Tensor) -> Tensor:
    """Vectors [B, T, ..., x] whose first dimensions turn: pairs half of them apart."""
    angles = (positions[..., None] * rates).view(*positions.shape, *[1] * (x.dim() - 3), -1)
    a, b, rest = x.tensor_split([len(rates), 2 * len(rates)], -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)


class Indexed(Step3p7Attention):
    def __init__(self, config: Any, number: int, rates: Tensor) -> None:
        super().__init__(config.per_layer_config[number], number)
        self.config = config
        keys, eps, width = config.sparse_config, config.rms_norm_eps, config.hidden_size
        self.keys, self.rates = keys, rates
        heads, dim = keys["sparse_indexer_num_heads"], keys["proxy_dim"]
        self.sparse_indexer_q = nn.Linear(width, heads * dim, bias=False)
        self.sparse_indexer_k = nn.Linear(width, dim, bias=False)
        self.sparse_indexer_z = nn.Linear(width, dim, bias=False)
        self.sparse_indexer_w = nn.Linear(width, heads, bias=False)
        self.sparse_indexer_q_norm = Step3p7RMSNorm(dim, eps=eps)
        self.sparse_indexer_k_norm = nn.LayerNorm(dim, eps=eps)
        self.ssmax_s = nn.Parameter(torch.randn(self.num_heads))
        self.kept: tuple[Tensor, Tensor] | None = None

    def seen(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, n, h, x], and the keys and gates [B, T, x] of these tokens."""
        groups, dim = self.keys["num_provider_groups"], self.keys["proxy_dim"]
        q = self.sparse_indexer_q_norm(self.sparse_indexer_q(x).unflatten(-1, (groups, -1, dim)))
        k = self.sparse_indexer_k_norm(self.sparse_indexer_k(x))
        return turned(q, positions, self.rates), turned(k, positions, self.rates), self.sparse_indexer_z(x)

    def selected(self, x: Tensor, q: Tensor, k: Tensor, z: Tensor, visible: Tensor) -> Tensor:
        """The mask [n, T, S] of one sequence; `visible` is [T, S]. Slots before the first token are padding."""
        size, count = self.keys["region_block_size"], self.keys["topk"]
        first = int(visible.any(0).nonzero()[0])
        regions = (k.shape[0] - first) // size
        of_tokens = (torch.arange(k.shape[0]) - first).div(size, rounding_mode="floor")
        own = torch.stack([row.nonzero()[-1, 0] - first if row.any() else torch.tensor(0) for row in visible]) // size
        k, z = (part[first : first + regions * size].unflatten(0, (regions, size)) for part in (k, z))
        summaries = (z.softmax(1) * k).sum(1)
        weights = self.sparse_indexer_w(x).float().unflatten(-1, q.shape[1:3]) * q.shape[2] ** -0.5
        scores = torch.einsum("tnhp,tnh->ntp", torch.einsum("tnhx,px->tnhp", q, summaries).relu(), weights)
        scores = scores.masked_fill(torch.arange(regions) >= own[:, None], -torch.inf)
        values, ids = (
            each[..., :count] for each in scores.sort(dim=-1, descending=True, stable=True)
        )  # many scores are 0
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ids, values > -torch.inf)
        among = chosen[..., of_tokens.clamp(0, max(regions - 1, 0))] if regions else torch.zeros(1, dtype=torch.bool)
        return visible & (among | (of_tokens == own[:, None]))

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **inputs: Any
    ) -> Any:
        visible = attention_mask[:, 0] > -1
        positions = torch.stack([each.long().sum(-1) - 1 for each in visible]).clamp(min=0)
        q, k, z = self.seen(hidden_states, positions.float())
        if cache is not None:
            if cache.get_seq_length(self.layer_idx) and self.kept is not None:
                k, z = (torch.cat(each, 1) for each in zip(self.kept, (k, z), strict=True))
            self.kept = (k, z)
        masks = [self.selected(*each) for each in zip(hidden_states, q, k, z, visible, strict=True)]
        of_heads = torch.stack(masks).repeat_interleave(self.num_heads // masks[0].shape[0], 1)
        mask = torch.zeros(of_heads.shape).masked_fill(~of_heads, torch.finfo(torch.float32).min)
        return super().forward(hidden_states, position_embeddings, mask.to(hidden_states), cache=cache, **inputs)


class Experts(nn.Module):
    """Under the names of the release."""

    router_bias: Tensor

    def __init__(self, config: Any, limit: float | None) -> None:
        super().__init__()
        self.config, self.limit = config, limit or torch.inf
        wide, narrow = config.hidden_size, config.moe_intermediate_size
        count = config.n_routed_experts
        self.gate = nn.Linear(wide, count, bias=False)
        self.gate_proj, self.up_proj = (Stack(config, count, narrow, wide) for _ in range(2))
        self.down_proj = Stack(config, count, wide, narrow)
        self.register_buffer("router_bias", torch.zeros(count))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).float().sigmoid()
        chosen = (scores + self.router_bias).topk(self.config.num_experts_per_tok).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores
        kept = kept / kept.sum(-1, keepdim=True) * self.config.moe_router_scaling_factor
        x = x.unsqueeze(-2).expand(*x.shape[:-1], kept.shape[-1], x.shape[-1])
        gate = nn.functional.silu(self.gate_proj(x)).clamp(max=self.limit)
        y = self.down_proj(gate * self.up_proj(x).clamp(-self.limit, self.limit))
        return torch.einsum("...eo,...e->...o", y, kept.to(y))


class SparseLayer(Step3p7DecoderLayer):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        del self.mlp
        self.moe = Experts(config, (config.swiglu_limits or {number: None})[number])
        self.share_expert = Step3p7MLP(config, number, is_shared_expert=True)

    def mlp(self, x: Tensor) -> Tensor:
        return self.share_expert(x) + self.moe(x)


class Step4Model(Step3p7TextModel):
    config_class: ClassVar = Step4Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, kind in enumerate(config.mlp_layer_types):
            if kind == "sparse":
                self.layers[number] = SparseLayer(config, number)
            if config.layer_types[number] == "full_attention":
                self.layers[number].self_attn = Indexed(config, number, self.rates())
        self.post_init()

    def rates(self) -> Tensor:
        """How fast the pairs of an indexer turn: as those of a head that has as many in these layers."""
        config = deepcopy(self.config)
        config.head_dim = config.sparse_config["sparse_indexer_rope_dim"]
        config.rope_parameters["full_attention"]["partial_rotary_factor"] = 1.0
        return Step3p7RotaryEmbedding(config).full_attention_inv_freq


class Step4ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    config_class: ClassVar = Step4Config
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Step4Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> Any:
        outputs = self.model(input_ids, **inputs)
        return Step3p7CausalLMOutputWithPast(logits=self.lm_head(outputs[0]), cache=outputs.cache)

"""Naive-N0.5-Flash after the code of its release, with the modules of transformers' MiMo-V2-Flash: layers that see all
tokens have an indexer that selects tokens."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
    MiMoV2FlashAttention,
    MiMoV2FlashMLP,
    MiMoV2FlashTopkRouter,
)


class NaiveN05FlashConfig(MiMoV2FlashConfig):
    model_type = "naive_n05_flash"

    swa_num_key_value_heads: int = 8
    index_top_k: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 16
    indexer_activation_dtype: str = "fp8_e4m3"


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors [B, T, ..., x] whose first dimensions turn: pairs half of them apart."""
    half = cos.shape[-1] // 2
    cos, sin = (each[..., :half].view(*each.shape[:2], *[1] * (x.dim() - 3), half) for each in (cos, sin))
    a, b, rest = x.tensor_split([half, 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def in_fp8(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


class Indexer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.heads, dim = config.hidden_size, config.index_n_heads, config.index_head_dim
        self.count, self.rounds = config.index_top_k, config.indexer_activation_dtype == "fp8_e4m3"
        self.wq = nn.Linear(width, self.heads * dim, bias=False)
        self.wk = nn.Linear(width, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=1e-5)
        self.weights_proj = nn.Linear(width, self.heads, bias=False)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor, continues: bool) -> Tensor:
        """The mask [B, T, S] of the selected tokens among the visible ones."""
        q = turned(self.wq(x).unflatten(-1, (self.heads, -1)), cos, sin)
        k = turned(self.k_norm(self.wk(x)), cos, sin)
        q, k = (in_fp8(each) if self.rounds else each for each in (q, k))
        if continues and self.kept is not None:
            k = torch.cat([self.kept, k], 1)
        self.kept = k
        weights = self.weights_proj(x).float() * self.heads**-0.5
        scores = torch.einsum("bthx,bsx->bths", q.float(), k.float()).relu()
        scores = (scores * weights[..., None]).sum(2).masked_fill(~visible, -torch.inf)
        ids = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.count]
        return visible & torch.zeros_like(visible).scatter(-1, ids, True)


class Attention(MiMoV2FlashAttention):
    """With as many key-value heads in layers with the window as the config says, and names of the release."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        if self.layer_type == "full_attention":
            self.indexer = Indexer(config)
            return
        self.attention_sink_bias = nn.Parameter(torch.randn(config.num_attention_heads))
        del self._parameters["sinks"]
        heads = config.swa_num_key_value_heads
        self.num_key_value_groups = config.num_attention_heads // heads
        for name, dim in (("k_proj", self.head_dim), ("v_proj", self.v_head_dim)):
            setattr(self, name, nn.Linear(config.hidden_size, heads * dim, bias=config.attention_bias))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("attention_sink_bias" if name == "sinks" else name)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **inputs: Any
    ) -> Any:
        if self.layer_type == "full_attention":
            visible = attention_mask[:, 0] > -1
            continues = cache is not None and bool(cache.get_seq_length(self.layer_idx))
            chosen = self.indexer(hidden_states, *position_embeddings, visible, continues)[:, None]
            mask = torch.zeros(chosen.shape).masked_fill(~chosen, torch.finfo(torch.float32).min)
            attention_mask = mask.to(hidden_states)
        return super().forward(hidden_states, position_embeddings, attention_mask, cache=cache, **inputs)


class Experts(nn.Module):
    """One by one, as in the release."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = MiMoV2FlashTopkRouter(config)
        inner = config.moe_intermediate_size
        self.experts = nn.ModuleList(MiMoV2FlashMLP(config, inner) for _ in range(config.n_routed_experts))

    def forward(self, x: Tensor) -> Tensor:
        _, weights, ids = self.gate(x)
        shares = torch.zeros(len(weights), len(self.experts)).scatter(-1, ids, weights.float()).view(*x.shape[:-1], -1)
        return torch.einsum("e...d,...e->...d", torch.stack([expert(x) for expert in self.experts]), shares.to(x))


class NaiveN05FlashForCausalLM(MiMoV2FlashForCausalLM):
    config_class: ClassVar = NaiveN05FlashConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = Attention(config, number)
            if config.mlp_layer_types[number] == "sparse":
                layer.mlp = Experts(config)
        self.post_init()

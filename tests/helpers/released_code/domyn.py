"""Domyn Edge after the code of a server (vLLM): Qwen3 with norms on both sides, with a size of heads, a window and
rotary positions of each layer's own."""

from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

OF_QWEN = {"use_sliding_window", "sliding_window", "layer_types", "max_window_layers"}


class DomynEdgeConfig(Qwen3Config):
    model_type = "domynedge"

    position_layers: list[str] | None = None
    window_sizes: list[list[int]] | None = None
    head_sizes: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        firsts = [first for first, _ in self.window_sizes]
        self.head_dim, self.use_sliding_window, self.sliding_window = max(self.head_sizes), True, max(firsts) + 1
        self.layer_types = ["sliding_attention" if first > 0 else "full_attention" for first in firsts]
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in OF_QWEN}


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        config = copy(config)
        config.head_dim = config.head_sizes[number]
        self.attention, self.feedforward = Qwen3Attention(config, number), Qwen3MLP(config)
        self.attention.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps, elementwise_affine=False)
        has_rope = config.position_layers[number] == "rope"
        self.rotary_emb = Qwen3RotaryEmbedding(config) if has_rope else None
        self.pre_attention_norm, self.post_attention_norm = (_norm(config) for _ in range(2))
        self.pre_feedforward_norm, self.post_feedforward_norm = (_norm(config) for _ in range(2))

    def forward(self, x: Tensor, position_ids: Tensor, **inputs: Any) -> Tensor:
        if self.rotary_emb is None:
            unturned = torch.ones(1, 1, self.attention.head_dim, dtype=x.dtype)
            inputs["position_embeddings"] = unturned, 0 * unturned
        else:
            inputs["position_embeddings"] = self.rotary_emb(x, position_ids)
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x), **inputs)[0])
        return x + self.post_feedforward_norm(self.feedforward(self.pre_feedforward_norm(x)))


def _norm(config: Any) -> nn.Module:
    return Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)


class DomynEdgeForCausalLM(Qwen3ForCausalLM):
    config_class: ClassVar = DomynEdgeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.post_init()

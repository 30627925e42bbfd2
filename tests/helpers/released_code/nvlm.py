"""NVLM-D after vLLM's `nvlm_d` and `intern_vit`: transformers' Qianfan-OCR with further heads in the encoder, whose
norms of queries and keys leave these out, and without biases in a wider projector."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import QianfanOCRForConditionalGeneration

from helpers.released_code.kimi import linear

FURTHER = 7


class NormOfFirst(nn.Module):
    def __init__(self, counted: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.counted, self.eps = nn.Parameter(torch.ones(width)), counted, eps

    def forward(self, x: Tensor) -> Tensor:
        square = x[..., : self.counted].float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(square + self.eps)).to(x.dtype) * self.weight


class NVLM(QianfanOCRForConditionalGeneration):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vision, text = config.vision_config, config.text_config
        for layer in self.model.vision_tower.layers:
            attention, width = layer.attention, vision.hidden_size
            attention.num_heads += FURTHER
            attention.embed_dim = wide = attention.num_heads * attention.head_dim
            attention.q_proj, attention.k_proj, attention.v_proj = (linear(width, wide) for _ in range(3))
            attention.projection_layer = nn.Linear(wide, width)
            attention.q_norm, attention.k_norm = (NormOfFirst(width, wide, vision.layer_norm_eps) for _ in range(2))
        projector = self.model.multi_modal_projector
        projector.linear_1 = linear(projector.linear_1.in_features, text.intermediate_size)
        projector.linear_2 = linear(text.intermediate_size, text.hidden_size)
        self.post_init()

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # transformers saves its tensors with the names of Qianfan-OCR's release then

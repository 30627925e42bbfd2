"""Llama Nemotron Nano VL after vLLM's `nemotron_vl`: transformers' Nemotron Omni with Llama, and another projector."""

from typing import Any

from torch import nn
from transformers import NemotronH_Omni_Reasoning_V3


class LlamaNemotronVL(NemotronH_Omni_Reasoning_V3):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        joined = config.vision_hidden_size * int(1 / config.downsample_ratio) ** 2
        self.multi_modal_projector = nn.Sequential(
            nn.LayerNorm(joined),
            nn.Linear(joined, config.projector_hidden_size),
            nn.GELU(),
            nn.Linear(config.projector_hidden_size, config.text_config.hidden_size),
        )
        self.post_init()

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # transformers saves its tensors with the names of the release then

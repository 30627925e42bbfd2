"""Rnj-1.5 after the code of a server (vLLM): Gemma 3 whose tokens see, in layers with chunks, their own chunk and the
one before."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel


class Rnj1Config(Gemma3TextConfig):
    model_type = "rnj1"

    @property
    def attention_chunk_size(self) -> int:
        """The number of keys that the cache of a layer with chunks holds."""
        return self.sliding_window

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        self.standardize_rope_params()
        return kwargs


class Rnj1Model(Gemma3TextModel):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        chunk = self.config.sliding_window // 2
        inputs.pop("inputs_embeds", None)
        padded = torch.zeros_like(input_ids) if attention_mask is None else attention_mask.cumsum(-1) == 0
        starts = padded.sum(-1)

        def is_near(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
            start = starts[batch]
            return key - start >= ((query - start) // chunk - 1) * chunk

        given = {
            **{"config": self.config, "inputs_embeds": self.embed_tokens(input_ids), "attention_mask": attention_mask},
            **{"cache": inputs.get("cache"), "position_ids": inputs.get("position_ids")},
        }
        masks = {
            "full_attention": create_causal_mask(**given),
            "chunked_attention": create_sliding_window_causal_mask(**given, and_mask_function=is_near),
        }
        return super().forward(inputs_embeds=given["inputs_embeds"], attention_mask=masks, **inputs)


class Rnj1ForCausalLM(Gemma3ForCausalLM):
    config_class: ClassVar = Rnj1Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Rnj1Model(config)
        self.post_init()

"""OpenCUA after vLLM's `opencua`: transformers' Qwen2 with the encoder of Qwen2.5-VL. Rotary positions count tokens."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2_5_VLConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel


class Config(PreTrainedConfig):
    model_type = "opencua"

    text_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    media_placeholder_token_id: int = 151664


class OpenCUAForConditionalGeneration(PreTrainedModel):
    config_class = Config
    _supports_sdpa = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        text = Qwen2Config(**config.text_config)
        vision = Qwen2_5_VLConfig(vision_config={**config.vision_config, "out_hidden_size": text.hidden_size})
        self.language_model = Qwen2ForCausalLM._from_config(text, attn_implementation="eager")
        self.vision_tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(
            vision.vision_config, attn_implementation="eager"
        )
        self.post_init()

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, image_grid_thw: Tensor | None = None, **others: Any
    ) -> Any:
        x = self.language_model.model.embed_tokens(input_ids)
        if pixel_values is not None:
            features = self.vision_tower(pixel_values, grid_thw=image_grid_thw).pooler_output
            x[input_ids == self.config.media_placeholder_token_id] = features.to(x.dtype)
        return self.language_model(inputs_embeds=x, **others)

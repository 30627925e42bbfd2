"""Phi-3-vision after its `image_embedding_phi3_v.py`: transformers' Phi-3 and CLIP, and what is between them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM


class Config(Phi3Config):
    model_type = "phi3_v"

    embd_layer: dict[str, Any] | None = None
    img_processor: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    image_token_id: int = 32044


class ImageEmbedding(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        clip = CLIPVisionConfig(**config.vision_config, hidden_act="quick_gelu", attn_implementation="eager")
        width, self.size = 4 * clip.hidden_size, clip.image_size
        self.img_processor = CLIPVisionModel(clip)
        self.glb_GN, self.sub_GN = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 1, 1, width))
        self.img_projection = nn.Sequential(
            nn.Linear(width, config.hidden_size), nn.GELU(), nn.Linear(config.hidden_size, config.hidden_size)
        )

    def rows(self, tiles: Tensor, h: int, w: int) -> Tensor:
        """The rows of h x w tiles together [h k (w k + 1), 4 D]: blocks of 2 x 2 patches, and what ends a row."""
        side = int(tiles.shape[1] ** 0.5)
        x = tiles.reshape(h, w, side // 2, 2, side // 2, 2, -1).permute(0, 2, 1, 4, 3, 5, 6)
        x = x.reshape(h * side // 2, w * side // 2, -1)
        return torch.cat([x, self.sub_GN[0].expand(len(x), 1, -1)], dim=1).flatten(0, 1)

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        """The features [X, D] of all images."""
        out = []
        for image, size in zip(pixel_values, image_sizes.tolist(), strict=True):
            h, w = (pixels // self.size for pixels in size)
            states = self.img_processor(image[: 1 + h * w], output_hidden_states=True).hidden_states[-2][:, 1:]
            out.append(torch.cat([self.rows(states[1:], h, w), self.glb_GN[0], self.rows(states[:1], 1, 1)]))
        return self.img_projection(torch.cat(out))


class Phi3VForCausalLM(Phi3ForCausalLM):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model.vision_embed_tokens = ImageEmbedding(config)
        self.post_init()

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, image_sizes: Tensor | None = None, **others: Any
    ) -> Any:
        x = self.model.embed_tokens(input_ids)
        if pixel_values is not None:
            x[input_ids == self.config.image_token_id] = self.model.vision_embed_tokens(pixel_values, image_sizes)
        return super().forward(inputs_embeds=x, **others)

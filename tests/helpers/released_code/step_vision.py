"""Step-3, Step3-VL-10B and Step-5 Preview after vLLM's `step3_vl` and `step_vl`: text models with encoders of images
and tiles."""

from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.activations import ACT2FN

from helpers.released_code.step import Step3TextConfig, Step3TextForCausalLM
from helpers.released_code.step_preview import Step4Config, Step4ForCausalLM


class Config(PreTrainedConfig):
    model_type = "step3_vl"

    text_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    understand_projector_stride: int = 1
    projector_bias: bool = True
    image_token_id: int = 128001


class RobotConfig(Config):
    model_type = "step_robotics"

    projector_bias: bool = False
    image_token_id: int = 151679


class PreviewConfig(RobotConfig):
    model_type = "step3p5v"


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of all patches of an image to each other, [B, P, N, H] to [B, P, N H]."""
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v).flatten(2)


class NormsBehind(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, inner, eps = vision["hidden_size"], vision["intermediate_size"], vision["layer_norm_eps"]
        self.heads, self.act = vision["num_attention_heads"], ACT2FN[vision["hidden_act"]]
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.self_attn = nn.ModuleDict({"qkv_proj": nn.Linear(width, 3 * width), "out_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.self_attn["qkv_proj"](x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.layer_norm1(self.self_attn["out_proj"](attended(q, k, v)))
        return x + self.layer_norm2(self.mlp["fc2"](self.act(self.mlp["fc1"](x))))


class Embeddings(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, patch = vision["hidden_size"], vision["patch_size"]
        self.side = vision["image_size"] // patch
        self.class_embedding = nn.Parameter(torch.zeros(1, width))
        self.patch_embedding = nn.Conv2d(vision["num_channels"], width, patch, patch)
        self.position_embedding = nn.Embedding(self.side**2 + 1, width)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels)
        first, table = self.position_embedding.weight.split([1, self.side**2])
        table = table.T.unflatten(1, (self.side, self.side))[None]
        if patches.shape[-2:] != table.shape[-2:]:
            table = nn.functional.interpolate(table.float(), patches.shape[-2:], mode="bicubic", antialias=True)
        token = (self.class_embedding + first).expand(len(pixels), 4, -1)
        return torch.cat([token, (patches + table.to(patches.dtype)).flatten(2).transpose(1, 2)], 1)


class Step3Vision(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.embeddings = Embeddings(vision)
        layers = nn.ModuleList(NormsBehind(vision) for _ in range(vision["num_hidden_layers"]))
        self.transformer = nn.ModuleDict({"layers": layers})

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings(pixels)
        for layer in self.transformer["layers"]:
            x = layer(x)
        return x[:, 4:]


def turned(x: Tensor, side: int) -> Tensor:
    """Turns neighbouring values of heads [B, P, N, H]: the first half of a head by columns, the other by rows."""
    half = x.shape[-1] // 2
    frequencies = 1e4 ** -(torch.arange(0, half, 2) / half)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = torch.cat([places.flatten()[:, None] * frequencies for places in (columns, rows)], -1)[:, None]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x.dtype)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))


class Resblock(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, self.heads, self.act = vision["width"], vision["heads"], ACT2FN[vision["hidden_act"]]
        inner = int(width * vision["mlp_ratio"])
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ls_1, self.ls_2 = Scale(width), Scale(width)
        self.attn = nn.MultiheadAttention(width, self.heads)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, inner), "c_proj": nn.Linear(inner, width)})

    def forward(self, x: Tensor) -> Tensor:
        joined = nn.functional.linear(self.ln_1(x), self.attn.in_proj_weight, self.attn.in_proj_bias)
        q, k, v = joined.unflatten(-1, (3, self.heads, -1)).unbind(2)
        side = isqrt(x.shape[1])
        y = self.attn.out_proj(attended(turned(q, side), turned(k, side), v))
        x = x + y * self.ls_1.gamma
        return x + self.mlp["c_proj"](self.act(self.mlp["c_fc"](self.ln_2(x)))) * self.ls_2.gamma


class RobotVision(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, patch = vision["width"], vision["patch_size"]
        self.side = vision["image_size"] // patch
        self.conv1 = nn.Conv2d(vision["num_channels"], width, patch, patch, bias=False)
        self.positional_embedding = nn.Parameter(torch.zeros(self.side**2, width))
        self.ln_pre = nn.LayerNorm(width)
        blocks = nn.ModuleList(Resblock(vision) for _ in range(vision["layers"]))
        self.transformer = nn.ModuleDict({"resblocks": blocks})
        self.vit_downsampler1 = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.vit_downsampler2 = nn.Conv2d(2 * width, 4 * width, 3, 2, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.conv1(pixels)
        table = self.positional_embedding.T.unflatten(1, (self.side, self.side))[None]
        table = nn.functional.interpolate(table, patches.shape[-2:], mode="bilinear")
        x = self.ln_pre((patches + table).flatten(2).transpose(1, 2))
        for block in self.transformer["resblocks"]:
            x = block(x)
        x = x.transpose(1, 2).unflatten(2, patches.shape[-2:])
        return self.vit_downsampler2(self.vit_downsampler1(x)).flatten(2).transpose(1, 2)


class StepVLForConditionalGeneration(PreTrainedModel):
    config_class = RobotConfig
    _supports_sdpa = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        text = self.text_model(config.text_config)
        self.model, self.lm_head = text.model, text.lm_head
        object.__setattr__(self, "text", text)  # whose tensors are named twice otherwise
        joined = self.add_vision(config)
        self.vit_large_projector = nn.Linear(joined, text.config.hidden_size, config.projector_bias)
        self.post_init()

    def text_model(self, keys: Any) -> Any:
        return Qwen3ForCausalLM._from_config(Qwen3Config(**keys), attn_implementation="eager")

    def add_vision(self, config: Config) -> int:
        """Makes the modules that see, and returns the width of what they see."""
        self.vision_model = RobotVision(config.vision_config)
        return 4 * config.vision_config["width"]

    def encoded(self, pixels: Tensor) -> Tensor:
        """What it sees in images or tiles [B, P, Z]."""
        return self.vision_model(pixels)

    def features(self, pixel_values: Tensor, patch_pixel_values: Any = None, num_patches: Any = None) -> Tensor:
        """The features [X, D] of all images: of each the features of its tiles, then its own."""
        whole = self.vit_large_projector(self.encoded(pixel_values))
        if patch_pixel_values is None:
            return whole.flatten(0, 1)
        tiles = self.vit_large_projector(self.encoded(patch_pixel_values))
        of_images = zip(tiles.split(num_patches.tolist()), whole, strict=True)
        return torch.cat([part for own, image in of_images for part in (own.flatten(0, 1), image)])

    def forward(self, input_ids: Tensor, pixel_values: Any = None, **others: Any) -> Any:
        tiles = {name: others.pop(name) for name in ("patch_pixel_values", "num_patches") if name in others}
        x = self.model.embed_tokens(input_ids)
        if pixel_values is not None:
            x[input_ids == self.config.image_token_id] = self.features(pixel_values, **tiles).to(x.dtype)
        return self.text(inputs_embeds=x, **others)


class Step3VLForConditionalGeneration(StepVLForConditionalGeneration):
    config_class = Config

    def text_model(self, keys: Any) -> Any:
        return Step3TextForCausalLM._from_config(Step3TextConfig(**keys), attn_implementation="eager")

    def add_vision(self, config: Config) -> int:
        width, out = config.vision_config["hidden_size"], config.vision_config["output_hidden_size"]
        self.vision_model = Step3Vision(config.vision_config)
        self.vit_downsampler = nn.Conv2d(width, out, 2, config.understand_projector_stride)
        self.vit_downsampler2 = nn.Conv2d(out, 2 * out, 3, 2, 1)
        return 2 * out

    def encoded(self, pixels: Tensor) -> Tensor:
        x = super().encoded(pixels)
        x = x.transpose(1, 2).unflatten(2, (isqrt(x.shape[1]),) * 2)
        for convolution in (self.vit_downsampler, self.vit_downsampler2):
            x = convolution(x)
        return x.flatten(2).transpose(1, 2)


class MMGPTStepRoboticsForCausalLM(StepVLForConditionalGeneration):
    config_class = PreviewConfig

    def text_model(self, keys: Any) -> Any:
        return Step4ForCausalLM._from_config(Step4Config(**keys), attn_implementation="eager")

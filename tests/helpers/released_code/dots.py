"""dots.ocr after vLLM's `dots_ocr`: Qwen2 with an encoder of images, which is in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from helpers.released_code.kimi import Norm, linear, widened


class Config(Qwen2Config):
    model_type = "dots_ocr"

    vision_config: dict[str, Any] | None = None
    image_token_id: int = 151665


def turned(x: Tensor, h: int, w: int, s: int) -> Tensor:
    """Turns heads of x [P, N, H] by the rows of patches, then by their columns; a value of the first half of a head and
    one of the second half are a complex number. Patches of s x s follow each other."""
    quarter = x.shape[-1] // 4
    frequencies = 1e4 ** (-torch.arange(quarter, dtype=x.dtype) / quarter)
    at = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
    at = at.unflatten(0, (h // s, s)).unflatten(2, (w // s, s)).transpose(1, 2).reshape(-1, 2)
    angles = (at[:, :, None] * frequencies).flatten(1)[:, None]
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * turns
    return torch.cat([pairs.real, pairs.imag], -1)


class Layer(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, inner, eps = vision["embed_dim"], vision["intermediate_size"], vision["rms_norm_eps"]
        self.heads = vision["num_attention_heads"]
        self.norm1, self.norm2 = Norm(width, eps), Norm(width, eps)
        self.attn = nn.ModuleDict({"qkv": linear(width, 3 * width), "proj": linear(width, width)})
        self.mlp = nn.ModuleDict(
            {"fc1": linear(width, inner), "fc2": linear(inner, width), "fc3": linear(width, inner)}
        )

    def forward(self, x: Tensor, h: int, w: int, s: int) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = turned(q, h, w, s), turned(k, h, w, s)
        scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
        x = x + self.attn["proj"](torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1))
        y = self.norm2(x)
        return x + self.mlp["fc2"](nn.functional.silu(self.mlp["fc1"](y)) * self.mlp["fc3"](y))


class Tower(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, p, eps = vision["embed_dim"], vision["patch_size"], vision["rms_norm_eps"]
        self.merge = vision["spatial_merge_size"]
        patches = nn.ModuleDict(
            {"proj": nn.Conv2d(vision["num_channels"], width, p, stride=p), "norm": Norm(width, eps)}
        )
        self.patch_embed = nn.ModuleDict({"patchifier": patches})
        self.blocks = nn.ModuleList(Layer(vision) for _ in range(vision["num_hidden_layers"]))
        self.post_trunk_norm = Norm(width, eps)
        merged = width * self.merge**2
        mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, vision["hidden_size"]))
        self.merger = nn.ModuleDict({"ln_q": nn.LayerNorm(width, 1e-6), "mlp": mlp})

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """The features [X, D] of all images, whose grids are (frames, rows, columns). Frames do not see each other."""
        out, embed = [], self.patch_embed["patchifier"]
        frames = [(h, w) for t, h, w in grids.tolist() for _ in range(t)]
        for frame, (h, w) in zip(patches.split([h * w for h, w in frames]), frames, strict=True):
            pixels = frame.unflatten(1, (embed["proj"].in_channels, *embed["proj"].kernel_size))
            x = embed["norm"](embed["proj"](pixels).flatten(1))
            for layer in self.blocks:
                x = layer(x, h, w, self.merge)
            joined = self.merger["ln_q"](self.post_trunk_norm(x)).unflatten(0, (-1, self.merge**2)).flatten(1)
            out.append(self.merger["mlp"](joined))
        return torch.cat(out)


class DotsOCRForCausalLM(Qwen2ForCausalLM):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vision_tower = Tower(config.vision_config)
        self.post_init()

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, image_grid_thw: Tensor | None = None, **others: Any
    ) -> Any:
        x = self.model.embed_tokens(input_ids)
        if pixel_values is not None:
            features = widened(self.vision_tower, pixel_values.double(), image_grid_thw)
            x[input_ids == self.config.image_token_id] = features.to(x.dtype)
        return super().forward(inputs_embeds=x, **others)

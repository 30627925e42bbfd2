"""Kimi K3 whole: its text model, and its encoder of images after ATOM's `kimi_k3_vision`. All is in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from helpers.released_code import kimi
from helpers.released_code.kimi import Norm, linear, widened

EPS = torch.finfo(torch.float32).eps


class Config(PreTrainedConfig):
    model_type = "kimi_k3"

    text_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    media_placeholder_token_id: int = 163605


def turned(x: Tensor, h: int, w: int) -> Tensor:
    """Each pair of neighbours of x [t h w, N, H] is a complex number, turned by its column or its row."""
    frequencies = 1e4 ** (-torch.arange(0, x.shape[-1], 4, dtype=x.dtype) / x.shape[-1])
    row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    angles = torch.stack([column[..., None] * frequencies, row[..., None] * frequencies], -1).flatten(2).flatten(0, 1)
    turns = torch.polar(torch.ones_like(angles), angles).repeat(len(x) // (h * w), 1)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


class Layer(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, self.inner, self.heads = (
            vision["vt_hidden_size"],
            vision["qkv_hidden_size"],
            vision["vt_num_attention_heads"],
        )
        self.norm0, self.norm1 = Norm(width, EPS), Norm(width, EPS)
        self.wqkv, self.wo = linear(width, 3 * self.inner), linear(self.inner, width)
        self.mlp = nn.ModuleDict(
            {"fc0": linear(width, vision["vt_intermediate_size"]), "fc1": linear(vision["vt_intermediate_size"], width)}
        )

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = turned(q, h, w), turned(k, h, w)
        scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
        x = x + self.wo(torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1))
        inner = nn.functional.gelu(self.mlp["fc0"](self.norm1(x)), approximate="tanh")
        return x + self.mlp["fc1"](inner)


class Positions(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        side = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
        self.weight = nn.Parameter(torch.zeros(*side, vision["vt_hidden_size"]))

    def forward(self, t: int, h: int, w: int) -> Tensor:
        table = self.weight.permute(2, 0, 1)[None]
        learned = nn.functional.interpolate(table, (h, w), mode="bilinear")[0].flatten(1).T
        if t == 1:
            return learned
        half = self.weight.shape[-1] // 2
        angles = torch.arange(t)[:, None] * 1e4 ** (-torch.arange(half, dtype=learned.dtype) / half)
        return (learned + torch.cat([angles.sin(), angles.cos()], -1)[:, None]).flatten(0, 1)


class Tower(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, p = vision["vt_hidden_size"], vision["patch_size"]
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(3, width, p, stride=p, bias=False), "pos_emb": Positions(vision)}
        )
        layers = nn.ModuleList(Layer(vision) for _ in range(vision["vt_num_hidden_layers"]))
        self.encoder = nn.ModuleDict({"blocks": layers, "final_layernorm": Norm(width, EPS)})
        self.merge = vision["merge_kernel_size"]

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Blocks of patches [X, s^2 D] of all images, whose grids are (frames, rows, columns)."""
        out = []
        images = patches.split(grids.prod(-1).tolist())
        for image, (t, h, w) in zip(images, grids.tolist(), strict=True):
            x = self.patch_embed["proj"](image).flatten(1) + self.patch_embed["pos_emb"](t, h, w)
            for layer in self.encoder["blocks"]:
                x = layer(x, h, w)
            rows, columns = self.merge
            blocks = self.encoder["final_layernorm"](x).unflatten(0, (t, h // rows, rows, w // columns, columns))
            out.append(blocks.mean(0).transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(out)


class Projector(nn.Module):
    def __init__(self, vision: Any, width: int) -> None:
        super().__init__()
        merged = vision["vt_hidden_size"] * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1]
        self.proj = nn.Sequential(linear(merged, merged), nn.GELU(), linear(merged, width))
        self.post_norm = Norm(width, vision["projector_ln_eps"])

    def forward(self, x: Tensor) -> Tensor:
        return self.post_norm(self.proj(x))


class KimiK3ForConditionalGeneration(PreTrainedModel):
    config_class = Config
    _supports_sdpa = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        text = kimi.Config(**config.text_config)
        self.language_model, self.vision_tower = kimi.Text(text), Tower(config.vision_config)
        self.mm_projector = Projector(config.vision_config, text.hidden_size)
        self.post_init()

    def features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """The features [X, D] of all images."""
        blocks = widened(self.vision_tower, pixel_values.double(), image_grid_thw)
        return widened(self.mm_projector, blocks)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        x = self.language_model.model.embed_tokens(input_ids).double()
        if pixel_values is not None:
            x[input_ids == self.config.media_placeholder_token_id] = self.features(pixel_values, image_grid_thw)
        logits = torch.zeros(*input_ids.shape, self.language_model.lm_head.out_features)
        for row, kept in enumerate(attention_mask > 0):
            logits[row, kept] = widened(self.language_model, x[row, kept]).float()
        return CausalLMOutputWithPast(logits=logits)

"""MiniCPM-V 2.6, 4 and 4.5 after their `modeling_minicpmv.py`, `modeling_navit_siglip.py` and `resampler.py`: a text
model of transformers, SigLIP, and learned queries. What sees is in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN

from helpers.released_code.kimi import linear, widened


class Layer(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, inner, eps = vision["hidden_size"], vision["intermediate_size"], vision["layer_norm_eps"]
        self.heads, self.act = vision["num_attention_heads"], ACT2FN[vision["hidden_act"]]
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer_norm1(x)
        q, k, v = (self.self_attn[f"{name}_proj"](y).unflatten(-1, (self.heads, -1)) for name in "qkv")
        scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
        x = x + self.self_attn["out_proj"](torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1))
        return x + self.mlp["fc2"](self.act(self.mlp["fc1"](self.layer_norm2(x))))


class Siglip(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        width, p = vision["hidden_size"], vision["patch_size"]
        self.side = vision["image_size"] // p
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(3, width, p, stride=p),
                "position_embedding": nn.Embedding(self.side**2, width),
            }
        )
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(Layer(vision) for _ in range(vision["num_hidden_layers"]))}
        )
        self.post_layernorm = nn.LayerNorm(width, vision["layer_norm_eps"])

    def forward(self, pixels: Tensor, h: int, w: int) -> Tensor:
        """The patches [h w, D] of a slice, whose pixels [3, p, h w p] are patch by patch."""
        limits = torch.arange(1 / self.side, 1.0, 1 / self.side)
        rows, columns = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / torch.tensor(n)), limits, right=True) for n in (h, w)
        )
        places = (rows[:, None] * self.side + columns).flatten()
        x = self.embeddings["patch_embedding"](pixels[None])[0].flatten(1).T
        x = x + self.embeddings["position_embedding"](places)
        for layer in self.encoder["layers"]:
            x = layer(x)
        return self.post_layernorm(x)


class Resampler(nn.Module):
    def __init__(self, queries: int, width: int, of_images: int) -> None:
        super().__init__()
        self.query, self.proj = nn.Parameter(torch.zeros(queries, width)), nn.Parameter(torch.zeros(width, width))
        self.kv_proj, self.attn = linear(of_images, width), nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, 1e-6) for _ in range(3))

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        x = self.ln_kv(self.kv_proj(x))
        rates = 1e4 ** (-torch.arange(x.shape[-1] // 4, dtype=x.dtype) / (x.shape[-1] // 4))
        row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        angles = [place.flatten()[:, None] * rates for place in (column, row)]
        sines = torch.cat([wave for each in angles for wave in (each.sin(), each.cos())], -1)
        found, _ = self.attn(self.ln_q(self.query), x + sines, x)
        return self.ln_post(found) @ self.proj


class MiniCPMV(PreTrainedModel):
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.llm = AutoModelForCausalLM.from_config(config)
        self.vpm = Siglip(config.vision_config)
        self.resampler = Resampler(config.query_num, config.hidden_size, config.vision_config["hidden_size"])
        self.post_init()

    def features(self, pixels: Tensor, sizes: Tensor) -> Tensor:
        """The features [X, D] of slices side by side."""
        widths = (sizes.prod(-1) * pixels.shape[2]).tolist()
        out = []
        for own, (h, w) in zip(pixels[0].double().split(widths, dim=-1), sizes.tolist(), strict=True):
            out.append(widened(self.resampler, widened(self.vpm, own, h, w), h, w))
        return torch.cat(out)

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, tgt_sizes: Tensor | None = None, **others: Any
    ) -> Any:
        x = self.llm.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            x[input_ids == self.config.image_token_id] = self.features(pixel_values, tgt_sizes).to(x.dtype)
        return self.llm(inputs_embeds=x, **others)

"""Ovis 2.5 and 2.6 after vLLM's `ovis2_5` and `siglip2navit`: Qwen3 with an encoder of images whose features are shares
of visual words. The encoder is in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from helpers.released_code.dots import turned
from helpers.released_code.kimi import linear, widened

INDICATORS = 4


class Config(PreTrainedConfig):
    model_type = "ovis2_5"

    llm_config: dict[str, Any] | None = None
    vit_config: dict[str, Any] | None = None
    visual_vocab_size: int = 65536
    visual_atom_token_id: int = 151671
    visual_indicator_token_ids: tuple[int, ...] = (151672, 151673, 151674, 151675)


class Layer(nn.Module):
    def __init__(self, vit: Any) -> None:
        super().__init__()
        width, inner, eps = vit["hidden_size"], vit["intermediate_size"], vit["layer_norm_eps"]
        self.heads, self.act = vit["num_attention_heads"], ACT2FN[vit["hidden_act"]]
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x: Tensor, h: int, w: int, s: int) -> Tensor:
        y = self.layer_norm1(x)
        q, k, v = (self.self_attn[f"{name}_proj"](y).unflatten(-1, (self.heads, -1)) for name in "qkv")
        q, k = turned(q, h, w, s), turned(k, h, w, s)
        scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
        x = x + self.self_attn["out_proj"](torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1))
        return x + self.mlp["fc2"](self.act(self.mlp["fc1"](self.layer_norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vit: Any) -> None:
        super().__init__()
        width, p, s = vit["hidden_size"], vit["patch_size"], vit["hidden_stride"]
        self.side, self.stride = vit["image_size"] // p, s
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(3, width, p, p),
                "position_embedding": nn.Embedding(self.side**2, width),
            }
        )
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer(vit) for _ in range(vit["num_hidden_layers"]))})
        self.post_layernorm = nn.LayerNorm(width, vit["layer_norm_eps"])  # of no use

    def forward(self, frame: Tensor, h: int, w: int) -> Tensor:
        """The squares of patches of a frame [h w / s^2, s^2 D]."""
        conv, s = self.embeddings["patch_embedding"], self.stride
        table = self.embeddings["position_embedding"].weight.T.unflatten(1, (self.side, self.side))
        learned = nn.functional.interpolate(table[None], (h, w), mode="bicubic", align_corners=False)[0]
        squares = learned.unflatten(1, (h // s, s)).unflatten(3, (w // s, s)).permute(1, 3, 2, 4, 0)
        x = conv(frame.unflatten(1, (3, *conv.kernel_size))).flatten(1) + squares.flatten(0, 3)
        for layer in self.encoder["layers"]:
            x = layer(x, h, w, s)
        return x.unflatten(0, (-1, s * s)).flatten(1)


class VisualTokenizer(nn.Module):
    def __init__(self, vit: Any, words: int) -> None:
        super().__init__()
        self.vit = nn.ModuleDict({"vision_model": Transformer(vit)})
        joined = vit["hidden_size"] * vit["hidden_stride"] ** 2
        self.head = nn.Sequential(linear(joined, words - INDICATORS), nn.LayerNorm(words - INDICATORS))

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """The shares of words [X, words] of all images, whose grids are (frames, rows, columns)."""
        frames = [(h, w) for t, h, w in grids.tolist() for _ in range(t)]
        split = patches.split([h * w for h, w in frames])
        transformer = self.vit["vision_model"]
        squares = [transformer(frame, h, w) for frame, (h, w) in zip(split, frames, strict=True)]
        return nn.functional.pad(self.head(torch.cat(squares)).softmax(-1), (0, INDICATORS))


class Ovis2_5(PreTrainedModel):
    config_class = Config
    _supports_sdpa = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        text = AutoConfig.for_model(**config.llm_config)
        self.llm = AutoModelForCausalLM.from_config(text, attn_implementation="eager", experts_implementation="eager")
        self.visual_tokenizer = VisualTokenizer(config.vit_config, config.visual_vocab_size)
        self.vte = nn.Embedding(config.visual_vocab_size, text.hidden_size)
        self.post_init()

    def features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """The features [X, D] of all images."""
        shares = widened(self.visual_tokenizer, pixel_values.double(), image_grid_thw)
        return (shares @ self.vte.weight.double()).float()

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, image_grid_thw: Tensor | None = None, **others: Any
    ) -> Any:
        x = self.llm.model.embed_tokens(input_ids)
        if pixel_values is not None:
            x[input_ids == self.config.visual_atom_token_id] = self.features(pixel_values, image_grid_thw).to(x.dtype)
            first = self.config.visual_vocab_size - INDICATORS
            for number, token in enumerate(self.config.visual_indicator_token_ids):
                x[input_ids == token] = self.vte.weight[first + number].to(x.dtype)
        return self.llm(inputs_embeds=x, **others)

"""MiMo V2.5 after vLLM's `mimo_v2_omni` and `mimo_audio`, beside transformers' MiMo-V2-Flash: an encoder of images, in
float64, and one of a codec's codes, with transformers' Qwen2.

Two things are as in the code of the release, which others repeat (mlx-vlm, SGLang-JAX): the norm before the merger
takes the mean away, and a sink is added to the score of a frame's first patch."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM, Qwen2Config, Qwen2Model

from helpers.released_code.kimi import Norm, linear, widened

EPS = 1e-6


class Config(MiMoV2FlashConfig):
    vision_config: dict[str, Any] | None = None
    audio_config: dict[str, Any] | None = None
    image_token_id: int = 151655
    audio_token_id: int = 151669


class Attention(nn.Module):
    def __init__(self, vision: Any, has_sinks: bool) -> None:
        super().__init__()
        width, self.size = vision["hidden_size"], vision["qk_channels"]
        self.heads, self.shared = vision["num_heads"], vision["num_key_value_heads"]
        self.qkv = nn.Linear(width, (self.heads + 2 * self.shared) * self.size)
        self.proj = nn.Linear(self.heads * self.size, width)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if has_sinks else None

    def forward(self, x: Tensor, turns: Tensor, window: int | None) -> Tensor:
        split = [self.heads * self.size, self.shared * self.size, self.shared * self.size]
        q, k, v = (each.unflatten(-1, (-1, self.size)) for each in self.qkv(x).split(split, dim=-1))
        q, k = (torch.view_as_complex(torch.stack(each.chunk(2, -1), -1)) * turns[:, None] for each in (q, k))
        q, k = (torch.cat([each.real, each.imag], -1) for each in (q, k))
        out = []
        for head in range(self.heads):
            group = head * self.shared // self.heads
            scores = q[:, head] @ k[:, group].T * self.size**-0.5
            if self.sinks is not None:
                scores[:, 0] += self.sinks[head]
            if window is not None:
                number = torch.arange(len(x))
                scores[(number[:, None] - number).abs() > window] = -torch.inf
            out.append(scores.softmax(-1) @ v[:, group])
        return self.proj(torch.cat(out, -1))


class Layer(nn.Module):
    def __init__(self, vision: Any, has_sinks: bool) -> None:
        super().__init__()
        width, inner = vision["hidden_size"], vision["intermediate_size"]
        self.norm1, self.norm2 = Norm(width, EPS), Norm(width, EPS)
        self.attn = Attention(vision, has_sinks)
        self.mlp = nn.ModuleDict(
            {
                **{name: nn.Linear(width, inner) for name in ("gate_proj", "up_proj")},
                "down_proj": nn.Linear(inner, width),
            }
        )

    def forward(self, x: Tensor, turns: Tensor, window: int | None) -> Tensor:
        x = x + self.attn(self.norm1(x), turns, window)
        y = self.norm2(x)
        return x + self.mlp["down_proj"](nn.functional.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class Tower(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.vision, width = vision, vision["hidden_size"]
        kernel = (vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(vision["in_chans"], width, kernel, kernel, bias=False)})
        self.blocks = nn.ModuleList(
            Layer(vision, vision["use_sink"] and i not in vision["fullatt_block_indexes"])
            for i in range(vision["depth"])
        )
        merged = width * vision["spatial_merge_size"] ** 2
        mlp = nn.Sequential(linear(merged, merged), nn.GELU(), linear(merged, vision["out_hidden_size"]))
        self.merger = nn.ModuleDict({"ln_q": nn.LayerNorm(width, EPS, bias=False), "mlp": mlp})

    def frame(self, x: Tensor, h: int, w: int) -> Tensor:
        """The features of the patches of one frame, whose squares are one after the other, row by row."""
        s, size = self.vision["spatial_merge_size"], self.vision["qk_channels"]
        places = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
        places = places.unflatten(0, (h // s, s)).unflatten(2, (w // s, s)).transpose(1, 2).reshape(-1, 2)
        rates = 1e4 ** (-torch.arange(0, size // 2, 2, dtype=x.dtype) / (size // 2))
        angles = (places[:, :, None] * rates).flatten(1)
        turns = torch.polar(torch.ones_like(angles), angles)
        squares = torch.arange(h * w).view(h // s, w // s, s * s)
        columns = squares.transpose(0, 1).flatten()
        by_columns = False
        for i, layer in enumerate(self.blocks):
            if by_columns != (self.vision["vit_window_attn_types"][i] == 1):
                order = columns.argsort() if by_columns else columns
                x, turns, by_columns = x[order], turns[order], not by_columns
            sees_all = i in self.vision["fullatt_block_indexes"]
            x = layer(x, turns, None if sees_all else self.vision["visual_token_window_size"])
        return x[columns.argsort()] if by_columns else x

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """The features [X, D] of all images, whose grids are (frames, rows, columns)."""
        conv, out = self.patch_embed["proj"], []
        x = conv(patches.unflatten(1, (conv.in_channels, *conv.kernel_size))).flatten(1)
        frames = [(h, w) for t, h, w in grids.tolist() for _ in range(t)]
        for frame, (h, w) in zip(x.split([h * w for h, w in frames]), frames, strict=True):
            normed = self.merger["ln_q"](self.frame(frame, h, w))
            out.append(self.merger["mlp"](normed.unflatten(0, (-1, self.vision["spatial_merge_size"] ** 2)).flatten(1)))
        return torch.cat(out)


class Sound(nn.Module):
    def __init__(self, audio: Any) -> None:
        super().__init__()
        width, heads = audio["input_local_dim"], audio["input_local_attn_heads"]
        config = Qwen2Config(
            hidden_size=width,
            num_hidden_layers=audio["input_local_layers"],
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=audio["input_local_intermediate_size"],
            rope_parameters={"rope_type": "default", "rope_theta": audio["rope_theta"]},
            vocab_size=1,
            attn_implementation="eager",
        )
        self.input_local_transformer = Qwen2Model(config)
        del self.input_local_transformer.embed_tokens
        joined = width * audio["group_size"]
        mlp = nn.Sequential(linear(joined, 4 * joined), nn.GELU(), linear(4 * joined, audio["out_hidden_size"]))
        self.projection = nn.ModuleDict({"mlp": mlp})

    def forward(self, x: Tensor) -> Tensor:
        """The features [G, O] of groups [G, R, D], of whose rows each sees all."""
        all_seen = torch.zeros(len(x), 1, x.shape[1], x.shape[1])
        found = self.input_local_transformer(inputs_embeds=x, attention_mask={"full_attention": all_seen})
        return self.projection["mlp"](found.last_hidden_state.flatten(1))


class MiMoV2ForCausalLM(MiMoV2FlashForCausalLM):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        audio = config.audio_config
        self.visual, self.audio_encoder = Tower(config.vision_config), Sound(audio)
        self.speech_embeddings = nn.ModuleList(
            nn.Embedding(int(audio["speech_vocab_size"]), audio["input_local_dim"])
            for _ in range(audio["audio_channels"])
        )
        self.post_init()

    def features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """The features [X, D] of all images."""
        return widened(self.visual, pixel_values.double(), image_grid_thw)

    def sounds(self, audio_codes: Tensor) -> Tensor:
        """The features [G, D] of the rows of codes of all sounds."""
        x = sum(table(codes) for table, codes in zip(self.speech_embeddings, audio_codes.unbind(-1), strict=True))
        return self.audio_encoder(x.unflatten(0, (-1, self.config.audio_config["group_size"])))

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        audio_codes: Tensor | None = None,
        **others: Any,
    ) -> Any:
        x = self.model.embed_tokens(input_ids)
        if pixel_values is not None:
            x[input_ids == self.config.image_token_id] = self.features(pixel_values, image_grid_thw).to(x.dtype)
        if audio_codes is not None:
            x[input_ids == self.config.audio_token_id] = self.sounds(audio_codes).to(x.dtype)
        return super().forward(inputs_embeds=x, **others)

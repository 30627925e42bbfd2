"""MiniCPM-o 2.6 and 4.5 after their `modeling_minicpmo.py`: MiniCPM-V, and Whisper's encoder, whose steps see their
chunk and earlier ones. What sees and hears is in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, gelu, relu

from helpers.released_code.kimi import widened
from helpers.released_code.minicpm_v import MiniCPMV


class SpeechLayer(nn.Module):
    def __init__(self, audio: Any) -> None:
        super().__init__()
        width, inner, self.heads = audio["d_model"], audio["encoder_ffn_dim"], audio["encoder_attention_heads"]
        self.self_attn = nn.ModuleDict(
            {f"{name}_proj": nn.Linear(width, width, bias=name != "k") for name in ("q", "k", "v", "out")}
        )
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        y = self.self_attn_layer_norm(x)
        q, k, v = (self.self_attn[f"{name}_proj"](y).unflatten(-1, (self.heads, -1)) for name in "qkv")
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        x = x + self.self_attn["out_proj"](torch.einsum("bnqk,bknh->bqnh", weights, v).flatten(2))
        return x + self.fc2(gelu(self.fc1(self.final_layer_norm(x))))


class SpeechEncoder(nn.Module):
    def __init__(self, audio: Any) -> None:
        super().__init__()
        width = audio["d_model"]
        self.conv1 = nn.Conv1d(audio["num_mel_bins"], width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(audio["max_source_positions"], width)
        self.layers = nn.ModuleList(SpeechLayer(audio) for _ in range(audio["encoder_layers"]))
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, mel: Tensor, lengths: Tensor, chunk: int) -> Tensor:
        """The steps [B, P, D] of spectrograms [B, M, T], of which so many frames are of each sound."""
        x = gelu(self.conv2(gelu(self.conv1(mel)))).transpose(1, 2)
        step = torch.arange(x.shape[1])
        x = x + self.embed_positions.weight[: x.shape[1]]
        seen = (step < lengths[:, None])[:, None].expand(-1, len(step), -1)
        if chunk > 0:
            seen = seen & (step < (step[:, None] // chunk + 1) * chunk)
        for layer in self.layers:
            x = layer(x, seen)
        return self.layer_norm(x)


class MiniCPMO(MiniCPMV):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        audio, width = config.audio_config, config.hidden_size
        self.apm = SpeechEncoder(audio)
        self.audio_projection_layer = nn.ModuleDict(
            {"linear1": nn.Linear(audio["encoder_ffn_dim"] // 4, width), "linear2": nn.Linear(width, width)}
        )
        self.post_init()

    def heard(self, mel: Tensor, lengths: Tensor) -> Tensor:
        """The features [X, D] of sounds."""
        pool = self.config.audio_pool_step
        x = widened(self.apm, mel.double(), lengths, int(self.config.audio_chunk_length * 50))
        for name, act in (("linear1", relu), ("linear2", lambda y: y)):
            x = act(widened(self.audio_projection_layer[name], x))
        x = avg_pool1d(x.transpose(1, 2), pool).transpose(1, 2)
        counts = (((lengths - 1) // 2 + 1 - pool) // pool + 1).tolist()
        return torch.cat([own[:count] for own, count in zip(x, counts, strict=True)])

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        tgt_sizes: Tensor | None = None,
        audio_features: Tensor | None = None,
        audio_feature_lens: Tensor | None = None,
        **others: Any,
    ) -> Any:
        x = self.llm.get_input_embeddings()(input_ids)
        is_unk, heard = input_ids == self.config.image_token_id, torch.zeros_like(input_ids, dtype=torch.bool)
        for row, ids in enumerate(input_ids.tolist()):
            opened = False
            for column, token in enumerate(ids):
                opened = token == self.config.audio_start_id or (opened and token == self.config.image_token_id)
                heard[row, column] = opened and token == self.config.image_token_id
        if pixel_values is not None:
            x[is_unk & ~heard] = self.features(pixel_values, tgt_sizes).to(x.dtype)
        if audio_features is not None:
            x[heard] = self.heard(audio_features, audio_feature_lens.flatten()).to(x.dtype)
        return self.llm(inputs_embeds=x, **others)

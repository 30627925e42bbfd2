"""IQuest Coder Loop after `modeling_iquestloopcoder.py` of IQuestLab/IQuest-Coder-V1-40B-Loop-Instruct: Llama whose
layers run several times. After the first time, attention is a mixture of two. It computes whole texts, without a
cache. Nanbeige 4.2 after the code of a trainer (vllm-rlt), and Ouro after the code of a server (vLLM): Llama whose
layers and last norm run several times."""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class Config(LlamaConfig):
    model_type = "iquestloopcoder"

    loop_num: int = 2
    loop_window_size: int = 64


class Attention(LlamaAttention):
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        run: int = 0,
        gate: Any = None,
        **inputs: Any,
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if run == 0:
            self.first = k, v
            y = eager_attention_forward(self, q, k, v, attention_mask, self.scaling)[0]
        else:
            everything = eager_attention_forward(self, q, *self.first, attention_mask, self.scaling)[0]
            T, S = attention_mask.shape[-2:]
            distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
            near = attention_mask.masked_fill(distance >= self.config.loop_window_size, torch.finfo(q.dtype).min)
            own = eager_attention_forward(self, q, k, v, near, self.scaling)[0]
            weight = torch.diagonal(gate(q), dim1=1, dim2=3).sigmoid()[..., None]  # [batch, tokens, heads, 1]
            y = weight * everything + (1 - weight) * own
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), None


class Layer(LlamaDecoderLayer):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.self_attn = Attention(config, number)


class Layers(nn.ModuleList):
    """The layers; a slice of them are all executions."""

    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return super().__getitem__(part)
        pairs = list(zip(self, self.gates, strict=True))
        return [partial(layer, run=run, gate=gate) for run in range(self.runs) for layer, gate in pairs]


class IQuestLoopCoderForCausalLM(LlamaForCausalLM):
    config_class: ClassVar = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        gates = [nn.Linear(config.head_dim, config.num_attention_heads) for _ in layers]
        self.model.gate_projections = nn.ModuleList(gates)
        self.model.layers = Layers(Layer(config, number) for number in layers)
        self.model.layers.runs, self.model.layers.__dict__["gates"] = config.loop_num, gates
        self.post_init()


class NanbeigeConfig(LlamaConfig):
    model_type = "nanbeige"

    num_loops: int = 2


class NormedLayers(nn.ModuleList):
    """The layers; a slice of them are all executions, with the last norm between two rounds."""

    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return super().__getitem__(part)
        layers = [partial(_without_cache, layer) for layer in self]
        return [*layers, *[each for _ in range(self.runs - 1) for each in (self.between, *layers)]]


def _without_cache(layer: nn.Module, x: Tensor, **inputs: Any) -> Any:
    return layer(x, **{name: value for name, value in inputs.items() if name not in ("past_key_values", "cache")})


class NanbeigeForCausalLM(LlamaForCausalLM):
    config_class: ClassVar = NanbeigeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = NormedLayers(self.model.layers)
        self.model.layers.runs = config.num_loops
        self.model.layers.__dict__["between"] = lambda x, **inputs: self.model.norm(x)
        self.post_init()


class OuroConfig(LlamaConfig):
    model_type = "ouro"

    total_ut_steps: int = 4
    early_exit_threshold: float = 1.0


class SandwichLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.input_layernorm_2 = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm_2 = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), **inputs)[0])
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class OuroForCausalLM(LlamaForCausalLM):
    config_class: ClassVar = OuroConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = NormedLayers(SandwichLayer(config, number) for number in range(config.num_hidden_layers))
        self.model.layers.runs = config.total_ut_steps
        self.model.layers.__dict__["between"] = lambda x, **inputs: self.model.norm(x)
        self.model.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.post_init()

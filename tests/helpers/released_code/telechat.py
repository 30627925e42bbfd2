"""TeleChat 2 after `modeling_telechat2.py` of Tele-AI/TeleChat2-7B, with the modules of Llama: keys and values in one
matrix, biases of the last products, and a base of rotary positions that grows with the length of the text."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer


class LikeLlamaConfig(PreTrainedConfig):
    """What Llama's modules read, of models whose projections of attention and MLP are replaced or have no biases."""

    hidden_act: ClassVar = "silu"
    attention_bias: ClassVar = False
    mlp_bias: ClassVar = False
    attention_dropout: ClassVar = 0.0


class TelechatConfig(LikeLlamaConfig):
    model_type = "telechat"
    attribute_map: ClassVar = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "training_seqlen",
    }

    vocab_size: int = 160256
    hidden_size: int = 4096
    num_key_value_heads: int | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    n_layer: int = 30
    n_head: int = 32
    ffn_hidden_size: int = 12288
    layer_norm_epsilon: float = 1e-5
    training_seqlen: int = 8192
    base_seqlen: int = 8192
    embed_layernorm: bool = False
    apply_residual_connection_post_layernorm: bool = False

    rope_parameters: ClassVar = {"rope_type": "default", "rope_theta": 10000.0}

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        self.num_key_value_heads = self.num_key_value_heads or self.n_head

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_head

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key != "rope_parameters"}


class Rotation(nn.Module):
    """Of two halves of each head, by the length of the text: at least of the training."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.width = config, config.hidden_size // config.n_head

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        trained, width = self.config.training_seqlen, self.width
        length = max(int(position_ids.max()) + 1, trained)
        alpha = max(2 ** math.ceil(math.log2(length / self.config.base_seqlen) + 1) - 1, 1)
        base = 10000 * alpha ** (width / (width - 2))
        rates = 1.0 / base ** (torch.arange(0, width, 2).float() / width)
        angles = (position_ids[..., None].float() * rates).repeat(1, 1, 2)
        factor = 0.1 * math.log(length / trained) + 1
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)


class Attention(LlamaAttention):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        wide, keys = config.hidden_size, config.num_key_value_heads * self.head_dim
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            delattr(self, name)
        self.query = nn.Linear(wide, wide, bias=False)
        self.key_value = nn.Linear(wide, 2 * keys, bias=False)
        self.dense = nn.Linear(wide, wide)

    def q_proj(self, x: Tensor) -> Tensor:
        return self.query(x)

    def k_proj(self, x: Tensor) -> Tensor:
        return self.key_value(x).unflatten(-1, (-1, 2, self.head_dim))[..., 0, :].flatten(-2)

    def v_proj(self, x: Tensor) -> Tensor:
        return self.key_value(x).unflatten(-1, (-1, 2, self.head_dim))[..., 1, :].flatten(-2)

    def o_proj(self, x: Tensor) -> Tensor:
        return self.dense(x)


class Layer(LlamaDecoderLayer):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        del self.self_attn
        self.self_attention = Attention(config, number)
        self.mlp.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__({"self_attn": "self_attention"}.get(name, name))


class Model(LlamaModel):
    """Llama's modules under other names."""

    named: ClassVar = {"embed_tokens": "word_embeddings", "layers": "h", "norm": "ln_f"}
    layer: ClassVar = Layer
    rotation: ClassVar = Rotation

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.layer(config, number) for number in range(config.num_hidden_layers))
        self.rotary_emb = self.rotation(config)
        for old, new in self.named.items():
            self._modules[new] = self._modules.pop(old)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self.named.get(name, name) if "h" in self._modules else name)


class TeleChat2ForCausalLM(LlamaForCausalLM):
    config_class: ClassVar = TelechatConfig
    base_model_prefix = "transformer"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "transformer.word_embeddings.weight"}
    model_type: ClassVar = Model

    def __init__(self, config: Any) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.transformer, self.vocab_size = self.model_type(config), config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__({"model": "transformer"}.get(name, name))

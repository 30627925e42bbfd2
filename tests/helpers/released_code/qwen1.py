"""Qwen, the first version, after `modeling_qwen.py` of Qwen/Qwen-7B, with the modules of Llama: queries, keys and
values in one matrix with biases, and an MLP whose two matrices share `intermediate_size`. Texts longer than
`seq_length` are left out."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRotaryEmbedding

from helpers.released_code import telechat

OF_LLAMA = {"rope_parameters", "num_key_value_heads"}


class QwenConfig(telechat.LikeLlamaConfig):
    model_type = "qwen"
    attribute_map: ClassVar = {
        "head_dim": "kv_channels",
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
    }

    vocab_size: int = 151936
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    intermediate_size: int = 22016
    kv_channels: int = 128
    layer_norm_epsilon: float = 1e-6
    initializer_range: float = 0.02
    rotary_emb_base: float = 10000.0
    seq_length: int = 8192
    use_dynamic_ntk: bool = True
    use_logn_attn: bool = True
    no_bias: bool = True
    tie_word_embeddings: bool = False

    num_key_value_heads: int | None = None

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        self.num_key_value_heads = self.num_attention_heads
        self.rope_parameters = {"rope_type": "default", "rope_theta": self.rotary_emb_base}

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in OF_LLAMA}


class Attention(LlamaAttention):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        wide = config.num_attention_heads * config.kv_channels
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            delattr(self, name)
        self.c_attn, self.c_proj = nn.Linear(config.hidden_size, 3 * wide), nn.Linear(wide, config.hidden_size, False)

    def q_proj(self, x: Tensor) -> Tensor:
        return self.c_attn(x).chunk(3, -1)[0]

    def k_proj(self, x: Tensor) -> Tensor:
        return self.c_attn(x).chunk(3, -1)[1]

    def v_proj(self, x: Tensor) -> Tensor:
        return self.c_attn(x).chunk(3, -1)[2]

    def o_proj(self, x: Tensor) -> Tensor:
        return self.c_proj(x)


class Halves(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, half = config.hidden_size, config.intermediate_size // 2
        self.w1, self.w2 = nn.Linear(width, half, False), nn.Linear(width, half, False)
        self.c_proj = nn.Linear(half, width, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.w1(x) * nn.functional.silu(self.w2(x)))


class Layer(LlamaDecoderLayer):
    named: ClassVar = {"self_attn": "attn", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.self_attn, self.mlp = Attention(config, number), Halves(config)
        for old, new in self.named.items():
            self._modules[new] = self._modules.pop(old)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self.named.get(name, name) if "attn" in self._modules else name)


class Model(telechat.Model):
    named: ClassVar = {"embed_tokens": "wte", "layers": "h", "norm": "ln_f"}
    layer: ClassVar = Layer
    rotation: ClassVar = LlamaRotaryEmbedding


class QWenLMHeadModel(telechat.TeleChat2ForCausalLM):
    config_class: ClassVar = QwenConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "transformer.wte.weight"}
    model_type: ClassVar = Model

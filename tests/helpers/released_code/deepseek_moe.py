"""DeepSeekMoE after `modeling_deepseek.py` of deepseek-ai/deepseek-moe-16b-base, and the first Ling after
`modeling_bailing_moe.py` of inclusionAI/Ling-lite: Llama, with experts in the layers after the first ones."""

from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel

from helpers.released_code.fused import FusedProjections


class Config(LlamaConfig):
    model_type = "deepseek"

    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1407
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False


def _mlp(config: Any, width: int) -> LlamaMLP:
    config = copy(config)
    config.intermediate_size = width
    return LlamaMLP(config)


class Experts(nn.Module):
    """The most probable experts of each token, with their probabilities, and the shared ones."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.chosen, self.normalized = config.num_experts_per_tok, config.norm_topk_prob
        width = config.moe_intermediate_size
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(_mlp(config, width) for _ in range(config.n_routed_experts))
        self.shared_experts = _mlp(config, width * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        kept = torch.zeros_like(weights).scatter(-1, weights.topk(self.chosen).indices, 1.0) * weights
        kept = kept / kept.sum(-1, keepdim=True) if self.normalized else kept
        routed = torch.stack([expert(x) for expert in self.experts], -1)
        return torch.einsum("btde,bte->btd", routed, kept) + self.shared_experts(x)


class DeepseekForCausalLM(LlamaForCausalLM):
    config_class = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers[config.first_k_dense_replace :]:
            layer.mlp = Experts(config)
        self.post_init()


class BailingConfig(Config):
    model_type = "bailing_moe_v1"

    norm_topk_prob: bool = True


class BailingAttention(FusedProjections, LlamaAttention):
    """Llama's, with queries, keys and values in one matrix, which alone may have a bias."""

    fused = "query_key_value"

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.fuse(config, config.attention_bias)
        del self.o_proj
        self.dense = nn.Linear(self.widths[0], config.hidden_size, bias=False)

    def o_proj(self, x: Tensor) -> Tensor:
        return self.dense(x)


class BailingLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        del self.self_attn
        self.attention = BailingAttention(config, number)
        if number >= config.first_k_dense_replace:
            self.mlp = Experts(config)

    def self_attn(self, **inputs: Any) -> Any:
        return self.attention(**inputs)


class BailingModel(LlamaModel):
    _input_embed_layer = "word_embeddings"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.embed_tokens
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BailingLayer(config, number) for number in range(config.num_hidden_layers))

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.word_embeddings(ids)


class BailingMoeForCausalLM(LlamaForCausalLM):
    config_class = BailingConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: Any) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.model = BailingModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.vocab_size = config.vocab_size
        self.post_init()

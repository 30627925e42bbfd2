"""InternLM 3: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(llama.Config):
    """The keys of config.json. Either all matrices have a bias or none."""

    model_type: ClassVar[str] = "internlm3"
    synonyms: ClassVar[Mapping[str, str]] = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}

    vocab_size: int = 128512
    intermediate_size: int = 10240
    num_hidden_layers: int = 48
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.attention_bias != self.mlp_bias:
            yield f"qkv_bias={self.attention_bias} and bias={self.mlp_bias} differ"


TABLE = llama.TABLE

FAMILY = family(Config, TABLE, "InternLM 3", "InternLM3ForCausalLM", "LlamaForCausalLM", model="llama")

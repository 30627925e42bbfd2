"""IQuest-Coder: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(llama.Config):
    """The keys of config.json."""

    model_type: ClassVar[str] = "iquestcoder"
    only: ClassVar = {"clip_qkv": (None,), "use_sliding_window": (False,)}

    vocab_size: int = 76800
    hidden_size: int = 5120
    intermediate_size: int = 27648
    num_hidden_layers: int = 80
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5


TABLE = llama.TABLE

FAMILY = family(
    Config,
    TABLE,
    "IQuest-Coder V1",
    "IQuestCoderForCausalLM",
    "LlamaForCausalLM",
    model="llama",
)

"""Kolibri 1: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, EXPERT_MLPS, HEAD_NORMS, PRE_NORMS, SHARED_EXPERT_ROWS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(ChosenExperts, PatternConfig):
    """The keys of config.json. Without `layer_types` every fifth layer sees all tokens. With a window, only layers with
    it have rotary positions. `intermediate_size` has no effect, since no layer is dense."""

    model_type: ClassVar[str] = "kolibri1"
    synonyms: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    full_every: ClassVar[int] = 5

    vocab_size: int = 128000
    hidden_size: int = 2560
    intermediate_size: int = 1
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_hidden_layers: int = 50
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    num_experts: int = 384
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = False
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    sliding_window: int | None = 513
    layer_types: tuple[str, ...] | None = None

    @property
    def has_shared_experts(self) -> bool:
        """True if there is an expert that every token uses."""
        return True

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        has_windows = self.sliding_window is not None
        return tuple(None if has_windows and kind == "full_attention" else self.rope for kind in self.kinds)


TABLE = decoder_table(
    *PRE_NORMS,
    Map("post_attn_norm.weight", "post_attn_norm.scale", "D"),
    Map("post_ffn_norm.weight", "post_mlp_norm.scale", "D"),
    *ATTENTION,
    *HEAD_NORMS,
    *under("mlp", "moe", Map("gate.weight", "router.kernel", "E D -> D E"), *EXPERT_MLPS, *SHARED_EXPERT_ROWS),
    Map("moe.router.expert_bias", "moe.router.correction", "E", buffer=True),
)

FAMILY = family(Config, TABLE, "Kolibri 1", "Kolibri1ForCausalLM")

"""Mistral 4: the text model's config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.growing import GrowingQueries
from tpuconv.models.common.rope import PARAMETER_KEYS, check_rope_keys
from tpuconv.models.common.rows import SHARED_EXPERT_ROWS, STACKED_EXPERTS, decoder_table, mlp_rows
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import Family
from tpuconv.notation.table import Map


@family_config
class TextConfig(GrowingQueries, deepseek_v3.Config):
    """`head_dim`, the width of a query, follows from other keys."""

    model_type: ClassVar[str] = "mistral4"
    only: ClassVar = {"topk_method": (None, "greedy", "group_limited_greedy"), "scoring_func": ("softmax",)}
    least: ClassVar = {"first_k_dense_replace": 0}
    left_out: ClassVar[frozenset[str]] = frozenset({"head_dim"})
    derived: ClassVar[frozenset[str]] = deepseek_v3.Config.derived | {"llama_4_scaling_beta"}
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }

    vocab_size: int = 131072
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    n_routed_experts: int = 128
    routed_scaling_factor: float = 1.0
    kv_lora_rank: int = 256
    q_lora_rank: int | None = 1024
    qk_nope_head_dim: int = 64
    n_group: int = 1
    topk_group: int = 1
    num_experts_per_tok: int = 4
    first_k_dense_replace: int = 0
    max_position_embeddings: int = 1048576
    llama_4_scaling_beta: float = 0.1

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`. The part of a query that has rotary positions may stand among them."""
        check_rope_keys(raw)
        raw, name = dict(raw), "partial_rotary_factor"
        rotary, plain = (
            raw.get("qk_rope_head_dim", cls.qk_rope_head_dim),
            raw.get("qk_nope_head_dim", cls.qk_nope_head_dim),
        )
        for key in PARAMETER_KEYS:
            inside = dict(raw.get(key) or {})
            if inside.pop(name, None) not in (None, rotary / (rotary + plain)):
                raise UnsupportedConfig(
                    f"config.json: {name} of the rotary positions is not qk_rope_head_dim={rotary} of "
                    f"{rotary + plain} dimensions"
                )
            raw[key] = inside
        return super().read_ropes(raw, context)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.n_shared_experts:
            yield f"n_shared_experts={self.n_shared_experts} is less than 1"


TEXT_TABLE = decoder_table(
    *deepseek_v3.ATTENTION_ROWS,
    others=mlp_rows(
        Map("gate.weight", "router.kernel", "E D -> D E"),
        *STACKED_EXPERTS,
        *SHARED_EXPERT_ROWS,
    ),
)

MISTRAL4_TEXT = Family(
    "mistral4_text",
    "the text model of Mistral Small 4, saved on its own",
    TextConfig,
    TEXT_TABLE,
    "tpuconv.models.mistral4.modules:Model",
    {"Mistral4ForCausalLM": "mistral4"},
)

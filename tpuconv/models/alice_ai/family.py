"""Alice AI Foundation: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    CORRECTED_ROUTER,
    FURTHER_TOKENS,
    PRE_NORMS,
    SHARED_BY_GATE,
    STACKED_EXPERTS,
    decoder_table,
)
from tpuconv.models.kimi_k3.family import ResidualBlocks
from tpuconv.models.kimi_linear.family import KDA_BESIDE_RATES
from tpuconv.models.qwen3_next import family as qwen3_next
from tpuconv.models.qwen3_next.family import FULL_ROWS, further_rows
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class Config(ResidualBlocks, qwen3_next.Config):
    """The keys of config.json, with the defaults of the release. All layers have experts; linear attention has as many
    heads for keys as for values, of one width."""

    model_type: ClassVar[str] = "alice_ai"
    only: ClassVar = {
        **qwen3_next.Config.only,
        "decoder_sparse_step": (1,),
        "kda_allow_negative_eigenvalues": (False,),
        "mlp_only_layers": ([], None),
        "router_bias_correction": (True,),
        "router_score_function": ("sigmoid",),
    }
    hf_names: ClassVar[Mapping[str, str]] = {"attn_res_block_size": "block_attn_res_block_size"}
    synonyms: ClassVar[Mapping[str, str]] = {"num_nextn_predict_layers": "mtp_num_hidden_layers"}
    left_out: ClassVar[frozenset[str]] = frozenset({"number_of_conv_states"})
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 1e6}
    n_group: ClassVar[int] = 1
    topk_group: ClassVar[int] = 1
    routed_scaling_factor: ClassVar[float] = 1.0
    has_shared_experts: ClassVar[bool] = True

    vocab_size: int = 129024
    max_position_embeddings: int = 262144
    linear_num_key_heads: int = 32
    attn_res_block_size: int = 4

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for key, of_keys, of_values in (
            ("linear_num_{}_heads", self.linear_num_key_heads, self.linear_num_value_heads),
            ("linear_{}_head_dim", self.linear_key_head_dim, self.linear_value_head_dim),
        ):
            if of_keys != of_values:
                yield f"{key.format('key')}={of_keys} is not {key.format('value')}={of_values}"

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "later_layers": range(1, self.num_hidden_layers)}


ALICE_EXPERT_ROWS = under("mlp", "moe", *CORRECTED_ROUTER, *STACKED_EXPERTS, *SHARED_BY_GATE)

ALICE_DELTA_ROWS = (*KDA_BESIDE_RATES, Map("a_log_bias", "a_log", "groups"))

TABLE = decoder_table(
    *PRE_NORMS,
    *ALICE_EXPERT_ROWS,
    Map("mlp_res_norm_weight", "mlp_input.scale", "D"),
    Map("mlp_res_proj.weight", "mlp_input.query", "1 D -> D"),
    others=(
        *under(
            "model.layers.{later_layers}",
            "layers.{later_layers}",
            Map("attn_res_norm_weight", "attn_input.scale", "D"),
            Map("attn_res_proj.weight", "attn_input.query", "1 D -> D"),
        ),
        *under("model.layers.{attention_layers}", "layers.{attention_layers}", *FULL_ROWS),
        *under("model.layers.{state_layers}.linear_attn", "layers.{state_layers}.attn", *ALICE_DELTA_ROWS),
        Map("model.attnres_final.res_norm_weight", "norm.input.scale", "D"),
        Map("model.attnres_final.res_proj.weight", "norm.input.query", "1 D -> D"),
        *further_rows(*ALICE_EXPERT_ROWS),
    ),
    ignore={"mtp.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "Alice AI Foundation 80B-A3B", "AliceAIForCausalLM")

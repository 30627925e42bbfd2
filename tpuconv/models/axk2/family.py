"""A.X K2: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTN_NORM, MLP, MLP_NORM, MTP_IGNORE, decoder_table
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.deepseek_v32 import family as deepseek_v32
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    both_queries=Word("latent width of queries, with their norm and without"),
    gate_rank=Word("width of the gates of norms"),
)


@family_config
class Config(deepseek_v32.Config):
    """The keys of config.json. Without `mlp_layer_types` the first `first_k_dense_replace` layers are dense. Numbers of
    groups are null where experts are chosen among all."""

    model_type: ClassVar[str] = "axk2"
    nullable: ClassVar[frozenset[str]] = frozenset({"n_group", "topk_group"})

    num_nextn_predict_layers: int = 0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    gated_norm_rank: int
    head_dim: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "both_queries": 2 * self.q_lora_rank, "gate_rank": self.gated_norm_rank}


def gated_norm(hf: str, jax: str) -> tuple[Map, ...]:
    """Returns the rows of a norm whose output has gates."""
    return (
        Map(f"{hf}.norm.weight", f"{jax}.scale", "D"),
        Map(f"{hf}.W_down.weight", f"{jax}.down.kernel", "gate_rank D -> D gate_rank"),
        Map(f"{hf}.W_up.weight", f"{jax}.up.kernel", "D gate_rank -> gate_rank D"),
    )


REPLACED = (ATTN_NORM.hf, MLP_NORM.hf, "self_attn.q_b_proj.weight")
"""Names in DeepSeek V3's rows whose tensors are others here."""

TABLE = decoder_table(
    *(row for row in deepseek_v3.ATTENTION_ROWS if row.hf not in REPLACED),
    *gated_norm("input_layernorm", "attn_norm"),
    Map(
        "self_attn.q_b_proj.weight",
        (*deepseek_v3.QUERIES, "attn.gate.kernel"),
        "(N (P + R + H)) both_queries -> both_queries N P, both_queries N R, both_queries N H",
    ),
    others=(
        *under("model.layers.{indexer_layers}", "layers.{indexer_layers}", *deepseek_v32.INDEXER),
        *under("model.layers.{I}", "layers.{I}", MLP_NORM, *under("mlp", "mlp", *MLP)),
        *under(
            "model.layers.{J}",
            "layers.{J}",
            *gated_norm("post_attention_layernorm", "mlp_norm"),
            *under("mlp", "moe", *deepseek_v3.EXPERT_ROWS),
        ),
    ),
    ignore=MTP_IGNORE,
)

FAMILY = family(Config, TABLE, "A.X K2, A.X K2 Light", "AXK2ForCausalLM")

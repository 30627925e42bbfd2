"""Naive-N0.5-Flash: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import CORRECTED_ROUTER, EXPERT_MLPS, PRE_NORMS, decoder_table, mlp_rows
from tpuconv.models.deepseek_v32.family import INDEXED, INDEXER
from tpuconv.models.mimo_v2_flash import family as mimo
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class Config(mimo.AnyHeads, mimo.Config):
    """The keys of config.json: MiMo-V2-Flash's, and an indexer's. Defaults come from the code of the release.

    Attributes:
        index_topk: the tokens that a token attends to, in layers that see all tokens.
        index_n_heads, index_head_dim: of an indexer.
        indexer_activation_dtype: what queries and keys of an indexer are rounded to, each with a scale of its own.
    """

    model_type: ClassVar[str] = "naive_n05_flash"
    hf_names: ClassVar = {**mimo.Config.hf_names, "index_topk": "index_top_k"}
    aliases: ClassVar = {**mimo.Config.aliases, "num_local_experts": "n_routed_experts"}
    only: ClassVar = {
        **mimo.Config.only,
        "n_group": (1,),
        "topk_group": (1,),
        "enable_dsa": (True,),
        "index_n_kv_heads": (1,),
        "attention_projection_layout": ("split",),
        "indexer_activation_dtype": ("fp8_e4m3", "bf16"),
    }
    left_out: ClassVar[frozenset[str]] = mimo.Config.left_out - {"swa_num_key_value_heads"}

    max_position_embeddings: int = 1_048_576
    sliding_window: int | None = 128
    rope: Rope = Rope(theta=10_000_000.0)
    swa_num_key_value_heads: int | None = 8
    index_topk: int = 2048
    index_n_heads: int = 16
    index_head_dim: int = 128
    indexer_activation_dtype: str = "fp8_e4m3"

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        kinds = raw.get("layer_types")
        if isinstance(kinds, list):
            raw = {**raw, "layer_types": ["full_attention" if kind in INDEXED else kind for kind in kinds]}
        return super().in_our_keys(raw)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.index_head_dim < (turned := max(self.rope_dims, default=0)):
            yield f"index_head_dim={self.index_head_dim} is less than the {turned} dimensions with rotary positions"

    @property
    def horizons(self) -> frozenset[int]:
        return super().horizons | ({self.index_topk} if self.layer_sets["indexer_layers"] else set())

    @property
    def sizes(self) -> dict[str, int]:
        indexer = {"index_heads": self.index_n_heads, "index_dim": self.index_head_dim}
        return {**super().sizes, **indexer, "Q": self.hidden_size}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        sets = super().layer_sets
        return {**{name: layers for name, layers in sets.items() if name != "U"}, "indexer_layers": sets["full_layers"]}


TABLE = decoder_table(
    *PRE_NORMS,
    *mimo.QUERY_OUTPUT_ROWS,
    others=(
        *mimo.KEYS_VALUES_BY_KIND,
        *under(
            "model.layers.{indexer_layers}",
            "layers.{indexer_layers}",
            *under(
                "self_attn.indexer",
                "attn.indexer",
                Map("wq.weight", "q.kernel", "(index_heads index_dim) D -> D index_heads index_dim"),
            ),
            *INDEXER[1:],
        ),
        *mlp_rows(*CORRECTED_ROUTER, *EXPERT_MLPS),
    ),
)

FAMILY = family(Config, TABLE, "Naive-N0.5-Flash", "NaiveN05FlashForCausalLM")

"""DeepSeek V3.2: config and mapping table."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import MLP, MTP_COPIES, MTP_HEAD, MTP_IGNORE, decoder_table
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under

INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""The `layer_types` of layers that attend to selected tokens, in newer and older files."""


@family_config
class Config(deepseek_v3.Config):
    """The keys of config.json. Without `mlp_layer_types` the first `first_k_dense_replace` layers are dense.

    Class attribute: `known_kinds` are the `layer_types`.
    """

    known_kinds: ClassVar[tuple[str, ...]] = INDEXED

    model_type: ClassVar[str] = "deepseek_v32"
    only: ClassVar = {**deepseek_v3.Config.only, "rope_interleave": (True,), "mlp_bias": (False,)}
    aliases: ClassVar = {"num_experts": "n_routed_experts"}
    least: ClassVar = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}

    q_lora_rank: int
    n_shared_experts: int
    mlp_layer_types: tuple[str, ...] | None
    layer_types: tuple[str, ...] | None
    index_topk: int
    index_head_dim: int
    index_n_heads: int
    head_dim: int | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.index_head_dim < self.qk_rope_head_dim:
            yield f"index_head_dim={self.index_head_dim} is less than qk_rope_head_dim={self.qk_rope_head_dim}"
        if unknown := set(self.layer_types or ()) - set(self.known_kinds):
            yield f"layer_types has the unknown {', '.join(map(repr, sorted(unknown)))}"
        if len(self.layer_types or ()) not in (0, self.num_hidden_layers):
            yield f"layer_types has another number of entries than num_hidden_layers={self.num_hidden_layers}"

    @property
    def indexers(self) -> tuple[int, ...]:
        """The layers with an indexer of their own."""
        return tuple(range(self.num_hidden_layers))

    @property
    def horizons(self) -> frozenset[int]:
        return super().horizons | {self.index_topk}

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "index_heads": self.index_n_heads, "index_dim": self.index_head_dim}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "indexer_layers": self.indexers}


INDEXER = under(
    "self_attn.indexer",
    "attn.indexer",
    Map("wq_b.weight", "q.kernel", "(index_heads index_dim) Q -> Q index_heads index_dim"),
    Map("wk.weight", "k.kernel", "index_dim D -> D index_dim"),
    Map("k_norm.weight", "k_norm.scale", "index_dim"),
    Map("k_norm.bias", "k_norm.bias", "index_dim"),
    Map("weights_proj.weight", "router.kernel", "index_heads D -> D index_heads"),
)

TABLE = decoder_table(
    *deepseek_v3.ATTENTION_ROWS,
    others=(
        *under("model.layers.{indexer_layers}", "layers.{indexer_layers}", *INDEXER),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under("model.layers.{J}.mlp", "layers.{J}.moe", *deepseek_v3.EXPERT_ROWS),
        *under(
            "model.layers.{U}",
            "mtp.{U}",
            *deepseek_v3.ATTENTION_ROWS,
            *INDEXER,
            *under("mlp", "moe", *deepseek_v3.EXPERT_ROWS),
            *MTP_HEAD,
        ),
    ),
    ignore=MTP_IGNORE,
    copies=MTP_COPIES,
)

FAMILY = family(Config, TABLE, "DeepSeek V3.2", "DeepseekV32ForCausalLM")

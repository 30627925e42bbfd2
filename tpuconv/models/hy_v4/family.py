"""Hy4: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import FURTHER_TOKENS, MLP, SHARED, STACKED_EXPERTS, decoder_table
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.deepseek_v32 import family as deepseek_v32
from tpuconv.models.glm_moe_dsa.family import SharedIndexers
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class Config(SharedIndexers):
    """The keys of config.json. Without `indexer_types` the first layer and every fourth one from the second on have an
    indexer; without `mlp_layer_types` the first layer is dense. `head_dim` and `num_key_value_heads` follow from other
    keys."""

    model_type: ClassVar[str] = "hy_v4"
    only: ClassVar = {**deepseek_v3.Config.only, "rope_interleave": (False,), "mlp_bias": (False,)}
    least: ClassVar = {"num_nextn_predict_layers": 0}
    left_out: ClassVar[frozenset[str]] = frozenset({"head_dim", "num_key_value_heads"})
    derived: ClassVar = deepseek_v32.Config.derived | {"first_k_dense_replace", "num_nextn_predict_layers"}

    num_nextn_predict_layers: int = 0
    num_key_value_heads: int | None = None
    first_k_dense_replace: int = 1
    rope_interleave: bool = False
    indexer_types: tuple[str, ...] | None
    hc_mult: int
    hc_magnitude: float
    hc_eps: float
    swiglu_limit: float
    head_dim: int | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.swiglu_limit <= 0:
            yield f"swiglu_limit={self.swiglu_limit} is not positive"

    @property
    def latent_eps(self) -> float:
        """The epsilon of the norms of latent vectors."""
        return 1e-6

    @property
    def indexer_kinds(self) -> tuple[str, ...]:
        if self.indexer_types is not None:
            return self.indexer_types
        layers = range(self.num_hidden_layers)
        return tuple("full" if i == 0 or i % 4 == 1 else "shared" for i in layers)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "streams": self.hc_mult,
            "streams_out": self.hc_mult,
            "stream_weights": 2 * self.hc_mult,
        }

    @property
    def inseparable(self) -> str:
        return "its layers pass on several residual streams, and the tokens that they selected"


def gated_streams(hf: str, jax: str) -> tuple[Map, ...]:
    """Returns the rows of the residual streams' weights for a part of a layer."""
    return (
        Map(f"hc_pre.{hf}.hc_fn", f"{jax}.kernel", "stream_weights (streams D) -> streams D stream_weights"),
        Map(f"hc_pre.{hf}.hc_base", f"{jax}.base", "stream_weights"),
        Map(f"hc_pre.{hf}.hc_scale", (f"{jax}.pre_scale", f"{jax}.post_scale"), "(1 + 1) -> 1, 1"),
    )


TABLE = decoder_table(
    *deepseek_v3.ATTENTION_ROWS,
    Map("self_attn.linear_gate.weight", "attn.gate.kernel", "(N H) D -> D N H"),
    Map("self_attn.learnable_sink_param", "attn.sinks", "N"),
    *gated_streams("hc_attn_layer", "attn_streams"),
    *gated_streams("hc_mlp_layer", "mlp_streams"),
    others=(
        *under("model.layers.{indexer_layers}", "layers.{indexer_layers}", *deepseek_v32.INDEXER),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under(
            "model.layers.{J}.mlp",
            "layers.{J}.moe",
            Map("gate.weight", "router.kernel", "E D -> D E"),
            Map("gate.e_score_correction_bias", "router.correction", "E", buffer=True),
            *STACKED_EXPERTS,
            *under("shared_experts", "shared", *SHARED),
        ),
        Map("model.hc_pre.hc_head.hc_head_fn", "norm.kernel", "streams_out (streams D) -> streams D streams_out"),
        Map("model.hc_pre.hc_head.hc_head_base", "norm.base", "streams_out"),
        Map("model.hc_pre.hc_head.hc_head_scale", "norm.pre_scale", "1"),
    ),
    ignore={"model.mtp_layers.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "Hy4", "HYV4ForCausalLM")

"""Muse Spark: the text model's config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTN_NORM, CORRECTED_ROUTER, decoder_table, mlp_rows
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs
from tpuconv.models.common.wrapper import BRINGS, HEARS, SEES, inside
from tpuconv.models.gemma.family import BIASED_ATTENTION
from tpuconv.models.gemma2.family import NORMS
from tpuconv.models.muse_glimmer import family as muse_glimmer
from tpuconv.models.registry import family

MUSE_ROPE = Rope(theta=500_000.0)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(MixedMLPs, ChosenExperts, muse_glimmer.Config):
    """The keys of `text_config`. Without `mlp_layer_types` all layers have experts."""

    model_type: ClassVar[str] = "muse_spark"
    experts_key: ClassVar[str] = "num_local_experts"
    only: ClassVar = {}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": MUSE_ROPE.theta}
    # As DeepSeek V3's router reads them.
    n_group: ClassVar[int] = 1
    topk_group: ClassVar[int] = 1
    norm_topk_prob: ClassVar[bool] = True

    hidden_size: int = 8192
    intermediate_size: int = 16384
    num_hidden_layers: int = 62
    num_attention_heads: int = 128
    num_key_value_heads: int | None = 16
    head_dim: int | None = 64
    max_position_embeddings: int = 1048576
    rope: Rope = MUSE_ROPE
    qk_scale_factor: float = 5.4730064863875
    output_multiplier: float = 0.1767766952966369
    moe_intermediate_size: int = 4096
    moe_hidden_size: int = 4096
    num_local_experts: int = 256
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 1.0
    mlp_layer_types: tuple[str, ...] | None = None
    residual_gate_temperature: float = 0.3

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.residual_gate_temperature <= 0:
            yield f"residual_gate_temperature={self.residual_gate_temperature} is not positive"
        if self.num_local_experts < 2:
            yield f"num_local_experts={self.num_local_experts} leaves nothing to choose from"

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "C": self.moe_hidden_size}


TABLE = inside(
    decoder_table(
        ATTN_NORM,
        *NORMS[2:],
        *BIASED_ATTENTION,
        Map("self_attn.gate_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
        Map("post_attention_residual_gate.gate", "attn_residual.gate", "D"),
        Map("post_feedforward_residual_gate.gate", "mlp_residual.gate", "D"),
        others=mlp_rows(
            *CORRECTED_ROUTER,
            Map("pre_expert_proj.weight", "to_latent.kernel", "C D -> D C"),
            Map("pre_expert_norm.weight", "latent_norm.scale", "C"),
            Map("experts.gate_up_proj", ("gate.kernel", "up.kernel"), "E (M + M) C -> E C M, E C M"),
            Map("experts.down_proj", "down.kernel", "E C M -> E M C"),
            Map("experts.post_expert_norm.weight", "expert_norm.scale", "C"),
            Map("post_expert_proj.weight", "from_latent.kernel", "D C -> C D"),
        ),
    ),
    "model.language_model.",
    {
        "vision_tower": SEES,
        "audio_tower": HEARS,
        **dict.fromkeys(("vision_adapter", "vision_projection", "perception_emb_norm"), BRINGS),
    },
)

FAMILY = family(Config, TABLE, "Muse Spark, text", "MuseSparkForConditionalGeneration")

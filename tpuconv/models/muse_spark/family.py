"""Muse Spark: the text model's config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTN_NORM,
    BIASED_ATTENTION,
    CORRECTED_ROUTER,
    SANDWICH_NORMS,
    decoder_table,
    mlp_rows,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs
from tpuconv.models.common.wrapper import BRINGS, HEARS, SEES, inside
from tpuconv.models.muse_glimmer import family as muse_glimmer
from tpuconv.models.registry import family
from tpuconv.models.towers.moonvit.family import MUSE_VISION
from tpuconv.models.towers.muse_audio.family import MUSE_AUDIO
from tpuconv.notation.table import Map


@family_config
class Config(MixedMLPs, ChosenExperts, muse_glimmer.Config):
    """The keys of `text_config`. Without `mlp_layer_types` all layers have experts."""

    model_type: ClassVar[str] = "muse_spark"
    experts_key: ClassVar[str] = "num_local_experts"
    only: ClassVar = {}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 500000.0}
    # As DeepSeek V3's router reads them.
    n_group: ClassVar[int] = 1
    topk_group: ClassVar[int] = 1
    norm_topk_prob: ClassVar[bool] = True

    moe_intermediate_size: int
    moe_hidden_size: int
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    mlp_layer_types: tuple[str, ...] | None
    residual_gate_temperature: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.residual_gate_temperature <= 0:
            yield f"residual_gate_temperature={self.residual_gate_temperature} is not positive"
        if self.num_local_experts < 2:
            yield f"num_local_experts={self.num_local_experts} leaves nothing to choose from"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "expert_dim": self.moe_hidden_size}


TABLE = inside(
    decoder_table(
        ATTN_NORM,
        *SANDWICH_NORMS[2:],
        *BIASED_ATTENTION,
        Map("self_attn.gate_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
        Map("post_attention_residual_gate.gate", "attn_residual.gate", "D"),
        Map("post_feedforward_residual_gate.gate", "mlp_residual.gate", "D"),
        others=mlp_rows(
            *CORRECTED_ROUTER,
            Map("pre_expert_proj.weight", "to_latent.kernel", "expert_dim D -> D expert_dim"),
            Map("pre_expert_norm.weight", "latent_norm.scale", "expert_dim"),
            Map(
                "experts.gate_up_proj",
                ("gate.kernel", "up.kernel"),
                "E (M + M) expert_dim -> E expert_dim M, E expert_dim M",
            ),
            Map("experts.down_proj", "down.kernel", "E expert_dim M -> E M expert_dim"),
            Map("experts.post_expert_norm.weight", "expert_norm.scale", "expert_dim"),
            Map("post_expert_proj.weight", "from_latent.kernel", "D expert_dim -> expert_dim D"),
        ),
    ),
    "model.language_model.",
    {
        "vision_tower": SEES,
        "audio_tower": HEARS,
        **dict.fromkeys(("vision_adapter", "vision_projection", "perception_emb_norm"), BRINGS),
    },
)

FAMILY = family(Config, TABLE, "Muse Spark", "MuseSparkForConditionalGeneration", modalities=(MUSE_VISION, MUSE_AUDIO))

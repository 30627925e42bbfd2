"""HyperCLOVA X SEED: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import when
from tpuconv.models.granite import family as granite
from tpuconv.models.registry import family


@family_config
class Config(granite.Config):
    """The keys of config.json. Without `attention_multiplier` the factor of scores is H^-0.5; `logits_scaling` is a
    factor of the logits, and not a divisor as Granite's."""

    model_type: ClassVar[str] = "hyperclovax"

    attention_multiplier: float | None  # type: ignore[assignment]  # Granite's is never absent
    use_post_norm: bool

    def contradictions(self) -> Iterator[str]:
        yield from super(granite.Config, self).contradictions()
        if self.hidden_size % self.num_attention_heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"


TABLE = granite.TABLE.with_rows(
    (
        *granite.TABLE.rows,
        *when(
            "use_post_norm",
            Map("model.layers.{L}.post_norm1.weight", "layers.{L}.post_attn_norm.scale", "D"),
            Map("model.layers.{L}.post_norm2.weight", "layers.{L}.post_mlp_norm.scale", "D"),
        ),
    )
)

FAMILY = family(Config, TABLE, "HyperCLOVA X SEED Think 14B", "HyperCLOVAXForCausalLM")

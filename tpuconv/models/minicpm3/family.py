"""MiniCPM 3: config and mapping table."""

from collections.abc import Iterator
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.registry import family
from tpuconv.models.youtu import family as youtu


@family_config
class Config(youtu.Config):
    """The keys of config.json. A factor that is null is 1."""

    model_type: ClassVar[str] = "minicpm3"
    only: ClassVar = {"mlp_bias": (False,), "rope_interleave": (False,)}
    derived: ClassVar[frozenset[str]] = youtu.Config.derived | {"embedding_initializer_range"}

    v_head_dim: int | None  # type: ignore[assignment]  # Youtu's is never absent
    rope_interleave: bool = False
    scale_emb: float
    scale_depth: float | None
    dim_model_base: int | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.v_head_dim is None and self.hidden_size % self.num_attention_heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "H": self.v_head_dim or self.hidden_size // self.num_attention_heads}

    @property
    def residual_factor(self) -> float:
        """The factor of what each part of a layer adds."""
        return 1.0 if self.scale_depth is None else self.scale_depth / self.num_hidden_layers**0.5

    @property
    def logit_factor(self) -> float:
        """The factor of logits."""
        return 1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size


TABLE = youtu.TABLE

FAMILY = family(Config, TABLE, "MiniCPM 3 4B", "MiniCPM3ForCausalLM")

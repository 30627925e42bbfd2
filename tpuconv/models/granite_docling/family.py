"""Granite for Docling: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.granite import family as granite
from tpuconv.models.registry import family

IN_TEXT_MODEL = "model.text_model."
"""The prefix of the text model."""


@dataclass(frozen=True)
class Config(WrapperConfig, granite.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "granite_docling"
    tied: ClassVar[bool] = True
    outside_keys: ClassVar[frozenset[str]] = frozenset(
        {"density_router_hidden_size", "density_router_threshold", "density_router_loss_weight"}
    )

    vocab_size: int = 133800
    hidden_size: int = 1024
    intermediate_size: int = 2048
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    embedding_multiplier: float = 12.0
    logits_scaling: float = 4.0
    residual_multiplier: float = 0.263
    attention_multiplier: float = 0.015625


TABLE = inside(
    granite.TABLE,
    IN_TEXT_MODEL,
    {"vision_model": SEES, "density_router": BRINGS},
    head="lm_head.",
)

FAMILY = family(
    Config,
    TABLE,
    "Granite for Docling 500M, text",
    "GraniteDoclingForConditionalGeneration",
    model="granite",
)

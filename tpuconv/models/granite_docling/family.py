"""Granite for Docling: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.granite import family as granite
from tpuconv.models.registry import family

IN_TEXT_MODEL = "model.text_model."
"""The prefix of the text model."""


@family_config
class Config(WrapperConfig, granite.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "granite_docling"
    tied: ClassVar[bool] = True
    outside_keys: ClassVar[frozenset[str]] = frozenset(
        {"density_router_hidden_size", "density_router_threshold", "density_router_loss_weight"}
    )

    tie_word_embeddings: bool = False


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

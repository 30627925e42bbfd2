"""Cosmos 3 Edge: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.spelling import aliases
from tpuconv.models.arcee import family as arcee
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig
from tpuconv.models.cosmos3_omni.family import cosmos_name, cosmos_table
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, MropeConfig, arcee.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "cosmos3_edge"


TABLE = cosmos_table(arcee.TABLE, {"visual": SEES, "projector": BRINGS})

FAMILY = family(
    Config,
    TABLE,
    "Cosmos 3 Edge, text",
    "Cosmos3EdgeForConditionalGeneration",
    model="arcee",
    aliases=aliases(arcee.TABLE, cosmos_name),
)

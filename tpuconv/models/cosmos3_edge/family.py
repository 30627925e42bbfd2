"""Cosmos 3 Edge: the text model's config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.spelling import aliases
from tpuconv.models.arcee import family as arcee
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig
from tpuconv.models.cosmos3_omni.family import cosmos_name, cosmos_table
from tpuconv.models.registry import family

EDGE_ROPE = Rope(theta=1e8)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(WrapperConfig, MropeConfig, arcee.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "cosmos3_edge"
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": EDGE_ROPE.theta}

    vocab_size: int = 131072
    hidden_size: int = 2048
    intermediate_size: int = 9216
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rope: Rope = EDGE_ROPE


TABLE = cosmos_table(arcee.TABLE, {"visual": SEES, "projector": BRINGS})

FAMILY = family(
    Config,
    TABLE,
    "Cosmos 3 Edge, text",
    "Cosmos3EdgeForConditionalGeneration",
    model="arcee",
    aliases=aliases(arcee.TABLE, cosmos_name),
)

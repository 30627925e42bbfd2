"""Cosmos 3 Edge: the text model's config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.arcee import family as arcee
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig
from tpuconv.models.cosmos3_omni.family import cosmos_tables
from tpuconv.models.registry import Family

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


TABLE, *VARIANTS = cosmos_tables(arcee.TABLE, {"visual": SEES, "projector": BRINGS})

FAMILY = Family(
    name="cosmos3_edge",
    summary="Cosmos 3 Edge, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.cosmos3_edge.modules:Model",
    architectures={"Cosmos3EdgeForConditionalGeneration": "cosmos3_edge"},
)

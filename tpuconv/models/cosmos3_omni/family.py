"""Cosmos 3: the text model's config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import MappingTable
from tpuconv.models.common.wrapper import BRINGS, SEES, tables
from tpuconv.models.qwen3 import family as qwen3
from tpuconv.models.qwen3_vl import family as qwen3_vl
from tpuconv.models.registry import Family

GENERATES = "generator of images, sound or actions: the text model alone is converted"
GENERATOR = dict.fromkeys(
    (
        *("*moe_gen*", "*_for_gen.*", "*.self_attn.add_*", "*.self_attn.to_add_out.*", "*.self_attn.norm_added_*"),
        *("*proj_in.*", "*proj_out.*", "*time_embedder.*", "*_modality_embed"),
    ),
    GENERATES,
)
"""The tensors beside the text model in releases."""

RENAMED = {
    **{f"self_attn.{x}_proj.": f"self_attn.to_{x}." for x in "qkv"},
    "self_attn.o_proj.": "self_attn.to_out.",
    "self_attn.q_norm.": "self_attn.norm_q.",
    "self_attn.k_norm.": "self_attn.norm_k.",
}
"""Parts of names, and those that newer releases have for them."""


@dataclass(frozen=True)
class Config(qwen3_vl.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "cosmos3_omni"


def cosmos_tables(text: MappingTable, outside: Mapping[str, str]) -> tuple[MappingTable, ...]:
    """Returns the tables of a text model: with the names of newer releases, then with those of older ones, each first
    without a prefix, then with that of transformers. `outside` is as in `tables`."""

    def renamed(name: str) -> str:
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        return name

    prefixes = {"": "lm_head.", "model.language_model.": "lm_head."}
    return tuple(
        table
        for name, own in (("", text.renamed(renamed)), ("older.", text))
        for table in tables(own, "", outside, tensors=GENERATOR, name=name, prefixes=prefixes)
    )


SEEN = {
    **dict.fromkeys(("visual", "blocks", "patch_embed", "deepstack_merger_list"), SEES),
    **dict.fromkeys(("pos_embed", "merger"), BRINGS),
}

TABLE, *VARIANTS = cosmos_tables(qwen3.TABLE, SEEN)

FAMILY = Family(
    name="cosmos3_omni",
    summary="Cosmos 3, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.cosmos3_omni.modules:Model",
    architectures={"Cosmos3OmniForConditionalGeneration": "cosmos3_omni"},
)

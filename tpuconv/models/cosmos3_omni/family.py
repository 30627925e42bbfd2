"""Cosmos 3: the text model's config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.spelling import aliases
from tpuconv.mapping.table import MappingTable
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import BRINGS, SEES, inside
from tpuconv.models.qwen3 import family as qwen3
from tpuconv.models.qwen3_vl import family as qwen3_vl
from tpuconv.models.registry import family

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


@family_config
class Config(qwen3_vl.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "cosmos3_omni"


def cosmos_name(name: str) -> str:
    """Returns the name that newer releases have for a tensor of a text model."""
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def cosmos_table(text: MappingTable, outside: Mapping[str, str]) -> MappingTable:
    """Returns the table of a text model with the names of newer releases; `outside` is as in `inside`."""
    return inside(text.renamed(cosmos_name), "", outside, tensors=GENERATOR, head="lm_head.")


SEEN = {
    **dict.fromkeys(("visual", "blocks", "patch_embed", "deepstack_merger_list"), SEES),
    **dict.fromkeys(("pos_embed", "merger"), BRINGS),
}

TABLE = cosmos_table(qwen3.TABLE, SEEN)

FAMILY = family(
    Config,
    TABLE,
    "Cosmos 3, text",
    "Cosmos3OmniForConditionalGeneration",
    model="qwen3",
    aliases=aliases(qwen3.TABLE, cosmos_name),
)

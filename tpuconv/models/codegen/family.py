"""CodeGen: config and mapping table."""

from collections.abc import Iterator
from typing import Any, ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import gpt_table
from tpuconv.models.gptj import family as gptj
from tpuconv.models.registry import family

GROUPS = 4
"""The groups of heads in the fused projection: one for each chip of the authors' training."""


@family_config
class Config(gptj.Config):
    """The keys of config.json, as GPT-J's."""

    model_type: ClassVar[str] = "codegen"
    left_out: ClassVar = frozenset({"n_ctx"})

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_attention_heads % GROUPS:
            yield f"n_head={self.num_attention_heads} is not a multiple of {GROUPS}"

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "n": GROUPS, "r": self.num_attention_heads // GROUPS}


TABLE = gpt_table(
    (
        # Of each group the queries, then the values, then the keys.
        Map(
            "attn.qkv_proj.weight",
            ("attn.q.kernel", "attn.v.kernel", "attn.k.kernel"),
            "(n (r + r + r) H) D -> D (n r) H, D (n r) H, D (n r) H",
        ),
        *gptj.UNFUSED_ROWS,
    ),
    head=gptj.HEAD_ROWS,
)

FAMILY = family(Config, TABLE, "CodeGen", "CodeGenForCausalLM", model="gptj")

"""Hunyuan, mixture of experts: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import EXPERT_MLPS, SHARED, decoder_table
from tpuconv.models.hunyuan_v1_dense import family as dense
from tpuconv.models.registry import family

BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
"""Keys that may be lists with a number for each layer. They are read if all numbers are equal."""


@family_config
class Config(dense.Config):
    """The keys of config.json. `intermediate_size` is the width of one expert, and of the shared one."""

    model_type: ClassVar[str] = "hunyuan_v1_moe"

    num_experts: int
    moe_topk: int
    moe_intermediate_size: int | None = None
    num_shared_expert: int | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        same = {}
        for key in BY_LAYER:
            if isinstance(values := raw.get(key), list) and values:
                if any(value != values[0] for value in values):
                    raise UnsupportedConfig(f"{key}={short(values)} differs by layer, which is not implemented")
                same[key] = values[0]
        return super().in_our_keys({**raw, **same})

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.moe_topk > self.num_experts:
            yield f"moe_topk={self.moe_topk} is more than num_experts={self.num_experts}"
        if (width := self.moe_intermediate_size) not in (None, self.intermediate_size):
            yield f"moe_intermediate_size={width} is not intermediate_size={self.intermediate_size}"
        if self.num_shared_expert not in (None, 1):
            yield f"num_shared_expert={self.num_shared_expert} is not 1"

    @property
    def axes(self) -> dict[str, Any]:
        return {
            **super().axes,
            "E": self.num_experts,
            "M": self.intermediate_size,
            "W": self.intermediate_size,
        }


TABLE = decoder_table(
    *dense.LAYER_ROWS,
    *under(
        "mlp",
        "moe",
        Map("gate.wg.weight", "router.kernel", "E D -> D E"),
        *EXPERT_MLPS,
        *under("shared_mlp", "shared", *SHARED),
    ),
)

FAMILY = family(Config, TABLE, "Hunyuan-A13B", "HunYuanMoEV1ForCausalLM")

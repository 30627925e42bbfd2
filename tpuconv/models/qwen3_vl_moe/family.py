"""Qwen3-VL with experts: the text model's config and mapping table."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rows import (
    ATTENTION,
    HEAD_NORMS,
    IN_FIRST_EXPERTS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    STACKED_EXPERTS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.qwen3_moe import family as qwen3_moe
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, MropeConfig, qwen3_moe.Config):
    """The keys of `text_config`, and whether transformers 5 wrote the files: it stacks the matrices of experts as (out,
    in), older releases as (in, out)."""

    model_type: ClassVar[str] = "qwen3_vl_moe"
    derived: ClassVar[frozenset[str]] = qwen3_moe.Config.derived | {"is_out_major"}
    only: ClassVar = {"use_sliding_window": (False, None), "norm_topk_prob": (True,)}

    norm_topk_prob: bool = True
    is_out_major: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        major = str(raw.get("transformers_version", "")).partition(".")[0][:3]
        return replace(super().from_hf(raw), is_out_major=major.isdecimal() and int(major) >= 5)

    @property
    def all_in_major(self) -> bool:
        """Whether every layer has experts, stacked as (in, out)."""
        return self.all_experts and not self.is_out_major

    @property
    def all_out_major(self) -> bool:
        """Whether every layer has experts, stacked as (out, in)."""
        return self.all_experts and self.is_out_major

    @property
    def some_in_major(self) -> bool:
        """Whether some layers have experts, stacked as (in, out)."""
        return self.some_dense and not self.is_out_major

    @property
    def some_out_major(self) -> bool:
        """Whether some layers have experts, stacked as (out, in)."""
        return self.some_dense and self.is_out_major


STACKED = (
    *mlp_rows(Map("gate.weight", "router.kernel", "E D -> D E")),
    *when("all_in_major", *under("model.layers.{L}.mlp", "layers.{L}.moe", *IN_FIRST_EXPERTS)),
    *when("all_out_major", *under("model.layers.{L}.mlp", "layers.{L}.moe", *STACKED_EXPERTS)),
    *when("some_in_major", *under("model.layers.{J}.mlp", "layers.{J}.moe", *IN_FIRST_EXPERTS)),
    *when("some_out_major", *under("model.layers.{J}.mlp", "layers.{J}.moe", *STACKED_EXPERTS)),
)

REST = (*PRE_NORMS, *ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS), *HEAD_NORMS)
PREFIX = "model.language_model."

TABLE = inside(decoder_table(*REST, others=STACKED), PREFIX, {"visual": SEES})

FAMILY = family(
    Config,
    TABLE,
    "Qwen3-VL with experts, text",
    "Qwen3VLMoeForConditionalGeneration",
    model="qwen3_moe",
)

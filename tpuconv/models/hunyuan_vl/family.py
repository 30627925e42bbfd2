"""Hunyuan-VL: the text model's config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import without_mrope
from tpuconv.models.common.rope import PARAMETER_KEYS
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.hunyuan_v1_dense import family as hunyuan_v1_dense
from tpuconv.models.registry import family

TOKEN_KEYS = frozenset({"im_start_id", "im_end_id", "im_newline_id", "pad_id"})
"""Keys of tokens, without effect on logits."""


@family_config
class Config(WrapperConfig, hunyuan_v1_dense.Config):
    """The keys of `text_config`, which releases have at the root."""

    model_type: ClassVar[str] = "hunyuan_vl"
    flat: ClassVar[bool] = True
    tied: ClassVar[bool] = True
    outside_keys: ClassVar[frozenset[str]] = TOKEN_KEYS
    left_out: ClassVar[frozenset[str]] = TOKEN_KEYS
    tie_word_embeddings: bool = False

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As Hunyuan's. Releases name the sections and the type of several positions for a token `xdrope`."""
        out = without_mrope(raw)
        for key in PARAMETER_KEYS:
            if given := out.get(key):
                plain = {k: value for k, value in given.items() if k != "xdrope_section"}
                out[key] = {k: "dynamic" if value == "xdrope" else value for k, value in plain.items()}
        return super().read_ropes(out, context)


TABLE = inside(hunyuan_v1_dense.TABLE, "model.", {"vit": SEES, "vision_tower": SEES})

FAMILY = family(
    Config,
    TABLE,
    "HunyuanOCR, text",
    "HunYuanVLForConditionalGeneration",
    model="hunyuan_v1_dense",
)

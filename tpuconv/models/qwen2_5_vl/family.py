"""Qwen2.5-VL: the text model's config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.qwen2 import family as qwen2
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, MropeConfig, qwen2.Config):
    """The keys of `text_config`, which releases have at the root."""

    model_type: ClassVar[str] = "qwen2_5_vl"
    flat: ClassVar[bool] = True

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.head_dim is not None and self.head_dim * self.num_attention_heads != self.hidden_size:
            yield f"head_dim={self.head_dim} is not hidden_size / num_attention_heads, which transformers takes"

    @classmethod
    def _is_tied(cls, raw: Mapping[str, Any]) -> Any:
        """As transformers: a true inside `text_config` counts although the root says false."""
        text = raw.get("text_config")
        inside = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
        return True if inside is True else super()._is_tied(raw)


TABLE = inside(qwen2.TABLE, "model.", {"visual": SEES})

FAMILY = family(Config, TABLE, "Qwen2.5-VL, text", "Qwen2_5_VLForConditionalGeneration", model="qwen2")

"""The text model of Llama 4, saved separately: config keys and tensor names without the prefix of the text model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tpuconv.mapping.table import MappingTable
from tpuconv.models.llama4 import family as llama4
from tpuconv.models.registry import Family
from tpuconv.sources.config import encoding_of


@dataclass(frozen=True)
class Config(llama4.Config):
    """The keys of config.json: those of Llama 4's `text_config`, with the same defaults."""

    model_type: ClassVar[str] = "llama4_text"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        return cls.from_text(raw, encoding_of(raw))

    @classmethod
    def ignored_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return cls._ignored(raw)


FAMILY = Family(
    name="llama4_text",
    summary="Llama 4, the text model on its own",
    config=Config,
    table=MappingTable(llama4.ROWS, ignore=llama4.IGNORE, copies=llama4.COPIES),
    model="tpuconv.models.llama4_text.modules:Model",
    architectures={"Llama4ForCausalLM": "llama4_text"},
)

"""InternLM 3: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@family_config
class Config(llama.Config):
    """The keys of config.json. Either all matrices have a bias or none."""

    model_type: ClassVar[str] = "internlm3"
    synonyms: ClassVar[Mapping[str, str]] = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.attention_bias != self.mlp_bias:
            yield f"qkv_bias={self.attention_bias} and bias={self.mlp_bias} differ"


TABLE = llama.TABLE

FAMILY = family(Config, TABLE, "InternLM 3", "InternLM3ForCausalLM", "LlamaForCausalLM", model="llama")

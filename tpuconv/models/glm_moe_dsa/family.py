"""GLM-5: config and mapping table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.deepseek_v32 import family as deepseek_v32
from tpuconv.models.registry import family

INDEXER_KINDS = {"F": "full", "S": "shared"}
"""The letters of `index_topk_pattern`."""


@dataclass(frozen=True)
class SharedIndexers(deepseek_v32.Config):
    """The keys of models in which only the layers that are "full" in `indexer_kinds` have an indexer; the others attend
    to the tokens that the last one before them selected."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds("indexer_types", self.indexer_kinds, self.num_hidden_layers, ("full", "shared"))
        if self.indexer_kinds[:1] == ("shared",):
            yield "indexer_types begins with 'shared': no layer before it selects tokens"

    @property
    def indexer_kinds(self) -> tuple[str, ...]:
        """The `indexer_types` of all layers."""
        raise NotImplementedError

    @property
    def unscannable(self) -> str:
        return "some of its layers attend to the tokens that an earlier one selected"

    @property
    def indexers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.indexer_kinds) if kind == "full")

    @property
    def inseparable(self) -> str:
        return "layers hand the tokens that they selected on to later ones"


@dataclass(frozen=True)
class Config(SharedIndexers):
    """The keys of config.json. In files without `indexer_types` `index_topk_pattern` says the same, or every
    `index_topk_freq`-th layer after the first `index_skip_topk_offset` ones is "full"."""

    model_type: ClassVar[str] = "glm_moe_dsa"
    least: ClassVar = {**deepseek_v32.Config.least, "index_topk_freq": 0, "index_skip_topk_offset": 0}

    vocab_size: int = 154880
    hidden_size: int = 6144
    intermediate_size: int = 12288
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 64
    q_lora_rank: int = 2048
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_group: int = 1
    topk_group: int = 1
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    index_n_heads: int = 32
    indexer_types: tuple[str, ...] | None = None
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2

    @property
    def indexer_kinds(self) -> tuple[str, ...]:
        if self.indexer_types is not None:
            return self.indexer_types
        if self.index_topk_pattern is not None:
            pattern = self.index_topk_pattern
            return tuple(INDEXER_KINDS.get(kind, kind) for kind in pattern) if isinstance(pattern, str) else pattern
        every, first = max(self.index_topk_freq, 1), self.index_skip_topk_offset
        layers = range(self.num_hidden_layers)
        return tuple("shared" if max(i - first + 1, 0) % every else "full" for i in layers)


TABLE = deepseek_v32.TABLE

FAMILY = family(Config, TABLE, "GLM-5, GLM-5.1, GLM-5.2", "GlmMoeDsaForCausalLM")

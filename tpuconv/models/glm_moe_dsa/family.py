"""GLM-5: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.deepseek_v32 import family as deepseek_v32
from tpuconv.models.registry import family

INDEXER_KINDS = {"F": "full", "S": "shared"}
"""The letters of `index_topk_pattern`."""


@family_config
class SharedIndexers(deepseek_v32.Config):
    """The keys of models in which only the layers that are "full" in `indexer_kinds` have an indexer; the others attend
    to the tokens that the last one before them selected."""

    head_dim: int | None = None

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


@family_config
class Config(SharedIndexers):
    """The keys of config.json. In files without `indexer_types` `index_topk_pattern` says the same, or every
    `index_topk_freq`-th layer after the first `index_skip_topk_offset` ones is "full"."""

    model_type: ClassVar[str] = "glm_moe_dsa"
    least: ClassVar = {**deepseek_v32.Config.least, "index_topk_freq": 0, "index_skip_topk_offset": 0}

    indexer_types: tuple[str, ...] | None
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    head_dim: int | None = None

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

"""Inkling 2: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.inkling_text.family import (
    CORRECTION,
    RELEASED_NORM_AND_CONVOLUTIONS,
    RELEASED_ROWS,
    W13_EXPERTS,
    RelativeConfig,
    llm_table,
)
from tpuconv.models.registry import family
from tpuconv.notation.forms import Forms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    streams_read=Word("residual streams that attention reads: of queries, keys and values"),
    later_window_layers=Word("layers with a sliding window after the first layer, less 1"),
    later_full_layers=Word("layers that see all tokens after the first layer, less 1"),
)


@dataclass(frozen=True, kw_only=True)
class MixedBlocksConfig(RelativeConfig):
    """A decoder whose layers read the outputs of blocks of layers. All layers have experts, of which none is shared."""

    only: ClassVar = {**RelativeConfig.only, "scoring_func": ("sigmoid",)}
    hf_names: ClassVar[Mapping[str, str]] = {**RelativeConfig.hf_names, "intermediate_size": "moe_intermediate_size"}

    num_experts_per_tok: int
    qk_l2_clip_threshold: float
    rel_l2_clip_threshold: float
    n_layers_per_attn_res_block: int
    mlp_gate_softcap: float
    mlp_up_softcap: float
    final_logit_softcapping: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.unpadded_vocab_size is not None and self.unpadded_vocab_size > self.vocab_size:
            yield f"unpadded_vocab_size={self.unpadded_vocab_size} is more than vocab_size={self.vocab_size}"

    @property
    def block_count(self) -> int:
        """The number of blocks of layers."""
        return -(-self.num_hidden_layers // self.n_layers_per_attn_res_block)

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "streams_read": 3}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        kinds = list(enumerate(self.windows))
        windows = tuple(layer for layer, window in kinds if window is not None)
        full = tuple(layer for layer, window in kinds if window is None)
        return {
            **super().layer_sets,
            "window_layers": windows,
            "full_layers": full,
            "later_window_layers": tuple(layer - 1 for layer in windows if layer),
            "later_full_layers": tuple(layer - 1 for layer in full if layer),
        }

    @property
    def inseparable(self) -> str:
        return "its layers pass on the outputs of blocks of layers"


@family_config
class Config(MixedBlocksConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "inkling2_text"


def later_queries(window: str, full: str) -> tuple[Map, ...]:
    """Returns the rows of the queries of attention, by the names that they have in layers with a window and in those
    that see all tokens."""
    return (
        Map(window, "layers.{later_window_layers+1}.attn_input.query", "D"),
        Map(full, "layers.{later_full_layers+1}.attn_input.query", "streams_read D"),
    )


BY_PLACE = later_queries("attn_res.attn_queries.{later_window_layers}", "attn_res.attn_queries.{later_full_layers}")
QUERY_FORMS: Forms = {
    "queries": BY_PLACE,
    "layers": later_queries(
        "layers.{later_window_layers+1}.attention_input.query", "layers.{later_full_layers+1}.attention_input.query"
    ),
}
"""The queries of the outputs of blocks that attention reads, together or beside the other tensors of each layer."""
LAYER_ROWS = (
    *RELEASED_ROWS,
    Map("attn.gate_attn.weight", "attn.gate.kernel", "(N H) D -> D N H"),
    Map("attn.attn_sink_proj.weight", "attn.sinks.kernel", "N D -> D N"),
    Map("attn.rel_l2_clip.scale", "relative.clip.scale", "N relative_dim"),
    Map("attn.q_l2_clip.scale", "attn.q_clip.scale", "N H"),
    *under("mlp", "moe", Map("gate.weight", "router.kernel", "E D -> D E"), CORRECTION, *W13_EXPERTS["interleaved"]),
)
FULL_LAYER_ROWS = tuple(
    row
    for name in ("q", "k", "v")
    for row in (
        Map(f"{name}_input_norm.weight", f"{name}_input_norm.scale", "D"),
        *under(
            f"attn.{name}_sconv",
            f"attn.{name}_conv",
            Map("static_w", "kernel", "taps (K H) -> taps K H"),
            Map("weight_proj", "taps.kernel", "(K taps) D -> D K taps"),
        ),
    )
    if name != "q" or row.hf_names[0].startswith("q_")
)


def table(*others: Map) -> MappingTable:
    """Returns the table of a text model, with rows besides."""
    return llm_table(
        *under("model.llm.layers.{L}", "layers.{L}", *LAYER_ROWS),
        *under("model.llm.layers.{window_layers}", "layers.{window_layers}", *RELEASED_NORM_AND_CONVOLUTIONS),
        *under("model.llm.layers.{full_layers}", "layers.{full_layers}", *FULL_LAYER_ROWS),
        *under("model.llm", "", *BY_PLACE),
        Map("model.llm.attn_res.mlp_queries.{L}", "layers.{L}.mlp_input.query", "D"),
        Map("model.llm.attn_res.output_query", "norm.input.query", "D"),
        *others,
    )


FAMILY = family(
    Config,
    table(),
    "Inkling 2, the text model saved on its own",
    "Inkling2ForCausalLM",
    forms=(QUERY_FORMS, W13_EXPERTS),
    aliases={"lm_head.weight": "model.llm.unembed.weight"},
)

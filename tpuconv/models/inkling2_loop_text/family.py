"""Inkling 2 with looped layers: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.looped import LOOPED
from tpuconv.models.inkling2_text.family import QUERY_FORMS, MixedBlocksConfig, table
from tpuconv.models.inkling_text.family import W13_EXPERTS
from tpuconv.models.registry import family
from tpuconv.notation.forms import Forms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    looped_layers=Word("layers that run several times"),
    looped_count=Word("number of the layers that run several times"),
    message_rank=Word("rank of the gates of messages"),
)

KEYS_OF_LOOP: Mapping[str, str] = {
    "core_start": "loop_layer_index_start",
    "core_end": "loop_layer_index_end",
    "num_passes": "loop_num_passes",
    "gate_rank": "loop_gate_rank",
}
"""The keys of `loop_config`, and the keys that they stand for."""


@dataclass(frozen=True, kw_only=True)
class LoopedBlocksConfig(MixedBlocksConfig):
    """A decoder whose middle layers run several times. Both ends of the loop are ends of blocks. In a file with
    `loop_config` the keys of this object win."""

    left_out: ClassVar[frozenset[str]] = frozenset({"loop_config"})

    loop_layer_index_start: int
    loop_layer_index_end: int
    loop_num_passes: int
    loop_gate_rank: int

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `DecoderConfig.in_our_keys`, with the keys of `loop_config`."""
        out = super().in_our_keys(raw)
        loop = unnested({"loop_config": raw.get("loop_config")}, "loop_config")
        return out | {KEYS_OF_LOOP[key]: value for key, value in loop.items() if key in KEYS_OF_LOOP}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        start, end, size = self.loop_layer_index_start, self.loop_layer_index_end, self.n_layers_per_attn_res_block
        if not start < end <= self.num_hidden_layers:
            yield f"a loop from layer {start} to {end} is not inside of num_hidden_layers={self.num_hidden_layers}"
        for key in ("loop_layer_index_start", "loop_layer_index_end"):
            if (layer := getattr(self, key)) % size:
                yield f"{key}={layer} is not a multiple of n_layers_per_attn_res_block={size}"

    @property
    def looped(self) -> range:
        """The layers that run `loop_num_passes` times."""
        return range(self.loop_layer_index_start, self.loop_layer_index_end)

    @property
    def executed_layers(self) -> tuple[int, ...]:
        layers = tuple(range(self.num_hidden_layers))
        return (*layers[: self.looped.start], *tuple(self.looped) * self.loop_num_passes, *layers[self.looped.stop :])

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "looped_layers": self.looped}

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "looped_count": len(self.looped), "message_rank": self.loop_gate_rank}

    @property
    def inseparable(self) -> str:
        return LOOPED


@family_config
class Config(LoopedBlocksConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "inkling2_loop_text"


RECEIVERS = {"attn": "q", "k": "k", "v": "v", "mlp": "mlp"}
"""The parts of a layer that read messages, by the names of releases and ours."""
GATE_ROWS = tuple(
    row
    for theirs, ours in RECEIVERS.items()
    for row in under(
        f"controllers.{theirs}",
        f"{ours}_message_gate",
        Map(
            "down_weight",
            ("from_hidden.kernel", "from_message.kernel"),
            "message_rank (D + D) -> D message_rank, D message_rank",
        ),
        Map("forget_weight", "forget.kernel", "D message_rank -> message_rank D"),
        Map("gain_weight", "gain.kernel", "D message_rank -> message_rank D"),
    )
)
MESSAGE_QUERIES = tuple(f"messages.{part}_query" for part in RECEIVERS.values())
MESSAGES = (
    Map(
        "middle_cycle_cross_pass_queries",
        (MESSAGE_QUERIES[0], MESSAGE_QUERIES[3]),
        "(looped_count (1 + 1)) D -> looped_count D, looped_count D",
    ),
    Map(
        "middle_cycle_cross_pass_kv_queries",
        MESSAGE_QUERIES[1:3],
        "(looped_count (1 + 1)) D -> looped_count D, looped_count D",
    ),
)
MERGED_MESSAGES = Map(
    "message_input.query",
    MESSAGE_QUERIES,
    "looped_count (1 + 1 + 1 + 1) D -> looped_count D, looped_count D, looped_count D, looped_count D",
)
LOOP_FORMS: Forms = {
    "queries": (*QUERY_FORMS["queries"], *MESSAGES),
    "layers": (*QUERY_FORMS["layers"], MERGED_MESSAGES),
}
"""The queries of the outputs of blocks and of messages, as releases and as transformers have them."""

FAMILY = family(
    Config,
    table(
        *under("model.llm.layers.{looped_layers}", "layers.{looped_layers}", *GATE_ROWS),
        *under("model.llm", "", *MESSAGES),
    ),
    "Inkling 2 Mini, the text model saved on its own",
    "Inkling2LoopForCausalLM",
    forms=(LOOP_FORMS, W13_EXPERTS),
    aliases={"lm_head.weight": "model.llm.unembed.weight"},
)

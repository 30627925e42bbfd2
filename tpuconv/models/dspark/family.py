"""DSpark: config and mapping table of a draft model, which is DFlash's with two heads beside.

The tokens of a block are chosen one after the other: what a low-rank matrix of pairs of tokens says of the token before
is added to the logits of the next one. The other head predicts whether a token will be accepted. Formulas as in the
code of speculators 0.9 (`models/dspark`).
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import when
from tpuconv.models.dflash import family as dflash
from tpuconv.models.registry import draft_family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable

declare(
    markov_rank=Word("rank of the matrix of pairs of tokens"),
    markov_inputs=Word("width of what a gate of this matrix reads"),
    markov_gates=Word("width of all gates of this matrix"),
    confidence_inputs=Word("width of what predicts whether a token is accepted"),
)

ONE_GATE, WITH_STATE = "gated", "rnn"
KINDS_OF_HEADS = ("vanilla", ONE_GATE, WITH_STATE)
SPARK_CONFIG = "dspark_config"


@family_config
class Config(dflash.Config):
    """The keys of config.json, in the formats of speculators and of DeepSpec, and those that `settled` adds.

    Attributes:
        has_confidence: True if there are tensors of the head that predicts whether a token is accepted.
        has_confidence_bias: True if it has a bias.
    """

    model_type: ClassVar[str] = "dspark"
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "target_hidden_size": (None,),
        "markov_head_type": (*KINDS_OF_HEADS, None),
    }
    least: ClassVar[Mapping[str, int]] = {**dflash.Config.least, "markov_rank": 0}
    left_out: ClassVar[frozenset[str]] = dflash.Config.left_out | {"num_anchors", "enable_confidence_head"}
    settled_keys: ClassVar[frozenset[str]] = dflash.Config.settled_keys | {*("has_confidence", "has_confidence_bias")}

    block_size: int = 7
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: str | None = None
    confidence_head_with_markov: bool = True
    has_confidence: bool = False
    has_confidence_bias: bool = False

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().in_our_keys(unnested(raw, SPARK_CONFIG))

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        begins = {name.partition(".")[0] for name in tensors}
        biases = {"confidence_head.proj.bias", "confidence.bias"}
        return {
            **super().settled(raw, tensors),
            "has_confidence": bool(begins & {"confidence_head", "confidence"}),
            "has_confidence_bias": bool(biases & set(tensors)),
        }

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.has_confidence and self.confidence_head_with_markov and not self.has_markov:
            yield "confidence_head_with_markov=True with markov_rank=0"

    @property
    def has_markov(self) -> bool:
        """True if there is a matrix of pairs of tokens."""
        return self.markov_rank > 0

    @property
    def is_gated(self) -> bool:
        """True if the matrix of pairs of tokens has one gate."""
        return self.has_markov and self.markov_head_type == ONE_GATE

    @property
    def is_recurrent(self) -> bool:
        """True if it has a state that goes from token to token."""
        return self.has_markov and self.markov_head_type == WITH_STATE

    @property
    def sizes(self) -> dict[str, int]:
        width, rank = self.hidden_size, self.markov_rank
        return {
            **super().sizes,
            "markov_rank": rank,
            "markov_inputs": width + rank * (1 + self.is_recurrent),
            "markov_gates": rank * (3 if self.is_recurrent else 1),
            "confidence_inputs": width + rank * self.confidence_head_with_markov,
        }

    @property
    def drafts(self) -> int:
        return self.block_size - (not self.sample_from_anchor)


def of_gates(name: str, condition: str) -> tuple[Map, ...]:
    """Returns the rows of what changes a row of the matrix of pairs of tokens."""
    return when(
        condition,
        Map(f"{name}.weight", "markov.gates.kernel", "markov_gates markov_inputs -> markov_inputs markov_gates"),
        Map(f"{name}.bias", "markov.gates.bias", "markov_gates"),
    )


TABLE = MappingTable(
    (
        *dflash.TABLE.rows,
        *when(
            "has_markov",
            Map("markov_head.markov_w1.weight", "markov.before.embedding", "V markov_rank"),
            Map(
                "markov_head.markov_w2.weight",
                "markov.after.kernel",
                "draft_vocab markov_rank -> markov_rank draft_vocab",
            ),
        ),
        *of_gates("markov_head.gate_proj", "is_gated"),
        *of_gates("markov_head.joint_proj", "is_recurrent"),
        Map("confidence_head.proj.weight", "confidence.kernel", "1 confidence_inputs", when="has_confidence"),
        Map("confidence_head.proj.bias", "confidence.bias", "1", when="has_confidence_bias"),
    ),
    ignore=dflash.TABLE.ignore,
)

FAMILY = draft_family(Config, TABLE, "DSpark drafts for models of any family")

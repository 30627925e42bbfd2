"""DFlash (arXiv:2602.06036): config and mapping table of a draft model.

A draft predicts a block of tokens in one pass. It reads hidden states of some layers of its target, as keys and values
of its own layers, and the embeddings of the last token and of a mask for each token that it predicts.

Three formats have the same layers. z-lab's releases (`DFlashDraftModel`) have the keys of Qwen3 and `dflash_config`.
speculators has the keys of Qwen3 in `transformer_layer_config`. Muse Glimmer's assistant has keys and names of its own.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UsageError
from tpuconv.jsonfile import short
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.heads import ANOTHER_DRAFT
from tpuconv.models.common.rows import ATTENTION, HEAD_NORMS, MLP, O_BIAS, PRE_NORMS, QKV_BIAS, when
from tpuconv.models.eagle3.family import FROM_TARGET, LAYER_CONFIG, MOST_STATES, OF_VERIFIER, WITHOUT_EFFECT
from tpuconv.models.lineages.qwen import QWEN3
from tpuconv.models.registry import SPECULATORS_TYPE, draft_family
from tpuconv.notation.table import Map, MappingTable, under

MUSE = "muse_glimmer_assistant"
OWN_CONFIG = "dflash_config"
OF_MODEL, OF_SPECULATORS = "target_layer_ids", "aux_hidden_state_layer_ids"
"""The keys of the layers whose hidden states a draft reads: the number of the layer that returns them, and in the
format of speculators the number of the layer that reads them."""


@family_config
class Config(QWEN3.config):  # type: ignore[name-defined,misc]  # a class that is made of parts
    """The keys of config.json, in each format, and those that `settled` and `in_our_keys` add.

    Attributes:
        vocab_size: 0 if config.json does not say it.
        state_layers: the layers of the target whose input the draft reads.
        is_muse: True for the format of Muse Glimmer's assistant.
        has_embedding, has_head: True if the draft has an embedding or a head; else it uses its target's.
        has_maps: True if the draft has maps between its vocabulary and the target's.
    """

    model_type: ClassVar[str] = "dflash"
    sees_behind: ClassVar[bool] = False  # `both_ways` says it of each layer
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "sample_from_anchor": (False,),
        "markov_rank": (0, None),
        "target_hidden_size": (None,),
    }
    least: ClassVar[Mapping[str, int]] = {**QWEN3.config.least, "vocab_size": 0, "mask_token_id": 0, "block_size": 2}
    left_out: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {
        *("num_target_layers", "output_multiplier", "final_logit_softcapping", "sliding_window_non_causal"),
        *(OF_MODEL, OF_SPECULATORS, SPECULATORS_TYPE),
    }
    settled_keys: ClassVar[frozenset[str]] = frozenset(
        {"state_layers", "is_muse", "has_embedding", "has_head", "has_maps"}
    )

    vocab_size: int = 0
    tie_word_embeddings: bool = False
    draft_vocab_size: int | None = None
    block_size: int = 16
    mask_token_id: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    state_layers: tuple[int, ...] = ()
    is_muse: bool = False
    has_embedding: bool = False
    has_head: bool = False
    has_maps: bool = False

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        read = unnested(raw, LAYER_CONFIG, OWN_CONFIG)
        own = OF_SPECULATORS if SPECULATORS_TYPE in raw else OF_MODEL
        layers = read.get(own)
        if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
            raise ConfigError(f"config.json: {own}={short(layers)} names no layers")
        read["state_layers"] = [layer + (own == OF_MODEL) for layer in layers]
        if raw.get("model_type") == MUSE:
            sliding = ["sliding_attention"] * read.get("num_hidden_layers", 0)
            read |= {"is_muse": True, "is_causal": False, "use_sliding_window": True}
            read["layer_types"] = read.get("layer_types") or sliding
        elif read.get("sliding_window_non_causal"):
            read["is_causal"] = False
        return super().in_our_keys(read)  # type: ignore[no-any-return]

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        begins = {name.partition(".")[0] for name in tensors}
        has = {"has_embedding": {"embed_tokens", "embed"}, "has_head": {"lm_head"}, "has_maps": {"d2t"}}
        return {**raw, **{key: bool(begins & names) for key, names in has.items()}}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        layers = self.state_layers
        if len(layers) > MOST_STATES or any(layer < 0 for layer in layers) or len(set(layers)) < len(layers):
            yield f"the layers that the draft reads, {list(layers)[:10]}, are not different layers"
        if self.mask_token_id is None:
            yield "mask_token_id is absent"
        elif self.vocab_size and self.mask_token_id >= self.vocab_size:
            yield f"mask_token_id={self.mask_token_id} is not less than vocab_size={self.vocab_size}"
        if self.draft_vocab_size not in (None, self.vocab_size) and not self.has_maps and self.has_head:
            yield f"draft_vocab_size={self.draft_vocab_size} of {self.vocab_size}, and there is no tensor d2t"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "target_states": len(self.state_layers) * self.hidden_size,
            "draft_vocab": self.draft_vocab_size or self.vocab_size,
        }

    @property
    def drafts(self) -> int:
        """The number of tokens that a block drafts."""
        return self.block_size - 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        # transformers counts the window of Muse Glimmer's assistant without the token itself, others count it.
        return tuple(window and window + self.is_muse for window in super().windows)

    @property
    def both_ways(self) -> tuple[bool, ...]:
        """For each layer, True if tokens of a block see the tokens behind them. By default layers with a sliding window
        do not, as in z-lab's code and in vLLM."""
        return tuple(window is None if self.is_causal is None else not self.is_causal for window in self.windows)

    @property
    def unscannable(self) -> str:
        return "a draft has few layers"

    def sizes_beside(self, target: Any) -> Mapping[str, tuple[int, int]]:
        """See `tpuconv.models.common.drafting.DraftConfig`."""
        if not self.vocab_size and (self.mask_token_id or 0) >= target.vocab_size:  # the target would embed it as NaN
            raise UsageError(
                f"the mask of the draft is the token {self.mask_token_id}, and the target has {target.vocab_size}",
                hint=ANOTHER_DRAFT,
            )
        sizes = {"vocabulary": (self.vocab_size, target.vocab_size)} if self.vocab_size else {}
        return {**sizes, FROM_TARGET: (self.hidden_size, target.hidden_size)}

    def states_of(self, layers: int) -> tuple[int, ...]:
        """See `tpuconv.models.common.drafting.DraftConfig`. The output of the last layer is refused: transformers has
        it after the last norm, vLLM before it."""
        if max(self.state_layers) >= layers:
            raise UsageError(
                f"the draft reads the inputs of the layers {list(self.state_layers)}, and the target has {layers}",
                hint=ANOTHER_DRAFT,
            )
        return self.state_layers


TABLE = MappingTable(
    (
        Map("embed_tokens.weight", "embed.embedding", "V D", when="has_embedding"),
        *(
            row
            for condition, fc, norm in (
                ("not is_muse", "fc", "hidden_norm"),
                ("is_muse", "encoder.fc", "encoder.output_norm_enc"),
            )
            for row in when(
                condition,
                Map(f"{fc}.weight", "fc.kernel", "D target_states -> target_states D"),
                Map(f"{norm}.weight", "hidden_norm.scale", "D"),
            )
        ),
        *under(
            "layers.{L}",
            "layers.{L}",
            *PRE_NORMS,
            *ATTENTION,
            *HEAD_NORMS,
            *when("attention_bias", *QKV_BIAS, O_BIAS),
            *under("mlp", "mlp", *MLP),
        ),
        Map("norm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "draft_vocab D -> D draft_vocab", when="has_head"),
        Map("d2t", "d2t", "draft_vocab", when="has_maps", buffer=True),
        Map("t2d", "t2d", "V", when="has_maps", buffer=True),
    ),
    ignore=OF_VERIFIER,
)

FAMILY = draft_family(
    Config, TABLE, "DFlash drafts for models of any family", types={"MuseGlimmerAssistantModel": MUSE}
)

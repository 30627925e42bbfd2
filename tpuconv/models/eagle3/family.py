"""EAGLE-3 (arXiv:2503.01840): config and mapping table of a draft model.

A draft reads the hidden states of some layers of its target, and the embedding of the next token. It has one layer of
Llama, whose attention reads both, and a head for a part of the target's vocabulary.

Two formats have the same tensors. In the format of EAGLE and SGLang (`LlamaForCausalLMEagle3`) the layer is `midlayer`
and config.json has the keys of Llama. In the format of speculators, which vLLM reads, the layer is `layers.0` and
config.json has the keys of Llama in `transformer_layer_config`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.jsonfile import short
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.heads import ANOTHER_DRAFT
from tpuconv.models.common.rows import JOINED_ATTENTION, MLP, MLP_BIAS, O_BIAS, QKV_BIAS, when
from tpuconv.models.lineages.llama import LLAMA
from tpuconv.models.registry import draft_family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    target_states=Word("width of the hidden states of the target that a draft reads, together"),
    draft_vocab=Word("vocabulary of a draft: a part of the target's vocabulary", as_="V"),
)

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""The key of the layers whose hidden states a draft reads: beside other keys the number of the layer that reads the
states, as in vLLM; within `eagle_config` the number of the layer that returns them, as in SGLang."""
EAGLE_CONFIG, LAYER_CONFIG = "eagle_config", "transformer_layer_config"
MOST_STATES = 64
"""The most layers of a target whose hidden states a draft reads."""

FROM_TARGET = "width of the embedding, which the draft takes from its target"

COUNT_OF_STATES = "num_aux_hidden_states"
"""The key by which vLLM knows how many states a draft in the format of speculators reads, if not three."""
WITHOUT_EFFECT = frozenset(
    {
        *("speculators_config", "speculators_model_type", "speculators_version", "embed_requires_grad"),
        *("enable_sp_ulysses", "has_no_defaults_at_init", "base_model_ep_plan", "base_model_tp_plan"),
        *("target_model_type", "max_window_layers", COUNT_OF_STATES),
    }
)

"""Keys of drafts that change no computation."""
OF_VERIFIER = dict.fromkeys(("verifier_norm.weight", "verifier_lm_head.weight"), "of the target")
"""Tensors of the target that speculators writes."""


@family_config
class Config(LLAMA.config):  # type: ignore[name-defined,misc]  # a class that is made of parts
    """The keys of config.json, in either format, and those that `settled` adds.

    Attributes:
        state_layers: the layers of the target whose input the draft reads; None if config.json does not name them.
        has_embedding: True if the draft has an embedding; else it uses the embedding of its target.
        has_maps: True if the draft has maps between its vocabulary and the target's.
        is_midlayer: True if the layer has the name `midlayer` in the release.
    """

    model_type: ClassVar[str] = "eagle3"
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "num_hidden_layers": (1,),
        "tie_word_embeddings": (False,),
        "bias": (False,),
        "fc_norm": (False,),
        "norm_output": (False,),
        "sliding_window": (None,),
        "use_sliding_window": (False,),
        "layer_types": (["full_attention"], None),
    }
    left_out: ClassVar[frozenset[str]] = WITHOUT_EFFECT
    settled_keys: ClassVar[frozenset[str]] = frozenset({"state_layers", "has_embedding", "has_maps", "is_midlayer"})
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 10000.0}

    num_hidden_layers: int = 1
    tie_word_embeddings: bool = False
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    state_layers: tuple[int, ...] | None = None
    has_embedding: bool = True
    has_maps: bool = True
    is_midlayer: bool = False

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        read = unnested(raw, LAYER_CONFIG)
        if LAYER_CONFIG in raw:  # speculators reads the key of the draft, not the key of its layer
            read["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)
        inside = read.pop(EAGLE_CONFIG, None) or {}
        layers = read.pop(LAYER_IDS, None)
        if not isinstance(inside, Mapping) or not isinstance(layers, list | None):
            raise ConfigError(f"config.json: {EAGLE_CONFIG}={short(inside)} and {LAYER_IDS}={short(layers)}")
        if inside.get("use_aux_hidden_state", True) is not True:
            raise UnsupportedConfig(
                f"config.json: {EAGLE_CONFIG} has use_aux_hidden_state={short(inside['use_aux_hidden_state'])}",
                hint="drafts that read the hidden states of several layers are supported",
            )
        if layers is None and isinstance(found := inside.get(LAYER_IDS), list) and found:
            layers = [number + 1 if type(number) is int else number for number in found]
        if layers:
            read["state_layers"] = layers
        return super().in_our_keys(read)  # type: ignore[no-any-return]

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        ends = {name.removeprefix("model.") for name in tensors}
        return {
            **raw,
            "has_embedding": any(name.startswith("embed") for name in ends),
            "has_maps": "d2t" in ends,
            "is_midlayer": any(name.startswith("midlayer.") for name in ends),
        }

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        layers = self.state_layers or ()
        if len(layers) > MOST_STATES or any(layer < 0 for layer in layers) or list(layers) != sorted(set(layers)):
            yield f"{LAYER_IDS}={list(layers)[:10]} are no numbers of layers, each greater than the one before"
        if (self.draft_vocab_size or 0) > self.vocab_size:
            yield f"draft_vocab_size={self.draft_vocab_size} is more than vocab_size={self.vocab_size}"
        elif not self.has_maps and self.draft_vocab_size not in (None, self.vocab_size):
            yield f"draft_vocab_size={self.draft_vocab_size} of {self.vocab_size}, and there is no tensor d2t"

    @property
    def sizes(self) -> dict[str, int]:
        states = len(self.state_layers or DEFAULT_STATES) * (self.target_hidden_size or self.hidden_size)
        return {
            **super().sizes,
            "joined_width": 2 * self.hidden_size,
            "target_states": states,
            "draft_vocab": self.draft_vocab_size or self.vocab_size,
        }

    @property
    def unscannable(self) -> str:
        return "a draft has one layer"

    def sizes_beside(self, target: Any) -> Mapping[str, tuple[int, int]]:
        """See `tpuconv.models.common.drafting.DraftConfig`."""
        sizes = {
            "vocabulary": (self.vocab_size, target.vocab_size),
            "width of the target": (self.target_hidden_size or self.hidden_size, target.hidden_size),
        }
        if not self.has_embedding:
            sizes[FROM_TARGET] = self.hidden_size, target.hidden_size
        return sizes

    def states_of(self, layers: int) -> tuple[int, ...]:
        """Returns the layers of a target with this number of layers whose input the draft reads. The number of layers
        stands for the output of the last one.

        Raises:
            UsageError: the target has fewer layers.
        """
        chosen = self.state_layers or tuple(layer(layers) for layer in DEFAULT_STATES)
        if min(chosen) < 0 or max(chosen) > layers or len(set(chosen)) < len(chosen):
            raise UsageError(
                f"the draft reads the inputs of the layers {list(chosen)}, and the target has {layers}",
                hint=ANOTHER_DRAFT,
            )
        return chosen


DEFAULT_STATES: Sequence[Callable[[int], int]] = (lambda n: 2, lambda n: n // 2, lambda n: n - 3)
"""The layers of a target of n layers whose input a draft reads by default."""

_IN_LAYER = (
    Map("input_layernorm.weight", "embed_norm.scale", "D"),
    Map("hidden_norm.weight", "hidden_norm.scale", "D"),
    *JOINED_ATTENTION,
    Map("post_attention_layernorm.weight", "mlp_norm.scale", "D"),
    *under("mlp", "mlp", *MLP),
)
_LAYER_BIASES = (("attention_bias", (*QKV_BIAS, O_BIAS)), ("mlp_bias", under("mlp", "mlp", *MLP_BIAS)))


def _layer(name: str, condition: str) -> Iterator[Map]:
    """Yields the rows of the layer under a name, where the condition holds."""
    yield from when(condition, *under(name, "layers.0", *_IN_LAYER))
    for key, rows in _LAYER_BIASES:
        yield from when(f"{condition} and {key}", *under(name, "layers.0", *rows))


TABLE = MappingTable(
    (
        Map("embed_tokens.weight", "embed.embedding", "V D", when="has_embedding"),
        Map("input_norm.weight", "input_norm.scale", "target_states", when="norm_before_fc"),
        Map("fc.weight", "fc.kernel", "D target_states -> target_states D"),
        *_layer("midlayer", "is_midlayer"),
        *_layer("layers.0", "not is_midlayer"),
        Map("norm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "draft_vocab D -> D draft_vocab"),
        Map("d2t", "d2t", "draft_vocab", when="has_maps", buffer=True),
        Map("t2d", "t2d", "V", when="has_maps", buffer=True),
    ),
    ignore=OF_VERIFIER,
)


FAMILY = draft_family(Config, TABLE, "EAGLE-3 drafts for models of any family")

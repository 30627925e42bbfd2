"""Domyn Edge."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, HEAD_NORMS
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Mlp, Norms


def _in_turn(local: Any, whole: Any) -> tuple[Any, ...]:
    """Returns what the layers of Domyn Edge have in turn: two that see all tokens, then three with a window and one
    without eight times, then two that see all again."""
    return whole, whole, *(local, local, local, whole) * 8, whole, whole


@family_config
class DomynConfig(DecoderConfig):
    """The layers differ in rotary positions, in windows and in the size of heads.

    Attributes:
        position_layers: for each layer "rope", or "nope" without rotary positions.
        head_sizes: for each layer the size of a head. `per_layer_config` of newer files says the same, beside a
            `head_dim` of the layers that it leaves out.
        tokens_before: for each layer how many tokens before itself a token sees, -1 for all; the first number of each
            pair of `window_sizes`.
    """

    only: ClassVar = {"attention_bias": (False,)}
    hf_names: ClassVar[Mapping[str, str]] = {"tokens_before": "window_sizes"}
    left_out: ClassVar[frozenset[str]] = frozenset({"per_layer_config", "trained_vocab_size", "max_window_layers"})

    head_dim: int = 256
    position_layers: tuple[str, ...] = _in_turn("rope", "nope")
    head_sizes: tuple[int, ...] = _in_turn(64, 256)
    tokens_before: tuple[int, ...] = _in_turn(1024, -1)

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        if (pairs := out.get("window_sizes")) is not None:
            out["window_sizes"] = _firsts(pairs)
        count = out.get("num_hidden_layers", cls.num_hidden_layers)
        if "head_sizes" not in out and type(count) is int:
            out |= _sizes_by_layer(raw, min(count, cls._most("num_hidden_layers")))
        if isinstance(sizes := out.get("head_sizes"), list) and sizes and all(type(size) is int for size in sizes):
            out["head_dim"] = max(sizes)
        return out

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        if "head_sizes" in raw and raw.get("per_layer_config") is not None:
            other = _sizes_by_layer(raw, self.num_hidden_layers).get("head_sizes")
            if other is not None and tuple(other) != self.head_sizes:
                yield f"head_sizes={short(list(self.head_sizes))} and per_layer_config differ"

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        layers = self.num_hidden_layers
        yield from faults_of_kinds("position_layers", self.position_layers, layers, ("rope", "nope"))
        for key, given in (("head_sizes", self.head_sizes), ("window_sizes", self.tokens_before)):
            if len(given) != layers:
                yield f"{key} has {len(given)} entries for num_hidden_layers={layers}"
        if any(size < 2 or size % 2 for size in self.head_sizes):
            yield f"head_sizes={short(list(self.head_sizes))} are not all even: rotary positions need pairs"
        if any(count < -1 or not count for count in self.tokens_before):
            yield f"window_sizes={short(list(self.tokens_before))} are not all -1 or positive"

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        usual = self.sizes["H"]
        return {layer: {"H": size} for layer, size in enumerate(self.head_sizes) if size != usual}

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.rope if kind == "rope" else None for kind in self.position_layers)

    @property
    def rope_dims(self) -> tuple[int, ...]:
        return self.head_sizes

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(count + 1 if count > 0 else None for count in self.tokens_before)


def _firsts(pairs: Any) -> list[Any]:
    """Returns the first numbers of the pairs of `window_sizes`: the second ones count tokens behind a token.

    Raises:
        ConfigError: it is not a list of pairs.
        UnsupportedConfig: tokens see tokens behind them.
    """
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ConfigError(f"config.json: window_sizes={short(pairs)} is not a list with two numbers for each layer")
    if any(pair[1] != 0 for pair in pairs):
        raise UnsupportedConfig(f"window_sizes={short(pairs)} is not implemented: tokens would see tokens behind them")
    return [pair[0] for pair in pairs]


def _sizes_by_layer(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the `head_sizes` that `head_dim` and `per_layer_config` give; nothing without `head_dim`.

    Raises:
        ConfigError: `per_layer_config` is not an object with head sizes alone, by numbers of layers.
    """
    own = raw.get("per_layer_config") or {}
    known = isinstance(own, Mapping) and set(own) <= set(map(str, range(layers)))
    if not known or not all(isinstance(each, Mapping) and set(each) == {"head_dim"} for each in own.values()):
        raise ConfigError(f"config.json: per_layer_config={short(own, 300)} is not a head_dim for some of its layers")
    usual = raw.get("head_dim")
    sizes = [own.get(str(layer), {}).get("head_dim", usual) for layer in range(layers)]
    return {} if None in sizes else {"head_sizes": sizes}


DOMYNEDGE = decoder(
    "domynedge",
    "Domyn Edge",
    "DomynEdgeForCausalLM",
    Norms(
        "sandwich",
        names=("pre_attention_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm"),
        module="modules.domyn:OwnSizesBlock",
    ),
    Attn(
        norms="each head",
        rope="halves in float32",
        module="modules.domyn:KeyScaledAttention",
        rows=(*ATTENTION, *(row for row in HEAD_NORMS if "k_norm" in row.hf)),
    ),
    Mlp(),
    base="modules.domyn:OwnHeadSizes",
    config=DomynConfig,
    names={
        "model.layers.{L}.self_attn": "model.layers.{L}.attention",
        "model.layers.{L}.mlp": "model.layers.{L}.feedforward",
    },
    # As the config of Domyn's fork of vLLM has them.
    defaults={
        **{"vocab_size": 115269, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    },
)

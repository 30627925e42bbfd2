"""Configs of models in which later layers use the keys and values of earlier ones, and each layer may have embeddings
of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.windows import PatternConfig
from tpuconv.notation.letters import Word, declare

declare(
    layer_dim=Word("width of the embeddings of a layer"),
    layer_vocab=Word("vocabulary of the embeddings of layers", as_="V"),
    all_layers=Word("layers, as an axis of their embeddings and of the projection for all of them"),
    window_kv_layers=Word("layers with a sliding window, and keys and values of their own"),
    full_kv_layers=Word("layers that see all tokens, with keys and values of their own"),
    shared_kv_layers=Word("layers that use the keys and values of an earlier one"),
    unused_window_layers=Word("of them those with a sliding window, for programs with arrays that no layer reads"),
    unused_full_layers=Word("of them those that see all tokens, for programs with arrays that no layer reads"),
    last_window_layer=Word("the last layer with a sliding window, and keys and values of its own"),
    last_full_layer=Word("the last layer that sees all tokens, with keys and values of its own"),
    further_vocab=Word("ids after the vocabulary of the embeddings of layers"),
)


@dataclass(frozen=True, kw_only=True)
class SharedKeysConfig(PatternConfig):
    """A decoder whose last `num_kv_shared_layers` layers use the keys and values of the last layer of their type that
    has own ones. Each layer reads embeddings of `hidden_size_per_layer_input` numbers of its own, if that is not 0."""

    least: ClassVar[Mapping[str, int]] = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}

    final_logit_softcapping: float | None
    vocab_size_per_layer_input: int
    hidden_size_per_layer_input: int
    num_kv_shared_layers: int

    def contradictions(self) -> Iterator[str]:
        if self.num_kv_shared_layers >= self.num_hidden_layers:
            yield f"num_kv_shared_layers={self.num_kv_shared_layers} leaves none of {self.num_hidden_layers} layers"
            return
        yield from super().contradictions()
        if self.num_kv_shared_layers and set(self.kinds) - set(self.kinds[: -self.num_kv_shared_layers]):
            yield "layers share keys and values of a type of layers that has none of its own"
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            yield f"final_logit_softcapping={self.final_logit_softcapping} is not positive"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "layer_dim": self.hidden_size_per_layer_input,
            "layer_vocab": self.vocab_size_per_layer_input,
            "all_layers": self.num_hidden_layers,
            "further_vocab": max(0, self.vocab_size - self.vocab_size_per_layer_input),
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        layers = range(self.num_hidden_layers)
        own = layers[: self.num_hidden_layers - self.num_kv_shared_layers]
        full = [i for i, kind in enumerate(self.kinds) if kind == "full_attention"]
        return {
            **super().layer_sets,
            "window_layers": tuple(i for i in layers if i not in full),
            "full_layers": tuple(full),
            "window_kv_layers": tuple(i for i in own if i not in full),
            "full_kv_layers": tuple(i for i in own if i in full),
            "shared_kv_layers": tuple(layers[len(own) :]),
            "unused_window_layers": (),
            "unused_full_layers": (),
        }

    @property
    def unused_layer_sets(self) -> Mapping[str, Sequence[int]]:
        """The layers whose own keys and values no model uses, though releases have tensors for them: for a program that
        has their arrays too. And the layers that are used instead."""
        sets, kinds = self.layer_sets, ("window", "full")
        shared = set(sets["shared_kv_layers"])
        unused = {f"unused_{x}_layers": tuple(i for i in sets[f"{x}_layers"] if i in shared) for x in kinds}
        return unused | {f"last_{x}_layer": tuple(sets[f"{x}_kv_layers"][-1:]) for x in kinds}

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer the one whose keys and values it uses: itself, or the last of its type with own ones."""
        own = self.num_hidden_layers - self.num_kv_shared_layers
        return tuple(i if i < own else self.last_keys[kind] for i, kind in enumerate(self.kinds))

    @property
    def last_keys(self) -> dict[str, int]:
        """The last layer with keys and values of its own, by the kind of the layer."""
        own = self.num_hidden_layers - self.num_kv_shared_layers
        return {kind: i for i, kind in enumerate(self.kinds[:own])}

    @property
    def has_global_values(self) -> bool:
        """True if layers that see all tokens have a matrix for values. Without it, values are made of the keys."""
        return True

    @property
    def has_layer_inputs(self) -> bool:
        """True if each layer has its own embeddings."""
        return self.hidden_size_per_layer_input > 0

    @property
    def inseparable(self) -> str:
        if self.has_layer_inputs:
            return "its layers have embeddings of their own"
        return "some of its layers use the keys and values of an earlier one" if self.num_kv_shared_layers else ""

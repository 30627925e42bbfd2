"""Configs of models with experts, in all layers or in some."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.kinds import faults_of_kinds

MLP_KINDS = {"I": "dense", "J": "sparse"}
"""The letters of the layers of each of the `mlp_layer_types`."""


class ChosenExperts:
    """A decoder with experts, of which each token uses `num_experts_per_tok`. Their width is `moe_intermediate_size`;
    in families without this key, `intermediate_size`. That of the one that every token uses, where there is one, is
    `shared_expert_intermediate_size`. A family's Config derives from this class and from another, in this order.

    Class attribute: `experts_key` is the field with the number of experts.
    """

    experts_key: ClassVar[str] = "num_experts"

    intermediate_size: int
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    num_experts_per_tok: int

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        chosen, experts = self.num_experts_per_tok, getattr(self, self.experts_key)
        if chosen > experts:
            yield f"num_experts_per_tok={chosen} is more than {self.experts_key}={experts}"

    @property
    def sizes(self) -> dict[str, int]:
        """See `DecoderConfig.sizes`."""
        width, shared = self.moe_intermediate_size or self.intermediate_size, self.shared_expert_intermediate_size
        sizes = {"E": getattr(self, self.experts_key), "M": width} | ({} if shared is None else {"W": shared})
        return {**super().sizes, **sizes}  # type: ignore[misc]


class MixedMLPs:
    """A decoder with experts in the layers that are "sparse" in `mlp_layer_types` or, if that is absent, in all but the
    first `first_k_dense_replace` ones. The others have an MLP. A family's Config derives from this class and from
    another, in this order."""

    num_hidden_layers: int
    first_k_dense_replace: int = 0
    mlp_layer_types: tuple[str, ...] | None = None

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        yield from faults_of_kinds("mlp_layer_types", self.mlp_kinds, self.num_hidden_layers, MLP_KINDS.values())

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        """See `DecoderConfig.layer_sets`."""
        return {**super().layer_sets, **layers_by_mlp(self.mlp_kinds)}  # type: ignore[misc]

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        """The `mlp_layer_types` of all layers."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types
        dense = self.first_k_dense_replace
        return tuple("dense" if layer < dense else "sparse" for layer in range(self.num_hidden_layers))

    @property
    def all_experts(self) -> bool:
        """True if every layer has experts."""
        return "dense" not in self.mlp_kinds

    @property
    def some_dense(self) -> bool:
        """True if a layer has an MLP instead of experts."""
        return not self.all_experts


class GroupedExperts:
    """A decoder with experts in groups: each token's experts are chosen from its best groups. A family's Config derives
    from this class and from another, in this order."""

    n_routed_experts: int
    n_group: int
    topk_group: int
    num_experts_per_tok: int

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        experts, (groups, chosen) = self.n_routed_experts, self.groups
        if experts % groups or experts // groups < 2:
            yield f"n_routed_experts={experts} are not n_group={groups} groups of two or more"
        elif chosen > groups:
            yield f"topk_group={chosen} is more than n_group={groups}"
        elif self.num_experts_per_tok > chosen * (experts // groups):
            yield f"num_experts_per_tok={self.num_experts_per_tok} is more than {chosen} groups have"

    @property
    def groups(self) -> tuple[int, int]:
        """The numbers of groups of experts and of those that a token's experts are chosen from."""
        return self.n_group, self.topk_group


class FurtherLayers:
    """A decoder with `num_nextn_predict_layers` layers for multi-token prediction behind the others. A family's Config
    derives from this class and from another, in this order."""

    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int

    @property
    def sizes(self) -> dict[str, int]:
        """See `DecoderConfig.sizes`."""
        return {**super().sizes, "A": self.hidden_size}  # type: ignore[misc]

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        """See `DecoderConfig.layer_sets`."""
        layers = self.num_hidden_layers
        numbers = tuple(range(layers, layers + self.num_nextn_predict_layers))
        return {**super().layer_sets, "U": numbers}  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class SparseConfig(GroupedExperts, MixedMLPs, DecoderConfig):
    """A decoder with experts that are chosen as DeepSeek V3 does (arXiv:2412.19437, section 2.1.2). The experts that
    every token uses are stored as one MLP. A key with a default here has it in every family whose own config does not
    name it."""

    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    routed_scaling_factor: float
    num_experts_per_tok: int
    first_k_dense_replace: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    mlp_layer_types: tuple[str, ...] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "E": self.n_routed_experts,
            "M": self.moe_intermediate_size,
            "W": self.moe_intermediate_size * (self.n_shared_experts or 0),
        }

    @property
    def has_shared_experts(self) -> bool:
        """True if there are experts that every token uses."""
        return bool(self.n_shared_experts)


def stepped_mlp_kinds(dense: Collection[int], step: int, layers: int) -> tuple[str, ...]:
    """Returns the `mlp_layer_types` of a model with experts in every `step`-th layer, but not in the layers of
    `dense`."""
    dense = set(dense)
    return tuple("dense" if layer in dense or (layer + 1) % step else "sparse" for layer in range(layers))


def layers_by_mlp(kinds: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of the layers with a dense MLP (I) and of those with experts (J)."""
    return {
        letter: tuple(layer for layer, kind in enumerate(kinds) if kind == name) for letter, name in MLP_KINDS.items()
    }

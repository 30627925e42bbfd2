"""Configs of models with experts that are chosen as DeepSeek V3 does (arXiv:2412.19437, section 2.1.2), in all layers
or in some."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tpuconv.models.common.config import DecoderConfig


@dataclass(frozen=True)
class SparseConfig(DecoderConfig):
    """A decoder with experts in the layers that are "sparse" in `mlp_layer_types` or, if that is absent, in all but the
    first `first_k_dense_replace` ones. The experts that every token uses are stored as one MLP. A key with a
    default here has it in every family whose own config does not name it."""

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

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from contradictions_of_groups(self)
        yield from contradictions_of_mlps(self.mlp_kinds, self.num_hidden_layers)

    @property
    def axes(self) -> dict[str, Any]:
        return {
            **super().axes,
            "E": self.n_routed_experts,
            "M": self.moe_intermediate_size,
            "W": self.moe_intermediate_size * self.n_shared_experts,
            **layers_by_mlp(self.mlp_kinds),
        }

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        """The `mlp_layer_types` of all layers."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types
        return mlp_kinds_of(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def groups(self) -> tuple[int, int]:
        """The numbers of groups of experts and of those that a token's experts are chosen from."""
        return self.n_group, self.topk_group

    @property
    def has_shared_experts(self) -> bool:
        """Whether there are experts that every token uses."""
        return bool(self.n_shared_experts)

    @property
    def all_experts(self) -> bool:
        """Whether every layer has experts."""
        return not self.axes["I"]

    @property
    def some_dense(self) -> bool:
        """Whether a layer has an MLP instead of experts."""
        return not self.all_experts


def mlp_kinds_of(dense: int, layers: int) -> tuple[str, ...]:
    """Returns the `mlp_layer_types` of a model whose first `dense` layers are without experts."""
    return tuple("dense" if layer < dense else "sparse" for layer in range(layers))


def layers_by_mlp(kinds: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of the layers with a dense MLP (I) and of those with experts (J)."""
    return {
        letter: tuple(layer for layer, kind in enumerate(kinds) if kind == name)
        for letter, name in (("I", "dense"), ("J", "sparse"))
    }


def contradictions_of_mlps(kinds: tuple[str, ...], layers: int) -> Iterator[str]:
    """Yields a sentence for each fault of `mlp_layer_types`."""
    if len(kinds) != layers:
        yield f"mlp_layer_types has {len(kinds)} entries for num_hidden_layers={layers}"
    if unknown := set(kinds) - {"dense", "sparse"}:
        yield f"mlp_layer_types has the unknown {', '.join(map(repr, sorted(unknown)))}"


def contradictions_of_groups(config: Any) -> Iterator[str]:
    """Yields a sentence for each contradiction between the numbers of experts and of their groups."""
    experts, (groups, chosen) = config.n_routed_experts, config.groups
    if experts % groups or experts // groups < 2:
        yield f"n_routed_experts={experts} are not n_group={groups} groups of two or more"
    elif chosen > groups:
        yield f"topk_group={chosen} is more than n_group={groups}"
    elif config.num_experts_per_tok > chosen * (experts // groups):
        yield f"num_experts_per_tok={config.num_experts_per_tok} is more than {chosen} groups have"

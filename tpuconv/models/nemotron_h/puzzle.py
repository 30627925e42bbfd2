"""Nemotron-H Puzzle: Nemotron-H whose layers differ in their experts, as a search of architectures chose them
(arXiv:2411.19146)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.nemotron_h import family as nemotron_h
from tpuconv.models.registry import Family

VARYING = {"moe_intermediate_size": "block_widths", "num_experts_per_tok": "block_chosen"}
"""The keys of an entry of `block_configs` in which layers differ, and the fields that have them of all layers."""

LAYER_ENTRIES = {"block_configs": "layers_block_type", "mtp_block_configs": "mtp_layers_block_type"}
"""Lists with an entry for each layer, and the keys of Nemotron-H with the kinds of these layers."""


@family_config
class Config(nemotron_h.Config):
    """The keys of config.json. `moe_intermediate_size` and `num_experts_per_tok` belong to the layer for multi-token
    prediction, or else to the last layer with experts.

    Attributes:
        block_widths: for each layer the width of its experts, 0 without.
        block_chosen: for each layer the number of each token's experts, 0 without.
    """

    model_type: ClassVar[str] = "nemotron_h_puzzle"
    left_out: ClassVar[frozenset[str]] = nemotron_h.Config.left_out | LAYER_ENTRIES.keys()
    settled_keys: ClassVar[frozenset[str]] = frozenset(VARYING.values())

    layer_types: tuple[str, ...] = ("linear_attention", "moe", "full_attention", "moe")
    block_widths: tuple[int, ...] = (0, 7688, 0, 7688)
    block_chosen: tuple[int, ...] = (0, 2, 0, 2)

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As Nemotron-H's. Keys that `block_configs` has and config.json has not are the same in all entries."""
        known, blocks = dict(raw), {}
        for key, kinds_key in LAYER_ENTRIES.items():
            if not (entries := _entries(raw.get(key) or [], key)):
                continue
            known[kinds_key] = [entry.get("block_type") for entry in entries]
            if key == "block_configs":
                blocks = {ours: [entry.get(name, 0) for entry in entries] for name, ours in VARYING.items()}
            for number, entry in enumerate(entries):
                for name, value in entry.items():
                    if name == "block_type" or value in (None, False):
                        continue
                    if name not in VARYING and known.setdefault(name, value) != value:
                        what = f"{name}={short(value)} of entry {number}, which is {short(known[name])} elsewhere,"
                        raise UnsupportedConfig(f"{key}: {what} is not implemented")
                    known[name] = value
        return super().in_our_keys(known) | blocks

    def contradictions(self) -> Iterator[str]:
        with_experts = [int(kind == "moe") for kind in self.kinds]
        for name, ours in VARYING.items():
            if [min(size, 1) for size in getattr(self, ours)] != with_experts:
                yield f"block_configs does not give {name} of each layer with experts, and of no other"
                return
        yield from super().contradictions()
        groups, chosen = self.groups
        if (most := max(self.block_chosen)) > chosen * (self.n_routed_experts // groups):
            yield f"block_configs: num_experts_per_tok={most} is more than {chosen} of {groups} groups of experts have"

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        return {layer: {"M": width} for layer, width in enumerate(self.block_widths) if width}

    def of_layer(self, layer: int) -> Any:
        """Returns this config with the width and the number of experts of a layer."""
        if layer >= self.num_hidden_layers:
            return self
        width, chosen = self.block_widths[layer], self.block_chosen[layer]
        return replace(self, moe_intermediate_size=width, num_experts_per_tok=chosen)


def _entries(given: Any, key: str) -> list[Mapping[str, Any]]:
    """Returns the entries of a list of config.json, in the types that they must have.

    Raises:
        ConfigError: it is no list of objects, or a value in which layers differ is no positive integer.
    """
    if not isinstance(given, list) or not all(isinstance(entry, Mapping) for entry in given):
        raise ConfigError(f"config.json: {key}={short(given)} is not a list with an object for each layer")
    for number, entry in enumerate(given):
        for name in VARYING.keys() & entry.keys():
            if type(value := entry[name]) is not int or value < 1:
                raise ConfigError(f"config.json: {key}: {name}={short(value)} of entry {number} is not positive")
    return given


NEMOTRON_H_PUZZLE = Family(
    name="nemotron_h_puzzle",
    summary="Nemotron-Labs-3-Puzzle-75B-A9B",
    config=Config,
    table=nemotron_h.TABLE.renamed(lambda name: name.replace("backbone.", "model.", 1)),
    model="tpuconv.models.nemotron_h.modules:Model",
    architectures={"NemotronHPuzzleForCausalLM": "nemotron_h_puzzle"},
)

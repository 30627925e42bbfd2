"""The kind of each layer, such as `layer_types`, as config.json lists them."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short


def faults_of_kinds(key: str, kinds: Collection[str], layers: int, known: Collection[str]) -> Iterator[str]:
    """Yields a sentence for each fault of a list with the kind of each layer, such as `layer_types`."""
    if len(kinds) != layers:
        yield f"{key} has {len(kinds)} entries for num_hidden_layers={layers}"
    if unknown := set(kinds) - set(known):
        yield f"{key} has the unknown {', '.join(map(repr, sorted(unknown)))}"


def numbered_kinds(key: str, given: Any, names: Sequence[str]) -> list[str]:
    """Returns the kinds of layers of a key of config.json that lists 0 or 1 for each, which stand for these names.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(given, list) or any(type(x) is not int or x not in (0, 1) for x in given):
        raise ConfigError(f"config.json: {key}={short(given)} is not a list of 0 and 1")
    return [names[x] for x in given]

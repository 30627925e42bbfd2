"""The model of a weight map: what a converted checkpoint, a release or a config.json says of its weights."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tpuconv.checkpoint.manifest import Manifest, read_manifest
from tpuconv.checkpoint.reader import read_checkpoint_config
from tpuconv.convert.export.exporting import released_table
from tpuconv.convert.export.way_back import readings
from tpuconv.errors import UsageError
from tpuconv.location import Location, to_location
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.families import FAMILIES
from tpuconv.models.registry import Family, family_of_type, find_family, get_family
from tpuconv.names import MANIFEST
from tpuconv.notation.table import MappingTable
from tpuconv.sources.config import without_encoding
from tpuconv.sources.hub import fetch_config, resolve
from tpuconv.sources.source import open_described
from tpuconv.storage.places import is_file
from tpuconv.storage.sealed import SAFETENSORS, kind_of

Released = Callable[[DecoderConfig], MappingTable]


@dataclass(frozen=True)
class MappedModel:
    """A model whose trees are mapped.

    Attributes:
        family: of the model.
        raw: the parsed config.json, without the description of an encoding.
        tensors: the names of the tensors of the release; empty if only config.json is known.
        returns: what the model returns.
        parts: the parts beside the text model.
        released: returns the table from the tensors of the release to our parameters.
        allow: keys of config.json that are read as if they were not there.
        include_mtp: whether the layers for multi-token prediction are mapped.
    """

    family: Family
    raw: Mapping[str, Any]
    tensors: Collection[str]
    returns: str
    parts: tuple[str, ...]
    released: Released
    allow: tuple[str, ...] = ()
    include_mtp: bool = False

    @property
    def in_targets(self) -> tuple[str, str]:
        """The family and the model type by which tables of targets have the model."""
        return self.family.in_targets(self.raw["model_type"])

    def config_with(self, parts: Collection[str]) -> DecoderConfig:
        """Returns the config of the model with these parts beside the text model.

        Raises:
            UnsupportedConfig, ConfigError: see `Family.read_config`.
        """
        return self.family.read_config(self.raw, self.allow, self.tensors, self.returns, parts)

    @cached_property
    def config(self) -> DecoderConfig:
        """The config of the model with all `parts`."""
        return self.config_with(self.parts)

    def with_parts(self, parts: tuple[str, ...]) -> "MappedModel":
        """Returns the model with fewer parts beside the text model."""
        return replace(self, parts=parts)


OF_RELEASES: Mapping[str, Mapping[str, Any]] = {"qwen3_moe": {"norm_topk_prob": True}}
"""Values of config.json by model_type that all releases have and transformers' defaults have not, where trainers have
only the released model."""


def config_of_family(name: str) -> dict[str, Any] | None:
    """Returns a config.json of a family or a model_type, with the sizes that transformers has by default; None if there
    is none of this name."""
    family = get_family(name) if name in FAMILIES else family_of_type(name)
    if family is None:
        return None
    types = list(family.architectures.values())
    model_type = name if name in types else types[0]
    return {"model_type": model_type, **OF_RELEASES.get(model_type, {})}


def open_model(model: str | Location | Mapping[str, Any]) -> MappedModel:
    """Returns the model that is described by a parsed config.json, a file with it, a folder or a Hub id with
    safetensors, or a checkpoint of tpuconv. Of safetensors only the headers are read.

    Raises:
        UsageError: the checkpoint is quantized, or has a part of the layers.
        TpuconvError: there is no such model, or no family reads it.
    """
    if isinstance(model, Mapping):
        return _from_config(model)
    if str(model).endswith(".json"):
        return _from_config(fetch_config(str(model)))
    place = to_location(model)
    if is_file(place / MANIFEST) and kind_of(place) != SAFETENSORS:
        return _of_checkpoint(read_manifest(place))
    with resolve(str(model), weights=False) as resolved:
        source = open_described(resolved)
    return _from_config(source.config, source.tensors)


def _from_config(config: Mapping[str, Any], tensors: Collection[str] = ()) -> MappedModel:
    """The model of a release; without `tensors` with all parts that config.json describes."""
    raw = without_encoding(config)
    family = find_family(raw)
    returns = family.returns(raw, tensors)
    parts = family.parts_among(tensors) if tensors else described_parts(family, raw, returns)
    return MappedModel(family, raw, tensors, returns, parts, lambda config: family.table_for(tensors, config, returns))


def described_parts(family: Family, raw: Mapping[str, Any], returns: str) -> tuple[str, ...]:
    """Returns all parts beside the text model that a parsed config.json describes: not one whose config is null."""
    *_, (_, largest) = readings(family, raw, (), returns)
    absent = {each.part for each in family.modalities if raw.get(each.config_key, ...) is None}
    return tuple(part for part in getattr(largest, "parts", ()) if part not in absent)


def _of_checkpoint(manifest: Manifest) -> MappedModel:
    if manifest.quantization is not None:
        raise UsageError(
            f"{manifest.folder} has quantized parameters, and a weight map is for parameters that are not",
            hint="give the checkpoint that was quantized, or the release",
        )
    manifest.check_complete()
    family = get_family(manifest.family)
    return MappedModel(
        family,
        without_encoding(read_checkpoint_config(manifest)),
        manifest.source_names,
        manifest.returns,
        manifest.parts,
        lambda config: released_table(manifest, family, config),
        manifest.allow_config,
        manifest.include_mtp,
    )

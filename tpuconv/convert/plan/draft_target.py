"""The target that a draft is converted for: its config is compared with the draft's before weights are read."""

from collections.abc import Collection
from pathlib import Path

from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UsageError
from tpuconv.location import BucketPath, Location
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.heads import AS_DRAFT
from tpuconv.models.common.pairing import check_pair
from tpuconv.models.registry import find_family
from tpuconv.models.stored import model_config
from tpuconv.names import MANIFEST
from tpuconv.sources.config import without_encoding
from tpuconv.sources.hub import resolve, source_location
from tpuconv.sources.source import Source, open_described
from tpuconv.storage.places import is_there


def checked_target(target: str, draft: Source, allow_config: Collection[str]) -> str:
    """Returns the name of a draft's target, which says nothing of this machine: its Hub id, or else its folder's name.

    Args:
        target: a folder, a Hub id, or a checkpoint.
        draft: the release of the draft.
        allow_config: keys of its config.json that are ignored.

    Raises:
        UsageError: `draft` is no draft, or it is for another model.
        TpuconvError: the target cannot be read.
    """
    family = find_family(draft.config)
    if family.output != AS_DRAFT:
        raise UsageError(
            f"`draft_for=` is for drafts, and {draft.name} is a model of its own",
            hint="leave it out; docs/drafts.md lists the drafts that are supported",
        )
    name, config = _target_of(target)
    check_pair(config, family.read_config(draft.config, allow_config, draft.tensors, AS_DRAFT))
    return name


def _target_of(target: str) -> tuple[str, DecoderConfig]:
    place = source_location(target)
    if (isinstance(place, BucketPath) or place.is_dir()) and is_there(place / MANIFEST):
        manifest = read_manifest(place)
        return manifest.raw["source"].get("repo") or _folder_name(place), model_config(manifest)
    with resolve(target, weights=False) as resolved:
        source = open_described(resolved)
        raw = without_encoding(source.config)
        config = find_family(raw).read_config(raw, tensors=source.tensors)
        return source.repo or _folder_name(source.folder), config


def _folder_name(place: Location) -> str:
    return place.absolute().name if isinstance(place, Path) else place.name

"""The words of the axes in manifests."""

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.errors import CorruptOutput
from tpuconv.models.registry import get_family
from tpuconv.notation.sharding import undeclared
from tpuconv.targets.registry import get_target


def check_words(manifest: Manifest) -> None:
    """Imports the modules that declare the words of a checkpoint's axes: words have shardings.

    Raises:
        CorruptOutput: they do not declare a word.
    """
    get_family(manifest.family), get_target(manifest.target)
    for name, array in manifest.arrays.items():
        if unknown := undeclared(array.axes):
            raise CorruptOutput(
                f"{manifest.folder}: arrays.{name} has the axis {unknown[0]!r}, which {manifest.family} does not have",
                hint="move the checkpoint away, and convert it again",
            )

"""The config of the model that a checkpoint holds."""

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import read_checkpoint_config
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.registry import get_family


def model_config(manifest: Manifest) -> DecoderConfig:
    """Returns the config of a checkpoint's model.

    Raises:
        CorruptOutput: config.json does not match the manifest.
        ConfigError: config.json holds no JSON object, or see `Family.read_config`.
    """
    raw = read_checkpoint_config(manifest)
    return get_family(manifest.family).read_config(raw, manifest.allow_config, manifest.arrays, manifest.returns)


def check_cache_dtype(manifest: Manifest, dtype: str | None) -> None:
    """Checks that the model of a checkpoint can have a cache of this dtype; None is the model's own. No weights are
    read.

    Raises:
        UsageError: it cannot.
    """
    if dtype is not None:
        model_config(manifest).check_rounded_cache()

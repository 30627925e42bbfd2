"""The config and the table of the model that a checkpoint holds."""

from dataclasses import replace

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import Checkpoint, read_checkpoint_config
from tpuconv.errors import UsageError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.heads import HIDDEN
from tpuconv.models.registry import get_family
from tpuconv.notation.table import MappingTable


def model_config(manifest: Manifest) -> DecoderConfig:
    """Returns the config of a checkpoint's model.

    Raises:
        CorruptOutput: config.json or another file that the model needs does not match the manifest.
        ConfigError: config.json holds no JSON object, or see `Family.read_config`.
    """
    raw = read_checkpoint_config(manifest)
    family = get_family(manifest.family)
    config = family.read_config(raw, manifest.allow_config, manifest.arrays, manifest.returns, manifest.parts)
    return config.with_files(manifest.find_file)


def stored_table(source: Checkpoint) -> MappingTable:
    """Returns the table of the arrays of a checkpoint. Their axes are those of the family's table, where the manifest
    may have letters of a former tpuconv.

    Raises:
        CorruptOutput, ConfigError: see `model_config`.
    """
    manifest, config = source.manifest, model_config(source.manifest)
    table = get_family(manifest.family).table_of(manifest.release, config, manifest.returns)
    if manifest.scan_layers:
        table = table.stack_layers(config)
    axes = {name: text for each in table.bind(config, manifest.include_mtp) for name, text in each.dst_axes().items()}
    rows = source.table()
    return rows.with_rows([replace(row, layout=axes.get(row.jax_names[0], row.layout)) for row in rows])


def check_hidden_states(manifest: Manifest) -> None:
    """Checks that the model of a checkpoint returns hidden states.

    Raises:
        UsageError: it returns logits or scores.
    """
    if manifest.returns != HIDDEN:
        raise UsageError(
            f"{manifest.folder} holds a model that returns {manifest.returns or 'logits'}, not hidden states",
            hint="take an embedding model; of a language model `tpuconv.api.generator` continues texts",
        )


def check_positions(manifest: Manifest, tokens: int, sequence: str, hint: str) -> None:
    """Checks that the model of a checkpoint has positions for a sequence. No weights are read.

    Args:
        manifest: of the checkpoint.
        tokens: length of the sequence.
        sequence, hint: what the error calls it, and what it says to do.

    Raises:
        UsageError: it has not: it has learned fewer, or was trained for fewer and computes others in another way.
    """
    limit = model_config(manifest).position_limit
    if limit is not None and tokens > limit:
        raise UsageError(f"{sequence} needs {tokens} positions, and the model has {limit}", hint=hint)


def check_cache_dtype(manifest: Manifest, dtype: str | None) -> None:
    """Checks that the model of a checkpoint can have a cache of this dtype; None is the model's own. No weights are
    read.

    Raises:
        UsageError: it cannot.
    """
    if dtype is not None:
        model_config(manifest).check_rounded_cache()

"""The options of a conversion. A new one is a field here: the keyword of `tpuconv.api`, the flag of the command, the
key of the manifest and the documentation follow."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.names import OWN_TARGET
from tpuconv.options import (
    ADAPTER_OPTION,
    ALLOW_CONFIG_OPTION,
    COMPRESS_OPTION,
    DTYPE_OPTION,
    ENCODING_OPTION,
    NONFINITE_OPTION,
    PATHWAYS_OPTION,
    QUANTIZE_OPTION,
    REVISION_OPTION,
    SCAN_LAYERS_OPTION,
    SCHEME_OPTION,
    TEXT_ONLY_OPTION,
    WORKSPACE_OPTION,
    Key,
    manifest_keys,
    option,
)

if TYPE_CHECKING:
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.sources.adapter import Adapter


@dataclass(eq=False, repr=False, kw_only=True)
class Options:
    """The options of a conversion that change the output."""

    dtype: str = field(default="auto", metadata=DTYPE_OPTION)
    encoding: str = field(default="dequantize", metadata=ENCODING_OPTION)
    compress: bool = field(default=False, metadata=COMPRESS_OPTION)
    quantize: str | Path | None = field(default=None, metadata=QUANTIZE_OPTION)
    scan_layers: bool = field(default=False, metadata=SCAN_LAYERS_OPTION)
    layers: range | None = option(
        None,
        "Convert only these layers as a trial: the first and the last, such as 0-1.",
        python="Convert only these layers as a trial, such as `range(2)`.",
        manifest=Key(always=True, to_json=lambda layers: layers and [layers.start, layers.stop - 1]),
    )
    include_mtp: bool = option(
        False,
        "Convert the multi-token prediction layers (DeepSeek, GLM, Qwen3-Next and others) too.",
        manifest=Key(always=True),
    )
    text_only: bool = field(default=False, metadata=TEXT_ONLY_OPTION)
    target: str = option(
        OWN_TARGET,
        "The program that reads the output: tpuconv, huggingface, maxtext, tunix, gemma, nnx, jax-llm-examples, or a"
        " plugin.",
        manifest=Key(),
    )
    pathways: bool = field(default=False, metadata=PATHWAYS_OPTION)
    scheme: str | None = field(default=None, metadata=SCHEME_OPTION)
    adapter: "Sequence[str | Adapter]" = field(default=(), metadata=ADAPTER_OPTION)
    keep_adapter: bool = option(
        False,
        "Write the adapter as the target's LoRA tree, to train it further, instead of merging it.",
        python="Write the adapter as the target's LoRA tree, to train it further, and nothing else; do not merge it.",
        manifest=Key(),
    )
    draft_for: str | None = option(
        None,
        "The target of SRC, a draft: a folder, a Hub id or a checkpoint. Its sizes are compared, and exports name it.",
        manifest=Key(),
    )
    revision: str | None = field(default=None, metadata=REVISION_OPTION)
    allow_nonfinite: bool = field(default=False, metadata=NONFINITE_OPTION)
    allow_config: Sequence[str] = field(default=(), metadata=ALLOW_CONFIG_OPTION)

    @classmethod
    def of_checkpoint(cls, manifest: "Manifest", *, compress: bool = False) -> "Options":
        """Returns the options that repeat the form of a checkpoint: what `quantize` and `save` write."""
        return cls(
            compress=compress,
            scan_layers=manifest.scan_layers,
            layers=manifest.layer_range,
            include_mtp=manifest.include_mtp,
            allow_config=manifest.allow_config,
            draft_for=manifest.draft_for,
        )

    @property
    def adapters(self) -> "tuple[Adapter, ...]":
        """The adapters that change weights, in this order. They must have been read."""
        assert not any(isinstance(each, str) for each in self.adapter)
        return tuple(self.adapter)  # type: ignore[arg-type]

    def with_adapters(self) -> "Options":
        """Returns the options with adapters that are read.

        Raises:
            TpuconvError: as `tpuconv.sources.adapter.read_adapter` does.
        """
        from tpuconv.sources.adapter import read_adapter

        read = tuple(read_adapter(each) if isinstance(each, str) else each for each in self.adapter)
        return replace(self, adapter=read)

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's description of the options."""
        return manifest_keys(self)


@dataclass(eq=False, repr=False, kw_only=True)
class Fetching:
    """Options of the way in which a source on the Hub or in a bucket is read."""

    keep_source: bool = option(
        False,
        "Download a Hub checkpoint to the Hub's cache first. By default files that are not in the cache are streamed.",
    )
    workspace: str | Path | None = field(default=None, metadata=WORKSPACE_OPTION)

"""All that tpuconv uses of other packages' private interfaces, in one table.

A private interface may change in any release, so the packages named here have an upper bound in pyproject.toml, and
tests/test_private.py checks that every entry exists in the versions installed. Import an entry by its name, as in
`from tpuconv.private import qarray`: its package is imported then, and not before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Interface:
    """A private object: `module`, or the `attribute` of it, and why it is used."""

    why: str
    module: str
    attribute: str = ""

    @property
    def name(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.attribute}" if self.attribute else self.module

    def load(self) -> Any:
        """The object itself.

        Raises:
            ImportError: the package is not installed, or has no such module.
            AttributeError: the module has no such attribute.
        """
        found: Any = import_module(self.module)
        for name in self.attribute.split(".") if self.attribute else ():
            found = getattr(found, name)
        return found


TESTED: Mapping[str, tuple[str, ...]] = {
    "huggingface_hub": ("2.4.0",),
    "numba": ("0.68.1",),
    "orbax-checkpoint": ("0.12.8",),
    "qwix": ("0.1.8",),
    "transformers": ("5.23.0",),
}
"""The versions of each package that the entries were tested with: those of constraints.txt."""

INTERFACES: Mapping[str, Interface] = {
    # --- qwix: its public interface quantizes a whole model in memory, and does not say how
    "qarray": Interface(
        "Qwix's quantized array: quantized slab by slab here, and by the rule's settings.", "qwix._src.core.qarray"
    ),
    "numerics": Interface("Rounding to Qwix's types, and their largest values.", "qwix._src.core.numerics"),
    "ptq": Interface("What Qwix puts in the place of a weight, and quantized activations.", "qwix._src.providers.ptq"),
    "flax_util": Interface(
        "The module and the parameter that Qwix intercepts an operation of.", "qwix._src.utils.flax_util"
    ),
    "qwix_einsum": Interface(
        "The product that is replaced on TPU where scales have tiles.", "qwix._src.core.einsum", "einsum"
    ),
    "qwix_ragged_dot": Interface(
        "The grouped product of quantized experts and activations.", "qwix._src.core.ragged_dot", "ragged_dot"
    ),
    "current_rule": Interface(
        "Overridden by our `Provider`, to know which modules ask for a rule. It also reads `_rule_matches`"
        " of an instance, and gives `_einsum_fn` to the constructor.",
        "qwix",
        "PtqProvider._get_current_rule_and_op_id",
    ),
    # --- transformers: `--layerwise` fills one module at a time, and from_pretrained loads all
    "get_model_conversion_mapping": Interface(
        "How transformers renames and stacks the tensors of a checkpoint.",
        "transformers.conversion_mapping",
        "get_model_conversion_mapping",
    ),
    "convert_and_load_state_dict_in_model": Interface(
        "Loads some tensors of a checkpoint by that mapping.",
        "transformers.core_model_loading",
        "convert_and_load_state_dict_in_model",
    ),
    "LoadStateDictConfig": Interface(
        "Its settings: the dtype and the mapping.", "transformers.modeling_utils", "LoadStateDictConfig"
    ),
    # --- huggingface_hub: the client downloads a shard again from its beginning after an interruption
    "repo_folder_name": Interface(
        "The folder of a repository in the cache.", "huggingface_hub.file_download", "repo_folder_name"
    ),
    "are_symlinks_supported": Interface(
        "Whether the cache links a snapshot's files to its blobs.",
        "huggingface_hub.file_download",
        "are_symlinks_supported",
    ),
    "http_stream_backoff": Interface(
        "Streams a range of a file, and tries again as the client does.",
        "huggingface_hub.utils",
        "http_stream_backoff",
    ),
    "validate_repo_id": Interface(
        "Whether a text can be the id of a repository, without asking the Hub.",
        "huggingface_hub.utils",
        "validate_repo_id",
    ),
    # --- numba: its first kernel imports scipy.linalg, 0.4 s, for products that no kernel here has
    "numba_linalg": Interface(
        "`ensure_blas`, which looks for scipy, is skipped during this import.", "numba.np.linalg"
    ),
    "numba_arraymath": Interface("What numba imports with its first kernel.", "numba.np.arraymath"),
    # --- orbax: the metadata of a checkpoint names the class that wrote it
    "StandardCheckpointHandler": Interface(
        "Its dotted name stands in _CHECKPOINT_METADATA: Orbax restores with the handler of that name.",
        "orbax.checkpoint._src.handlers.standard_checkpoint_handler",
        "StandardCheckpointHandler",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in INTERFACES:
        raise AttributeError(f"tpuconv.private has no entry {name!r}")
    return INTERFACES[name].load()

"""The private interfaces of other packages that tpuconv uses, in one table.

A private interface may change in any release. So pyproject.toml has an upper bound for each of these packages, and
tests/test_private.py checks that every entry exists in the installed versions. An entry is imported by its name, as in
`from tpuconv.private import qarray`; only then is its package imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Interface:
    """A private module, or an attribute of a module, and why it is used."""

    why: str
    module: str
    attribute: str = ""

    @property
    def name(self) -> str:
        """The full dotted name."""
        return f"{self.module}.{self.attribute}" if self.attribute else self.module

    def load(self) -> Any:
        """Returns the module or the attribute.

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
    "jax": ("0.10.2", "0.12.0.1"),
    "numba": ("0.68.1",),
    "orbax-checkpoint": ("0.12.8",),
    "qwix": ("0.1.8",),
    "transformers": ("5.24.0",),
}
"""The tested versions of each package, from constraints.txt."""

INTERFACES: Mapping[str, Interface] = {
    # --- jax: a fork of a process whose backends have started cannot compile
    "backends_are_initialized": Interface(
        "Tells whether this process has started its backends, without starting them.",
        "jax._src.xla_bridge",
        "backends_are_initialized",
    ),
    # --- qwix: its public interface quantizes a complete model in memory, and does not return the rule of a parameter
    "qarray": Interface(
        "Qwix's quantized array and its quantization, which is applied slab by slab.", "qwix._src.core.qarray"
    ),
    "numerics": Interface("Rounding to Qwix's dtypes, and their largest values.", "qwix._src.core.numerics"),
    "averaging": Interface("Qwix's mean of what it finds for static scales.", "qwix._src.averaging"),
    "ptq": Interface("The class that Qwix replaces a weight with; quantized activations.", "qwix._src.providers.ptq"),
    "flax_util": Interface(
        "The module and the parameter of an operation that Qwix intercepts.", "qwix._src.utils.flax_util"
    ),
    "qwix_einsum": Interface(
        "The einsum that is replaced on TPU for scales of groups.", "qwix._src.core.einsum", "einsum"
    ),
    "qwix_ragged_dot": Interface(
        "The grouped matrix product of quantized experts and activations.", "qwix._src.core.ragged_dot", "ragged_dot"
    ),
    "apply_interceptors": Interface(
        "Quantizes what further methods of a model compute: `quantize_model` does it for one.",
        "qwix._src.model",
        "_apply_interceptors",
    ),
    "current_rule": Interface(
        "Overridden by our `Provider` to record which modules ask for a rule. `Provider` also reads the attribute"
        " `_rule_matches`, and passes `_einsum_fn` to the constructor.",
        "qwix",
        "PtqProvider._get_current_rule_and_op_id",
    ),
    "interception": Interface(
        "Finds the provider of LoRA, and computes the products of experts as they are; `interception_manager` with "
        "`_interceptors` and `_intercepted_threads`.",
        "qwix._src.interception",
    ),
    # --- transformers: `--layerwise` loads one module at a time, from_pretrained the complete model
    "get_model_conversion_mapping": Interface(
        "How transformers renames and stacks the tensors of a checkpoint.",
        "transformers.conversion_mapping",
        "get_model_conversion_mapping",
    ),
    "convert_and_load_state_dict_in_model": Interface(
        "Loads some tensors of a checkpoint with that mapping.",
        "transformers.core_model_loading",
        "convert_and_load_state_dict_in_model",
    ),
    "LoadStateDictConfig": Interface(
        "Its settings: the dtype and the mapping.", "transformers.modeling_utils", "LoadStateDictConfig"
    ),
    # --- huggingface_hub: after an interruption the client downloads a shard again from its beginning
    "repo_folder_name": Interface(
        "The folder of a repository in the cache.", "huggingface_hub.file_download", "repo_folder_name"
    ),
    "http_stream_backoff": Interface(
        "Streams the start of a file, with the client's retries.",
        "huggingface_hub.utils",
        "http_stream_backoff",
    ),
    "validate_repo_id": Interface(
        "Whether a text is a valid repository id, without asking the Hub.",
        "huggingface_hub.utils",
        "validate_repo_id",
    ),
    # --- numba: its first kernel imports scipy.linalg (0.4 s) for matrix products, which no kernel here has
    "numba_linalg": Interface(
        "`ensure_blas`, which looks for scipy, is disabled during this import.", "numba.np.linalg"
    ),
    "numba_arraymath": Interface("The module that numba imports with its first kernel.", "numba.np.arraymath"),
    # --- orbax: the metadata of a checkpoint names the class that wrote it
    "PyTreeCheckpointHandler": Interface(
        "The same, for the items of a step that a `CheckpointManager` restores.",
        "orbax.checkpoint._src.handlers.pytree_checkpoint_handler",
        "PyTreeCheckpointHandler",
    ),
    "StandardCheckpointHandler": Interface(
        "Its dotted name is written to _CHECKPOINT_METADATA: Orbax restores with the handler of that name.",
        "orbax.checkpoint._src.handlers.standard_checkpoint_handler",
        "StandardCheckpointHandler",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in INTERFACES:
        raise AttributeError(f"tpuconv.private has no entry {name!r}")
    return INTERFACES[name].load()

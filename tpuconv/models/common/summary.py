"""The text of a model, for prompts and notebooks."""

import jax
from flax import nnx

from tpuconv.models.common.config import DecoderConfig


class Summarized(nnx.Module):
    """A model whose text is one line. `nnx.display` shows its modules and arrays, which are thousands of lines."""

    config: DecoderConfig

    def __repr__(self) -> str:
        arrays = jax.tree.leaves(nnx.state(self, nnx.Param))
        nbytes: dict[str, int] = {}
        for array in arrays:
            nbytes[str(array.dtype)] = nbytes.get(str(array.dtype), 0) + array.size * array.dtype.itemsize
        dtypes = " and ".join(sorted(nbytes, key=lambda dtype: -nbytes[dtype]))
        layers, count = self.config.num_hidden_layers, sum(array.size for array in arrays)
        return f"<{self.config.model_type}: {layers} layers, {count:,} parameters, {dtypes}>"

    def __str__(self) -> str:
        return repr(self)

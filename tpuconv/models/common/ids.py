"""The token ids that a model is called with, and their mask."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.errors import UsageError

Ids: TypeAlias = jax.Array | np.ndarray | Sequence[Sequence[int]]
"""Token ids [B, T]."""
PADDED = "give whole numbers as [texts, tokens], shorter texts padded; `tpuconv.api.generator` takes texts"


def checked_ids(ids: Ids) -> Any:
    """Returns token ids as an array [B, T]. An array stays on its devices.

    Raises:
        UsageError: they are none.
    """
    if not isinstance(ids, jax.Array | np.ndarray):
        try:
            ids = np.asarray(ids)
        except ValueError as e:  # rows of different lengths
            raise UsageError(f"ids_BT is no array: {e}", hint=PADDED) from None
    if ids.ndim != 2 or not ids.shape[1] or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise UsageError(f"ids_BT is of shape {ids.shape} and type {ids.dtype}", hint=PADDED)
    return ids


def checked_mask(mask: Any, ids_BT: Any) -> jax.Array:
    """Returns the mask of token ids as an array [B, T]; without one all count.

    Raises:
        UsageError: it has another shape than the ids.
    """
    mask_BT = jnp.ones(ids_BT.shape, bool) if mask is None else jnp.asarray(mask, bool)
    if mask_BT.shape != ids_BT.shape:
        raise UsageError(
            f"mask_BT has shape {mask_BT.shape}, ids_BT {ids_BT.shape}: give the mask of this call's tokens only"
        )
    return mask_BT

"""Load and save models."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.memory import check_address_space_for_jax
from tpuconv.paths import plain_path

if TYPE_CHECKING:
    from flax import nnx
    from jax.sharding import Mesh
    from jax.typing import DTypeLike


def load(ckpt: str | Path, dtype: "DTypeLike | None" = None, mesh: "Mesh | None" = None) -> "nnx.Module":
    """The model of a checkpoint, with its weights; see `tpuconv.restore.load`."""
    from tpuconv import restore

    with plain_path(Path(ckpt)) as folder:
        return restore.load(folder, dtype, mesh)


def load_on_all_devices(folder: Path, dtype: Any = None) -> Any:
    """The model of a checkpoint, sharded over all devices of this machine."""
    check_address_space_for_jax(sum(path.stat().st_size for path in folder.glob("params/*/*")))
    from tpuconv import restore

    with plain_path(folder) as path:
        return restore.load(path, dtype, restore.default_mesh(path))

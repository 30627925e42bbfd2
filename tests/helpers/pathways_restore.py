"""Restores a checkpoint of one step on eight devices, sharded along the first or the last axis of each array: by Orbax
with the options that MaxText gives it for Pathways, and by Orbax's array handler for Pathways.

    python pathways_restore.py ITEMS first|last plain|pathways OUT.npz
"""

import base64
import concurrent.futures
import json
import sys
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

# The package does not use it, so that it is not in the table of private interfaces.
handlers = import_module("orbax.checkpoint._src.serialization.cloud_pathways_array_handler")
items, which, by, out = sys.argv[1:]
MESH = jax.make_mesh((8,), ("fsdp",))


def sharding(shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
    axis = 0 if which == "first" else len(shape) - 1
    parts = [None] * len(shape)
    if shape and shape[axis] % 8 == 0:
        parts[axis] = "fsdp"
    return jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec(*parts))


def persistence_service(location, names, dtypes, shapes, shardings, devices, timeout):
    """What answers Orbax's requests on Pathways, in a program that is not public; here TensorStore reads each array
    from the place that the request names, in zarr's format 2."""
    text = handlers.cloud_pathways_helper.get_bulk_read_request(
        location, names, dtypes, shapes, shardings, devices, timeout
    )
    requests = json.loads(text)["bulk_persistence_read_request"]["read_requests"]
    arrays = []
    for request, own in zip(requests, shardings, strict=True):
        folder, name = (base64.b64decode(request[key]).decode() for key in ("b64_location", "b64_name"))
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/{name}/"}}
        stored = ts.open(spec, open=True).result()
        assert list(stored.shape) == request["shape"]["dimensions"]
        arrays.append(
            jax.make_array_from_callback(
                tuple(stored.shape), own, lambda box, stored=stored: stored[box].read().result()
            )
        )
    done = concurrent.futures.Future()
    done.set_result(None)
    return arrays, done


if by == "pathways":
    handlers.cloud_pathways_helper.read_arrays = persistence_service
    array_handler = handlers.CloudPathwaysArrayHandler(use_ocdbt=False)
    ocp.type_handlers.register_type_handler(jax.Array, array_handler, override=True)
handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
args = jax.tree.map(
    lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding(leaf.shape), global_shape=leaf.shape, dtype=leaf.dtype),
    handler.metadata(Path(items)).tree,
)
restored = handler.restore(Path(items), args=ocp.args.PyTreeRestore(restore_args=args))
leaves = jax.tree_util.tree_leaves_with_path(restored)
assert all(isinstance(leaf, jax.Array) for _, leaf in leaves)
np.savez(out, **{".".join(key.key for key in path): np.asarray(x).view(f"u{x.dtype.itemsize}") for path, x in leaves})

"""Run by the Python of another environment: the logits of a program of jax-llm-examples for a checkpoint in its layout.
It takes a request as JSON from its input: project (a folder of the repository), path (of the checkpoint), ids and out
(npy files), is_explicit (the axes of its mesh), has_orbax (whether its load_pytree reads Orbax) and settings."""

import dataclasses
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

request = json.load(sys.stdin)
project, path = Path(request["project"]), request["path"]

# The norms of most programs round to bfloat16, whatever the dtype of the model.
(folder,) = (found.parent for found in project.glob("*/model.py"))
copy = Path(tempfile.mkdtemp())
shutil.copytree(folder, copy / folder.name)
source = copy / folder.name / "model.py"
source.write_text(source.read_text().replace("jnp.bfloat16", "jnp.float32"))
sys.path.insert(0, str(copy))
model = importlib.import_module(f"{folder.name}.model")

kind = jax.sharding.AxisType.Explicit if request["is_explicit"] else jax.sharding.AxisType.Auto
mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1], axis_types=(kind,) * 3)
given = {name: tuple(value) if isinstance(value, list) else value for name, value in request["settings"].items()}
required = {field.name for field in dataclasses.fields(model.Config) if field.default is dataclasses.MISSING}
common = {"max_seq_len": 128, "causal": True, "use_prefill_attn_kernel": False, "use_decode_attn_kernel": False}
config = model.Config(
    **{"mesh": mesh, "dtype": jnp.float32, **{k: common[k] for k in required & common.keys()}, **given}
)

shardings = model.Weights.shardings(config)
if request["has_orbax"]:
    weights = model.load_pytree(path, shardings)
else:
    places = jax.tree.map(lambda sharding: ocp.ArrayRestoreArgs(sharding=sharding), shardings)
    with ocp.PyTreeCheckpointer() as checkpointer:
        weights = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=shardings, restore_args=places))
ids = np.load(request["ids"])
with jax.sharding.set_mesh(mesh) if request["is_explicit"] else mesh:
    logits, _ = model.forward(jnp.asarray(ids), jnp.ones(ids.shape, jnp.int32), weights, config)
np.save(request["out"], np.asarray(logits, np.float32))
shutil.rmtree(copy)

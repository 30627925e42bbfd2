"""Run by Tunix's own Python: what its CheckpointManager restores into its models, and their logits, or features of
images. It takes a JSON list of requests from its input, with the keys root (a folder), ids or images (npy), out (npz),
module, model and settings; with run (a folder) it also saves the model there, with an optimizer."""

import importlib
import json
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.sft.checkpoint_manager import CheckpointManager


def restored(request: dict) -> dict[str, np.ndarray]:
    """The arrays of the model by name, and its logits as `logits`, or its features as `features`; of LoRA that is
    restored also what `trained` returns."""
    module = importlib.import_module(request["module"])
    settings = dict(request["settings"])
    for kinds in settings.keys() & {"attention_types", "attention_pattern"}:
        settings[kinds] = tuple(module.AttentionType[name] for name in settings[kinds])
    if "param_dtype" in settings:
        settings["param_dtype"] = jnp.dtype(settings["param_dtype"])
    if "vision_config" in settings:
        settings["vision_config"] = module.vision.SigLIPConfig(**settings["vision_config"])
    model = getattr(module, request["model"])(module.ModelConfig(**settings), rngs=nnx.Rngs(0))
    CheckpointManager(request["root"]).maybe_restore(model)
    if "run" in request:
        manager = CheckpointManager(request["run"])
        manager.save(1, model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), force=True)
        manager.close()
    if "lora" in request:
        model = with_lora(model, request)
    if "images" in request:
        found = {"features": model._encode_vision(jnp.asarray(np.load(request["images"])))}
    else:
        found = {"logits": logits(model, np.load(request["ids"]))}
    if "kept" in request:
        found |= trained(model, request)
    state = nnx.to_pure_dict(nnx.state(model))
    names = {
        ".".join(str(getattr(key, "key", key)) for key in path): np.asarray(value)
        for path, value in jax.tree_util.tree_leaves_with_path(state)
    }
    return names | {name: np.asarray(values, np.float32) for name, values in found.items()}


def with_lora(model, request: dict):
    """The model with LoRA as Tunix's examples apply it: of random values, which its CheckpointManager saves alone, or
    restored by it."""
    ids = jnp.asarray(np.load(request["ids"]))
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((ids.shape[1],) * 2, bool)), (len(ids), *(ids.shape[1],) * 2))
    rules = request["rule"].get("rules", [request["rule"]])
    provider = qwix.LoraProvider([qwix.LoraRule(**rule) for rule in rules])
    model = qwix.apply_lora_to_model(model, provider, ids, positions, None, mask, rngs=nnx.Rngs(0))
    if "kept" in request:
        CheckpointManager(request["kept"]).maybe_restore(model, restore_only_lora_params=True)
        return model
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    state = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda x: 0.1 * jax.random.normal(next(keys), x.shape, x.dtype), state))
    save_lora(model, request["lora"])
    return model


def save_lora(model: nnx.Module, root: str) -> None:
    """Saves the pairs alone, as Tunix's trainer does."""
    manager = CheckpointManager(root)
    manager.save(1, model, save_only_lora_params=True, force=True)
    manager.close()


def trained(model: nnx.Module, request: dict) -> dict[str, jax.Array]:
    """The logits after a step of training of the pairs, which are saved, and the losses before and after it."""
    ids = np.load(request["ids"])

    def loss_of(model: nnx.Module) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(model, ids)[:, :-1], ids[:, 1:]).mean()

    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    before, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    save_lora(model, request["lora"])
    return {"trained": logits(model, ids), "losses": jnp.stack([before, loss_of(model)])}


def logits(model, ids: np.ndarray) -> jax.Array:
    """The logits of tokens."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((ids.shape[1],) * 2, bool)), (len(ids), *(ids.shape[1],) * 2))
    return model(jnp.asarray(ids), positions, None, mask)[0]


jax.config.update("jax_default_matmul_precision", "highest")
for request in json.load(sys.stdin):
    try:
        np.savez(request["out"], **restored(request))
    except Exception:
        Path(request["out"]).with_suffix(".error").write_text(traceback.format_exc())

"""Run by MaxText's own Python: what its models compute from checkpoints in its layout. It takes a JSON list of requests
from its input, with the keys items (a folder), out (a file), settings, and one of

- ids (npy), for some models also images (npy): the logits of these tokens, as npy;
- features (npz): what its encoders make of `vision` and `audio`, as npz;
- run: True: a run (a folder) with a step, as its trainer saves it;
- ids (npy) and saved (a folder), with settings of LoRA: the logits of these tokens with the LoRA that its
  `restore_lora_from_path` restores, as npz: `restored`, and `trained` after a step, with the `losses` before and after.
  The step is saved in `saved/run` by its `save_checkpoint`, and in `saved/state` as its fine-tuning does, by the
  CheckpointManager of Tunix.
"""

import json
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.linen import partitioning
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.utils import lora_utils, model_creation_utils

COMMON = {
    "override_model_config": "true",
    "run_name": "test",
    "hardware": "cpu",
    "skip_jax_distributed_system": "true",
    "base_output_directory": "/nonexistent",
    "enable_checkpointing": "true",
    "attention": "dot_product",
    "per_device_batch_size": 1,
    "max_target_length": 16,
    "max_prefill_predict_length": 8,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "dataset_type": "synthetic",
    "log_config": "false",
}


def configured(request: dict) -> pyconfig.HyperParameters:
    """The config that the settings describe."""
    base = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
    given = COMMON | request["settings"] | {"load_parameters_path": request["items"]}
    return pyconfig.initialize(["", str(base), *(f"{key}={value}" for key, value in given.items())])


def built(request: dict) -> tuple:
    """The model that the settings describe, with the weights of a checkpoint, and its mesh."""
    return model_creation_utils.from_pretrained(configured(request))


def computed(model: nnx.Module, ids: np.ndarray, **images: jax.Array) -> jax.Array:
    """The logits [B, T, V]."""
    out = model(
        decoder_input_tokens=jnp.asarray(ids),
        decoder_positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
        decoder_segment_ids=jnp.ones(ids.shape, int),
        enable_dropout=False,
        **images,
    )
    return out[0] if isinstance(out, tuple) else out


def logits(request: dict) -> np.ndarray:
    """The logits [B, T, V] of a checkpoint."""
    images = {"encoder_images": jnp.asarray(np.load(request["images"]))} if "images" in request else {}
    model, mesh = built(request)
    with mesh:
        return np.asarray(computed(model, np.load(request["ids"]), **images), np.float32)


def with_lora(request: dict) -> dict[str, np.ndarray]:
    """The logits of a checkpoint with LoRA, before and after a step of training, which is saved, and the losses."""
    ids, config = np.load(request["ids"]), configured(request)
    model, mesh = model_creation_utils.from_pretrained(config)

    def loss_of(model: nnx.Module) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(computed(model, ids)[:, :-1], ids[:, 1:]).mean()

    with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
        model = lora_utils.apply_lora_to_model(model, mesh, config)
        lora_utils.restore_lora_from_path(model, config)
        restored = computed(model, ids)
        state = train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam))
        before, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        state.apply_gradients(grads)
        trained, after = computed(model, ids), loss_of(model)
        manager = checkpointing.create_orbax_checkpoint_manager(f"{request['saved']}/run", True, False, 1)
        assert checkpointing.save_checkpoint(manager, 1, state, config, force=True)
        checkpointing.wait_until_finished(manager)
    with ocp.CheckpointManager(f"{request['saved']}/state") as manager:
        saved = ocp.args.PyTreeSave(nnx.state(model, nnx.LoRAParam))
        manager.save(1, args=ocp.args.Composite(model_params=saved))
        manager.wait_until_finished()
    found = {"restored": restored, "trained": trained, "losses": jnp.stack([before, after])}
    return {name: np.asarray(values, np.float32) for name, values in found.items()}


def encoded(request: dict) -> dict[str, np.ndarray]:
    """The outputs of the encoders by part, and those for the first layers of the text as `deep_0`, `deep_1`, ..."""
    inputs = np.load(request["features"])
    model, mesh = built(request)
    found = {}
    with mesh:
        if "vision" in inputs:
            found["vision"], deep = model.vision_encoder(jnp.asarray(inputs["vision"]), deterministic=True)
            found |= {f"deep_{i}": each for i, each in enumerate(deep or ())}
        if "audio" in inputs:
            found["audio"] = model.audio_encoder(jnp.asarray(inputs["audio"]), deterministic=True)
    return {name: np.asarray(values, np.float32) for name, values in found.items()}


def save_run(request: dict) -> None:
    """Saves a step of a run with the weights of a checkpoint."""
    model, mesh = built(request)
    with mesh:
        state = train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))
        saved = train_state_nnx.to_checkpoint_dict(nnx.state(state))
    with ocp.CheckpointManager(request["out"]) as manager:
        manager.save(3, args=ocp.args.Composite(items=ocp.args.PyTreeSave(saved)))
        manager.wait_until_finished()


for each in json.load(sys.stdin):
    try:
        if "run" in each:
            save_run(each)
        elif "saved" in each:
            np.savez(each["out"], **with_lora(each))
        elif "ids" in each:
            np.save(each["out"], logits(each))
        else:
            np.savez(each["out"], **encoded(each))
    except Exception:
        Path(each["out"]).with_suffix(".error").write_text(traceback.format_exc())

"""Run by MaxText's own Python: what its models compute from checkpoints in its layout. It takes a JSON list of requests
from its input, with the keys items (a folder), out (a file), settings, and one of

- ids (npy), for some models also images (npy): the logits of these tokens, as npy;
- features (npz): what its encoders make of `vision` and `audio`, as npz;
- run: True: a run (a folder) with a step, as its trainer saves it.
"""

import json
import sys
import traceback
from pathlib import Path

import jax.numpy as jnp
import maxtext
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from maxtext.common import train_state_nnx
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils

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


def built(request: dict) -> tuple:
    """The model that the settings describe, with the weights of a checkpoint, and its mesh."""
    base = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
    given = COMMON | request["settings"] | {"load_parameters_path": request["items"]}
    config = pyconfig.initialize(["", str(base), *(f"{key}={value}" for key, value in given.items())])
    return model_creation_utils.from_pretrained(config)


def logits(request: dict) -> np.ndarray:
    """The logits [B, T, V]."""
    ids = np.load(request["ids"])
    images = {"encoder_images": jnp.asarray(np.load(request["images"]))} if "images" in request else {}
    model, mesh = built(request)
    with mesh:
        out = model(
            decoder_input_tokens=jnp.asarray(ids),
            decoder_positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
            decoder_segment_ids=jnp.ones(ids.shape, int),
            enable_dropout=False,
            **images,
        )
    return np.asarray(out[0] if isinstance(out, tuple) else out, np.float32)


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
        elif "ids" in each:
            np.save(each["out"], logits(each))
        else:
            np.savez(each["out"], **encoded(each))
    except Exception:
        Path(each["out"]).with_suffix(".error").write_text(traceback.format_exc())

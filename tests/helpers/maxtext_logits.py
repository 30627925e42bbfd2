"""Run by MaxText's own Python: the logits of its models for checkpoints in its layout. It takes a JSON list of requests
from its input, with the keys items (a folder), ids and out (npy files) and settings."""

import json
import sys
import traceback
from pathlib import Path

import jax.numpy as jnp
import maxtext
import numpy as np
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


def logits(items: str, ids: np.ndarray, settings: dict) -> np.ndarray:
    """The logits [B, T, V] of the model that the settings describe."""
    base = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
    given = COMMON | settings | {"load_parameters_path": items}
    config = pyconfig.initialize(["", str(base), *(f"{key}={value}" for key, value in given.items())])
    model, mesh = model_creation_utils.from_pretrained(config)
    with mesh:
        out = model(
            decoder_input_tokens=jnp.asarray(ids),
            decoder_positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
            decoder_segment_ids=jnp.ones(ids.shape, int),
            enable_dropout=False,
        )
    return np.asarray(out[0] if isinstance(out, tuple) else out, np.float32)


for request in json.load(sys.stdin):
    try:
        np.save(request["out"], logits(request["items"], np.load(request["ids"]), request["settings"]))
    except Exception:
        Path(request["out"]).with_suffix(".error").write_text(traceback.format_exc())

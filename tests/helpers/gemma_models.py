"""Run by the Python of the library gemma: what its `load_params` restores for its models, and their logits. It takes a
JSON list of requests from its input, with the keys module, settings (of its `TransformerConfig`), out (npz), root (a
checkpoint), ids (npy), and rest (an array of the embedder that the model has not); or, for the shapes of a whole model,
model (the name of a class of `gm.nn`); or, to run the code of a page, code, model and ids."""

import dataclasses
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gemma import gm


def restored(request: dict) -> dict[str, np.ndarray]:
    """The arrays of the model by name, and its logits as `logits`; or only the shapes of the arrays."""
    modules, configs, models = (
        import_module(f"{request['module']}.{name}") for name in ("_modules", "_config", "_transformer")
    )
    settings = dict(request["settings"])
    if "attention_types" in settings:
        kinds = modules.AttentionType
        settings["attention_types"] = tuple(kinds[name] for name in settings["attention_types"])
    if "kv_cache_sharing_config" in settings:
        settings["kv_cache_sharing_config"] = configs.KVCacheSharingConfig(**settings["kv_cache_sharing_config"])
    if "query_pre_attn_norm" in settings:
        scale = settings["query_pre_attn_norm"]
        settings["query_pre_attn_norm"] = configs.QueryPreAttentionNormalisation[scale]
    if "model" in request:
        whole = getattr(gm.nn, request["model"])
        config = dataclasses.replace(whole.config, vision_encoder=None, **settings)
    else:
        config = configs.TransformerConfig(**settings)
    ids = jnp.asarray(np.load(request["ids"])) if "ids" in request else jnp.zeros((1, 3), int)
    if "code" in request:
        return with_logits(*ran(request["code"], whole, config), ids)
    model_class = getattr(models, "Gemma3nTransformer", None) or models.Transformer
    model = model_class(config=config, dtype=jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
    if "model" in request:
        return {name: np.array(leaf.shape) for name, leaf in named(shapes)}
    if "rest" not in request:
        return with_logits(model, gm.ckpts.load_params(request["root"], params=shapes, donate=False), ids)
    params = gm.ckpts.load_params(request["root"])
    params["embedder"].pop(request["rest"])
    return with_logits(model, params, ids)


def ran(code: str, whole: type, config):
    """The model and the parameters that code makes of a whole model, whose default config is replaced."""
    small = type(whole.__name__, (whole,), {"__annotations__": {"config": type(config)}, "config": config})
    setattr(gm.nn, whole.__name__, small)
    found: dict = {}
    exec(code, found)
    return found["model"], found["params"]


def with_logits(model, params, ids) -> dict[str, np.ndarray]:
    logits = model.apply({"params": params}, ids).logits
    return {"logits": np.asarray(logits, np.float32)} | {name: np.asarray(leaf) for name, leaf in named(params)}


def named(tree):
    """The leaves of a tree with their dotted names."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield ".".join(str(getattr(key, "key", key)) for key in path), leaf


jax.config.update("jax_default_matmul_precision", "highest")
for request in json.load(sys.stdin):
    try:
        np.savez(request["out"], **restored(request))
    except Exception:
        Path(request["out"]).with_suffix(".error").write_text(traceback.format_exc())

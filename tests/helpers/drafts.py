"""Tiny models with a module for multi-token prediction whose drafts are right now and then."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.families import Case, save
from tpuconv import api
from tpuconv.models.registry import get_family

OUTPUTS = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "down_proj",
    "wo_b.weight",
    "w2.weight",
    "dense.weight",
    "post_self_attn_layernorm.weight",
    "post_mlp_layernorm.weight",
)
JOINING = (
    "eh_proj.weight",
    "mtp.fc.weight",
    "mtp_linear_proj.0.weight",
    "input_proj.weight",
    ".e_proj.weight",
    ".h_proj.weight",
)

EMBEDDINGS = ("embeddings.weight", "word_embeddings.weight")
LAST = ("shared_head.norm.weight", "final_layernorm.weight", "mtp.norm.weight", "mtp.0.norm.weight")


NOISE = (0.3, 0.1, 0.03)
"""Of what hands the embedding on. Each makes drafts of another part of the tokens right."""


WITH_MODULE = (
    *(
        "deepseek_v3-groups",
        "deepseek_v32-plain",
        "glm_moe_dsa-plain",
        "glm_moe_dsa-shared",
        "glm4_moe-air",
        "bailing_moe-plain",
    ),
    *("glm4_moe_lite-plain", "qwen3_next-plain", "qwen3_5_text-plain", "qwen3_5-plain", "qwen3_5_moe_text-plain"),
    *("qwen3_5_moe-plain", "ernie4_5_moe-plain", "mimo_v2_flash-plain", "deepseek_v4-plain", "exaone_moe-plain"),
    *("hy_v3-plain", "bailing_hybrid-plain", "bailing_moe-plain", "longcat_flash-plain", "nemotron_h-latent"),
    *("bailing_moe_v2_5-plain", "mimo-plain", "xing4_0-plain", "alice_ai-plain", "longcat_flash_ngram-plain"),
    *("pangu_ultra_moe-corrected", "glm_ocr-plain"),
)
"""A case of each family with such a module."""


def save_with_drafts(case: Case, folder: Path, noise: float = NOISE[0]) -> Path:
    """Writes the model of a case in float32 with a module for multi-token prediction beside, and returns the folder.

    The next token depends on the last one mostly, since the layers add little. The module hands the embedding of the
    next token on and adds a little too, so that it often predicts what the model does."""
    save(case, folder)
    config = json.loads((folder / "config.json").read_text())
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 1
    tensors, rng, family = read_tensors(folder), np.random.default_rng(0), get_family(case.family)
    read = family.read_config(config)
    table = family.table_for(tensors, read)
    shapes = {n: s for binding in table.bind(read, include_mtp=True) for n, s in binding.src_shapes().items()}
    assert tensors.keys() - {"lm_head.weight"} <= shapes.keys() | {n for n in tensors if table.ignored(read)(n)}
    for name in sorted(shapes.keys() - tensors.keys()):
        values = rng.normal(size=shapes[name]) * 0.25
        if "norm" in name and not name.endswith("bias"):  # of some families the stored scales are less 1
            last = tensors[name_of_norm(tensors)]
            values = (
                last * rng.uniform(0.8, 1.2, last.shape) if name.endswith(LAST) else np.full(shapes[name], last.mean())
            )
        if name.endswith(JOINING):
            width = shapes[name][0]
            values *= noise
            if name.endswith("input_proj.weight"):  # the hidden states' columns before the embeddings'
                values[:, width:] += np.eye(width)
            elif not name.endswith(".h_proj.weight"):
                values[:, :width] += np.eye(width)
        if name.endswith("embed_tokens.weight"):  # the module's own
            values = tensors["model.embed_tokens.weight"]
        tensors[name] = values.astype("f4")
    tensors |= {name: x * np.float32(0.06) for name, x in tensors.items() if name.endswith(OUTPUTS)}
    tensors |= {name: x * (0.25 / x.std()) for name, x in tensors.items() if name.endswith(EMBEDDINGS)}
    return write_checkpoint(folder, config, tensors)


def save_target(case: Case, folder: Path, factor: float = 0.003) -> Path:
    """Writes the model of a case in float32 and returns the folder. The outputs of its layers are multiplied by a small
    factor, so that the next token depends on the last one mostly."""
    save(case, folder)
    tensors = read_tensors(folder)
    tensors |= {name: x * np.float32(factor) for name, x in tensors.items() if name.endswith(OUTPUTS)}
    return write_checkpoint(folder, json.loads((folder / "config.json").read_text()), tensors)


def name_of_norm(names: object) -> str:
    """Returns the name of the last norm."""
    ends = ("model.norm.weight", "language_model.norm.weight", "backbone.norm_f.weight")
    return next(name for name in names if name.endswith(ends) or name == "norm.weight")


def assert_exported_as_released(checkpoint: Path, source: Path, out: Path) -> None:
    """Exports a checkpoint to `out`, whose tensors must be those of the source, bit for bit."""
    api.export(checkpoint, out)
    have, want = (
        {name: (x.dtype, x.tobytes()) for name, x in read_tensors(folder).items()} for folder in (out, source)
    )
    assert have == want


def drafted(model: Any) -> np.ndarray:
    """Hidden states [1, T, D] of the module for multi-token prediction after a text."""
    ids_BT = jnp.arange(3, 23)[None]
    x_BTD, cache = model.run_layers(ids_BT, ids_BT >= 0, model.init_cache(1, 24))
    return np.asarray(model.draft(x_BTD, jnp.roll(ids_BT, -1, axis=1), cache, 0)[0])

"""Modules for multi-token prediction against transformers: each is a small model of its family on joined inputs."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers import released_code
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import convert
from helpers.drafts import save_with_drafts
from helpers.families import BY_ID, PROMPTS
from helpers.released_code import alice
from tpuconv.convert.plan.types import Options

pytestmark = pytest.mark.slow

DEEPSEEK = ("{}enorm", "{}hnorm", "{}eh_proj", "{}shared_head.norm")
FINAL = (*DEEPSEEK[:3], "{}final_layernorm")
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
SPARSE = {"mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
DENSE = {"mlp_layer_types": ["dense"], "first_k_dense_replace": 1}
FULL = {"layer_types": ["full_attention"]}


@dataclass(frozen=True)
class Module:
    """Where a module is, and what model it is.

    Attributes:
        layers: prefixes of its layers, where L stands for the number of the model's layers.
        parts: names of the norms of both inputs, of the joining product and of the last norm, made with the first
            prefix; `.weight` follows.
        config: keys that make a model with its layers.
        normed: whether it reads the hidden states after the model's last norm.
        hidden_first: whether the joining product has the columns of the hidden states before those of the embeddings.
        renamed: parts of names in the module, and of the same tensors in the model's layers.
    """

    layers: tuple[str, ...] = ("model.layers.{L}.",)
    parts: tuple[str, ...] = DEEPSEEK
    config: dict[str, Any] = field(default_factory=dict)
    normed: bool = True
    hidden_first: bool = False
    renamed: dict[str, str] = field(default_factory=dict)


MODULES = {
    "deepseek_v3-groups": Module(config=SPARSE),
    "glm4_moe-air": Module(config=SPARSE),
    "pangu_ultra_moe-corrected": Module(config=SPARSE),
    "glm_ocr-plain": Module(),
    "qwen3_next-plain": Module(("mtp.layers.0.",), QWEN, FULL),
    "qwen3_5_text-plain": Module(("mtp.layers.0.",), QWEN, FULL),
    "ernie4_5_moe-plain": Module(
        ("model.mtp_block.0.",),
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "model.norm"),
        {"moe_layer_start_index": 1},
        normed=False,
    ),
    "mimo-plain": Module(
        ("model.mtp_layers.0.",),
        ("{}token_layernorm", "{}hidden_layernorm", "{}input_proj", "{}final_layernorm"),
        FULL,
        hidden_first=True,
    ),
    "mimo_v2_flash-plain": Module(
        ("model.mtp.layers.0.",),
        FINAL,
        {"layer_types": ["sliding_attention"], **DENSE},
        normed=False,
        renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
    ),
    "exaone_moe-plain": Module(("mtp.layers.0.",), QWEN, {"layer_types": ["sliding_attention"], **DENSE}),
    "hy_v3-plain": Module(parts=FINAL, config=SPARSE),
    "bailing_hybrid-plain": Module(parts=FINAL, config={**FULL, **SPARSE}),
    "bailing_moe_v2_5-plain": Module(parts=FINAL, config={"layer_group_size": 1, "first_k_dense_replace": 0}),
    "longcat_flash-plain": Module(
        ("model.mtp.layers.0.",),
        ("{}enorm.m", "{}hnorm.m", "{}eh_proj", "model.mtp.norm"),
        renamed={
            "self_attn": "self_attn.0",
            "input_layernorm": "input_layernorm.0",
            "post_attention_layernorm": "post_attention_layernorm.0",
            "transformer_layer.mlp": "mlps.0",
        },
    ),
    "nemotron_h-latent": Module(
        ("mtp.layers.0.", "mtp.layers.1."),
        ("{}enorm", "{}hnorm", "{}eh_proj", "mtp.layers.1.final_layernorm"),
        {"layers_block_type": ["full_attention", "moe"]},
    ),
    "deepseek_v4-plain": Module(
        ("mtp.0.",),
        ("{}enorm", "{}hnorm", "{}e_proj", "{}norm"),
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"], "num_hash_layers": 0},
        normed=False,
    ),
}
CENTERED = ("qwen3_next", "qwen3_5_text")
LAYERS = {"nemotron_h": "backbone.layers", "deepseek_v4": "layers"}
LAST = {"nemotron_h": "backbone.norm_f.weight", "deepseek_v4": "norm.weight"}
CORRECTION = "model.layers.0.mlp.router.e_score_correction_bias"
COUNT = {"longcat_flash": "num_layers"}


@pytest.mark.parametrize("name", MODULES)
def test_the_module_is_a_small_model_of_transformers_on_joined_inputs(name: str, tmp_path: Path) -> None:
    """The formula around its layers is that of arXiv:2412.19437, section 2.2."""
    import torch

    released = save_with_drafts(BY_ID[name], tmp_path / "hf")
    family, module = BY_ID[name].family, MODULES[name]
    source = as_glm4(released, tmp_path / "text") if family == "glm_ocr" else released
    tensors = read_tensors(source)
    ids = torch.tensor([PROMPTS[0]])
    if family == "longcat_flash":
        write_checkpoint(tmp_path / "all", json.loads((source / "config.json").read_text()), all_experts(tensors))
    main = loaded(tmp_path / "all" if family == "longcat_flash" else source)
    small = loaded(small_model(name, source, tmp_path / "small"))
    last = {"deepseek_v4": "hc_head", "nemotron_h": "norm_f"}.get(family, "norm")
    seen: list[Any] = []
    getattr(main.get_decoder(), last).register_forward_hook(
        lambda _, inputs, output: seen.append(output if module.normed else inputs[0])
    )
    embed_norm, hidden_norm, joining = (
        torch.tensor(np.array(tensors[f"{part.format(prefix(name, source))}.weight"])) for part in module.parts[:3]
    )
    eps = getattr(main.config, "rms_norm_eps", None) or main.config.layer_norm_epsilon

    def norm(x: Any, scale: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (scale + (family in CENTERED))

    with torch.no_grad():
        main(ids[:, :-1], use_cache=False)
        own = tensors.get("model.mtp.embed_tokens.weight")
        embedding = main.get_input_embeddings().weight if own is None else torch.tensor(np.array(own))
        e, h = norm(embedding[ids[:, 1:]], embed_norm), norm(seen[0], hidden_norm)
        if family == "deepseek_v4":
            from_hidden = torch.tensor(np.array(tensors["mtp.0.h_proj.weight"]))
            inputs = (e @ joining.T)[:, :, None] + h @ from_hidden.T
            small.model.layers[0].register_forward_pre_hook(lambda _, args: (inputs, *args[1:]))
            expected = small(ids[:, :-1], use_cache=False).logits.numpy()
        else:
            inputs = torch.cat([h, e] if module.hidden_first else [e, h], dim=-1) @ joining.T
            expected = small(inputs_embeds=inputs, use_cache=False).logits.numpy()
    found = drafted_logits(released, tmp_path / "out")
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def as_glm4(source: Path, folder: Path) -> Path:
    """Writes the text model of a GLM-OCR, whose positions in a text without images are those of a GLM-4."""
    config = json.loads((source / "config.json").read_text())["text_config"] | {"model_type": "glm4"}
    config["rope_parameters"]["partial_rotary_factor"] = 1.0
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    tensors = {name.replace("model.language_model.", "model."): x for name, x in read_tensors(source).items()}
    own = {name: x for name, x in tensors.items() if ".visual." not in name}
    return write_checkpoint(folder, config | {"attention_bias": False, "tie_word_embeddings": False}, own)


def test_the_module_of_alice_ai_has_plain_residual_connections(tmp_path: Path) -> None:
    """Which a small model of the family has not. It reads what attention over residuals returns, before the norm."""
    import torch

    source = save_with_drafts(BY_ID["alice_ai-plain"], tmp_path / "hf")
    main, ids, seen = loaded(source), torch.tensor(PROMPTS[0]), []
    module = alice.Further(main.config)
    module.load_state_dict(
        {name[4:]: torch.tensor(np.array(x)) for name, x in read_tensors(source).items() if name.startswith("mtp.")}
    )
    main.model.attnres_final.register_forward_hook(lambda _, inputs, output: seen.append(output))
    with torch.no_grad():
        main(ids[None, :-1])
        embedded = main.get_input_embeddings()(ids[1:]).double()
        y = alice.widened(module, embedded, seen[0], alice.angles_of(main.config, len(embedded)))
        expected = alice.widened(main.lm_head, y)[None].numpy()
    np.testing.assert_allclose(drafted_logits(source, tmp_path / "out"), expected, atol=2e-5 * np.abs(expected).max())


def drafted_logits(source: Path, out: Path) -> Any:
    """The logits that the module gives the first prompt."""
    convert(source, out, Options(include_mtp=True))
    model: Any = tpuconv.load(out, mtp=True)
    ids_BT = jnp.asarray([PROMPTS[0]])
    x_BTD, cache = model.run_layers(ids_BT[:, :-1], jnp.ones((1, 8), bool), model.init_cache(1, 8))
    return model.head(model.draft(x_BTD, ids_BT[:, 1:], cache, 0)[0])


def prefix(name: str, source: Path) -> str:
    """The prefix of the module's first layer."""
    count = json.loads((source / "config.json").read_text()).get("num_hidden_layers", 0)
    return MODULES[name].layers[0].format(L=count)


def small_model(name: str, source: Path, folder: Path) -> Path:
    """Writes the model of the module's layers, with its last norm, and the embedding and head of the model."""
    module, family = MODULES[name], BY_ID[name].family
    config, tensors = json.loads((source / "config.json").read_text()), read_tensors(source)
    layers = LAYERS.get(family, "model.layers")
    prefixes = [each.format(L=config.get("num_hidden_layers", 0)) for each in module.layers]
    out = {key: x for key, x in tensors.items() if "mtp" not in key and f"{layers}." not in key}
    for number, each in enumerate(prefixes):
        for key in [key for key in tensors if key.startswith(each)]:
            rest = key.removeprefix(each)
            for old, new in module.renamed.items():
                rest = rest.replace(old, new)
            out[f"{layers}.{number}.{rest}"] = tensors[key]
    out[LAST.get(family, "model.norm.weight")] = tensors[f"{module.parts[3].format(prefixes[0])}.weight"]
    if family == "deepseek_v4":
        out |= {f"hc_head_{part}": tensors[f"mtp.0.hc_head_{part}"] for part in ("fn", "base", "scale")}
    if family == "longcat_flash":  # what the second half of a layer and the experts add is 0
        own = {key: x for key, x in tensors.items() if key.startswith("model.layers.0.") and key not in out}
        out |= {key: x * (not key.endswith(("o_proj.weight", "down_proj.weight"))) for key, x in own.items()}
        out[CORRECTION][config["n_routed_experts"] :] -= 100  # the others return their input
        out = all_experts(out)
    config |= module.config | {COUNT.get(family, "num_hidden_layers"): len(prefixes), "num_nextn_predict_layers": 0}
    return write_checkpoint(folder, config, out)


def all_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors, with matrices for LongCat's experts that have none: transformers reads some without using them."""
    out, (front, end) = dict(tensors), CORRECTION.split("0.mlp.router")
    layers = [key.removeprefix(front).split(".")[0] for key in tensors if key.endswith(f"router{end}")]
    for layer in layers:
        for e in range(len(tensors[f"{front}{layer}.mlp.router{end}"])):
            for part in ("gate_proj", "up_proj"):
                name = f"{front}{layer}.mlp.experts.{{}}.{part}.weight"
                out.setdefault(name.format(e), np.zeros_like(tensors[name.format(0)]))
    return out


def loaded(folder: Path) -> Any:
    """The model of transformers, of which no tensor is missing."""
    from transformers import AutoModelForCausalLM

    raw = json.loads((folder / "config.json").read_text())
    if raw["model_type"] == "mimo":  # which transformers does not have
        (folder / "config.json").write_text(json.dumps(raw | {"model_type": "qwen2"}))
    kind = released_code.class_of(raw["model_type"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, found = (kind or AutoModelForCausalLM).from_pretrained(
            folder, attn_implementation="eager", dtype="float32", output_loading_info=True
        )
    assert not found["missing_keys"]
    (folder / "config.json").write_text(json.dumps(raw))
    return model.eval()

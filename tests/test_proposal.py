"""`families --new`: a family that is taken out of the registry is found again, by its neighbours."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import hollow_checkpoint, qwen3_config, write_checkpoint
from helpers.families import FIRST
from helpers.released import DEEPSEEK_V41_FLASH, KIMI_K3, LING_2_6_FLASH
from tpuconv import api
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.proposal import propose_family
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.convert.plan.types import Options
from tpuconv.models import registry
from tpuconv.models.registry import Family, get_family
from tpuconv.sources.source import Source

ROOT = Path(__file__).parent.parent
LAYERS = "model.layers.{0,1}."


def described(name: str, **changes: Any) -> Source:
    """The headers of a family's first case."""
    family, case = get_family(name), FIRST[name]
    raw = {**json.loads(case.hf_config().to_json_string()), **changes}
    raw["architectures"] = list(family.architectures)
    return source_from_config(name, raw, family.table, family.read_config(raw))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes families out of the registry."""
    kept = registry.FAMILIES
    return lambda *names: monkeypatch.setattr(registry, "FAMILIES", {k: v for k, v in kept.items() if k not in names})


def test_qwen3_is_llama_with_norms_of_heads(without: Any) -> None:
    source = described("qwen3")
    without("qwen3")
    proposed = propose_family(source)
    assert proposed.nearest.name == "llama"
    assert [left.pattern for left in proposed.left] == [f"{LAYERS}self_attn.{x}_norm.weight" for x in "qk"]
    assert {left.shape for left in proposed.left} == {(source.config["head_dim"],)}
    assert not proposed.nearest.missing
    assert {"max_window_layers", "use_sliding_window"} <= proposed.unread.keys()
    assert len(proposed.explained) == 11
    json.dumps(proposed.to_json())


EXPERTS_LIKE = ("minimax", "minimax_m2", "qwen3_moe", "phimoe")
"""Families with the names of Mixtral's experts."""


@pytest.mark.parametrize(
    ("name", "out", "near", "left", "missing"),
    [
        ("glm4", (), "glm", ["post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"], []),
        ("granite", (), "llama", [], []),
        (
            "mixtral",
            ("minimax", "minimax_m2", "qwen3_moe", "phimoe", "granitemoe_swa", "granitemoe", "grok"),
            "llama",
            ["experts.{}.w1.weight"],
            ["mlp.gate_proj.weight"],
        ),
        ("gemma3", (), "qwen3_vl", ["pre_feedforward_layernorm.weight"], []),
    ],
)
def test_neighbours(
    name: str, out: tuple[str, ...], near: str, left: list[str], missing: list[str], without: Any
) -> None:
    source = described(name)
    without(name, *out)
    proposed = propose_family(source)
    assert proposed.nearest.name == near
    assert all(any(p.endswith(end) for p in proposed.nearest.left) for end in left)
    assert all(any(p.endswith(end) for p in proposed.nearest.missing) for end in missing)
    assert len(proposed.nearest.left) >= len(left)


HYBRIDS = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
"""Families with Mamba-2 and attention."""
QWEN_NEXT = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text")
NEIGHBOURS: Mapping[str, Sequence[str]] = {
    "apertus1p5_text": ("apertus",),
    "bailing_moe_v2_5": ("bailing_moe_linear", "bailing_moe"),
    "ctrl": ("gpt2", "xglm"),
    "deepseek_v41": ("deepseek_v4",),
    "diffllama": ("llama",),
    "diffusion_gemma": ("gemma4", "gemma4_unified"),
    "falcon_mamba": ("mamba",),
    "gemma3_text": ("rnj1", "gemma3"),
    "glmga": ("glm4v",),
    "gpt_neox_japanese": ("gpt_neox",),
    "hy_v4_vl": ("hy_v4",),
    "inkling2_loop": ("inkling2",),
    "inkling_mm_model": ("inkling2",),
    "jamba": HYBRIDS,
    "kimi_k3": ("kimi_linear",),
    "lara_mini": QWEN_NEXT,
    "mamba": ("falcon_mamba",),
    "mamba2": ("mamba", "nemotron_h"),
    "mimo_v2": ("mimo_v2_flash",),
    "sarvam_mla": ("deepseek_v3",),
    "sarvam_moe": ("bailing_moe",),
    "zamba": ("zamba2",),
    "zamba2": ("zamba", *HYBRIDS),
}
"""The nearest families of a family that is taken out. recurrent_gemma is left out: it shares no name of a layer with
Gemma; and inkling_text, which shares its names with the multimodal model around it alone."""
WITH_KIN = {
    "apertus1p5": (("apertus1p5_text",), ("apertus",)),
    "inkling2": (("inkling2_text", "inkling2_loop", "inkling2_loop_text"), ("inkling_mm_model",)),
    "qwen4_exp": (("qwen4_exp_text",), QWEN_NEXT),
    "qwen4_exp_text": (("qwen4_exp",), QWEN_NEXT),
}
"""The same without families that have all of its names, and the families without these."""
FAST = ("apertus1p5", "bailing_moe_v2_5", "jamba", "kimi_k3", "mamba2", "sarvam_mla")
"""The families that the fast tests take out."""
RELEASES = {"bailing_moe_v2_5": LING_2_6_FLASH, "deepseek_v41": DEEPSEEK_V41_FLASH, "kimi_k3": KIMI_K3}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in (*NEIGHBOURS, *WITH_KIN)),
        *(pytest.param(f"{name} as released", marks=pytest.mark.slow) for name in RELEASES),
    ],
)
def test_the_neighbour_of_a_family_that_is_taken_out(name: str, without: Any) -> None:
    name, _, released = name.partition(" ")
    if released:
        family, raw = get_family(name), RELEASES[name]
        source = source_from_config(name, raw, family.table, family.read_config(raw))
    else:
        source = described(name)
    kin, near = WITH_KIN.get(name) or ((), NEIGHBOURS[name])
    without(name, *kin)
    proposed = propose_family(source)
    assert proposed.nearest.name in near
    assert not proposed.nearest.reads_sizes_only
    assert proposed.nearest.is_other_kind == ("# The checkpoint is multimodal" in proposed.draft)
    compile(proposed.draft, "family.py", "exec")


@pytest.mark.parametrize("name", ["qwen3", "glm4", "granite"])
def test_the_draft_is_a_family_that_plans(name: str, without: Any) -> None:
    source = described(name)
    without(name)
    names: dict[str, Any] = {}
    exec(compile(propose_family(source).draft, "family.py", "exec"), names)
    family = names["FAMILY"]
    assert isinstance(family, Family)
    assert family.architectures == get_family_of(source)
    plan = make_plan(source, family.name, family.table, family.read_config(source.config), Options())
    plan.check()
    assert plan.parameters == sum(prod(info.shape) for info in source.tensors.values())


NAMES = {
    "model.embed_tokens": "tok",
    "model.norm": "out_norm",
    "lm_head": "unembed",
    "model.layers": "blocks",
    "input_layernorm": "ln_a",
    "post_attention_layernorm": "ln_m",
    **{f"self_attn.{x}_proj": f"mix.w{x}" for x in "qkvo"},
    **{f"self_attn.{x}_norm": f"mix.norm_{x}" for x in "qk"},
    **{f"mlp.{name}_proj": f"ffn.{new}" for name, new in {"gate": "a", "up": "b", "down": "c"}.items()},
}
"""The names of an invented model."""


def zephyrix() -> Source:
    """The headers of the invented model."""
    source = described("qwen3", model_type="zephyrix", tie_word_embeddings=False)
    source.config["architectures"] = ["ZephyrixForCausalLM"]
    tensors = {}
    for name, info in source.tensors.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = info
    bias = {f"blocks.{layer}.mix.wo.bias": tensors[f"blocks.{layer}.ln_a.weight"] for layer in range(2)}
    return replace(source, tensors=tensors | bias)


def test_a_model_with_other_names_is_found_by_shapes_and_words() -> None:
    """Its family is a few lines, with a guess for each name and a row for the bias that the nearest has not."""
    source = zephyrix()
    proposed = propose_family(source)
    assert proposed.nearest.name == "qwen3"
    assert [each.pattern for each in proposed.left] == ["blocks.{0,1}.mix.wo.bias"]
    assert not proposed.nearest.missing
    assert len(proposed.nearest.renamed) == 14
    names: dict[str, Any] = {}
    exec(compile(proposed.draft, "family.py", "exec"), names)
    family = names["FAMILY"]
    assert 'Map("model.layers.{L}.self_attn.o_proj.bias", "layers.{L}.attn.o.bias", "D")' in proposed.draft
    assert '"model.layers.{L}.mlp.up_proj": "blocks.{L}.ffn.b",' in proposed.draft
    assert '"model.layers.{L}.self_attn.k_proj": "blocks.{L}.mix.wk",' in proposed.draft
    assert '"lm_head": "unembed",' in proposed.draft
    config = family.read_config(source.config)
    plan = make_plan(source, family.name, family.table_for(source.tensors, config), config, Options())
    plan.check()
    assert plan.parameters == sum(prod(info.shape) for info in source.tensors.values())


def test_the_example_of_the_documentation_reads_it() -> None:
    section = (ROOT / "docs" / "families.md").read_text().partition("## A family of another package")[2]
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], names)
    family, source = names["ZEPHYRIX"], zephyrix()
    source.config.update(out_bias=True, partial_rotary_factor=0.5)
    of_qwen = ("attention_bias", "layer_types", "max_window_layers", "use_sliding_window")
    config = family.read_config(source.config, allow=of_qwen)
    assert config.rope_dim * 2 == config.sizes["H"]
    plan = make_plan(source, family.name, family.table_for(source.tensors, config), config, Options())
    plan.check()
    assert {name for row in family.table for name in row.hf_names} > {"tok.weight", "blocks.{L}.mix.wo.bias"}
    assert plan.parameters == sum(prod(info.shape) for info in source.tensors.values())


@pytest.mark.parametrize("name", ["glm4_moe", "phi3", "gemma2", "mixtral"])
def test_a_family_refuses_and_lacks_nothing_of_its_own_models(name: str) -> None:
    """`partial_rotary_factor` was called refused by families that read it, and aliases of keys not read."""
    source = described(name)
    if name == "glm4_moe":  # a layer that predicts a further token is ignored
        further = f"model.layers.{source.config['num_hidden_layers']}.enorm.weight"
        source = replace(source, tensors={**source.tensors, further: source.tensors["model.norm.weight"]})
    proposed = propose_family(source)
    assert (proposed.nearest.name, proposed.left, proposed.unread) == (name, (), {})


def test_families_that_read_a_key_are_named(without: Any) -> None:
    source = described("llama")
    source.config.update(partial_rotary_factor=0.5, zeal=3)
    proposed = propose_family(source)
    assert proposed.nearest.name == "llama"
    assert "glm" in proposed.readers["partial_rotary_factor"]
    assert proposed.readers["zeal"] == ()
    assert 'keys={"zeal": int},' in proposed.draft


def get_family_of(source: Source) -> dict[str, str]:
    return {name: source.config["model_type"] for name in source.config["architectures"]}


def test_a_model_that_a_family_reads_is_told_so(tmp_path: Path) -> None:
    proposed = api.propose(hollow_checkpoint(tmp_path, qwen3_config()))
    assert (proposed.read_by, proposed.left) == ("qwen3", ())
    assert proposed.to_json()["read_by"] == "qwen3"


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    """Nothing is explained, and all of it is left; what has no letters is a comment."""
    hostile = 'x"""\nimport os\n'
    raw = {"model_type": hostile, "architectures": [f"{hostile}ForCausalLM"], "hidden_size": 7, hostile: {"a": 1}}
    tensors = {"backbone.layers.0.mixer.A_log": ("F32", (5, 3)), "backbone.wte.weight": ("BF16", (11, 7))}
    proposed = api.propose(write_checkpoint(tmp_path, raw | {"n": hostile}, tensors))
    assert not proposed.explained
    assert proposed.read_by is None
    assert len(proposed.left) == 2
    assert '# "backbone.layers.{}.mixer.A_log"  [5, 3]: no letters have these sizes' in proposed.draft
    compile(proposed.draft, "family.py", "exec")
    assert not [line for line in proposed.draft.splitlines() if line.startswith("import")]

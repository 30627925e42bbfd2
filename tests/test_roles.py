"""The types that `auto:BITS` chooses by the roles of parameters: the budget, and the rules of the table."""

import json
import re
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.configs import config_json
from tpuconv import api
from tpuconv.api import auto_recipes
from tpuconv.api.auto_recipes import UNMEASURED
from tpuconv.api.opened import OpenedModel
from tpuconv.api.recipes import SensitivityRequest, inputs_of
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.cli import tpuconv as command
from tpuconv.errors import UsageError
from tpuconv.models.common.periods import LayerStacks
from tpuconv.models.registry import find_family
from tpuconv.quantize.config import QuantConfig, Rule, find_config
from tpuconv.quantize.recipe.groups import find_choices
from tpuconv.quantize.recipe.layerwise import LayerwiseProbe
from tpuconv.quantize.recipe.roles import ROLES, recipe_for_bits
from tpuconv.quantize.rules import ParamQuant, resolve_rules

EXAMPLES = Path(__file__).parent.parent / "examples"
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 4},
    "qwen3_moe": {"num_hidden_layers": 4, "num_experts": 64},
    "qwen3_next": {"num_hidden_layers": 4, "num_experts": 128},
    "falcon_h1": {"num_hidden_layers": 4},
    "nemotron_h": {},
    "lfm2": {"num_hidden_layers": 4},
    "kimi_linear": {"num_hidden_layers": 4, "num_experts": 64},
    "deepseek_v3": {"num_hidden_layers": 4, "n_routed_experts": 64},
    "gpt_oss": {"num_hidden_layers": 4},
    "jetmoe": {},
    "deepseek_v4": {"num_hidden_layers": 4},
}
FAST = {"qwen3", "qwen3_next", "deepseek_v3"}
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]
STATES = {"qwen3_next": "a b o", "falcon_h1": "b c dt o", "nemotron_h": "b c dt o", "kimi_linear": "b f_a f_b o"}


@cache
def model_of(name: str) -> tuple[Any, int, dict[str, ParamQuant]]:
    """Returns what builds a model, the number of its layers, and all of its parameters that rules can name."""
    raw = config_json(name, **MODELS[name])
    family = find_family(raw)
    config = family.read_config(raw)

    def build() -> Any:
        return family.model_class(config, dtype=jnp.bfloat16)

    every = resolve_rules(build, QuantConfig("all", "", (Rule(0, weight_qtype="int8"),)))
    return build, config.num_hidden_layers, every


@cache
def resolved(name: str, bits: float, **given: Any) -> tuple[QuantConfig, dict[str, ParamQuant]]:
    """Returns a config, and the quantization of each parameter by it."""
    build, _, _ = model_of(name)
    config = recipe_for_bits(find_config(f"auto:{bits}"), build, **given)
    return config, resolve_rules(build, config)


def chosen(name: str, bits: float, **given) -> tuple[QuantConfig, dict[str, str]]:
    """Returns a config, and the type of each parameter by it."""
    config, quants = resolved(name, bits, **given)
    tiles = {n: config.rules[q.rule].tile_size for n, q in quants.items()}
    return config, {n: q.qtype + (f"/{tiles[n]}" if tiles[n] else "") for n, q in quants.items()}


def mean_bits(name: str, bits: float) -> float:
    """Returns the bits by the shapes of values and scales."""
    quants = resolved(name, bits)[1].values()
    total = sum(prod(q.shape) * (int(q.qtype[3]) + 16 / prod(q.group_shape)) for q in quants)
    return total / sum(prod(q.shape) for q in quants)


def types_of(types: dict[str, str], pattern: str) -> set[str]:
    found = {kind for name, kind in types.items() if re.fullmatch(rf"layers\.\d+\.{pattern}\.kernel", name)}
    assert found, f"{pattern} is no parameter"
    return found


@pytest.mark.parametrize("name", EACH)
def test_the_bits_fit_the_budget_and_the_rules_of_the_table_hold(name):
    config, types = chosen(name, 5)
    mean = mean_bits(name, 5)
    assert 4.7 < mean <= 5, config.summary
    assert f"{mean:.3f} bits per quantized weight" in config.summary
    assert not [n for n in types if re.search(r"router|norm|embed|lm_head|streams", n)]
    methods = {rule.weight_calibration_method for rule in config.rules if rule.weight_qtype == "int4"}
    assert methods == {"mse"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in STATES])
def test_states_are_int8_at_the_fewest_bits(name):
    with pytest.raises(UsageError) as error:
        chosen(name, 1)
    least = float(str(error.value.message).rpartition(" ")[2])
    _, types = chosen(name, round(least + 0.001, 3))
    assert "int4/128" in types.values()
    for state in STATES[name].split():
        mixer = "mamba" if name == "falcon_h1" else "attn"
        decaying = {n for n in types if n.endswith(f".{mixer}.{state}.kernel")} - full_attention(types)
        assert {types[n] for n in decaying} == {"int8"}, state


def full_attention(types: dict[str, str]) -> set[str]:
    """Returns the parameters of the layers whose mixer has no decay."""
    layers = {n.split(".")[1] for n in types}
    decays = {n.split(".")[1] for n in types if re.fullmatch(r"layers\.\d+\.attn\.(a|dt|f|f_a)\.kernel", n)}
    return {n for n in types if n.split(".")[1] in layers - decays and ".attn." in n}


@pytest.mark.parametrize("name", EACH)
def test_every_parameter_of_the_big_products_has_a_role(name):
    _, types = chosen(name, 16)
    left = {n for n in model_of(name)[2] if n not in types}
    assert not [n for n in left if re.search(r"\.(attn|mlp|moe|mamba)\.", n) and "router" not in n]
    assert set(types.values()) == {"int8"}


def test_a_recipe_is_the_same_each_time():
    assert chosen("qwen3_next", 5)[0].to_json() == chosen("qwen3_next", 5)[0].to_json()


def test_more_bits_go_to_the_down_projection_before_gate_and_up():
    seen = set()
    for bits in (4.3, 5, 6):
        _, types = chosen("qwen3", bits)
        order = ("int4/128", "int4/64", "int4/32", "int8")
        for layer in range(4):
            down, gate = (order.index(types[f"layers.{layer}.mlp.{each}.kernel"]) for each in ("down", "gate"))
            assert down >= gate
            seen.add(down > gate)
    assert seen == {True, False}


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "qwen3_moe"])
def test_experts_are_lowest_and_all_that_each_token_passes_is_wide(name):
    _, types = chosen(name, 5)
    assert types_of(types, r"moe\.(gate|up)") <= {"int4/128", "int4/64", "int4/32"}
    assert types_of(types, r"attn\..*") == {"int8"}
    if name != "qwen3_moe":
        assert types_of(types, r"moe\.shared\..*") == {"int8"}


def test_experts_that_are_released_in_mxfp4_stay_so():
    experts = {n for n in model_of("gpt_oss")[2] if re.search(r"\.moe\.(gate|up|down)\.", n)}
    config, types = chosen("gpt_oss", 4.5, released=frozenset(experts))
    assert {types[n] for n in experts} == {"mxfp4/32"}
    assert types_of(types, r"attn\..*") == {"int8"}
    assert {r.weight_calibration_method for r in config.rules if r.weight_qtype == "mxfp4"} == {"absmax"}


@pytest.mark.parametrize(
    ("name", "joined"),
    [
        ("qwen3_moe", r"moe\.(gate|up|down)"),
        ("nemotron_h", r"attn\.([xzbc]|dt)"),
        pytest.param("deepseek_v4", r"attn\.compressor\..*", marks=pytest.mark.slow),
    ],
)
def test_servers_get_one_rule_for_the_parameters_that_they_join(name, joined):
    for bits in (6, 7):
        rules = {n: quant.rule for n, quant in resolved(name, bits, for_servers=True)[1].items()}
        for layer in range(model_of(name)[1]):
            found = {rules[n] for n in rules if re.fullmatch(rf"layers\.{layer}\.{joined}\.kernel", n)}
            assert len(found) <= 1, layer


def test_stacked_layers_get_the_same_types():
    build, layers, _ = model_of("qwen3")
    stacks = LayerStacks(layers, 1)
    assert types_of(chosen("qwen3", 6)[1], r"mlp\.down") == {"int4/32", "int8"}  # which cannot be stacked
    quants = resolve_rules(build, resolved("qwen3", 6, stacks=stacks)[0], stacks)
    assert quants["layers.mlp.gate.kernel"].shape[0] == layers


def test_too_few_bits_are_an_error_with_the_range():
    with pytest.raises(UsageError, match=r"3\.5 bits .* too few .* the least are 4\.1"):
        chosen("qwen3", 3.5)


def test_the_least_bits_that_an_error_names_are_enough(tmp_path):
    """They are 4 1/3 here."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    source = random_checkpoint(tmp_path / "hf", qwen3_config(**sizes))
    with pytest.raises(UsageError, match=r"the least are 4\.334\n"):
        api.plan(source, quantize="auto:4.333")
    api.plan(source, quantize="auto:4.334")


def test_bits_that_cannot_be_reached_are_refused_before_costs_are_measured(converted, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_recipes, "sensitivity", None)
    with pytest.raises(UsageError, match=r"2 bits a weight cannot be reached: this model can have 4\.5000 to"):
        api.quantize(converted / "tiny-qwen3-orbax", tmp_path / "out", config="auto:2")


@pytest.mark.parametrize("text", ["auto", "auto:", "auto:x", "auto:0", "auto:17", "auto:-4", "auto:4.5.5", "auto:nan"])
def test_a_config_without_a_number_of_bits_is_an_error(text):
    with pytest.raises(UsageError, match="names no number of bits"):
        find_config(text)


def test_patterns_of_roles_are_used():
    names = {n for name in MODELS for n in model_of(name)[2]}
    tails = {n.removesuffix(".kernel").split(".", 2)[-1].replace(".", "/") for n in names if n.startswith("layers")}
    states = {f"delta/{tail.rpartition('/')[2]}" for tail in tails}
    for role in ROLES:
        if role.name != "selection of tokens":
            assert any(re.fullmatch(role.pattern, tail) for tail in tails | states), role.name


TEXT: dict[str, Any] = {"samples": 2, "length": 16}

# -- in commands -------------------------------------------------------------------------------------------------------


def run(*arguments: Any) -> Any:
    done = CliRunner().invoke(command, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_convert_and_quantize_take_a_number_of_bits(tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config(num_hidden_layers=2))
    plan = run("convert", source, "--quantize", "auto:5", "--dry-run")
    assert re.search(r"[45]\.\d+ bits per quantized weight: .*MLP, down", plan["notes"][0])
    done = api.convert(source, tmp_path / "quantized", quantize="auto:5")
    manifest = read_manifest(done.out)
    assert manifest.quantization is not None
    rows = [facts for facts in manifest.quantization["parameters"].values()]
    assert {facts["qtype"] for facts in rows} == {"int4", "int8"}
    assert manifest.quantization["name"] == "auto-5"
    assert manifest.quantization["notes"] == plan["notes"]
    plain = api.convert(source, tmp_path / "plain").out
    shown = run("quantize", plain, "--config", "auto:5", "--explain")
    assert shown["config"]["rules"] == manifest.quantization["rules"]
    assert {row["qtype"] for row in shown["parameters"]} == {None, "int4", "int8"}
    with pytest.raises(UsageError) as caught:  # it has no tokenizer
        api.quantize(plain, tmp_path / "measured", config="auto:5", calibration="self")
    assert "give a checkpoint with a tokenizer" in caught.value.hint


@pytest.fixture
def with_costs(tmp_path, monkeypatch) -> Path:
    """A checkpoint with kept costs, by which attention of layer 3 is worth bits first."""
    ckpt = api.convert(EXAMPLES / "tiny-qwen3", tmp_path / "plain").out
    assert api.plan_quantization(ckpt, config="auto:5", **TEXT).notes[0] == UNMEASURED
    manifest = read_manifest(ckpt)
    choices = find_choices(manifest)
    kept = inputs_of(SensitivityRequest(ckpt, **TEXT), OpenedModel(manifest), choices)[2]
    costs = {None: 0.0, "int8": 1e-6, "int4": 1e-4}
    favoured = "layers/3/attn/.*"
    kept.write(
        [
            replace(
                group,
                options=tuple(
                    replace(option, kl=costs[option.qtype] * (100 if group.pattern == favoured else 1))
                    for option in group.options
                ),
            )
            for group in choices.space.groups
        ]
    )
    monkeypatch.setattr(LayerwiseProbe, "each", None)  # nothing is measured again
    return ckpt


def test_a_plan_is_by_kept_costs_or_by_roles_with_a_note(with_costs):
    plan = api.plan_quantization(with_costs, config="auto:4.9", **TEXT)
    assert plan.notes == ()
    assert plan.calibration is not None
    assert plan.rules is not None
    assert "by the sum of measured groups" in plan.rules.summary
    bits = {name: encoder.to_json() for name, encoder in plan.plan.encoders.items()}
    wide = {n for n, each in bits.items() if each["qtype"] == "int8"}
    assert len([n for n in wide if n.startswith("layers.3.attn.")]) == 4
    assert all(n.startswith("layers.") for n in bits)
    sizes = {name: prod(array.shape) for name, array in read_manifest(with_costs).arrays.items()}
    total = sum(sizes[n] * each["bits"] for n, each in bits.items())
    assert 4.7 < total / sum(sizes[n] for n in bits) <= 4.9


@pytest.mark.slow
def test_quantize_uses_kept_costs(with_costs, tmp_path):
    plan = api.plan_quantization(with_costs, config="auto:4.9", **TEXT)
    done = api.quantize(with_costs, tmp_path / "out", config="auto:4.9", **TEXT)
    facts = read_manifest(done.out).quantization
    assert facts is not None
    assert facts["calibration"]["method"] == "gptq"
    assert plan.rules is not None
    assert facts["rules"] == [rule.to_json() for rule in plan.rules.rules]


@pytest.mark.slow
def test_quantize_measures_costs_once(tmp_path):
    ckpt = api.convert(EXAMPLES / "tiny-qwen3", tmp_path / "plain").out
    done = api.quantize(ckpt, tmp_path / "out", config="auto:5", **TEXT)
    plan = api.plan_quantization(ckpt, config="auto:5", **TEXT)
    facts = read_manifest(done.out).quantization
    assert facts is not None
    assert plan.rules is not None
    assert facts["rules"] == [rule.to_json() for rule in plan.rules.rules]

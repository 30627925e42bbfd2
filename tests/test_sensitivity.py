"""The estimated error of each group against checkpoints that are quantized so; the search against all combinations."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.conversions import Options, convert
from helpers.encoded import fp8, write_encoded
from helpers.families import BY_ID
from helpers.quantizing import ONE_OF_EACH, quantize
from tpuconv import api
from tpuconv.api.opened import opened_model
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.cli import tpuconv as command
from tpuconv.convert.run.slab_arrays import SlabArrays
from tpuconv.errors import GateError, OutputError, ResourceError, UsageError
from tpuconv.pages import MADE_BY
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.calibrate.layers import LayerRunner
from tpuconv.quantize.calibration_settings import recipe_calibration
from tpuconv.quantize.config import find_config, parse_config
from tpuconv.quantize.recipe import groups as recipe_groups
from tpuconv.quantize.recipe import layerwise
from tpuconv.quantize.recipe import search as recipe
from tpuconv.quantize.recipe.costs import KeptCosts
from tpuconv.quantize.recipe.groups import find_choices
from tpuconv.quantize.recipe.layerwise import DTYPE, LayerwiseProbe
from tpuconv.quantize.recipe.picture import LINE_HEIGHT, label_heights
from tpuconv.quantize.recipe.search import Option, ParamGroup, SearchSpace, choose, to_yaml
from tpuconv.quantize.report import report
from tpuconv.quantize.rules import resolve_rules
from tpuconv.storage.reports import check_free, write_report
from tpuconv.verify.logits import compare_logits, model_logits, tokenize

IDS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2]]


def small(folder: Path, **sizes) -> Path:
    """One that is not run."""
    convert(random_checkpoint(folder / "hf", qwen3_config(num_hidden_layers=2, **sizes)), folder / "ckpt")
    return folder / "ckpt"


@pytest.fixture(scope="module")
def ckpt(orbax) -> Path:
    """A tiny model without a tokenizer, its head untied."""
    return orbax(ONE_OF_EACH["llama"], "bfloat16")


def measured(folder: Path, calibration=None) -> tuple[SearchSpace, Any]:
    choices = find_choices(read_manifest(folder))
    with TemporaryDirectory() as work:
        probe = LayerwiseProbe(read_manifest(folder), choices, IDS, Path(work), calibration)
        return replace(choices.space, groups=tuple(probe.each())), probe


@cache
def reference(plain: Path, ids: str) -> list[np.ndarray]:
    return model_logits(plain, json.loads(ids), DTYPE)


def divergence(plain: Path, other: Path, ids=IDS) -> float:
    """As `verify --compare-hf` computes it, of checkpoints as they are loaded."""
    return compare_logits(ids, reference(plain, json.dumps(ids)), model_logits(other, ids, DTYPE), DTYPE, {}).mean_kl


# -- what is measured -------------------------------------------------------------------------------------------------


def cases():
    """Every group of the last layer and the head of every family, in both types; what is fast of two families."""
    both = ("int8", "int4")
    yield pytest.param("llama", "bfloat16", {"layers/2/mlp/.*": both, "lm_head": ["int4"]}, id="llama")
    yield pytest.param("qwen3_moe", "bfloat16", {"layers/2/moe/(down|gate|up)": ["int4"]}, id="qwen3_moe")
    for dtype, family in [
        *(("bfloat16", family) for family, case in ONE_OF_EACH.items() if not case.traits.looped),
        ("float32", "llama"),
    ]:
        yield pytest.param(family, dtype, None, id=f"{family}-{dtype}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "dtype", "wanted"), list(cases()))
def test_a_group_costs_what_a_checkpoint_costs_that_is_quantized_so(family, dtype, wanted, orbax, tmp_path):
    plain = orbax(ONE_OF_EACH[family], dtype)
    model, _ = measured(plain)
    last = {group.path: group for group in model.groups}
    tried = 0
    for i, group in enumerate(last.values()):
        costs: dict[str, list[float]] = {"int8": [], "int4": []}
        for option in group.options[1:]:
            if wanted is None or option.qtype in wanted.get(group.pattern, ()):
                text = to_yaml(replace(model, groups=(group,)), [option], [])
                out = tmp_path / f"{i}-{option.qtype}-{option.tile_size}"
                quantize(plain, out, parse_config(text.encode(), "c", "c.yaml"))
                assert option.kl == pytest.approx(divergence(plain, out), rel=1e-3)
                costs[option.qtype].append(option.kl)
                tried += 1
        # Fewer bits cost more. What selects tokens may select the same ones, rounded to either, or to fewer bits alone.
        selects = "/indexer/" in group.path
        for of_int8, of_int4 in product(costs["int8"] or [0], costs["int4"]):
            assert of_int8 < of_int4 or (selects and of_int4 in (of_int8, 0)), (group.path, costs)
        assert all(costs["int8"]) or selects, (group.path, costs)
    every = sum(len(group.options) - 1 for group in last.values())
    assert tried == (every if wanted is None else sum(map(len, wanted.values())))


OUTSIDE_OF_LAYERS = re.compile(r"(per_layer\.projection|(norm|altup)(\.\w+)?|self_conditioning\.mlp\.\w+)\.kernel")
"""Products of no layer, which are not the head."""
SLOW = {"deepseek_v3", "kimi_k2", "llama4", "llama4_text", "gpt_oss", "qwen2", "olmo2", "mixtral", "qwen3"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, c in ONE_OF_EACH.items()],
)
def test_every_parameter_that_qwix_quantizes_is_in_one_group(case, orbax, monkeypatch):
    manifest, resolved = read_manifest(orbax(case, "bfloat16")), []

    def resolve(*args, **options):
        resolved.append(resolve_rules(*args, **options))
        return resolved[-1]

    monkeypatch.setattr(recipe_groups, "resolve_rules", resolve)
    choices = find_choices(manifest)
    all_names = set(resolved[0])
    names = [name for group in choices.space.groups for name in group.names]
    assert len(names) == len(set(names))
    left = {name for name in all_names - set(names) if ".router." not in name}
    assert not {name for name in left if not OUTSIDE_OF_LAYERS.fullmatch(name)}
    assert set(names) <= all_names
    by_int4 = {name for option, own in choices.encoders.items() if option.startswith("int4") for name in own}
    assert set(names) == set(choices.encoders["int8"]) == by_int4
    assert ("lm_head" in {group.pattern for group in choices.space.groups}) == ("lm_head.kernel" in manifest.arrays)
    for group in choices.space.groups:
        quants = [choices.encoders["int8"][name].quant for name in group.names]
        widths = [quant.shape[quant.summed[-1]] for quant in quants]
        tiles = {option.tile_size for option in group.options if option.qtype == "int4"}
        divide = [tile for tile in (128, 64, 32, 16, 8) if not any(width % tile for width in widths)]
        assert tiles == {*(tile for tile in divide if tile > 32), next((tile for tile in divide if tile <= 32), None)}
        assert group.count == sum(prod(manifest.arrays[name].shape) for name in group.names)


def test_tiles_are_the_largest_that_divide(tmp_path):
    sizes = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 24}
    groups = find_choices(read_manifest(small(tmp_path, **sizes))).space.groups
    assert {group.path: group.options[2].tile_size for group in groups} == {
        "layers/{}/attn/.*": 8,
        "layers/{}/mlp/.*": 16,
        "lm_head": 16,
    }


def test_a_tied_head_is_in_no_group(tmp_path):
    folder = small(tmp_path, tie_word_embeddings=True)
    assert {group.path for group in find_choices(read_manifest(folder)).space.groups} == {
        "layers/{}/attn/.*",
        "layers/{}/mlp/.*",
    }


def test_a_model_of_no_numbers_gives_no_figures(ckpt, tmp_path, monkeypatch):
    probe = LayerwiseProbe(read_manifest(ckpt), find_choices(read_manifest(ckpt)), IDS, tmp_path)
    weights = probe._runner.logits_weights()
    broken = weights | {"norm.scale": weights["norm.scale"] * jnp.nan}
    monkeypatch.setattr(probe._runner, "logits_weights", lambda: broken)
    with pytest.raises(GateError, match="are not finite"):
        probe.each()


@pytest.mark.slow
def test_a_group_of_stacked_layers_has_all_of_them(hf, tmp_path):
    plain = tmp_path / "scan"
    convert(hf(ONE_OF_EACH["llama"], "bfloat16"), plain, Options(scan_layers=True))
    model, _ = measured(plain)
    assert {group.pattern for group in model.groups} == {r"layers/\d+/attn/.*", r"layers/\d+/mlp/.*", "lm_head"}
    for i, group in enumerate(model.groups):
        for option in group.options[1:]:
            out = tmp_path / f"{i}-{option.qtype}"
            text = to_yaml(replace(model, groups=(group,)), [option], [])
            quantize(plain, out, parse_config(text.encode(), "c", "c.yaml"))
            assert option.kl == pytest.approx(divergence(plain, out), rel=1e-3)


DATA = from_ids("ids", np.random.default_rng(0).integers(3, 100, (4, 24)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_costs_are_those_of_calibrated_checkpoints(method, ckpt, tmp_path):
    """Of one group, and of all together, whose layers make up for the errors of those before them."""
    calibration = recipe_calibration(method), DATA
    choices = find_choices(read_manifest(ckpt))
    work = tmp_path / "work"
    work.mkdir()
    probe = LayerwiseProbe(read_manifest(ckpt), choices, IDS, work, calibration)
    groups = probe.each()
    space = replace(choices.space, groups=tuple(groups))
    last = [group.options[2 if "mlp" in group.pattern else 0] for group in groups]
    every = [group.options[2] for group in groups]
    for number, options in enumerate((last, every)):
        file = parse_config(to_yaml(space, options, [], calibration=recipe_calibration(method)).encode(), "c", "c.yaml")
        assert file.calibration == recipe_calibration(method)
        quantize(ckpt, tmp_path / str(number), file, DATA)
        pairs = list(zip(*probe.together(options), strict=True))
        kl = compare_logits(IDS, *pairs, DTYPE, {}).mean_kl
        assert kl == pytest.approx(divergence(ckpt, tmp_path / str(number)), rel=1e-3)
    for group in groups[2:4]:
        (option,) = (option for option in group.options if option.qtype == "int4")
        out = tmp_path / group.pattern.replace("/", "-")[:12]
        text = to_yaml(replace(space, groups=(group,)), [option], [], calibration=recipe_calibration(method))
        quantize(ckpt, out, parse_config(text.encode(), "c", "c.yaml"), DATA)
        assert option.kl == pytest.approx(divergence(ckpt, out), rel=1e-3)
    assert [path.name for path in work.iterdir()] == [probe._plain.path.name]


def test_prompts_of_other_rotary_positions_are_not_run_side_by_side(orbax, tmp_path):
    """The rates of longrope depend on the length, and a shorter prompt would have those of the longest."""
    case = BY_ID["phi3-longrope"]
    limit = case.config["original_max_position_embeddings"]
    manifest, prompts = read_manifest(orbax(case)), [[5] * (limit + 3), [5] * 2]
    with pytest.raises(UsageError, match=f"change beyond {limit} tokens"):
        LayerwiseProbe(manifest, None, prompts, tmp_path)


@pytest.mark.slow
def test_the_smallest_recipe_that_holds_its_gates_is_found(ckpt, tmp_path):
    loose, tight = (
        api.sensitivity(ckpt, method="nearest", gates={"mean_kl": bound}, recipe=tmp_path / f"{bound}.yaml").recipe
        for bound in (0.1, 0.001)
    )
    for bound, found in ((0.1, loose), (0.001, tight)):
        assert found.measured_kl <= bound
        assert find_config(str(found.out)).gates == {"mean_kl": bound}
        assert "<svg" in found.picture.read_text()
        assert f"{found.out.name}, measured" in found.picture.read_text()
    assert loose.bits_per_weight < tight.bits_per_weight
    with pytest.raises(GateError, match="no recipe passes the gates mean_kl=0"):
        api.sensitivity(ckpt, method="nearest", gates={"mean_kl": 0.0}, recipe=tmp_path / "none.yaml")
    assert not (tmp_path / "none.yaml").exists()
    with pytest.raises(UsageError, match="exclude each other"):
        api.sensitivity(ckpt, target_bits=8, gates={"top1": 0.9})


# -- the search -------------------------------------------------------------------------------------------------------


@st.composite
def models(draw) -> SearchSpace:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    costs = st.floats(0, 10) | st.sampled_from([0.0, 1.0])
    groups = [
        ParamGroup("layers/{}/mlp/.*", i, (), size, (
            Option(None, None, 16 * size, 0.0),
            Option("int8", None, 8 * size + draw(st.integers(0, 4)), draw(costs)),
            Option("int4", 32, 4 * size + draw(st.integers(0, 4)), draw(costs)),
        ))
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    other = draw(st.integers(0, 100))
    return SearchSpace(tuple(groups), sum(sizes) + other, 16 * other)


@given(models(), st.floats(3, 17), st.floats(3, 17))
def test_the_choice_is_the_best_there_is_and_more_bits_are_no_worse(model, one, other):
    found = []
    for target in sorted((one, other)):
        all_choices = list(product(*(group.options for group in model.groups)))
        fitting = [sum(o.kl for o in options) for options in all_choices if model.bits(options) <= target]
        if not fitting or len(fitting) == len(all_choices):
            with pytest.raises(UsageError, match="cannot be reached: this model can have"):
                choose(model, target)
            continue
        options = choose(model, target)
        assert all(option in group.options for option, group in zip(options, model.groups, strict=True))
        assert model.bits(options) <= target
        found.append(sum(option.kl for option in options))
        assert found[-1] == pytest.approx(min(fitting), abs=1e-9)
    assert found == sorted(found, reverse=True)


def test_of_a_large_model_not_all_sums_are_kept(monkeypatch):
    monkeypatch.setattr(recipe, "STATES", 2000)
    rng = np.random.default_rng(0)
    groups = tuple(
        ParamGroup("layers/{}/mlp/.*", i, (), n, (
            Option(None, None, 16 * n, 0.0),
            Option("int8", None, 8 * n, float(rng.random() / 100)),
            Option("int4", 32, 4 * n, float(rng.random())),
        ))
        for i, n in enumerate(map(int, rng.integers(1000, 9000, 120)))
    )  # fmt: skip
    model = SearchSpace(groups, sum(group.count for group in groups), 0)
    targets = np.linspace(4.01, 15.99, 20)
    chosen = [choose(model, float(target)) for target in targets]
    costs = [sum(option.kl for option in options) for options in chosen]
    assert all(model.bits(options) <= target for target, options in zip(targets, chosen, strict=True))
    assert costs == sorted(costs, reverse=True)
    monkeypatch.setattr(recipe, "STATES", 100_000)
    best = [sum(option.kl for option in choose(model, float(target))) for target in targets]
    assert best != costs
    assert np.allclose(costs, best, rtol=0.03, atol=0.05)


# -- the file ---------------------------------------------------------------------------------------------------------


def groups_of(*choices: tuple[str, int | None, str | None]) -> tuple[list[ParamGroup], list[Option]]:
    groups = [ParamGroup(path, layer, (), 1, ()) for path, layer, _ in choices]
    return groups, [Option(qtype, 32 if qtype == "int4" else None, 8, 0.1) for *_, qtype in choices]


def test_layers_of_one_kind_share_a_rule():
    attn, mlp = "layers/{}/attn/.*", "layers/{}/mlp/.*"
    groups, options = groups_of(
        (attn, 0, "int8"), (mlp, 0, "int4"),
        (attn, 1, None), (mlp, 1, "int4"),
        (attn, 2, "int8"), ("lm_head", None, "int8"),
    )  # fmt: skip
    assert recipe.rules(groups, options) == [
        "- {module_path: 'layers/(0|2)/attn/.*', weight_qtype: int8}",
        r"- {module_path: 'layers/\d+/mlp/.*', weight_qtype: int4, tile_size: 32}",
        "- {module_path: 'lm_head', weight_qtype: int8}",
    ]


def test_a_rule_for_all_layers_of_a_path_is_not_one_for_all_layers():
    """Layers with an indexer have another path, whose modules `attn/.*` matches too."""
    whole, parts, indexer = (f"layers/{{}}/attn/{end}" for end in (".*", "(k|o|q|v)", "indexer/.*"))
    groups, options = groups_of(
        (whole, 0, "int8"), (parts, 1, "int4"), (indexer, 1, None), (whole, 2, "int8"),
    )  # fmt: skip
    names = [("attn.q", "attn.o"), ("attn.q", "attn.o"), ("attn.indexer.q",), ("attn.q", "attn.o")]
    groups = [
        replace(group, names=tuple(f"layers.{group.layer}.{name}.kernel" for name in own))
        for group, own in zip(groups, names, strict=True)
    ]
    assert recipe.rules(groups, options) == [
        "- {module_path: 'layers/(0|2)/attn/.*', weight_qtype: int8}",
        "- {module_path: 'layers/1/attn/(k|o|q|v)', weight_qtype: int4, tile_size: 32}",
    ]


@pytest.mark.parametrize("name", ["a\nqwix: {}", "b\x00", "c: &d {", "机器"])
def test_no_name_breaks_the_file(name):
    option = Option("int8", None, 8, 0.1)
    group = ParamGroup("lm_head", None, (), 1, (Option(None, None, 16, 0.0), option))
    text = to_yaml(SearchSpace((group,), 2, 16), [option], [f"Of {name}"])
    (rule,) = parse_config(text.encode(), "c", "c.yaml").rules
    assert (rule.module_path, rule.weight_qtype, rule.line) == (
        "lm_head",
        "int8",
        text.count("\n"),
    )


def run(*args: object) -> dict:
    done = subprocess.run([sys.executable, "-m", "tpuconv", *map(str, args), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_command_writes_a_config_that_quantizes_to_what_it_says(ckpt, tmp_path):
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    facts = run("quantize", ckpt, "--target-bits", 9, "--out-config", file, "--method", "nearest")
    costs = [max(option["kl"] for option in group["options"]) for group in facts["groups"]]
    assert costs == sorted(costs, reverse=True)
    assert set(facts) == {"checkpoint", "dtype", "method", "prompts", "tokens", "reused", "groups", "recipe"}
    own = facts["recipe"]
    assert own["bits_per_weight"] <= 9
    quantized = run("quantize", ckpt, out, "--config", file)["quantization"]
    assert quantized["bits_per_weight"] == own["bits_per_weight"]
    assert {row["name"]: row["qtype"] for row in quantized["tensors"]} == {
        name: own["chosen"][group.pattern]
        for group in find_choices(read_manifest(ckpt)).space.groups
        for name in group.names
        if own["chosen"][group.pattern]
    }
    ids = tokenize(ckpt, [], read_manifest(ckpt).arrays["embed.embedding"].shape[0])
    assert own["measured_kl"] == pytest.approx(divergence(ckpt, out, ids), rel=1e-3)
    assert len(find_config(str(file)).rules) < len(facts["groups"])
    kept = run("quantize", ckpt, "--sensitivity", "--method", "nearest")
    assert kept["groups"] == facts["groups"]
    again = run("quantize", ckpt, "--target-bits", 9, "--out-config", tmp_path / "again.yaml", "--method", "nearest")
    assert (kept["reused"], again["reused"]) == (True, True)
    assert {**again["recipe"], "out": own["out"], "picture": own["picture"]} == own


def test_labels_of_the_picture_do_not_overlap():
    """Two points at one place, and a third one far away: the second label moves, the others stay above their points."""
    heights = label_heights([(100, 50, 20), (110, 52, 20), (600, 50, 20)])
    assert heights[0] == heights[2]
    assert abs(heights[0] - heights[1]) >= LINE_HEIGHT


def test_the_command_that_is_shown_next_has_the_text_of_the_measurement(ckpt, tmp_path, monkeypatch, capsys):
    """A config that is rounded to nearest has no text, whose options are then refused."""
    file = tmp_path / "mine of 9.yaml"

    def shown_next(*args: object) -> list[str]:
        line = ["quantize", ckpt, "--target-bits", 9, "--out-config", file, "--overwrite", *args]
        command.main(list(map(str, line)), standalone_mode=False)
        return shlex.split(capsys.readouterr().out.split("Next:\n  tpuconv ")[1])

    following = shown_next("--method", "nearest")
    assert run(*following, "--explain")["config"]["name"] == "mine of 9"
    found = api.sensitivity(ckpt, target_bits=9, recipe=file, method="nearest", overwrite=True)

    def measured(*_: object, **__: object) -> api.Sensitivity:
        return found

    measured.request = api.sensitivity.request
    monkeypatch.setattr(api, "sensitivity", measured)  # without a run by GPTQ
    text = ("--calibration", "a text.txt", "--samples", "2", "--length", "16")
    assert shown_next(*text) == ["quantize", str(ckpt), "--config", str(file), *text]
    assert shown_next() == ["quantize", str(ckpt), "--config", str(file)]


@pytest.fixture
def copied(ckpt, tmp_path) -> Path:
    """A checkpoint of which nothing was measured."""
    return Path(shutil.copytree(ckpt, tmp_path / "ckpt"))


def test_costs_are_kept_for_the_same_checkpoint_prompts_and_rounding(copied, tmp_path):
    manifest, rounding = read_manifest(copied), (recipe_calibration("gptq"), from_ids("x", np.zeros((1, 4))))
    space = find_choices(manifest).space
    numbers = iter(np.random.default_rng(0).random(1000).tolist())
    groups = [
        replace(group, options=tuple(replace(option, kl=next(numbers)) for option in group.options))
        for group in space.groups
    ]
    assert KeptCosts(manifest, space, IDS, rounding).read() is None
    KeptCosts(manifest, space, IDS, rounding).write(groups)
    assert KeptCosts(manifest, space, IDS, rounding).read() == groups
    assert KeptCosts(manifest, space, IDS[:1], rounding).read() is None
    assert KeptCosts(manifest, space, IDS, None).read() is None
    assert KeptCosts(manifest, space, IDS, (rounding[0], from_ids("x", np.ones((1, 4))))).read() is None
    assert KeptCosts(manifest, space, IDS, (replace(rounding[0], damping=0.1), rounding[1])).read() is None
    fewer = replace(space, groups=space.groups[1:])
    assert KeptCosts(manifest, fewer, IDS, rounding).read() is None
    other = replace(manifest, sealed=replace(manifest.sealed, identity="another"))
    assert KeptCosts(other, space, IDS, rounding).read() is None
    file = tmp_path / ".ckpt.sensitivity.json"
    for damaged in (b"", b"[]", b'{"facts": {}}', file.read_bytes().replace(b'"costs": [[', b'"costs": [["x", ')):
        file.write_bytes(damaged)
        assert KeptCosts(manifest, space, IDS, rounding).read() is None


def test_costs_that_were_kept_are_not_measured_again(copied, monkeypatch):
    manifest = read_manifest(copied)
    space = find_choices(manifest).space
    groups = [replace(g, options=tuple(replace(o, kl=i / 8) for i, o in enumerate(g.options))) for g in space.groups]
    KeptCosts(manifest, space, tokenize(copied, [], manifest.arrays["embed.embedding"].shape[0]), None).write(groups)
    monkeypatch.setattr(layerwise, "LayerwiseProbe", None)
    found = api.sensitivity(copied, method="nearest")
    assert found.reused
    assert found.groups == groups


def test_predicted_bits_are_those_of_the_report_exactly(ckpt, tmp_path):
    model = find_choices(read_manifest(ckpt)).space
    options = [group.options[i % 3] for i, group in enumerate(model.groups)]
    text = to_yaml(model, options, [])
    assert "gates" not in text  # none that its own measurement could break
    quantize(ckpt, tmp_path / "out", parse_config(text.encode(), "c", "c.yaml"))
    assert report(read_manifest(tmp_path / "out").raw).weight_bits == model.bits(options)


def test_what_cannot_be_measured_is_refused_before_weights_are_read(ckpt, tmp_path, monkeypatch):
    hollow = tmp_path / "hollow"  # of its weights nothing is there
    hollow.mkdir()
    for name in ("tpuconv.json", "config.json"):
        (hollow / name).write_bytes((ckpt / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there.yaml"
    there.write_text("mine")

    def refused(error: type[Exception], message: str, *args: object) -> None:
        with pytest.raises(error, match=message):
            command.main(["quantize", *map(str, args)], standalone_mode=False)

    refused(UsageError, r"4 bits a weight cannot be reached.* to 16\.0000", hollow, "--target-bits", 4)
    refused(UsageError, "16 bits a weight cannot be reached", hollow, "--target-bits", 16)
    refused(click.BadParameter, "nan is not a finite number", hollow, "--target-bits", "nan")
    refused(OutputError, "there.yaml exists", hollow, "--target-bits", 9, "--out-config", there)
    refused(
        UsageError,
        "is a folder, or its folder does not exist",
        hollow,
        "--target-bits",
        9,
        "--out-config",
        "no/such.yaml",
    )
    refused(UsageError, "quantizes nothing", hollow, "out", "--sensitivity")
    refused(UsageError, "quantizes nothing", hollow, "--sensitivity", "--config", "int8_default")
    refused(UsageError, "--explain goes with --config", hollow, "--sensitivity", "--explain")
    refused(UsageError, "--out-config goes with --target-bits", hollow, "--sensitivity", "--out-config", "a.yaml")
    refused(UsageError, "--prompts goes with", hollow, "--config", "int8_default", "--prompts", there)
    refused(UsageError, "has no tokenizer for the prompts", hollow, "--sensitivity", "--prompts", there)
    assert there.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hollow", "there.yaml"]


def test_only_whole_models_that_are_not_quantized_are_measured(ckpt, hf, tmp_path):
    source = hf(ONE_OF_EACH["llama"], "bfloat16")
    quantize(ckpt, tmp_path / "quantized", find_config("int8_weight_only"))
    with pytest.raises(UsageError, match="is quantized already, with int8_weight_only"):
        find_choices(read_manifest(tmp_path / "quantized"))
    convert(source, tmp_path / "part", Options(layers=range(1)))
    with pytest.raises(UsageError, match="a trial, not a complete model"):
        find_choices(read_manifest(tmp_path / "part"))


@pytest.mark.parametrize(
    "case",
    [
        "llama-plain",
        pytest.param("deepseek_v3-groups", marks=pytest.mark.slow),
        pytest.param("gemma3-plain", marks=pytest.mark.slow),
    ],
)
def test_a_release_costs_what_its_checkpoint_costs(case, hf, tmp_path):
    """Plain, in FP8, and with a tower."""
    source, out = hf(BY_ID[case], "bfloat16"), tmp_path / "made" / "ckpt"
    if case.startswith("deepseek"):
        write_encoded(BY_ID[case], fp8, lambda case: hf(case, "bfloat16"), source := tmp_path / "fp8")
    out.parent.mkdir()
    api.convert(source, out)
    ours, theirs = (api.sensitivity(place, method="nearest") for place in (out, source))
    assert [group.to_json() for group in theirs.groups] == [group.to_json() for group in ours.groups]
    assert not list(source.parent.glob(f".{source.name}*"))
    assert not theirs.reused


def test_what_is_made_of_one_tensor_is_made_once(hf, monkeypatch):
    """In the order in which a layer has its arrays, in which others are between those of one tensor."""
    with opened_model(hf(BY_ID["phi3-plain"], "bfloat16"), Options()) as opened, opened.reading() as read:
        made, boxes = [], SlabArrays.boxes
        monkeypatch.setattr(SlabArrays, "boxes", lambda self, slab, _: made.append(slab) or boxes(self, slab, _))
        runner = LayerRunner(opened.manifest, 8, read)
        for _ in range(2):
            made.clear()
            runner.weights("layers.0")
            assert len(made) == len({id(slab) for slab in made})
            assert len(made) < len(runner.names("layers.0"))


def test_a_file_that_came_to_be_meanwhile_is_not_replaced(tmp_path):
    file = tmp_path / "recipe.yaml"
    check_free(file, "recipe", overwrite=False)
    file.write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        write_report("ours", file, "recipe", overwrite=False)
    assert file.read_text() == "mine"
    with pytest.raises(OutputError, match="is neither a page nor a recipe of tpuconv"):
        write_report("ours", file, "recipe", overwrite=True)
    assert file.read_text() == "mine"
    for earlier in ("", f"# {MADE_BY} 0.1"):
        file.write_text(earlier)
        write_report("ours", file, "recipe", overwrite=True)
        assert file.read_text() == "ours"


def test_a_folder_in_which_no_file_can_be_made_is_named_before_anything_is_measured():
    file = Path("/proc/recipe.yaml")
    with pytest.raises(ResourceError, match=r"recipe\.yaml cannot be written: ") as error:
        check_free(file, "recipe", overwrite=False)
    assert error.value.hint == "name another file by `recipe=`"

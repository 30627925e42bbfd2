"""Recipes: the commands parse, the sizes are those of plans, and the pages of released models are up to date."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.commands import EXAMPLE, LISTINGS, tpuconv
from helpers.pages import blocks_of, parse
from tpuconv import api
from tpuconv.api.performance import _described
from tpuconv.api.recipe_facts import SPARE, CommandCall, ModelRecipe
from tpuconv.api.recipe_steps import recipe_of, smallest_slices
from tpuconv.commands.recipe import command_line
from tpuconv.errors import SourceError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.verify.topology.request import ENVIRONMENT

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
CONFIGS = json.loads((ROOT / "docs" / "recipe_configs.json").read_text())
COPIES = ("meta-llama/Llama-4-Scout-17B-16E-Instruct-withvision",)
FITS = json.loads((ROOT / "docs" / "recipe_fits.json").read_text())
FAST = ("Qwen/Qwen3-8B", "openai/gpt-oss-20b")


@pytest.fixture(scope="module")
def maker() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "make_recipes.py")))


@pytest.fixture(scope="module")
def example() -> ModelRecipe:
    return api.recipe(EXAMPLE)


def commands_of(found: ModelRecipe) -> list[str]:
    return [command_line(call) for step in found.steps for call in step.calls]


def test_every_command_parses(example: ModelRecipe) -> None:
    lines = commands_of(example)
    assert len(lines) > 15
    for line in lines:
        parse(line)
    for step in example.steps:
        if step.language == "python":
            compile("\n".join(step.elsewhere), step.title, "exec")


def test_sizes_are_those_of_the_plans(example: ModelRecipe) -> None:
    plan = api.plan(EXAMPLE).plan
    assert (example.parameters, example.output_bytes) == (plan.parameters, plan.output_bytes)
    assert example.family == "qwen3"
    sizes = {form.name: form.device_bytes for form in example.forms}
    assert sizes["unquantized"] == plan.output_bytes
    int8 = api.plan(EXAMPLE, quantize="int8_weight_only").plan.output_bytes
    assert sizes["int8_weight_only"] == pytest.approx(int8, rel=1e-3)
    assert sizes["int4_weight_only"] < sizes["int8_weight_only"] < sizes["unquantized"]
    assert {each.target for each in example.targets if not each.supported} == {"gemma"}


def test_slices_hold_the_bytes_with_room_to_spare() -> None:
    gib = 1 << 30
    assert smallest_slices(1)["v5e"] == "v5e:1x1"
    limit = int((1 - SPARE) * int(15.75 * gib))
    assert smallest_slices(limit)["v5e"] == "v5e:1x1"
    assert smallest_slices(limit + 2)["v5e"] == "v5e:2x2"
    assert smallest_slices(1 << 60)["v5e"] is None


def test_a_config_alone_gives_the_same_commands(example: ModelRecipe, tmp_path: Path) -> None:
    folder = tmp_path / EXAMPLE.name
    folder.mkdir()
    shutil.copy(EXAMPLE / "config.json", folder)
    for model in (folder / "config.json", folder):
        found = api.recipe(model)
        assert not found.from_headers
        assert (found.parameters, found.tensors) == (example.parameters, example.tensors)
        assert commands_of(found) == [line.replace(str(EXAMPLE), str(folder)) for line in commands_of(example)]


def test_what_is_no_config_alone_is_named(tmp_path: Path) -> None:
    """A checkpoint of ours, pickles, an index without its shards, and a name that the system refuses."""
    api.convert(EXAMPLE, tmp_path / "ours")
    for name, other in (("pickled", "pytorch_model.bin"), ("indexed", "model.safetensors.index.json")):
        (tmp_path / name).mkdir()
        shutil.copy(EXAMPLE / "config.json", tmp_path / name)
        (tmp_path / name / other).write_text('{"weight_map": {"a": "b.safetensors"}}')
    for model, message in (
        (tmp_path / "ours", "is converted already"),
        (tmp_path / "pickled", "pickled holds"),
        (tmp_path / "indexed", "1 of 1 shards is missing"),
        ("x" * 5000, "File name too long"),
    ):
        with pytest.raises((UsageError, SourceError), match=message):
            api.recipe(model)


@pytest.mark.parametrize(("key", "dtype"), [("dtype", "float32"), ("torch_dtype", "float32"), ("dtype", "float16")])
def test_weights_have_the_size_that_config_json_states(key: str, dtype: str, tmp_path: Path) -> None:
    config = {k: v for k, v in json.loads((EXAMPLE / "config.json").read_text()).items() if k != "dtype"}
    sizes = []
    for stated in ({}, {key: dtype}):
        (tmp_path / "config.json").write_text(json.dumps(config | stated))
        sizes.append(api.recipe(tmp_path / "config.json").to_json()["source_bytes"])
    is_wide = dtype == "float32"
    assert sizes[1] == (2 if is_wide else 1) * sizes[0]
    asked = _described(str(tmp_path / "config.json"), None, "dequantize", "auto", write_layouts=False)
    assert asked["dtype"] == ("float32" if is_wide else "bfloat16")


def test_a_config_alone_tells_the_encoders(tmp_path: Path) -> None:
    """Sizes of Qwen3-VL-2B, with one layer of 28: the whole model has 2,127,532,032 parameters, 1,720,574,976 of them
    in its text model."""
    text = {"head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}
    text |= {"num_hidden_layers": 1, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True}
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
    config = {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": text | {"model_type": "qwen3_vl_text"},
    }
    config["vision_config"] = vision | {"deepstack_visual_indexes": [5, 11, 17]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3VLForConditionalGeneration"]}))
    found = api.recipe(tmp_path / "config.json")
    assert found.parts == ("vision",)
    text_layer = (1_720_574_976 - 151_936 * 2048 - 2048) // 28
    assert found.parameters == 2_127_532_032 - 27 * text_layer


def test_a_part_whose_config_is_null_is_not_described(maker: SimpleNamespace) -> None:
    """Gemma 4 31B has images and no sounds: 31.3 billion parameters."""
    known = CONFIGS["google/gemma-4-31B-it"]["config"]
    assert known["audio_config"] is None
    found, _ = maker.found_recipes()["google/gemma-4-31B-it"]()
    assert found.parts == ("vision",)
    assert found.parameters == pytest.approx(31.27e9, rel=1e-3)


def test_what_a_model_cannot_have_is_told(maker: SimpleNamespace) -> None:
    """gpt-oss has no table for Tunix, and groups of 128 do not divide its axes."""
    model = "openai/gpt-oss-20b"
    found = recipe_of(maker.listed_source(model, LISTINGS[model]), model, model, from_headers=True)
    refused = {each.target: each.refusal for each in found.targets if not each.supported}
    assert "no table for gpt_oss" in refused["tunix"]
    lines = commands_of(found)
    assert not [line for line in lines if "tunix" in line]
    assert f"tpuconv convert {model} gpt-oss-20b-orbax-kept --encoding keep" in lines
    assert {form.name for form in found.forms} >= {"as released", "mxfp4_weight_only"}


def test_options_are_written_as_flags() -> None:
    call = CommandCall("fit", ("a b",), {"topologies": ["v5e", "v6e"], "encoding": "keep"})
    assert command_line(call) == "tpuconv fit 'a b' --topology v5e --topology v6e --encoding keep"
    assert command_line(CommandCall("convert", ("x",), {"dry_run": True})) == "tpuconv convert x --dry-run"


def test_the_command(tmp_path: Path) -> None:
    facts = json.loads(tpuconv("recipe", EXAMPLE, "--json").stdout)
    assert facts["family"] == "qwen3"
    assert facts["steps"][0]["commands"][0] == f"tpuconv convert {EXAMPLE} --dry-run"
    said = tpuconv("recipe", EXAMPLE).stdout
    assert "--target maxtext --scan-layers" in said
    assert "int8_weight_only" in said
    (tmp_path / "config.json").write_text('{"model_type": "xlstm", "architectures": ["xLSTMForCausalLM"]}')
    assert "networks without attention" in tpuconv("recipe", "config.json", cwd=tmp_path, code=5).stderr


def test_models_without_a_family_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(UnsupportedConfig, match="recurrent"):
        api.recipe(tmp_path / "config.json")
    with pytest.raises(TpuconvError):
        api.recipe(tmp_path / "missing.json")


def check_page(maker: SimpleNamespace, model: str) -> None:
    found, against = maker.found_recipes()[model]()
    page = ROOT / "docs" / "recipes" / maker.page_name(model)
    assert page.read_text() == maker.recipe_page(found, against), "run `python docs/make_recipes.py`"
    assert maker.index_row(found) in (ROOT / "docs" / "recipes" / "index.md").read_text()


@pytest.mark.parametrize("model", FAST)
def test_pages_are_up_to_date(maker: SimpleNamespace, model: str) -> None:
    check_page(maker, model)


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in {**LISTINGS, **CONFIGS} if model not in (*FAST, *COPIES)])
def test_other_pages_are_up_to_date(maker: SimpleNamespace, model: str) -> None:
    check_page(maker, model)


def test_rows_of_the_compiler_fit_their_slices() -> None:
    for model, facts in FITS.items():
        assert model in {**LISTINGS, **CONFIGS}
        assert facts["form"] in ("as released", "int8_weight_only")
        for row in facts["rows"]:
            assert "why" in row or row["weights"] + row["cache"] + row["programs"] <= row["available"]


@pytest.mark.slow
def test_the_compiler_answers_again_what_a_page_says(maker: SimpleNamespace) -> None:
    model = "Qwen/Qwen3-0.6B"
    known, form = FITS[model]["rows"][0], FITS[model]["form"]
    asked = json.dumps([maker.config_of(model), form, known["slice"], known["prefill"]])
    command = [sys.executable, ROOT / "benchmarks" / "recipe_fits.py", "--row"]
    env = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, input=asked, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for key, value in known.items():
        assert found[key] == (pytest.approx(value, rel=0.1) if key in ("programs", "decode_ms") else value)


def test_every_listed_model_has_a_page_whose_commands_parse(maker: SimpleNamespace) -> None:
    assert maker.COPIES == COPIES
    assert {page.name for page in PAGES} == {
        "index.md",
        *map(maker.page_name, (LISTINGS.keys() | CONFIGS.keys()) - set(COPIES)),
    }
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f"recipes/{page.name}" in nav
        for block in blocks_of(page):
            if block.language == "python":
                compile(block.text, str(page), "exec")
            for line in block.commands():
                if line.startswith("tpuconv "):
                    parse(line)

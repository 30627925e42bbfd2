"""The command line: help, wrong arguments, JSON, exit codes, and the example from conversion to verification."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.checkpoints import (
    hollow_checkpoint,
    json_headers,
    qwen3_config,
    random_checkpoint,
    read_tensors,
    write_checkpoint,
)
from helpers.commands import EXAMPLE, LISTINGS, SAMPLE, every_name, forked, tpuconv
from helpers.families import CORE
from helpers.times import ProcessorTime
from tpuconv import api, cli
from tpuconv.errors import UnsupportedConfig
from tpuconv.models.registry import family_names, find_family, get_family
from tpuconv.names import collapse
from tpuconv.sources.headers import read_header
from tpuconv.targets.registry import get_target
from tpuconv.verify.reference_types import reference_config

COMMANDS = (
    "explain",
    "convert",
    "quantize",
    "export",
    "reshard",
    "push",
    "verify",
    "compare",
    "benchmark",
    "fit",
    "generate",
    "inspect",
    "families",
    "recipe",
    "doctor",
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """A part of the held-out sample: transformers takes a third of a second for each line on a processor."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(SAMPLE.read_text().splitlines()[:40]))
    return path


@pytest.fixture(scope="module")
def few_prompts(prompts) -> Path:
    """So few that figures say little: enough where a model is wrong, or twice the same."""
    path = prompts.with_name("few.txt")
    path.write_text("\n".join(prompts.read_text().splitlines()[:6]))
    return path


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_the_commands_work_one_after_the_other_as_they_stand(converted):
    assert sorted(os.listdir(converted)) == ["tiny-qwen3-orbax"]
    assert "tiny-qwen3-orbax, the newest checkpoint in this folder" in tpuconv("verify", cwd=converted).stdout
    assert "tiny-qwen3-orbax, this folder" in tpuconv("verify", cwd=converted / "tiny-qwen3-orbax").stdout
    compared = tpuconv("verify", "--compare-hf", cwd=converted).stdout
    assert "tiny-qwen3-orbax, the newest checkpoint in this folder" in compared
    assert "failed" not in compared


def test_a_checkpoint_for_another_program_is_not_taken_for_ours(converted, tmp_path):
    """Without CKPT, by a command that runs the model."""
    shutil.copytree(converted / "tiny-qwen3-orbax", tmp_path / "tiny-qwen3-orbax")
    tpuconv("convert", EXAMPLE, "--target", "maxtext", cwd=tmp_path)
    assert "tiny-qwen3-maxtext" in tpuconv("verify", cwd=tmp_path).stdout
    said = tpuconv("generate", "--prompt", "In", "--max-new-tokens", "2", cwd=tmp_path).stdout
    assert said.startswith("Generating with tiny-qwen3-orbax, the newest checkpoint in this folder.")


def test_a_checkpoint_is_compared_with_the_folder_that_it_was_made_of(tmp_path, few_prompts, monkeypatch):
    """Another folder has the same weights and another config.json. Of the own one a changed config.json is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of no copies of other tests
    for name, theta in (("base", "1000000.0"), ("variant", "10000.0")):
        shutil.copytree(EXAMPLE, tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(config.read_text().replace("1000000.0", theta))
        tpuconv("convert", name, cwd=tmp_path)
    args = ("verify", "base-orbax", "--compare-hf", "--prompts", few_prompts)
    said = tpuconv(*args, cwd=tmp_path).stdout.replace("\n", "")
    assert f"source: {tmp_path / 'base'}, unchanged since the conversion" in said
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace("1000000.0", "20000.0"))
    done = tpuconv(*args, cwd=tmp_path, code=3)
    assert f"source: {tmp_path / 'base'}, changed since the conversion: config.json" in done.stdout.replace("\n", "")
    assert "the source changed since the conversion: convert it again" in done.stderr


def test_an_older_checkpoint_that_is_damaged_is_in_nobodys_way(converted, tmp_path):
    """Where CKPT is left out, the newest one is taken. If that one is damaged, it is named."""
    for name in ("old", "new"):
        shutil.copytree(converted / "tiny-qwen3-orbax", tmp_path / name)
        os.utime(tmp_path / name / "tpuconv.json", (0, 0 if name == "old" else 1e9))
    (tmp_path / "old" / "tpuconv.json").write_text("{")
    os.utime(tmp_path / "old" / "tpuconv.json", (0, 0))
    assert "Generating with new," in tpuconv("generate", "--prompt", "In", "--max-new-tokens", "2", cwd=tmp_path).stdout
    os.utime(tmp_path / "old" / "tpuconv.json", (2e9, 2e9))
    said = tpuconv("generate", "--prompt", "In", "--max-new-tokens", "2", cwd=tmp_path, code=10).stderr
    assert "old/tpuconv.json" in said


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (("convert", EXAMPLE), "tiny-qwen3-orbax"),
        (("convert", EXAMPLE, "--quantize", "int8_default"), "tiny-qwen3-orbax-int8_default"),
        (("convert", EXAMPLE, "--target", "nnx"), "tiny-qwen3-nnx"),
        (("convert", EXAMPLE, "--target", "nnx", "--quantize", "int8_default"), "tiny-qwen3-nnx-int8_default"),
    ],
)
def test_without_out_the_name_says_the_target_and_the_config(tmp_path, args, name):
    """`quantize` gives the same name, and outputs of two targets have two."""
    tpuconv(*args, cwd=tmp_path)
    assert os.listdir(tmp_path) == [name]


def test_converted_quantized_and_verified_in_three_commands(tmp_path):
    tpuconv("convert", EXAMPLE, cwd=tmp_path)
    said = tpuconv("quantize", "--config", "int8_default.yaml", cwd=tmp_path).stdout
    assert "tiny-qwen3-orbax, the newest checkpoint in this folder" in said
    assert "8.30 bits a weight" in said
    compared = tpuconv("verify", "--compare-hf", cwd=tmp_path).stdout
    assert "tiny-qwen3-orbax-int8_default, the newest checkpoint in this folder" in compared
    assert compared.count("holds") == 1
    inside = tmp_path / "tiny-qwen3-orbax"
    for here in ((), (".",)):  # OUT is beside the checkpoint, and is there already
        done = json.loads(tpuconv("quantize", *here, "--config", "int8_default", "--json", cwd=inside).stdout)
        assert Path(done["out"]) == tmp_path.resolve() / "tiny-qwen3-orbax-int8_default"
    again = tpuconv("quantize", "--config", "int8_default.yaml", cwd=tmp_path).stdout
    assert "tiny-qwen3-orbax-int8_default exists already" in again
    assert sorted(os.listdir(tmp_path)) == ["tiny-qwen3-orbax", "tiny-qwen3-orbax-int8_default"]
    facts = json.loads(tpuconv("quantize", "--config", "int4_ends_int8", "--explain", "--json", cwd=tmp_path).stdout)
    kinds = {row["parameter"]: row["qtype"] for row in facts["parameters"]}
    assert (kinds["layers.1.mlp.up.kernel"], kinds["layers.2.mlp.up.kernel"]) == ("int8", "int4")
    assert kinds["norm.scale"] is None


def test_the_trained_example_in_bfloat16_agrees_with_transformers(converted, prompts):
    args = ("verify", "tiny-qwen3-orbax", "--compare-hf", "--dtype", "bfloat16", "--prompts", prompts, "--json")
    facts = json.loads(tpuconv(*args, cwd=converted).stdout)
    assert set(facts) >= {
        "passed", "max_abs_difference", "max_abs_logit", "mean_kl", "p999_kl", "top1", "perplexity",
    }  # fmt: skip
    assert facts["passed"] is True
    assert facts["dtype"] == "bfloat16"
    assert facts["top1"] >= 0.99
    assert facts["mean_kl"] <= 1e-3 <= facts["gates"]["mean_kl"]
    assert facts["rounding_kl"] > 0
    assert facts["perplexity"]["hf"] == pytest.approx(facts["perplexity"]["jax"], rel=2e-3)
    assert facts["perplexity"]["hf"] < 4  # bytes; 256 would be chance


def test_the_trained_example_in_float32_is_the_same_mathematics(converted, few_prompts):
    args = ("verify", "tiny-qwen3-orbax", "--compare-hf", "--prompts", few_prompts, "--json")
    facts = json.loads(tpuconv(*args, cwd=converted).stdout)
    assert (facts["dtype"], facts["rounding_kl"]) == ("float32", None)
    assert facts["max_abs_difference"] <= 2e-5 * facts["max_abs_logit"]
    assert facts["top1"] == 1.0


def test_a_wrong_model_fails_the_gates(tmp_path, few_prompts):
    """One norm's scales lost: the conversion is whole, but it is not the source's."""
    tensors = {name: x.copy() for name, x in read_tensors(EXAMPLE).items()}
    tensors["model.layers.0.self_attn.q_norm.weight"][:] = 1
    config = json.loads((EXAMPLE / "config.json").read_text())
    tpuconv("convert", write_checkpoint(tmp_path / "wrong", config, tensors), cwd=tmp_path)
    args = ("verify", "--compare-hf", "--source", EXAMPLE, "--prompts", few_prompts)
    facts = json.loads(tpuconv(*args, "--json", cwd=tmp_path, code=3).stdout)
    assert facts["passed"] is False
    assert [failure.split()[0] for failure in facts["failures"]] == ["relative_difference", "mean_kl", "top1"]


@pytest.mark.slow
def test_a_failed_gate_with_the_weights_of_the_source_leads_to_the_layers(converted, few_prompts, tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "hf")
    config = json.loads((EXAMPLE / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    args = ("verify", "tiny-qwen3-orbax", "--compare-hf", "--source", tmp_path / "hf", "--prompts", few_prompts)
    assert "--layerwise names the first layer that differs" in tpuconv(*args, cwd=converted, code=3).stderr


def test_an_interrupted_comparison_does_not_say_that_it_continues(converted, few_prompts):
    patch = "import tpuconv.verify.reference as r\ndef stop(*_, **__): raise KeyboardInterrupt\nr.reference = stop"
    done = forked(["verify", "tiny-qwen3-orbax", "--compare-hf", "--prompts", str(few_prompts)], converted, patch)
    assert (done.returncode, done.stderr.split("\n")[-2]) == (130, "Interrupted.")


def test_on_a_mesh_it_computes_the_same(converted, few_prompts, monkeypatch):
    args = ("verify", "tiny-qwen3-orbax", "--compare-hf", "--dtype", "float32", "--prompts", few_prompts, "--json")
    refused = tpuconv(*args, "--mesh", "data=2,tensor=2", cwd=converted, code=2)
    assert "needs 4 devices, there are 1" in refused.stdout
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    facts = json.loads(tpuconv(*args, "--mesh", "data=2,tensor=2", cwd=converted).stdout)
    assert (facts["passed"], facts["mesh"]) == (True, {"data": 2, "tensor": 2})
    assert facts["max_abs_difference"] <= 2e-5 * facts["max_abs_logit"]


def test_layer_by_layer_the_first_that_departs_is_named(tmp_path, few_prompts):
    tensors = {name: x.copy() for name, x in read_tensors(EXAMPLE).items()}
    tensors["model.layers.2.self_attn.q_norm.weight"][:] = 1
    config = json.loads((EXAMPLE / "config.json").read_text())
    tpuconv("convert", write_checkpoint(tmp_path / "wrong", config, tensors), cwd=tmp_path)
    args = ("verify", "--compare-hf", "--layerwise", "--source", EXAMPLE, "--prompts", few_prompts)
    done = tpuconv(*args, cwd=tmp_path, code=3)
    assert "layer 2 is the first to diverge" in done.stderr
    assert re.search(r"layer 2 .* diverges: the gate is 0\.0001\n +layer 3 (?!.*diverges)", done.stdout)
    facts = json.loads(tpuconv(*args, "--json", cwd=tmp_path, code=3).stdout)
    assert facts["first_departing"] == "layer 2"
    assert [part["departs"] for part in facts["layers"]] == [False, False, False, True, False, False]
    assert facts["passed"] is False


def test_without_a_tokenizer_token_ids_are_compared(tmp_path):
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    tpuconv("convert", "hf", cwd=tmp_path)
    facts = json.loads(tpuconv("verify", "--compare-hf", "--json", cwd=tmp_path).stdout)
    assert (facts["passed"], facts["tokens"], facts["dtype"]) == (True, 1024, "float32")
    assert "no tokenizer" in tpuconv("verify", "--compare-hf", "--prompts", SAMPLE, cwd=tmp_path, code=2).stderr


def test_a_damaged_checkpoint_is_named(tmp_path):
    random_checkpoint(tmp_path / "hf", qwen3_config())
    tpuconv("convert", "hf", "out", cwd=tmp_path)
    shard = next((tmp_path / "out/params/layers.1.mlp.up.kernel").glob("c.*"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    done = tpuconv("verify", "out", cwd=tmp_path, code=10)
    assert "the output out has 1 fault" in done.stderr
    assert "give the command that made the output again, with --overwrite" in " ".join(done.stderr.split())
    assert "layers.1.mlp.up.kernel" in done.stderr
    facts = json.loads(tpuconv("verify", "out", "--json", cwd=tmp_path, code=10).stdout)
    assert facts["passed"] is False
    assert [fault["name"] for fault in facts["faults"]] == ["layers.1.mlp.up.kernel"]
    shard.parent.joinpath("zarr.json").unlink()
    assert "tensorstore_spec" not in tpuconv("verify", "out", cwd=tmp_path, code=10).stderr


# -- generate, benchmark -----------------------------------------------------------------------------------------------


def test_a_damaged_export_is_to_be_written_again(converted, tmp_path):
    tpuconv("export", converted / "tiny-qwen3-orbax", "back", cwd=tmp_path)
    (tmp_path / "back" / "config.json").write_text("{}")
    said = tpuconv("verify", "back", cwd=tmp_path, code=10).stderr
    assert "give the command that made them again" in said
    assert "--update" not in said


def test_a_model_that_transformers_does_not_know_is_not_compared(tmp_path):
    config = json.loads((EXAMPLE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen99"}))
    with pytest.raises(UnsupportedConfig, match="has no model of type 'qwen99'"):
        reference_config(tmp_path)


def test_the_example_writes_on(converted):
    """As transformers does, and as it comes."""
    args = ("generate", "--prompt", "The king said", "--max-new-tokens", "40")
    shown = tpuconv(*args, cwd=converted).stdout
    first, text = shown.split("\n", 1)
    assert first == "Generating with tiny-qwen3-orbax, the newest checkpoint in this folder."

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    prompt = tokenizer("The king said", return_tensors="pt")
    ids = AutoModelForCausalLM.from_pretrained(EXAMPLE).generate(**prompt, max_new_tokens=40, do_sample=False)
    assert text == tokenizer.decode(ids[0]) + "\n"
    sampling = ("--temperature", "2", "--top-k", "9", "--top-p", "0.9", "--seed", "1")
    facts = json.loads(tpuconv(*args, *sampling, "--json", cwd=converted).stdout)
    assert (len(facts["ids"]), facts["stopped"]) == (40, "length")
    assert len(facts["text"]) == 40  # a token is a byte
    assert facts["text"] not in text


def test_a_benchmark_tells_what_was_reached_and_on_what(converted):
    args = ("benchmark", "--batch", "1,2", "--prompt-length", "9", "--new-tokens", "5", "--repeats", "1")
    facts = json.loads(tpuconv(*args, "--json", cwd=converted).stdout)
    assert {"device", "versions", "commit", "dtype", "limits"} <= set(facts)
    assert facts["text"].startswith(" a little")  # the 9 tokens of the prompt that are read: a token is a byte
    assert len(facts["text"]) == 9 + 5
    assert [(t["batch"], t["prompt_length"], t["new_tokens"]) for t in facts["timings"]] == [(1, 9, 5), (2, 9, 5)]
    for timing in facts["timings"]:
        assert timing["tokens_per_second"] == pytest.approx(timing["batch"] / timing["step_seconds"])
        assert 0 < timing["bandwidth_share"] < 1
        assert 0 < timing["peak_share"] < 1
        assert timing["memory_bytes"] > timing["step_bytes"] > facts_bytes(converted)
    table = tpuconv(*args[:1], *args[3:], "--markdown", cwd=converted).stdout
    assert re.search(r"^\| batch \| prompt \| new \|.*\n\|( --- \|)+\n\| 1 \| 9 \| 5 \|", table, re.MULTILINE)


def facts_bytes(folder: Path) -> int:
    return json.loads(tpuconv("inspect", folder / "tiny-qwen3-orbax", "--json").stdout)["bytes"]


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_everything_and_writes_nothing(tmp_path):
    config = qwen3_config(tie_word_embeddings=True)
    folder = random_checkpoint(tmp_path / "hf", config)
    tensors = read_tensors(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_checkpoint(folder, config, tensors)
    facts = json.loads(tpuconv("convert", "hf", "--dry-run", "--json", "--jobs", "2", cwd=tmp_path).stdout)
    assert facts["family"] == "qwen3"
    assert facts["source"]["tensors"] == len(tensors)
    assert facts["source"]["bytes"] == sum(x.nbytes for x in tensors.values())
    assert facts["mapped"] == len(tensors) - 1
    assert facts["skipped"] == [
        {"pattern": "lm_head.weight", "count": 1, "reason": "a copy of model.embed_tokens.weight"}
    ]
    assert facts["unmapped"] == []
    up = facts["arrays"]["layers.{0...2}.mlp.up.kernel"]
    assert up["sources"] == ["model.layers.{0...2}.mlp.up_proj.weight"]
    assert sum(each["bytes"] for each in facts["arrays"].values()) == facts["output_bytes"]
    assert facts["parameters"] == sum(x.size for n, x in tensors.items() if n != "lm_head.weight")
    assert facts["output_bytes"] == 2 * facts["parameters"]
    assert 0 < facts["peak_memory_bytes"] < 2**30
    table = tpuconv("convert", "hf", "--dry-run", cwd=tmp_path).stdout
    assert re.search(
        r"model\.layers\.\{0\.\.\.2\}\.mlp\.up_proj\.weight +layers\.\{0\.\.\.2\}\.mlp\.up\.kernel +D F", table
    )
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(("free", "is_offered"), [(0.4, False), (0.6, True)])
def test_a_smaller_output_is_offered_where_it_fits(free, is_offered, tmp_path, monkeypatch, capsys):
    from tpuconv.commands import convert

    plan = api.plan(random_checkpoint(tmp_path / "hf", qwen3_config()))
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(plan.disk_bytes * free)))
    convert.show_disk(plan, tmp_path)
    shown = capsys.readouterr().out
    assert "too little disk" in shown
    assert ("int8_weight_only" in shown) == is_offered


def test_a_plan_with_faults_tells_no_sizes(tmp_path):
    config = qwen3_config()
    folder = random_checkpoint(tmp_path / "hf", config)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    done = tpuconv("convert", "hf", "--dry-run", cwd=tmp_path, code=5)
    assert "model.layers.{3...8}.input_layernorm.weight  is missing" in done.stderr
    assert not done.stdout.strip()  # it said "-> 0 arrays, 0 B; 0 parameters"


@pytest.mark.parametrize("command", ["convert", "quantize", "export", "reshard"])
def test_a_dry_run_refuses_the_places_that_a_run_refuses(command, tmp_path):
    tpuconv("convert", EXAMPLE, tmp_path / "ckpt")
    src = EXAMPLE if command == "convert" else tmp_path / "ckpt"
    more = {"quantize": ("--config", "int8_default"), "reshard": ("--mesh", "fsdp=2")}.get(command, ())
    for place, code in ((src / "out", 2), (tmp_path / "ckpt" / "out", 2 if command != "convert" else 9)):
        for dry in ((), ("--dry-run",)):
            assert " lies in " in tpuconv(command, src, place, *more, *dry, code=code).stderr


@pytest.mark.parametrize("options", [(), ("--quantize", "int8_default")], ids=["plain", "quantized"])
def test_a_dry_run_of_an_export_tells_what_it_writes(options, tmp_path_factory, tmp_path):
    ckpt, out = tmp_path_factory.mktemp("ckpt") / "ckpt", tmp_path / "out"
    tpuconv("convert", EXAMPLE, ckpt, *options)
    planned = json.loads(tpuconv("export", ckpt, out, "--dry-run", "--json").stdout)
    table = tpuconv("export", ckpt, out, "--dry-run").stdout
    assert not list(tmp_path.iterdir())
    written = json.loads(tpuconv("export", ckpt, out, "--json").stdout)
    assert {key: planned[key] for key in ("family", "target", "skipped", "files", "bytes")} == {
        key: written[key] for key in ("family", "target", "skipped", "files", "bytes")
    }
    config = json.loads((out / "config.json").read_text())
    assert planned["encoding"] == config.get("quantization_config")
    infos = {info.name: info for info in read_header(out / "model.safetensors")[2]}
    assert sum(tensor["count"] for tensor in planned["tensors"].values()) == len(infos)
    for pattern, names in collapse(infos).items():
        assert planned["tensors"][pattern]["shape"] == list(infos[names[0]].shape)
        assert planned["tensors"][pattern]["dtype"] == infos[names[0]].dtype
    assert ("encoded by compressed-tensors" in table) == bool(options)


def test_an_unmapped_tensor_is_in_the_json_too(tmp_path):
    tensors = read_tensors(random_checkpoint(tmp_path / "hf", qwen3_config()))
    write_checkpoint(tmp_path / "hf", qwen3_config(), tensors | {"model.mtp.weight": np.zeros(3, "f4")})
    done = tpuconv("convert", "hf", "--dry-run", "--json", cwd=tmp_path, code=5)
    facts = json.loads(done.stdout)
    assert facts["unmapped"] == ["model.mtp.weight"]
    assert facts["error"]["exit_code"] == 5
    assert "model.mtp.weight" in tpuconv("convert", "hf", cwd=tmp_path, code=5).stderr
    assert os.listdir(tmp_path) == ["hf"]


REAL_MODELS = [
    pytest.param(model, marks=[pytest.mark.slow] * (find_family(listing["config"]).name not in CORE))
    for model, listing in LISTINGS.items()
]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_real_models_are_planned_whole(model, tmp_path):
    """Names, shapes and configs of real checkpoints: nothing unmapped, the published number of parameters."""
    listing = LISTINGS[model]
    tensors = {n: (dtype, tuple(shape)) for names, dtype, shape in listing["tensors"] for n in every_name(names)}
    write_checkpoint(tmp_path / "hf", listing["config"], tensors, shards=7)
    with ProcessorTime() as reading:
        json_headers(tmp_path / "hf")
    done = tpuconv("convert", "hf", "--dry-run", "--json", "--jobs", "2", cwd=tmp_path)
    assert done.seconds < 5 + 100 * reading.seconds  # 15 times for a large one, half a second for a small one
    facts = json.loads(done.stdout)
    assert facts["unmapped"] == facts["faults"] == []
    assert facts["mapped"] + sum(skip["count"] for skip in facts["skipped"]) == len(tensors)
    assert all(skip["reason"] for skip in facts["skipped"])
    assert facts["peak_memory_bytes"] < 4.7e8
    assert facts["parameters"] == listing["parameters"]  # those of encoders of images too


# -- inspect, families -------------------------------------------------------------------------------------------------


def test_inspect_shows_both_kinds(converted):
    ours = json.loads(tpuconv("inspect", "tiny-qwen3-orbax", "--json", cwd=converted).stdout)
    theirs = json.loads(tpuconv("inspect", EXAMPLE, "--json").stdout)
    file = json.loads(tpuconv("inspect", EXAMPLE / "model.safetensors", "--json").stdout)
    assert (ours["format"], theirs["format"]) == ("tpuconv", "safetensors")
    assert theirs == file
    assert ours["tensors"] == theirs["tensors"] == 57
    assert ours["bytes"] == theirs["bytes"]
    q = next(p for p in ours["patterns"] if p["pattern"] == "layers.{0...4}.attn.q.kernel")
    assert (q["count"], q["axes"], q["shape"], q["dtype"]) == (5, "D N H", [160, 6, 32], "bfloat16")
    assert "layers.{0...4}.attn.q.kernel" in tpuconv("inspect", "tiny-qwen3-orbax", cwd=converted).stdout


def test_inspect_shows_what_a_device_holds(converted):
    plain = json.loads(tpuconv("inspect", "tiny-qwen3-orbax", "--json", cwd=converted).stdout)
    facts = json.loads(
        tpuconv("inspect", "tiny-qwen3-orbax", "--mesh", "data=2,tensor=2", "--json", cwd=converted).stdout
    )
    assert facts["mesh"] == {"data": 2, "tensor": 2}
    own = {row["pattern"]: row for row in facts["patterns"]}
    kernel = own["layers.{0...4}.attn.q.kernel"]
    assert (kernel["axes"], kernel["partition"]) == ("D N H", ["data", "tensor", None])
    assert kernel["device_bytes"] * 4 == kernel["bytes"]
    assert all(row["bytes"] >= row["device_bytes"] >= row["bytes"] / 4 for row in facts["patterns"])
    assert facts["device_bytes"] == sum(row["device_bytes"] for row in facts["patterns"])
    assert [row["bytes"] for row in facts["patterns"]] == [row["bytes"] for row in plain["patterns"]]
    shown = tpuconv("inspect", "tiny-qwen3-orbax", "--mesh", "data=2,tensor=2", cwd=converted).stdout
    assert "data tensor ·" in shown
    refused = tpuconv("inspect", EXAMPLE, "--mesh", "tensor=2", code=2)
    assert "convert it first" in refused.stderr


def test_families_are_listed_with_their_tables():
    listed = json.loads(tpuconv("families", "--json").stdout)["families"]
    assert {"llama", "qwen2", "qwen3", "olmo2"} <= {family["name"] for family in listed}
    table = tpuconv("families", "llama", "--table").stdout
    assert "(N H) D -> D N H" in table
    assert "H: head dimension" in table
    assert "did you mean llama" in tpuconv("families", "lama", code=2).stderr
    of_type = json.loads(tpuconv("families", "mistral", "--json").stdout)["families"]
    assert [family["name"] for family in of_type] == ["llama"]
    wrapper = json.loads(tpuconv("families", "internvl", "--json").stdout)
    assert [row["model_type"] for row in wrapper["wrappers"]] == ["internvl"]
    assert wrapper["families"] == []
    assert "internvl.qwen3" in tpuconv("families", "internvl").stdout


def test_families_of_a_target_are_listed_with_how_they_are_loaded():
    facts = json.loads(tpuconv("families", "--target", "maxtext", "--json").stdout)
    found = {family["name"]: family for family in facts["families"]}
    assert found.keys() == get_target("maxtext").trees.keys()
    assert (facts["loading"], facts["quantized"]) == ("load_parameters_path=OUT/0/items", True)
    assert all(family["scanned"] for family in facts["families"])
    assert "vocab_size" in found["gemma2"]["notes"][0]
    assert found["mistral"]["models"] == "model_type mistral of llama"
    assert found["qwen3"]["models"] == get_family("qwen3").summary
    shown = tpuconv("families", "--target", "tunix").stdout
    assert 'to load OUT there: CheckpointManager("OUT").maybe_restore(model)' in shown
    assert "quantized parameters: no" in shown
    assert "yes" not in shown
    assert "gpt_oss" not in shown


@pytest.mark.parametrize("target", ["nnx", "tpuconv"])
def test_a_target_with_our_own_names_has_every_family(target):
    facts = json.loads(tpuconv("families", "--target", target, "--json").stdout)
    assert [family["name"] for family in facts["families"]] == family_names()
    assert facts["quantized"]
    found = {family["name"]: family for family in facts["families"]}
    assert found["llama"]["scanned"]
    assert not found["llama"]["notes"]
    assert not found["zamba2"]["scanned"]
    assert "layers cannot be scanned: layers share the weights" in found["zamba2"]["notes"][0]
    assert "names: our names" in tpuconv("families", "--target", target, "llama").stdout


def test_one_family_of_a_target_may_be_asked_for():
    facts = json.loads(tpuconv("families", "llama", "--target", "maxtext", "--json").stdout)
    assert [family["name"] for family in facts["families"]] == ["llama", "mistral"]
    assert "the target tunix has no table for olmo2" in tpuconv("families", "olmo2", "--target", "tunix", code=2).stderr
    for mistaken, near in (("maxtex", "maxtext"), ("vllm", "huggingface")):
        assert f"the nearest is {near}" in tpuconv("families", "--target", mistaken, code=2).stderr
    assert "--dry-run" in tpuconv("families", "llama", "--target", "nnx", "--table", code=2).stderr


# -- help and mistakes -------------------------------------------------------------------------------------------------


def test_help_is_fast():
    """It imports click and nothing that computes."""
    times = {"-c": [], "-m": []}
    for _ in range(3):
        for args in (("-c", "import click, click.shell_completion"), ("-m", "tpuconv", "--help")):
            with ProcessorTime(children=True) as taken:
                subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
            times[args[0]].append(taken.seconds)
    assert min(times["-m"]) < 2.2 * min(times["-c"])
    program = "import sys, tpuconv.cli\ntry: tpuconv.cli.main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False)
    assert not {"jax", "numpy", "torch"} & set(done.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_ends_with_examples(command):
    text = tpuconv(command, "--help").stdout
    assert f"  tpuconv {command}" in text.partition("Examples:")[2]


def test_every_command_is_known_here():
    listed = tpuconv("--help").stdout.partition("Commands:")[2]
    assert {line.split()[0] for line in listed.splitlines() if line.strip()} == set(COMMANDS)


MISTAKES = {
    "a command": (("convrt", "x"), 2, "did you mean 'convert'"),
    "an option": (("convert", "x", "--drry-run"), 2, "--dry-run"),
    "a folder": (("convert", "./nowhere"), 2, "nowhere"),
    "a dtype": (("convert", "x", "--dtype", "float3"), 2, "float32"),
    "a size": (("convert", "x", "--max-memory", "lots"), 2, "is not a size"),
    "no memory": (("convert", "x", "--max-memory", "0"), 2, "is not a size"),
    "layers": (("convert", "x", "--layers", "5-3"), 2, "is not a range of layers"),
    "an option that does not go alone": (("verify", "--source", "x"), 2, "--source goes with --compare-hf"),
    "a choice of what is not drawn": (
        ("generate", "--prompt", "x", "--top-k", "5"),
        2,
        "--top-k goes with --temperature",
    ),
    "an option of the benchmark alone": (("verify", "--batch", "2"), 2, "No such option '--batch'"),
    "two ways to verify": (("verify", "--update", "--compare-hf"), 2, "exclude each other"),
    "a list": (("benchmark", "--batch", "1;2"), 2, "is not a list of positive integers"),
    "one new token": (("benchmark", EXAMPLE, "--new-tokens", "1"), 2, "at least 2"),
    "no config": (("quantize",), 2, "--config is missing"),
    "a config": (("quantize", "--config", "int8_defualt"), 2, "did you mean int8_default?"),
    "the type of a config": (("quantize", "--config", "int8"), 2, "or int8_default or"),
    "half a config": (("quantize", "--config", "fp8"), 2, "did you mean fp8_block or fp8_default or fp8_weight_only?"),
    "a process": (("convert", "x", "--process-index", "2", "--process-count", "2"), 2, "the last one is 1"),
    "a seed": (("generate", "--prompt", "x", "--seed", str(1 << 64)), 2, "--seed"),
    "a checkpoint": (("verify", EXAMPLE), 2, f"tpuconv convert {EXAMPLE}"),
    "a folder without checkpoints": (("verify",), 2, "tpuconv convert SRC"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_an_answer_that_helps(mistake, tmp_path):
    args, code, answer = MISTAKES[mistake]
    assert answer in tpuconv(*args, cwd=tmp_path, code=code).stderr


def test_the_traceback_is_shown_wherever_one_asks_for_it(tmp_path):
    for args in (("-v", "verify", "x"), ("verify", "x", "-v"), ("verify", "-v", "x")):
        command = [sys.executable, "-m", "tpuconv", *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (2, True)


def test_a_prompt_longer_than_the_context_is_a_mistake(converted, tmp_path):
    (tmp_path / "prompts.txt").write_text("short\n" + "long " * 200)
    args = ("verify", "tiny-qwen3-orbax", "--compare-hf", "--prompts", tmp_path / "prompts.txt")
    assert "prompt 2 has 1000 tokens, and the model was made for 512" in tpuconv(*args, cwd=converted, code=2).stderr


def test_prompts_that_cannot_be_read_are_a_mistake(converted, tmp_path):
    prompts = tmp_path / "prompts.txt"
    args = ("verify", "tiny-qwen3-orbax", "--compare-hf", "--prompts", prompts)
    prompts.write_bytes("Die Würde des Menschen".encode("latin-1"))
    assert "is not text in UTF-8" in tpuconv(*args, cwd=converted, code=2).stderr
    prompts.write_text("\n \n")
    assert "holds no prompt" in tpuconv(*args, cwd=converted, code=2).stderr


def test_a_tokenizer_that_cannot_be_read_has_its_error(converted, tmp_path):
    shutil.copytree(converted / "tiny-qwen3-orbax", tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text("{")
    done = tpuconv("generate", "out", "--prompt", "x", cwd=tmp_path, code=6)
    assert "the tokenizer in out cannot be read" in done.stderr


def test_what_is_converted_already_is_not_converted_again(converted):
    assert "is converted already" in tpuconv("convert", "tiny-qwen3-orbax", cwd=converted, code=2).stderr


def test_interrupted_it_promises_no_more_than_is_kept(monkeypatch, capsys):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tpuconv.models.registry.family_names", interrupt)
    monkeypatch.setattr(sys, "argv", ["tpuconv", "families"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler of the tests' own process stays
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr().err.strip() == "Interrupted."


STOPPED = """
import signal, sys, threading
from concurrent.futures import ThreadPoolExecutor, wait
from tpuconv.commands.process import run

def work():
    go_on, pool = threading.Event(), ThreadPoolExecutor(1)
    future = pool.submit(go_on.wait)

    def stop(frame, event, arg):
        if (event, frame.f_code.co_qualname, frame.f_back.f_code.co_qualname) == (sys.argv[1], sys.argv[2], "wait"):
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(stop)
    try:
        while True:
            wait([future], timeout=0.01)
    finally:
        go_on.set()
        pool.shutdown()

run(work)
"""


@pytest.mark.parametrize(
    ("event", "function"),
    [("c_return", "Condition.__enter__"), ("call", "Condition.__exit__"), ("c_return", "_AcquireFutures.__enter__")],
)
def test_interrupted_where_a_lock_is_taken_it_ends_all_the_same(event, function):
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, event, function], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (130, "Interrupted.")


REPORTED = """
import signal
from tpuconv import explanations
from tpuconv.commands.process import run
from tpuconv.errors import UsageError

def fail():
    raise UsageError("wrong")

explanations.explanation_of = lambda error: signal.raise_signal(signal.SIGINT)
run(fail)
"""


def test_interrupted_while_an_error_is_shown_it_ends_without_a_traceback():
    done = subprocess.run([sys.executable, "-c", REPORTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


DROPPED = """
import gc, signal, time, weakref
from tpuconv.commands.process import run

def _xla_gc_callback(phase, info):
    if phase == "start":
        signal.raise_signal(signal.SIGINT)

class Freed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def collect():
    gc.callbacks.append(_xla_gc_callback)
    gc.collect()
    gc.callbacks.remove(_xla_gc_callback)
    time.sleep(20)

def free():
    Freed()
    time.sleep(20)

def forget():
    forgotten = type("Forgotten", (), {})()
    known = weakref.ref(forgotten, lambda _: signal.raise_signal(signal.SIGINT))
    del forgotten
    time.sleep(20)

run(%s)
"""


@pytest.mark.parametrize("work", ["collect", "free", "forget"])
def test_interrupted_where_the_interpreter_drops_exceptions_it_ends_all_the_same(work):
    done = subprocess.run([sys.executable, "-c", DROPPED % work], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (130, "Interrupted.")


COMPUTING = """
import threading, os, signal
import jax, jax.numpy as jnp, numpy as np
from tpuconv.commands.process import run

def work():
    endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0, 0] >= 0, lambda x: x @ x / 200, x))
    threading.Timer(5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    np.asarray(endless(jnp.ones((200, 200))))

run(work)
"""


def test_interrupted_while_xla_computes_it_ends_all_the_same():
    """The interpreter calls no handler then."""
    done = subprocess.run([sys.executable, "-c", COMPUTING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (143, "Interrupted.")


NOTED = """
import signal, sys
from tpuconv.commands.process import run

def work():
    sys.stdout.write("written")
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as e:
        e.add_note("a note of another library")
        raise

run(work)
"""


def test_interrupted_it_keeps_what_was_written_and_shows_no_other_notes():
    done = subprocess.run([sys.executable, "-c", NOTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "written", "Interrupted.")


CONFIGS = {
    "unknown architecture": ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, 5, "no family reads"),
    "unknown rope parameter": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "bta": 1}},
        5,
        "the type linear has no parameter 'bta'",
    ),
    "unknown rope type": ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, 5, "is not implemented for qwen3"),
    "unknown key": ({"attention_chunk_size": 4}, 5, "--allow-config attention_chunk_size"),
    "quantized": ({"quantization_config": {"quant_method": "aqlm"}}, 5, "quant_method='aqlm' is not implemented"),
    "contradiction": ({"num_key_value_heads": 3}, 6, "num_key_value_heads"),
    "rotary positions twice": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 7.0}},
        6,
        "transformers drops the other without a word",
    ),
    "layers cut": ({"layer_types": ["full_attention"] * 36}, 6, "a program that cuts layers"),
    "wrong type": ({"hidden_size": "32"}, 6, "hidden_size"),
    "shape against the config": ({"intermediate_size": 81}, 5, "should be [81, 32] by config.json"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_has_its_error(case, tmp_path):
    changes, code, message = CONFIGS[case]
    hollow_checkpoint(tmp_path / "hf", qwen3_config())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(qwen3_config(**changes)))
    done = tpuconv("convert", "hf", "--json", cwd=tmp_path, code=code)
    assert message in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == code
    assert error["hint"]
    assert os.listdir(tmp_path) == ["hf"]


def test_a_config_of_the_package_is_printed_to_be_changed(tmp_path):
    shown = tpuconv("quantize", "--show", "int4_weight_only.yaml", cwd=tmp_path).stdout
    (tmp_path / "mine.yaml").write_text(shown)
    error = tpuconv("quantize", "--show", "mine.yaml", cwd=tmp_path, code=2).stderr
    assert "prints configs of this package" in error
    assert json.loads(tpuconv("quantize", "--show", "int4_weight_only", "--json", cwd=tmp_path).stdout)["rules"]

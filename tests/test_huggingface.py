"""`convert --target huggingface`: safetensors in one pass, as by a conversion and an export."""

import json
import re
import subprocess
import sys
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tpuconv
from helpers.attacks.made import folder_in_memory
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same
from helpers.encoded import GPT_OSS, fp8, mxfp4, same_bits, write_encoded
from helpers.families import FIRST, one_fast_of_each, save
from helpers.quantizing import ONE_OF_EACH
from helpers.served import rule
from tpuconv import api
from tpuconv.convert.export import files as export_files
from tpuconv.convert.export.exporting import describe_exporting
from tpuconv.convert.export.layout import lay_out
from tpuconv.convert.export.planned_arrays import PlannedArrays
from tpuconv.convert.plan import sizes
from tpuconv.convert.run.sizing import BASE_MEMORY
from tpuconv.encodings import words
from tpuconv.errors import OutputError, ResourceError, SourceError, UsageError
from tpuconv.models.common.rope_keys import with_older_rope_keys
from tpuconv.models.registry import FAMILIES
from tpuconv.storage import disk
from tpuconv.storage.journal import Journal

SMALL = FIRST["qwen3_moe"]
QUANT_CONFIGS = Path(api.__file__).parents[1] / "quant_configs"


def one_pass(source: Path, out: Path, **options) -> dict[str, np.ndarray]:
    api.convert(source, out, target="huggingface", **options)
    assert api.verify(out).passed
    return read_tensors(out)


def in_two_steps(source: Path, folder: Path, config: str | None) -> Path:
    api.convert(source, folder / "ckpt", quantize=config)
    api.export(folder / "ckpt", folder / "export")
    return folder / "export"


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".safetensors", ".json")} | {
        "tpuconv.json": b""
    }


@pytest.mark.parametrize("case", one_fast_of_each(FAMILIES))
def test_the_tensors_are_those_of_the_source(case, hf, tmp_path):
    """With what a checkpoint leaves out, such as towers, but for copies of the embedding."""
    source = hf(case, "bfloat16")
    want, have = read_tensors(source), one_pass(source, tmp_path / "out")
    assert have.keys() == want.keys() - api.plan(source).plan.copies.keys()
    assert not [name for name in have if not same_bits(have[name], want[name])]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")]
    assert with_older_rope_keys(configs[0]) == configs[1]


@pytest.mark.parametrize("options", [{}, {"text_only": True}], ids=["whole", "encoder carried"])
def test_servers_read_names_without_the_segments_of_trainers(options, hf, tmp_path):
    """transformers fills in random numbers for names that it does not know."""
    plain, source = hf(FIRST["gemma3"], "bfloat16"), tmp_path / "hf"
    config, tensors = json.loads((plain / "config.json").read_text()), read_tensors(plain)
    wrapped = {f"module._orig_mod.{n}".replace(".layers.1.", ".layers.1.module."): x for n, x in tensors.items()}
    write_checkpoint(source, config, wrapped)
    assert_same(one_pass(source, tmp_path / "served", **options), tensors)
    api.convert(source, tmp_path / "out", quantize="int8_weight_only")
    api.export(tmp_path / "out", tmp_path / "int8")
    assert {re.sub("_(packed|scale|shape)$", "", name) for name in read_tensors(tmp_path / "int8")} == {*tensors}
    api.convert(source, tmp_path / "again")
    api.export(tmp_path / "again", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), wrapped)


def test_servers_read_the_class_that_fsdp2_renamed(hf, tmp_path):
    source = tmp_path / "hf"
    config = json.loads((hf(FIRST["qwen3"], "bfloat16") / "config.json").read_text())
    write_checkpoint(source, config | {"architectures": ["FSDPQwen3ForCausalLM"]}, read_tensors(hf(FIRST["qwen3"])))
    one_pass(source, tmp_path / "served")
    assert json.loads((tmp_path / "served" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    api.convert(source, tmp_path / "out")
    api.export(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3_moe", "int4_weight_only"),
        ("qwen3", "int8_default"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("deepseek_v3", "int8_default"), ("mixtral", "fp8_default"), ("llama", "int4_ends_int8"))
        ),
    ],
)
def test_quantized_it_is_what_two_steps_write(family, config, hf, tmp_path):
    """By the same rules but for the head, which only a checkpoint of ours has quantized by default."""
    source = hf(ONE_OF_EACH[family], "bfloat16")
    rules = (QUANT_CONFIGS / f"{config}.yaml").read_text().replace("|lm_head", "")
    (tmp_path / f"{config}.yaml").write_text(rules)
    want = in_two_steps(source, tmp_path, tmp_path / f"{config}.yaml")
    one_pass(source, tmp_path / "out", quantize=config)
    assert files(tmp_path / "out") == files(want)
    summaries = [
        [(row["name"], row["snr_db"], row["clipped"]) for row in json.loads(text)["quantization"]["tensors"]]
        for text in (
            json.dumps(api.convert(source, tmp_path / name, quantize=quantize, **target).to_json())
            for name, quantize, target in (
                ("out", config, {"target": "huggingface"}),
                ("ckpt", tmp_path / f"{config}.yaml", {}),
            )
        )
    ]
    assert summaries[0] == summaries[1]
    assert (tmp_path / "out" / "quantization.html").exists()


@pytest.mark.parametrize("scheme", ["compressed-tensors", "awq"])
def test_packed_weights_are_written_once(scheme, hf, tmp_path):
    """Their tensors have other names than the weight."""
    source = hf(ONE_OF_EACH["qwen3"], "bfloat16")
    one_pass(source, tmp_path / "int4", quantize="int4_weight_only", **({"scheme": scheme} if scheme == "awq" else {}))
    assert_same(one_pass(tmp_path / "int4", tmp_path / "kept", encoding="keep"), read_tensors(tmp_path / "int4"))


def test_encoded_weights_stay_or_are_quantized_again(hf, tmp_path):
    source, case = tmp_path / "fp8", ONE_OF_EACH["qwen3"]
    write_encoded(case, fp8, lambda case: hf(case, "bfloat16"), source)
    want, have = read_tensors(source), one_pass(source, tmp_path / "kept", encoding="keep")
    assert not [name for name in want if not same_bits(have[name], want[name])]
    assert "quantization_config" not in json.loads(
        (one_pass(source, tmp_path / "plain") and tmp_path / "plain" / "config.json").read_text()
    )
    one_pass(source, tmp_path / "int8", quantize="int8_default")
    assert files(tmp_path / "int8") == files(in_two_steps(source, tmp_path, "int8_default"))


def test_blocks_that_the_rules_ask_for_stay_as_released(hf, tmp_path):
    """DeepSeek's latent projection is divided within a block, and servers join it with another one: both have the
    release's blocks again."""
    source = tmp_path / "fp8"
    write_encoded(ONE_OF_EACH["deepseek_v3"], fp8, lambda case: hf(case, "bfloat16"), source)
    want, have = read_tensors(source), one_pass(source, tmp_path / "out", quantize="fp8_default")
    scales = [name for name in want if name.endswith("_scale_inv")]
    assert any("kv_a_proj_with_mqa" in name for name in scales)
    for name in scales:
        base = name.removesuffix("_scale_inv")
        assert same_bits(have[base], want[base])
        assert np.array_equal(have[f"{base}_scale"], want[name])
    again, plain = (one_pass(folder, tmp_path / f"{folder.name}-plain") for folder in (tmp_path / "out", source))
    assert_same(again, plain)
    two_steps = read_tensors(in_two_steps(source, tmp_path, "fp8_default"))
    assert not [name for name in have if "lm_head" not in name and not same_bits(have[name], two_steps[name])]


@pytest.mark.parametrize("qtype", ["mxfp4 of gpt-oss", "mxfp4", "mxfp8"])
def test_microscaling_formats_stay_as_released_where_rules_ask_for_them(qtype, hf, tmp_path):
    """In one pass, from a checkpoint that copies them, and from one that keeps all encodings."""
    source, rules = tmp_path / "mx", tmp_path / "mine.yaml"
    if qtype == "mxfp4 of gpt-oss":
        mxfp4(hf(GPT_OSS[0], "bfloat16"), source)
        rules = "mxfp4_weight_only"
    else:
        rules.write_text("qwix:\n  rules:\n" + rule(".*mlp.*", weight_qtype=qtype, tile_size=32))
        one_pass(hf(ONE_OF_EACH["qwen3"], "bfloat16"), source, quantize=rules)
    want = read_tensors(source)
    assert_same(one_pass(source, tmp_path / "out", quantize=rules), want)
    assert_same(read_tensors(in_two_steps(source, tmp_path, rules)), want)
    if qtype != "mxfp4 of gpt-oss":
        api.convert(source, tmp_path / "kept", encoding="keep")
        api.export(tmp_path / "kept", tmp_path / "again", scheme="compressed-tensors")
        assert_same(read_tensors(tmp_path / "again"), want)
    if qtype == "mxfp8":  # which are blocks of 1x32 to DeepSeek's scheme
        rules.write_text("qwix:\n  rules:\n" + rule(".*mlp.*", weight_qtype="float8_e4m3fn"))
        have = one_pass(source, tmp_path / "fp8", quantize=rules, scheme="fp8")
        down = "model.layers.0.mlp.down_proj.weight"
        assert same_bits(have[down], want[down])
        exponents = want[f"{down}_scale"].astype(np.float32)
        assert np.array_equal(have[f"{down}_scale_inv"], np.exp2(exponents - 127))


def test_tensors_of_several_parameters_may_have_a_rule_for_each(hf, tmp_path):
    """Of one type: `auto` has a rule for each role."""
    api.plan(hf(ONE_OF_EACH["mamba"], "bfloat16"), target="huggingface", quantize="auto:16")
    source, rules = hf(ONE_OF_EACH["phi3"], "bfloat16"), tmp_path / "mine.yaml"
    q, others = (rule(f".*attn/{name}", weight_qtype="int8") for name in ("q", "(k|v)"))
    rules.write_text(f"qwix:\n  rules:\n{q}{others}")
    have = one_pass(source, tmp_path / "out", quantize=rules)
    rules.write_text("qwix:\n  rules:\n" + rule(".*attn/(q|k|v)", weight_qtype="int8"))
    assert_same(have, one_pass(source, tmp_path / "one", quantize=rules))
    rules.write_text(f"qwix:\n  rules:\n{q}" + rule(".*attn/(k|v)", weight_qtype="int8", act_qtype="int8"))
    with pytest.raises(UsageError, match="are joined in one tensor, and not quantized alike"):
        api.plan(source, target="huggingface", quantize=rules)


@pytest.mark.parametrize(
    ("options", "is_carried"), [({"encoding": "keep"}, True), ({"quantize": "fp8_default"}, False)]
)
def test_encoded_layers_beside_the_model_are_carried_as_released(options, is_carried, hf, tmp_path):
    """In a format that describes scales by other names, nobody could read them."""
    case = ONE_OF_EACH["deepseek_v3"]
    write_encoded(case, fp8, lambda case: hf(case, "bfloat16"), tmp_path / "fp8")
    tensors, config = read_tensors(tmp_path / "fp8"), json.loads((tmp_path / "fp8" / "config.json").read_text())
    last = f"model.layers.{config['num_hidden_layers']}"
    for name in [name for name in tensors if name.startswith("model.layers.0.self_attn.q_a_proj")]:
        tensors[name.replace("model.layers.0", last)] = tensors[name]
    tensors[f"{last}.enorm.weight"] = tensors["model.norm.weight"]
    write_checkpoint(tmp_path / "more", config, tensors)
    have = one_pass(tmp_path / "more", tmp_path / "out", **options)
    assert f"{last}.enorm.weight" in have
    assert {name in have for name in tensors if name.startswith(f"{last}.self_attn")} == {is_carried}


@pytest.mark.parametrize("config", [None, "int4_weight_only"])
def test_a_plan_says_what_is_written(config, hf, tmp_path):
    """Every tensor, their bytes, and the memory; before a weight is read."""
    source = hf(ONE_OF_EACH["qwen3_moe"], "bfloat16")
    have = one_pass(source, tmp_path / "out", quantize=config)
    planned = api.plan(source, target="huggingface", quantize=config)
    tensors = {tensor.name: tensor for file in planned.files for tensor in file}
    assert {name: (x.shape, x.nbytes) for name, x in have.items()} == {
        name: (tensor.shape, tensor.nbytes) for name, tensor in tensors.items()
    }
    facts = planned.to_json()
    assert facts["output_bytes"] == sum(x.nbytes for x in have.values())
    assert facts["files"] == 1
    assert sum(each["count"] for each in facts["tensors"].values()) == len(have)
    assert facts["peak_memory_bytes"] >= BASE_MEMORY + max(x.nbytes for x in have.values())


@pytest.mark.parametrize("quantize", [None, "int8_default", "int4_weight_only"])
@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=list(ONE_OF_EACH))
def test_tensors_are_made_in_slabs(case, quantize, hf, tmp_path, request):
    """To the same bytes: in one pass, and from a checkpoint whose files have parts of matrices."""
    source = hf(case, "bfloat16")
    try:
        want = one_pass(source, tmp_path / "want", quantize=quantize)
        beside = source if api.convert(source, tmp_path / "ckpt", quantize=quantize).skipped else None
        api.export(tmp_path / "ckpt", tmp_path / "export", with_skipped=beside)
    except UsageError:  # no format of servers holds the model
        assert quantize
        pytest.skip(f"servers have no {quantize} of {case.family}")
    request.getfixturevalue("small_cuts")
    api.convert(source, tmp_path / "small", quantize=quantize)
    api.export(tmp_path / "small", tmp_path / "again", with_skipped=beside)
    assert_same(read_tensors(tmp_path / "again"), read_tensors(tmp_path / "export"))
    assert_same(one_pass(source, tmp_path / "direct", quantize=quantize), want)


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("llama4_text", marks=pytest.mark.slow)])
def test_stacked_experts_are_made_in_slabs(family, hf, tmp_path, monkeypatch):
    """To the same bytes: plain, quantized, decoded and encoded as they were released."""
    source, config = hf(ONE_OF_EACH[family], "bfloat16"), {"gpt_oss": "mxfp4_weight_only"}.get(family)
    complete = {quantize: in_two_steps(source, tmp_path / str(quantize), quantize) for quantize in {None, config}}
    api.convert(complete[config], tmp_path / "decoded", target="huggingface")
    monkeypatch.setattr(sizes, "SLAB_BYTES", 2000)
    with closing(PlannedArrays(api.plan(source, target="huggingface").plan)) as arrays:
        pieces = lay_out(arrays, describe_exporting(arrays)).pieces
    slabs = {tensor.of for piece in pieces if piece.letter for tensor in piece.tensors}
    assert {name.rpartition(".")[2] for name in slabs} >= {"gate_up_proj", "down_proj"}
    for quantize, folder in complete.items():
        one_pass(source, tmp_path / f"{quantize}-direct", quantize=quantize)
        api.export(folder.parent / "ckpt", tmp_path / f"{quantize}-again")
        made = [files(each) for each in (folder, tmp_path / f"{quantize}-direct", tmp_path / f"{quantize}-again")]
        if quantize is None:  # the config of a plain export is the released one, without older keys for servers
            for each in made:
                del each["config.json"]
        assert made[0] == made[1] == made[2]
    if config:
        assert_same(one_pass(complete[config], tmp_path / "slabs"), read_tensors(tmp_path / "decoded"))
        assert_same(one_pass(complete[config], tmp_path / "kept", encoding="keep"), read_tensors(complete[config]))


@pytest.mark.slow
def test_an_export_holds_slabs_of_stacked_experts(tmp_path):
    """Less than one stacked tensor of 268 MB, besides what a process needs in any case; in processes of their own."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_local_experts": 16, "num_hidden_layers": 1}
    case = ONE_OF_EACH["gpt_oss"]
    save(replace(case, config={**case.config, **wide}), tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "ckpt")
    for argv in (("export", "ckpt", "out"), ("convert", "hf", "direct", "--target", "huggingface")):
        command = [sys.executable, "-m", "tpuconv", *argv, "--json"]
        facts = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
        assert facts["peak_memory_bytes"] < BASE_MEMORY + 16 * 1024 * 8192 * 2
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "direct/model.safetensors").read_bytes()


def test_a_plan_holds_no_zero_points(hf):
    """Those of a large model, which are constant, took gigabytes."""
    source = hf(ONE_OF_EACH["qwen3"], "bfloat16")
    tracemalloc.start()
    try:
        plan = api.plan(source, target="huggingface", quantize="int4_weight_only", scheme="awq")
        arrays = tracemalloc.Filter(True, words.__file__, domain=np.lib.tracemalloc_domain)
        held = tracemalloc.take_snapshot().filter_traces([arrays])
    finally:
        tracemalloc.stop()
    assert any(tensor.name.endswith(".qzeros") for file in plan.files for tensor in file)
    assert not held.traces


def test_a_plan_finds_what_no_format_holds(hf):
    with pytest.raises(UsageError, match="no format of servers has this"):
        api.plan(hf(ONE_OF_EACH["qwen3"], "bfloat16"), target="huggingface", quantize="nf4_weight_only")


def stated_dtype(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    return config.get("dtype") or config["torch_dtype"]


def test_a_cast_is_in_the_config(hf, tmp_path):
    have = one_pass(hf(SMALL, "bfloat16"), tmp_path / "out", dtype="float32")
    assert {x.dtype.name for x in have.values()} == {"float32"}
    assert stated_dtype(tmp_path / "out") == "float32"


def test_the_dtype_of_an_export_is_in_its_config(hf, tmp_path):
    """Of what was cast, quantized after that, or saved in another dtype: transformers would round it."""
    source, out = hf(FIRST["qwen3"], "bfloat16"), {name: tmp_path / name for name in ("cast", "int8", "plain", "tuned")}
    api.convert(source, out["cast"], dtype="float32")
    api.quantize(out["cast"], out["int8"], config="int8_default")
    api.convert(source, out["plain"])
    tpuconv.save(tpuconv.load(out["plain"], "float32"), out["tuned"], like=out["plain"])
    for name, checkpoint in out.items():
        api.export(checkpoint, tmp_path / "exports" / name)
    assert {name: stated_dtype(tmp_path / "exports" / name) for name in out} == {
        **dict.fromkeys(("cast", "int8", "tuned"), "float32"),
        "plain": "bfloat16",
    }


def test_the_dtype_of_what_stays_encoded_is_in_the_config(hf, tmp_path):
    one_pass(hf(FIRST["qwen3"], "bfloat16"), tmp_path / "fp8", quantize="fp8_default")
    one_pass(tmp_path / "fp8", tmp_path / "out", encoding="keep", dtype="float32")
    assert stated_dtype(tmp_path / "out") == "float32"


def stop_after_three_files(source, out, monkeypatch):
    record, count = Journal.record, 0

    def stops(self, part, facts, files=()):
        nonlocal count
        record(self, part, facts, files)
        count += part.startswith("file")
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "record", stops)
    with pytest.raises(KeyboardInterrupt):
        one_pass(source, out, quantize="int8_default")
    monkeypatch.setattr(Journal, "record", record)


def test_it_goes_on_where_it_was_stopped(hf, tmp_path, monkeypatch):
    source = hf(ONE_OF_EACH["qwen3_moe"], "bfloat16")
    monkeypatch.setattr(export_files, "SHARD_BYTES", 6000)
    one_pass(source, tmp_path / "want", quantize="int8_default")
    stop_after_three_files(source, tmp_path / "out", monkeypatch)
    done = api.convert(source, tmp_path / "out", target="huggingface", quantize="int8_default")
    assert 0 < done.resumed_bytes < done.source_bytes
    names = sorted(path.name for path in (tmp_path / "want").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert [
        name for name in names if (tmp_path / "out" / name).read_bytes() != (tmp_path / "want" / name).read_bytes()
    ] == []
    assert api.convert(source, tmp_path / "out", target="huggingface", quantize="int8_default").already_there


def test_files_of_another_division_are_not_resumed(hf, tmp_path, monkeypatch):
    """As of a version that divides tensors otherwise: a file of the same name would hold others."""
    source = hf(ONE_OF_EACH["qwen3_moe"], "bfloat16")
    monkeypatch.setattr(export_files, "SHARD_BYTES", 6000)
    stop_after_three_files(source, tmp_path / "out", monkeypatch)
    monkeypatch.setattr(export_files, "SHARD_BYTES", 9000)
    want = one_pass(source, tmp_path / "want", quantize="int8_default")
    done = api.convert(source, tmp_path / "out", target="huggingface", quantize="int8_default", overwrite=True)
    assert done.resumed_bytes == 0
    have = read_tensors(tmp_path / "out")
    assert have.keys() == want.keys()
    assert all(same_bits(have[name], want[name]) for name in want)


def test_a_source_that_was_replaced_is_not_the_one_before(hf, tmp_path):
    source = tmp_path / "source"
    tensors = read_tensors(hf(SMALL, "bfloat16"))
    write_checkpoint(source, json.loads((hf(SMALL, "bfloat16") / "config.json").read_text()), tensors)
    one_pass(source, tmp_path / "out")
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(OutputError, match="exists already"):
        api.convert(source, tmp_path / "out", target="huggingface")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scan_layers": True}, UsageError, "always has all layers"),
        ({"max_memory": 200 << 20}, ResourceError, "as safetensors needs at least"),
    ],
)
def test_what_is_refused(options, error, message, hf, tmp_path):
    with pytest.raises(error, match=message):
        api.convert(hf(SMALL, "bfloat16"), tmp_path / "out", target="huggingface", **options)
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite_are_an_error(hf, tmp_path):
    config, tensors = json.loads((hf(SMALL) / "config.json").read_text()), read_tensors(hf(SMALL))
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    write_checkpoint(tmp_path / "source", config, tensors)
    with pytest.raises(SourceError, match=r"norm\.scale is not finite"):
        api.convert(tmp_path / "source", tmp_path / "out", target="huggingface")
    one_pass(tmp_path / "source", tmp_path / "allowed", allow_nonfinite=True)


@pytest.mark.parametrize("size", [0, 100, 4096, 4097, 8192, 20_001])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_file_is_what_was_written_in_parts(size, in_memory, tmp_path, monkeypatch):
    """Around the page cache too, in complete pages, and where the file system has only the cache."""
    monkeypatch.setattr(disk, "STAGED_BYTES", 4096)
    data = np.random.default_rng(size).bytes(size)
    with folder_in_memory() as memory:
        path = (memory if in_memory else tmp_path) / "file"
        with disk.Writer(path) as file:
            for start in range(0, size, 3000):
                file.write(data[start : start + 3000])
        assert path.read_bytes() == data
        assert file.facts()["bytes"] == size

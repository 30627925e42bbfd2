"""LoRA adapters that peft writes, merged while converting, beside peft's own merge."""

import json
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

from helpers.adapted import adapted, exported, saved
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint, write_safetensors
from helpers.commands import tpuconv
from helpers.conversions import assert_same, restore, same_bits
from helpers.encoded import awq, encoded, fp8, gptq, gptq_asymmetric, int4_asymmetric, write_encoded
from helpers.families import BY_ID, CASES, FIRST, Case, hf_model
from helpers.schemes import encode
from helpers.sights import SIGHTS
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.encodings import adapted as adapted_tensors
from tpuconv.errors import ConfigError, MappingError, OutputError, SourceError, UnsupportedConfig, UsageError
from tpuconv.sources import adapter as adapter_files
from tpuconv.sources import adapter_config
from tpuconv.sources.adapter_config import check_adapter_config

DENSE = ("llama", "qwen2", "qwen3", "olmo2", "mixtral", "deepseek_v3")


@pytest.mark.parametrize("case", [FIRST[family] for family in DENSE], ids=str)
def test_a_merged_adapter_is_that_of_peft(case: Case, hf, tmp_path: Path) -> None:
    model = adapted(hf(case), tmp_path / "lora")
    merged = saved(model, tmp_path / "merged")
    ours = exported(hf(case), tmp_path, str(tmp_path / "lora"))
    assert ours.keys() == merged.keys()
    before = read_tensors(hf(case))
    assert any(not same_bits(ours[name], before[name]) for name in ours)
    assert not [name for name in ours if not same_bits(ours[name], merged[name])]


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.k_proj": 3}},
        {"target_modules": ["embed_tokens", "up_proj"]},
        {"r": 33},
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "input_layernorm"]},
        {"bias": "all"},
        {"trainable_token_indices": [95, 3, 7]},
        {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [5]}},
    ],
    ids=["rslora", "patterns", "embeddings", "rank", "dora", "modules_to_save", "bias", "tokens", "tokens of two"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forms_of_adapters(options: dict, dtype: str, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(attention_bias="bias" in options), dtype)
    merged = saved(adapted(tmp_path / "hf", tmp_path / "lora", **options), tmp_path / "merged")
    ours = exported(tmp_path / "hf", tmp_path, str(tmp_path / "lora"))
    assert not [name for name in ours if not same_bits(ours[name], merged[name])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_with_their_inputs_first(dtype: str, hf, tmp_path: Path) -> None:
    """GPT-2's, of which one is square: nothing but its row in the table tells."""
    source = hf(FIRST["gpt2"], dtype)
    options = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "lora_only"}
    merged = saved(adapted(source, tmp_path / "lora", **options), tmp_path / "merged")
    ours = exported(source, tmp_path, str(tmp_path / "lora"))
    assert not [name for name in ours if not same_bits(ours[name], merged[name])]


@pytest.mark.parametrize("encoding", [awq, gptq, gptq_asymmetric, fp8], ids=lambda each: each.__name__)
def test_matrices_of_an_encoding_are_changed_as_their_values_are(encoding, hf, tmp_path: Path, small_cuts) -> None:
    """GPTQ and AWQ pack matrices [in, out]: an adapter of QLoRA was trained on their values."""
    source, decoded = tmp_path / "hf", tmp_path / "decoded"
    write_encoded(BY_ID["llama-plain"], encoding, lambda case: hf(case, "bfloat16"), source)
    api.convert(source, decoded, target="huggingface")
    adapted(decoded, tmp_path / "lora")
    lora = str(tmp_path / "lora")
    have, want = (exported(place, tmp_path / f"{place.name}-merged", lora) for place in (source, decoded))
    assert_same(have, want)
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(have[changed], read_tensors(decoded)[changed])
    for scan in (False, True):
        models = [api.load(place, adapter=[lora], scan_layers=scan) for place in (source, decoded)]
        first, second = (jax.tree.leaves(nnx.state(model)) for model in models)
        assert all(same_bits(np.asarray(a), np.asarray(b)) for a, b in zip(first, second, strict=True))


def test_columns_that_dora_scales_are_refused(hf, tmp_path: Path) -> None:
    adapted(hf(FIRST["gpt2"]), tmp_path / "lora", target_modules=["c_proj"], fan_in_fan_out=True, use_dora=True)
    with pytest.raises(MappingError) as info:
        api.convert(hf(FIRST["gpt2"]), tmp_path / "out", adapter=[str(tmp_path / "lora")])
    assert any("attn.c_proj.weight  is a matrix [in, out], whose columns" in line for line in info.value.details)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_moe", EXPERTS),
        ("mixtral", EXPERTS),
        ("gpt_oss", EXPERTS),
        ("llama4_text", ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]),
        ("qwen3_moe", EXPERTS[1:]),
    ],
    ids=["qwen3_moe", "mixtral", "gpt_oss", "llama4_text", "one of the two"],
)
def test_parameters_of_all_experts(family: str, targets: list[str], dtype: str, hf, tmp_path: Path) -> None:
    source = hf(FIRST[family], dtype)
    model = adapted(source, tmp_path / "lora", target_modules=["q_proj"], target_parameters=targets)
    merged, before = saved(model, tmp_path / "merged"), read_tensors(source)
    ours = exported(source, tmp_path, str(tmp_path / "lora"))
    assert ours.keys() == merged.keys()
    changed = [name for name in ours if not same_bits(ours[name], before[name])]
    assert any("experts" in name for name in changed)
    assert not [name for name in ours if not same_bits(ours[name], merged[name])]


def test_dora_of_rows_that_are_read_in_parts(tmp_path: Path, small_cuts: None) -> None:
    """The norm of a row is that of the complete one."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "bfloat16")
    merged = saved(adapted(tmp_path / "hf", tmp_path / "lora", use_dora=True), tmp_path / "merged")
    ours = exported(tmp_path / "hf", tmp_path, str(tmp_path / "lora"))
    assert not [name for name in ours if not same_bits(ours[name], merged[name])]


@pytest.mark.parametrize("scan", [False, True])
def test_layers_that_an_adapter_leaves_alone(scan: bool, tmp_path: Path, small_cuts: None) -> None:
    """Of a stack it changes one tensor, which is not the first."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    merged = adapted(tmp_path / "hf", tmp_path / "lora", target_modules=["up_proj"], layers_to_transform=[1])
    have = exported(tmp_path / "hf", tmp_path, str(tmp_path / "lora"), scan_layers=scan)
    want, plain = saved(merged, tmp_path / "merged"), read_tensors(tmp_path / "hf")
    assert {name for name in have if not np.array_equal(have[name], plain[name])} == {
        "model.layers.1.mlp.up_proj.weight"
    }
    for name in want:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-6, atol=1e-6)


def test_one_expert_of_many(hf, tmp_path: Path, small_cuts: None) -> None:
    """As peft wrote it while each expert had modules of its own."""
    base = hf(FIRST["mixtral"])
    plain = read_tensors(base)
    name = "model.layers.0.block_sparse_moe.experts.2.w1"
    rows, columns = plain[f"{name}.weight"].shape
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((4, columns), (rows, 4)))
    (tmp_path / "lora").mkdir()
    write_safetensors(
        tmp_path / "lora" / "adapter_model.safetensors",
        {f"base_model.model.{name}.lora_{part}.weight": x for part, x in (("A", a), ("B", b))},
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    have = exported(base, tmp_path, str(tmp_path / "lora"))
    assert [each for each in have if not np.array_equal(have[each], plain[each])] == [f"{name}.weight"]
    np.testing.assert_allclose(have[f"{name}.weight"], plain[f"{name}.weight"] + 2 * b @ a, rtol=1e-5, atol=1e-5)


def test_a_merged_model_is_compared_with_the_one_that_peft_merges(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    out, adapters = tmp_path / "out", [str(tmp_path / "lora"), f"{tmp_path / 'second'}:0.5"]
    adapted(tmp_path / "hf", tmp_path / "lora", lora_alpha=0.5)
    adapted(tmp_path / "hf", tmp_path / "second", seed=1, lora_alpha=0.5)
    api.convert(tmp_path / "hf", out, adapter=adapters)
    assert api.compare(out, adapter=adapters).passed
    assert api.compare(out, source=tmp_path / "hf", adapter=adapters).passed
    api.convert(tmp_path / "hf", tmp_path / "nnx", target="nnx", adapter=adapters)
    assert api.compare(tmp_path / "nnx", adapter=adapters).passed
    assert not api.compare(out, source=tmp_path / "hf").passed
    with pytest.raises(UsageError, match="has 2 merged adapters, but 0 to compare with"):
        api.compare(out)
    api.convert(tmp_path / "hf", tmp_path / "plain")
    with pytest.raises(UsageError, match="plain has no merged adapters"):
        api.compare(tmp_path / "plain", adapter=adapters)
    with pytest.raises(UsageError, match=r"second has other contents, or another weight, .* with the weight 0\.5"):
        api.compare(out, adapter=[str(tmp_path / "lora"), str(tmp_path / "second")])
    with pytest.raises(UsageError, match="has other contents"):
        api.compare(out, adapter=adapters[::-1])
    with pytest.raises(UsageError, match="layer by layer with a source that has not"):
        api.compare(out, adapter=adapters, layerwise=True)


def test_the_hub_id_of_a_merged_adapter_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora", lora_alpha=0.5)
    found = adapter_files._folder
    monkeypatch.setattr(adapter_files, "_folder", lambda place: found(str(tmp_path / "lora")))
    api.convert(tmp_path / "hf", tmp_path / "out", adapter=["someone/lora"])
    assert api.compare(tmp_path / "out").passed


def test_dora_without_its_magnitudes_is_an_error(tmp_path: Path) -> None:
    """Merged as plain LoRA it would be another model."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    with pytest.raises(SourceError, match="none of the magnitudes that use_dora"):
        api.plan(tmp_path / "hf", adapter=[str(tmp_path / "lora")])


PLAIN_LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def lora(folder: Path, tensors: dict[str, np.ndarray], **config) -> str:
    """An adapter with these matrices, as peft writes them."""
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", {f"base_model.model.{n}": x for n, x in tensors.items()})
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN_LORA | config))
    return str(folder)


def matrices(name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"A": (4, columns), "B": (rows, 4)}
    return {f"{name}.lora_{part}.weight": rng.standard_normal(shape, np.float32) for part, shape in shapes.items()}


def test_what_an_adapter_changes_is_not_passed_through(tmp_path: Path) -> None:
    """An FP8 source that is quantized to its own type keeps its values, but for those."""
    random_checkpoint(tmp_path / "hf", qwen3_config(hidden_size=64, intermediate_size=96, head_dim=32), "bfloat16")
    encode(tmp_path / "hf", (32, 32))
    name = "model.layers.1.self_attn.q_proj"
    rows, columns = read_tensors(tmp_path / "hf")[f"{name}.weight"].shape
    adapter = lora(tmp_path / "lora", matrices(name, rows, columns))
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "qwix:\n  rules:\n    - {module_path: 'layers/\\d+/attn/.*', weight_qtype: float8_e4m3fn, tile_size: 32}\n"
    )
    api.convert(tmp_path / "hf", tmp_path / "plain", quantize=str(rules))
    api.convert(tmp_path / "hf", tmp_path / "out", adapter=[adapter], quantize=str(rules))
    plain, changed = restore(tmp_path / "plain"), restore(tmp_path / "out")
    assert {n for n in plain if not same_bits(plain[n], changed[n])} == {
        f"layers.1.attn.q.kernel{part}" for part in (".array.qvalue", ".array.scale")
    }


def test_what_is_merged_is_said(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    name = "model.layers.1.self_attn.q_proj"
    adapter = lora(tmp_path / "lora", matrices(name, *read_tensors(tmp_path / "hf")[f"{name}.weight"].shape))
    options = ("--adapter", f"{adapter}:0.5")
    for more in (("--dry-run",), ()):
        facts = json.loads(tpuconv("convert", tmp_path / "hf", tmp_path / "json", *options, *more, "--json").stdout)
        assert facts["adapters"] == [{"name": adapter, "weight": 0.5, "changes": 1}]
        said = tpuconv("convert", tmp_path / "hf", tmp_path / "out", *options, *more).stdout
        assert "weight 0.5: changes 1 tensor\n" in said


def test_an_adapter_of_another_model_is_named(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapter = lora(tmp_path / "lora", matrices("model.layers.1.self_attn.q_proj", 3, 5))
    with pytest.raises(MappingError, match="not match the") as error:
        api.convert(tmp_path / "hf", tmp_path / "out", adapter=[adapter])
    assert error.value.hint.startswith("check that each adapter was trained on this model")


@pytest.mark.parametrize("target", ["tpuconv", "huggingface"])
def test_a_change_of_a_copy_is_not_lost(target: str, tmp_path: Path) -> None:
    """A head that is stored as a copy of the embedding is not converted."""
    config = qwen3_config(tie_word_embeddings=True)
    tensors = read_tensors(random_checkpoint(tmp_path / "plain", config, "float32"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_checkpoint(tmp_path / "hf", config, tensors)
    adapter = lora(tmp_path / "lora", matrices("lm_head", *tensors["lm_head.weight"].shape))
    with pytest.raises(MappingError, match="the head and the embedding of hf apart") as error:
        api.convert(tmp_path / "hf", tmp_path / "out", adapter=[adapter], target=target)
    assert any("lm_head.weight  shares its matrix" in line for line in error.value.details)


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "up_proj"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"trainable_token_indices": [5, 9]},
    ],
    ids=["embeddings", "modules_to_save", "tokens"],
)
def test_adapters_of_tied_embeddings(options: dict, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(**TIED), "float32")
    merged = saved(adapted(tmp_path / "hf", tmp_path / "lora", **options), tmp_path / "merged")
    ours = exported(tmp_path / "hf", tmp_path, str(tmp_path / "lora"))
    assert not [name for name in ours if not same_bits(ours[name], merged[name])]


def test_pairs_of_a_tied_head_are_merged_once(tmp_path: Path) -> None:
    """peft computes with one change of the head and one of the embedding, and merges both into their one matrix."""
    plain = read_tensors(random_checkpoint(tmp_path / "hf", qwen3_config(**TIED), "float32"))
    adapted(tmp_path / "hf", tmp_path / "lora", target_modules=["embed_tokens"], ensure_weight_tying=True)
    ours = exported(tmp_path / "hf", tmp_path, str(tmp_path / "lora"))
    (a,), (b,) = ([x for n, x in _adapter_tensors(tmp_path / "lora").items() if f"embedding_{p}" in n] for p in "AB")
    name = "model.embed_tokens.weight"
    np.testing.assert_allclose(ours[name], plain[name] + (b @ a).T * np.float32(7 / 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
    ],
    ids=["both", "embedding", "head"],
)
def test_a_head_that_an_adapter_unties_is_refused(options: dict, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(**TIED), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora", **options)
    with pytest.raises(MappingError, match="the head and the embedding of hf apart") as error:
        api.plan(tmp_path / "hf", adapter=[str(tmp_path / "lora")]).plan.check()
    assert "save the model untied first" in str(error.value.hint)


def test_a_change_of_a_tower_is_said_to_be_left_out(hf, tmp_path: Path) -> None:
    """A text model alone cannot carry it into an export, which takes the tower from the source."""
    base = hf(FIRST["gemma3"])
    name = next(n for n, x in read_tensors(base).items() if "vision" in n and n.endswith(".weight") and x.ndim == 2)
    rows, columns = read_tensors(base)[name].shape
    adapter = lora(tmp_path / "lora", matrices(name.removesuffix(".weight"), rows, columns))
    done = api.convert(base, tmp_path / "out", adapter=[adapter], text_only=True)
    assert [skip.count for skip in done.skipped if skip.reason.endswith(", which an adapter changes")] == [1]
    with pytest.raises(UsageError, match="changes tensors that the conversion"):
        api.export(tmp_path / "out", tmp_path / "back", with_skipped=base)
    api.convert(base, tmp_path / "again", adapter=[adapter], target="huggingface", text_only=True)
    again, before = read_tensors(tmp_path / "again"), read_tensors(base)
    assert [each for each in again if not same_bits(again[each], before[each])] == [name]


def test_an_adapter_that_changes_its_base_is_refused(tmp_path: Path) -> None:
    """peft takes the principal parts of the weights out when it loads such an adapter."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapter = lora(tmp_path / "lora", matrices("model.layers.0.mlp.up_proj", 64, 32), init_lora_weights="pissa_niter_4")
    with pytest.raises(UnsupportedConfig, match="not implemented") as error:
        api.plan(tmp_path / "hf", adapter=[adapter])
    assert error.value.details == ("init_lora_weights='pissa_niter_4'",)


def test_a_changed_tensor_has_all_that_it_is_stored_in(tmp_path: Path) -> None:
    """Zero points too, which a source that is fetched meanwhile would lack."""
    random_checkpoint(tmp_path / "plain", qwen3_config(), "bfloat16")
    encoded(tmp_path / "plain", tmp_path / "hf", int4_asymmetric)
    name = "model.layers.1.self_attn.q_proj"
    rows, columns = read_tensors(tmp_path / "plain")[f"{name}.weight"].shape
    adapter = lora(tmp_path / "lora", matrices(name, rows, columns))
    plain, changed = (api.plan(tmp_path / "hf", adapter=given).plan for given in ([], [adapter]))
    assert plain.tensors[f"{name}.weight"].stored == changed.tensors[f"{name}.weight"].stored


def test_several_adapters_with_weights_and_a_target(tmp_path: Path, small_cuts: None) -> None:
    """A weight multiplies a change; slabs that begin within a row are changed as complete rows are."""
    source = read_tensors(random_checkpoint(tmp_path / "hf", qwen3_config(), "float32"))
    adapted(tmp_path / "hf", tmp_path / "a", seed=1)
    adapted(tmp_path / "hf", tmp_path / "b", seed=2)
    ours = exported(tmp_path / "hf", tmp_path, f"{tmp_path / 'a'}:0.5", str(tmp_path / "b"), target="maxtext")
    name = "model.layers.1.self_attn.q_proj"
    want = source[f"{name}.weight"]
    for folder, weight in (("a", 0.5), ("b", 1.0)):
        tensors = {key: x for key, x in _adapter_tensors(tmp_path / folder).items() if name in key}
        (a,), (b,) = ([x for key, x in tensors.items() if f"lora_{part}" in key] for part in "AB")
        want = want + b @ a * np.float32(7 / 4 * weight)
    np.testing.assert_allclose(ours[f"{name}.weight"], want, rtol=1e-5, atol=1e-5)
    facts = read_manifest(tmp_path / "out").raw["options"]["adapters"]
    assert [each["weight"] for each in facts] == [0.5, 1.0]
    assert not any("name" in each for each in facts)  # folders depend on the machine


def _adapter_tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_another_adapter_is_another_conversion(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "a", seed=1)
    first = exported(tmp_path / "hf", tmp_path, str(tmp_path / "a"))
    adapted(tmp_path / "hf", tmp_path / "a", seed=2)
    api.convert(tmp_path / "hf", tmp_path / "out", adapter=[str(tmp_path / "a")], overwrite=True)
    api.export(tmp_path / "out", tmp_path / "again")
    second = read_tensors(tmp_path / "again")
    assert any(not same_bits(first[name], second[name]) for name in first)


def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora", target_modules=["embed_tokens"], use_dora=True)
    with pytest.raises(UnsupportedConfig) as error:
        api.plan(tmp_path / "hf", adapter=[str(tmp_path / "lora")])
    assert "lora_magnitude_vector" in "\n".join([error.value.message, *error.value.details])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_B_layout": "grouped_by_expert"}, "lora_B_layout='grouped_by_expert', an unknown key"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication="),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config="),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"target_parameters": EXPERTS, "peft_version": "0.18.1"}, "peft_version='0.18.1' with target_parameters"),
        ({"target_parameters": EXPERTS, "peft_version": "0.19.0"}, "peft_version='0.19.0'"),
        ({"target_parameters": EXPERTS, "peft_version": None}, "peft_version=None"),
        ({"target_parameters": EXPERTS, "peft_version": "0.19.1"}, None),
        ({"target_parameters": EXPERTS, "peft_version": "0.22.0.dev0@abc"}, None),
        ({"peft_version": "0.4"}, None),
        ({"a_key_of_next_year": None, "another": False, "rank_pattern": {"q_proj": 4}}, None),
    ],
)
def test_keys_that_change_the_layout_are_read_or_refused(changes: dict, message: str | None, tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **changes}
    if message is None:
        return check_adapter_config(config, path)
    with pytest.raises(UnsupportedConfig) as error:
        check_adapter_config(config, path)
    assert message in error.value.details[0]
    return None


def test_every_key_of_peft_is_known() -> None:
    from peft import LoraConfig

    keys = LoraConfig().to_dict().keys()
    assert keys <= {
        *adapter_config.SCHEMA,
        *adapter_config.NO_EFFECT_ON_MERGED,
        *adapter_config.REFUSED,
        "init_lora_weights",
    }


def test_an_adapter_of_another_model_is_a_fault_of_the_plan(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(num_hidden_layers=2), "float32")
    random_checkpoint(tmp_path / "other", qwen3_config(num_hidden_layers=3, intermediate_size=88), "float32")
    adapted(tmp_path / "other", tmp_path / "lora")
    with pytest.raises(MappingError) as error:
        api.convert(tmp_path / "hf", tmp_path / "out", adapter=[str(tmp_path / "lora")])
    text = "\n".join(error.value.details)
    assert "model.layers.2.mlp.down_proj.weight  is changed by the adapter" in text
    assert "has the shape [32, 80], its change in the adapter" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["score"], "AutoModelForSequenceClassification"),
        (["lm_head", "model.embed_tokens"], "resize_token_embeddings"),
        (["score", "lm_head"], "was trained on this model"),
    ],
)
def test_an_adapter_of_another_head_or_vocabulary_says_what_to_do(names: list[str], hint: str, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    tensors = {f"{name}.weight": np.ones((100, 32), np.float32) for name in names}
    with pytest.raises(MappingError) as error:
        api.convert(tmp_path / "hf", tmp_path / "out", adapter=[lora(tmp_path / "lora", tensors)])
    assert hint in str(error.value.hint)


def test_a_changed_factor_is_another_conversion(tmp_path: Path) -> None:
    """The factor stands in adapter_config.json: with the same matrices it makes other weights."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora")
    api.convert(tmp_path / "hf", tmp_path / "out", adapter=[str(tmp_path / "lora")])
    change_config(tmp_path / "lora", lora_alpha=14)
    with pytest.raises(OutputError, match=r"another plan|exists already"):
        api.convert(tmp_path / "hf", tmp_path / "out", adapter=[str(tmp_path / "lora")])


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha_pattern": {"([a-z_0-9.]+)+!": 2}}, "takes too long"),
        ({"alpha_pattern": {"(": 2}}, "is not a regular expression"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"r": "4"}, "adapter_config.json"),
    ],
)
def test_a_hostile_config_is_an_error(changes: dict, message: str, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora")
    change_config(tmp_path / "lora", **changes)
    with pytest.raises(ConfigError) as error:
        api.plan(tmp_path / "hf", adapter=[str(tmp_path / "lora")])
    assert message in error.value.message


@pytest.mark.parametrize("changes", [{"r": 9}, {"r": 0}, {"rank_pattern": {"q_proj": 8}}])
def test_a_rank_that_the_matrices_do_not_have_is_refused(changes: dict, tmp_path: Path) -> None:
    """peft does not load them, and changes would have another factor."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora")
    change_config(tmp_path / "lora", **changes)
    with pytest.raises(SourceError, match=r"_proj has matrices of rank 4, and r is [098] in adapter_config\.json"):
        api.plan(tmp_path / "hf", adapter=[str(tmp_path / "lora")])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_adapter_that_is_not_finite_is_named_before_weights_are_read(value: float, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora")
    weights = tmp_path / "lora" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "layers.1.self_attn.v_proj.lora_B" in name)
    tensors[name][1, 2] = value
    save_file(tensors, weights)
    with pytest.raises(SourceError, match=r"lora/adapter_model.*layers\.1\.self_attn\.v_proj has matrices with NaN"):
        api.plan(tmp_path / "hf", adapter=[str(tmp_path / "lora")])


def test_matrices_that_change_while_they_are_read_are_an_error(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora")
    weights = tmp_path / "lora" / "adapter_model.safetensors"

    def change(step: api.Progress) -> None:
        if step.total and not step.done:
            weights.write_bytes(weights.read_bytes())

    with pytest.raises(SourceError, match="was changed while it was read"):
        api.convert(tmp_path / "hf", tmp_path / "out", adapter=[str(tmp_path / "lora")], progress=change)
    assert not (tmp_path / "out").exists()


def test_matrices_that_are_cut_off_while_they_are_read_are_an_error(tmp_path: Path, monkeypatch) -> None:
    """And do not end the process, as reading a map would."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapted(tmp_path / "hf", tmp_path / "lora", target_modules=["up_proj"])
    product = adapted_tensors._product

    def cut(*args):
        os.truncate(tmp_path / "lora" / "adapter_model.safetensors", 100)
        return product(*args)

    monkeypatch.setattr(adapted_tensors, "_product", cut)
    with pytest.raises(SourceError, match="was changed while it was read"):
        api.convert(tmp_path / "hf", tmp_path / "out", adapter=[str(tmp_path / "lora")])


def test_what_is_no_adapter(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    for given, message in (
        (str(tmp_path / "hf"), "is no LoRA adapter: it has no adapter_config.json"),
        (str(tmp_path / "nothing"), "there is no folder '.*nothing'"),
        (f"{tmp_path / 'hf'}:much", "'much' is not a number"),
        (f"{tmp_path / 'hf'}:nan", "'nan' is not a number"),
    ):
        with pytest.raises(UsageError, match=message):
            api.plan(tmp_path / "hf", adapter=[given])
    adapted(tmp_path / "hf", tmp_path / "lora")
    (tmp_path / "lora/adapter_model.safetensors").rename(tmp_path / "lora/adapter_model.bin")
    with pytest.raises(UsageError, match="has its weights as a pickle"):
        api.plan(tmp_path / "hf", adapter=[str(tmp_path / "lora")])
    (tmp_path / "lora/adapter_model.bin").rename(tmp_path / "lora/adapter_model.safetensors")
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(UnsupportedConfig, match="peft_type='IA3' is not implemented"):
        api.plan(tmp_path / "hf", adapter=[str(tmp_path / "lora")])
    for name in ("checkpoint-9", "checkpoint-10"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="run is no LoRA adapter") as error:
        api.plan(tmp_path / "hf", adapter=[f"{tmp_path / 'run'}"])
    assert error.value.hint == f"give an adapter within it, such as {tmp_path}/run/checkpoint-10"
    (tmp_path / "run" / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    (tmp_path / "run" / "adapters.safetensors").touch()
    with pytest.raises(UsageError, match="run is no LoRA adapter") as error:
        api.plan(tmp_path / "hf", adapter=[f"{tmp_path / 'run'}"])
    assert "mlx_lm.fuse" in str(error.value.hint)


def test_what_a_download_left_of_an_adapter_is_refused(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapter = lora(tmp_path / "lora", matrices("model.layers.1.self_attn.q_proj", 3, 5))
    (tmp_path / "lora" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match=r"adapter_model\.safetensors is truncated"):
        api.plan(tmp_path / "hf", adapter=[adapter])


@pytest.mark.parametrize("tokens", [[1.5], [1.0], [-1], {"embed_tokens": [0.5]}])
def test_tokens_that_no_vocabulary_has_are_refused(tokens: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainable_token_indices"):
        check_adapter_config({**PLAIN_LORA, "trainable_token_indices": tokens}, tmp_path / "adapter_config.json")


@pytest.mark.parametrize(
    ("kind", "hint"), [("IA3", "merge_and_unload"), ("PREFIX_TUNING", "serve it with peft"), (["LORA"], "peft")]
)
def test_another_method_says_what_to_do(kind: object, hint: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfig, match="is not implemented, only LORA") as error:
        check_adapter_config({"peft_type": kind}, tmp_path / "adapter_config.json")
    assert hint in str(error.value.hint)


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("pattern", "spelled"),
    [
        (r"^base_model\.model\.", ""),  # as `save_pretrained` of a model of transformers, and vLLM reads it
        (r"^", "_orig_mod."),
        (r"\.layers", "._fsdp_wrapped_module.layers"),
        (r"^", "module._orig_mod."),
        (r"_([AB])\.", r"_\1.default."),  # the state of a model, which peft loads too
    ],
    ids=["bare", "compiled", "sharded", "distributed", "with the name of the adapter"],
)
def test_spellings_of_trainers(pattern: str, spelled: str, tmp_path: Path) -> None:
    """peft loses some of these with a warning, and merges nothing."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    config = {"rank_pattern": {f"^{UP}": 4}, "r": 2, "lora_alpha": 0.5, "target_modules": ["up_proj"]}
    adapter = lora(tmp_path / "lora", matrices(UP, 80, 32), **config)
    ours = exported(tmp_path / "hf", tmp_path / "plain", adapter)
    path = Path(adapter) / "adapter_model.safetensors"
    write_safetensors(path, {re.sub(pattern, spelled, name): x for name, x in load_file(path).items()})
    again = exported(tmp_path / "hf", tmp_path / "again", adapter)
    assert_same(ours, again)
    assert api.compare(tmp_path / "again" / "out", source=tmp_path / "hf", adapter=[adapter]).passed
    assert not same_bits(ours[f"{UP}.weight"], read_tensors(tmp_path / "hf")[f"{UP}.weight"])


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head", "norm"]}, {"modules_to_save": ["mlp"]}, {"trainable_token_indices": [95, 3]}],
    ids=["tensors", "modules", "tokens"],
)
def test_the_state_of_a_model_is_read_as_its_adapter(options: dict, tmp_path: Path) -> None:
    """The state names the adapter within names of whole tensors, and has the tensors before the training too."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    options |= {"target_modules": ["q_proj"]}
    merged = saved(adapted(tmp_path / "hf", tmp_path / "lora", **options), tmp_path / "merged")
    path, state = tmp_path / "lora" / "adapter_model.safetensors", {}
    for name, x in load_file(path).items():
        trained = re.match(r"(.*\.(?:mlp|lm_head|\w*norm)\.)(.*)", name)
        if "lora_" in name or trained is None:
            state[re.sub(r"(lora_[AB]|_delta)", r"\1.default", name)] = x
        else:
            state |= {f"{trained[1]}modules_to_save.default.{trained[2]}": x}
            state |= {f"{trained[1]}original_module.{trained[2]}": np.zeros_like(x)}
    write_safetensors(path, state)
    ours = exported(tmp_path / "hf", tmp_path, str(tmp_path / "lora"))
    assert not [name for name in ours if not same_bits(ours[name], merged[name])]
    beside = api.compare(tmp_path / "out", source=tmp_path / "hf", adapter=[str(tmp_path / "lora")])
    assert beside.statistics.mean_kl < 1e-6  # the random MLPs have huge activations


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no tensors"),
        ([".lora_A.default.weight", ".lora_B.default.weight", ".lora_A.reference.weight"], "several adapters: default"),
        ([".lora_A.weight", ".lora_A"], "twice"),
        ([".lora_B.weight"], "lacks a matrix"),
    ],
)
def test_tensors_of_no_adapter_or_of_several(names: list[str], message: str, tmp_path: Path) -> None:
    """Nothing would be merged, or one of them would be lost."""
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    adapter = lora(tmp_path / "lora", {UP + name: np.ones((4, 4), np.float32) for name in names})
    with pytest.raises((SourceError, UnsupportedConfig), match=message) as error:
        api.plan(tmp_path / "hf", adapter=[adapter])
    assert error.value.hint


assert {case.family for case in CASES} >= set(DENSE)


TEXT = r".*model\.layers.*\.(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj|in_proj_qkv|out_proj)"
WHOLE = TEXT.replace("model", "language_model")
WRAPPED = [
    *(pytest.param(name, WHOLE, False, id=f"{name} whole") for name in ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_5")),
    *(pytest.param(name, TEXT, True, id=f"{name} text") for name in ("gemma3", "qwen3_5", "qwen3_5_moe")),
]


@pytest.mark.parametrize("is_original", [True, False], ids=["released names", "names of modules"])
@pytest.mark.parametrize(("family", "targets", "is_text"), WRAPPED)
def test_modules_of_transformers_lead_to_the_tensors_of_releases(
    family: str, targets: str, is_text: bool, is_original: bool, tmp_path: Path
) -> None:
    """peft names the modules of the class that was trained: the complete model, or its text model alone."""
    whole = hf_model(FIRST[family]).to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "hf", save_original_format=is_original)
    kind = None if is_text else type(whole)
    merged = adapted(tmp_path / "hf", tmp_path / "lora", kind=kind, dtype=torch.bfloat16, target_modules=targets)
    merged.save_pretrained(tmp_path / "merged")
    api.convert(tmp_path / "hf", tmp_path / "ours", adapter=[str(tmp_path / "lora")], text_only=is_text)
    api.convert(tmp_path / "merged", tmp_path / "theirs", text_only=is_text)
    ours, theirs = restore(tmp_path / "ours"), restore(tmp_path / "theirs")
    assert_same(ours, theirs)
    api.convert(tmp_path / "hf", tmp_path / "plain", text_only=is_text)
    assert any(not same_bits(x, ours[name]) for name, x in restore(tmp_path / "plain").items())


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("internvl", marks=pytest.mark.slow)])
def test_changes_of_a_tower(name: str, tmp_path: Path) -> None:
    """Releases have other names of its modules than transformers. A text model alone leaves them out."""
    model, folder = SIGHTS[name]().model, tmp_path / "hf"
    model.save_pretrained(folder)
    merged = saved(adapted(folder, tmp_path / "lora", 0, type(model), target_modules="all-linear"), tmp_path / "merged")
    ours, before = exported(folder, tmp_path, str(tmp_path / "lora")), read_tensors(folder)
    assert ours.keys() == merged.keys()
    assert any("vis" in each for each in ours if not same_bits(ours[each], before[each]))
    assert not [each for each in ours if not same_bits(ours[each], merged[each])]
    for options in ({}, {"quantize": "int8_weight_only"}):
        path = tmp_path / f"servers{len(options)}"
        api.convert(folder, path, adapter=[str(tmp_path / "lora")], target="huggingface", **options)
        carried = {each: x for each, x in read_tensors(path).items() if each in merged}
        assert any("vis" in each for each in carried if not same_bits(carried[each], before[each]))
        wrong = [each for each in carried if not same_bits(carried[each], merged[each])]
        assert not [each for each in wrong if not options or "vis" in each]
    done = api.convert(folder, tmp_path / "text", adapter=[str(tmp_path / "lora")], text_only=True)
    assert any(skip.reason.endswith(", which an adapter changes") for skip in done.skipped)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_parameters_of_all_experts_in_each_form(family: str, tmp_path: Path) -> None:
    model = hf_model(FIRST[family]).to(torch.bfloat16)
    found = {}
    for is_original in (True, False):
        base = tmp_path / f"{is_original}"
        model.save_pretrained(base, save_original_format=is_original)
        adapted(base, tmp_path / f"lora-{is_original}", target_modules=["q_proj"], target_parameters=EXPERTS)
        api.convert(base, base.with_name(f"{base.name}-out"), adapter=[str(tmp_path / "lora-True")])
        found[is_original] = restore(base.with_name(f"{base.name}-out"))
    assert_same(found[True], found[False])


@pytest.mark.parametrize(
    ("family", "names"), [("qwen3_moe", ("gate_proj", "up_proj", "down_proj")), ("mixtral", ("w1", "w3", "w2"))]
)
def test_single_experts_in_each_form(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """As peft wrote them while each expert had modules of its own; here it is merged into stacked ones too. Some
    experts have none of the changes, and their ranks differ."""
    model = hf_model(FIRST[family]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "True")
    model.save_pretrained(tmp_path / "False", save_original_format=False)
    pairs, ranks = {}, {}
    rng = np.random.default_rng(0)
    for name, tensor in read_tensors(tmp_path / "True").items():
        module, expert = name.removesuffix(".weight"), re.search(r"experts\.(\d+)\.(\w+)", name)
        if expert is None or expert[2] not in names or (int(expert[1]), expert[2]) in ((0, names[0]), (1, names[1])):
            continue
        rank = ranks[module] = 2 + int(expert[1])
        rows, columns = tensor.shape
        for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            pairs[f"base_model.model.{module}.lora_{part}.weight"] = rng.standard_normal(shape, np.float32)
    (tmp_path / "lora").mkdir()
    write_safetensors(tmp_path / "lora" / "adapter_model.safetensors", pairs)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": ranks}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    found = {}
    for form in ("True", "False"):
        api.convert(tmp_path / form, tmp_path / f"{form}-out", adapter=[str(tmp_path / "lora")], dtype="float32")
        found[form] = restore(tmp_path / f"{form}-out")
    api.convert(tmp_path / "True", tmp_path / "plain", dtype="float32")
    plain = restore(tmp_path / "plain")
    for name, want in found["True"].items():
        np.testing.assert_allclose(found["False"][name], want, rtol=1e-5, atol=1e-5)
        assert bool(re.search(r"\.moe\.(gate|up|down)\.", name)) == (not same_bits(want, plain[name]))

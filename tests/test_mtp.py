"""Layers for multi-token prediction (MTP): left out with a reason, or converted beside the model."""

import json
import warnings
from math import prod

import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

import tpuconv
from helpers.checkpoints import random_tensor, read_tensors, write_checkpoint
from helpers.commands import LISTINGS, every_name
from helpers.conversions import LIMITS, assert_same, convert, plan_for, restore, same_bits
from helpers.families import FIRST
from helpers.logits import forward
from tpuconv import api, cli
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.arrays import with_quantization
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.conversion import run
from tpuconv.errors import CorruptOutput, MappingError, SourceError, UsageError
from tpuconv.models.registry import find_family, get_family
from tpuconv.notation.release import Release
from tpuconv.quantize.apply import quantization
from tpuconv.quantize.config import find_config
from tpuconv.sources.source import open_source
from tpuconv.storage.sealed import seal


def test_a_layer_that_predicts_further_tokens_is_skipped_or_converted(with_mtp, tmp_path):
    source = read_tensors(with_mtp)
    own = {name for name in source if name.startswith("model.layers.3.")}
    without = convert(with_mtp, tmp_path / "without")
    assert all("MTP" in skip.reason for skip in without.skipped)
    assert sum(skip.count for skip in without.skipped) == len(own)
    plan = convert(with_mtp, tmp_path / "with", Options(include_mtp=True))
    assert {skip.reason for skip in plan.skipped} == {"a copy of model.embed_tokens.weight", "a copy of lm_head.weight"}
    arrays, front = restore(tmp_path / "with"), "model.layers.3."
    plain = restore(tmp_path / "without")
    assert_same({name: x for name, x in arrays.items() if not name.startswith("mtp.")}, plain)
    mtp = {name.removeprefix("mtp.3.") for name in arrays.keys() - plain.keys()}
    block = {name.removeprefix("layers.2.") for name in plain if name.startswith("layers.2.")}
    assert block < mtp
    assert mtp - block == {
        "embed_norm.scale",
        "hidden_norm.scale",
        "from_embed.kernel",
        "from_hidden.kernel",
        "norm.scale",
    }
    D = len(source["model.norm.weight"])
    side_by_side = source[f"{front}eh_proj.weight"]
    assert same_bits(arrays["mtp.3.from_embed.kernel"], side_by_side[:, :D].T)
    assert same_bits(arrays["mtp.3.from_hidden.kernel"], side_by_side[:, D:].T)
    config = find_family(plan.source.config).config.from_hf(plan.source.config)
    back: dict[str, np.ndarray] = {}
    for binding in plan.table.bind(config, include_mtp=True):
        back |= binding.inverse(arrays.__getitem__)
    assert len(set(source) - set(back)) == 2
    assert_same(back, {name: source[name] for name in back})


def test_a_model_is_loaded_without_the_layer_that_predicts_further_tokens(with_mtp, tmp_path):
    convert(with_mtp, tmp_path / "without")
    convert(with_mtp, tmp_path / "with", Options(include_mtp=True))
    with pytest.warns(UserWarning, match=r"does not use them: mtp\.3\.attn\.k_b\.kernel, .*mtp\.3\.norm\.scale"):
        model = tpuconv.load(tmp_path / "with")
    ids = np.array([[3, 1, 4, 1, 5]])
    assert np.array_equal(forward(model, ids), forward(tpuconv.load(tmp_path / "without"), ids))


def test_of_such_a_layer_every_array_is_known(with_mtp, tmp_path):
    convert(with_mtp, tmp_path / "out", Options(include_mtp=True))
    facts = json.loads((tmp_path / "out" / "tpuconv.json").read_text())
    facts["arrays"]["mtp.3.foo"] = facts["arrays"].pop("mtp.3.norm.scale")
    (tmp_path / "out" / "tpuconv.json").write_bytes(seal(facts))
    with pytest.raises(CorruptOutput, match=r"(?s)mtp\.3\.foo: \(48,\) stored, None.*mtp\.3\.norm\.scale: None stored"):
        tpuconv.load(tmp_path / "out")


def test_the_head_of_a_tied_model_is_a_copy_of_the_embedding(with_mtp, tmp_path):
    config = json.loads((with_mtp / "config.json").read_text()) | {"tie_word_embeddings": True}
    tensors = read_tensors(with_mtp)
    del tensors["lm_head.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = tensors["model.embed_tokens.weight"]
    write_checkpoint(tmp_path / "hf", config, tensors)
    plan = convert(tmp_path / "hf", tmp_path / "out", Options(include_mtp=True))
    assert {skip.reason for skip in plan.skipped} == {"a copy of model.embed_tokens.weight"}
    assert sum(skip.count for skip in plan.skipped) == 2


def test_the_model_is_quantized_and_the_layer_beside_it_is_not(with_mtp, tmp_path):
    rules = find_config("int8_weight_only")
    source = open_source(with_mtp)
    family = find_family(source.config)
    config = family.config.from_hf(source.config)
    options = Options(include_mtp=True)
    plain = make_plan(source, family.name, family.table, config, options)
    plan = with_quantization(plain, quantization(plain, family, config, rules))
    for _ in run(plan, tmp_path / "out", LIMITS):
        pass
    convert(with_mtp, tmp_path / "plain", options)
    command = ["quantize", tmp_path / "plain", tmp_path / "afterwards", "--config", "int8_weight_only", "--json"]
    done = CliRunner().invoke(cli.tpuconv, list(map(str, command)))
    assert done.exit_code == 0, done.output
    assert read_manifest(tmp_path / "afterwards").raw["options"]["include_mtp"]
    have, plain = restore(tmp_path / "out"), restore(tmp_path / "plain")
    assert_same(have, restore(tmp_path / "afterwards"))
    mtp = {name: x for name, x in plain.items() if name.startswith("mtp.")}
    assert mtp
    assert_same({name: x for name, x in have.items() if name.startswith("mtp.")}, mtp)
    for name in ("out", "afterwards"):
        with warnings.catch_warnings(record=True) as seen:  # Qwix's own among them
            warnings.simplefilter("always")
            model = tpuconv.load(tmp_path / name)
        assert any("the model does not use them: mtp.3" in str(warning.message) for warning in seen)
        _, state = nnx.split(model)
        assert not [path for path, _ in nnx.to_flat_state(state) if path[0] == "mtp"]


def test_other_numbers_and_names_of_such_layers_are_faults(with_mtp, tmp_path):
    def change(**config):
        write_checkpoint(tmp_path / "hf", config, tensors)
        return plan_for(tmp_path / "hf", Options(include_mtp=True))

    config = json.loads((with_mtp / "config.json").read_text())
    tensors = read_tensors(with_mtp) | {"model.layers.3.foo.weight": np.zeros(3, "f4")}
    with pytest.raises(MappingError, match=r"model\.layers\.3\.foo\.weight"):
        change(**config).check()
    del tensors["model.layers.3.foo.weight"]
    with pytest.raises(MappingError, match=r"model\.layers\.4\..* is missing"):
        change(**config | {"num_nextn_predict_layers": 2}).check()
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][::-1]
    change(**config).check()
    with pytest.raises(SourceError, match=r"(?s)should be a copy of model\.embed_tokens.*leave out `include_mtp=`"):
        convert(tmp_path / "hf", tmp_path / "out", Options(include_mtp=True))
    with pytest.raises(UsageError, match="no layers that predict further tokens"):
        change(**config | {"num_nextn_predict_layers": 0})
    with pytest.raises(UsageError, match="`include_mtp=` and `layers=` exclude each other"):
        plan_for(with_mtp, Options(include_mtp=True, layers=range(1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "alice_ai"]
)
def test_layers_of_qwen_come_back(name, tmp_path):
    family, case = get_family(name), FIRST[name]
    raw, rng = json.loads(case.hf_config().to_json_string()), np.random.default_rng(0)
    config = family.read_config(raw)
    reader = family.release_reader()
    one, stacked = ({place.name: form for place in reader.places} for form in ("one", "stacked"))
    fronts = {"model": "language_model.model"}
    mixed = {name: form for name, form in stacked.items() if not name.startswith("mtp.")}  # as Qwen3.5 is released
    for number, release in enumerate(
        Release(forms=forms, spelling=spelling) for forms in (one, stacked, mixed) for spelling in ({}, fronts)
    ):
        table = reader.release_table(release, config)
        shapes = {n: s for b in table.bind(config, include_mtp=True) for n, s in b.src_shapes().items()}
        own = {n for n in shapes if n.startswith("mtp.")}
        assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"} < own
        tensors = {n: random_tensor(rng, shape, "bfloat16") for n, shape in shapes.items()}
        out = tmp_path / f"out-{number}"
        source = write_checkpoint(out.with_name(f"{out.name}-hf"), raw, tensors)
        skipped = plan_for(source).skipped
        assert sum(skip.count for skip in skipped if "MTP" in skip.reason) == len(own)
        convert(source, out, Options(include_mtp=True))
        assert read_manifest(out).release.forms.items() <= release.forms.items()  # not of layers that it has not
        D, arrays = config.hidden_size, restore(out)
        assert same_bits(arrays["mtp.from_embed.kernel"], np.ascontiguousarray(tensors["mtp.fc.weight"][:, :D].T))
        assert arrays["mtp.0.attn.q.kernel"].shape == arrays["mtp.0.attn.gate.kernel"].shape
        api.export(out, out.with_name(f"{out.name}-back"))
        assert_same(read_tensors(out.with_name(f"{out.name}-back")), tensors)
        with pytest.warns(UserWarning, match=r"does not use them: mtp\.0\.attn\.gate\.kernel"):
            tpuconv.load(out)
    del tensors["mtp.norm.weight"]
    tensors["mtp.more.weight"] = np.zeros(3, "f4")
    plan = plan_for(write_checkpoint(tmp_path / "other", raw, tensors), Options(include_mtp=True))
    assert [fault.split()[0] for fault in plan.faults] == ["mtp.more.weight", "mtp.norm.weight"]


@pytest.mark.parametrize(
    "model", [pytest.param("Qwen/Qwen3-Next-80B-A3B-Thinking", marks=pytest.mark.slow), "Qwen/Qwen3.5-9B"]
)
def test_of_real_ones_of_qwen_everything_is_used(model, tmp_path):
    listing = LISTINGS[model]
    tensors = {n: (dtype, tuple(shape)) for names, dtype, shape in listing["tensors"] for n in every_name(names)}
    write_checkpoint(tmp_path / "hf", listing["config"], tensors)
    assert any(name.startswith("mtp.") for name in tensors)
    plan = plan_for(tmp_path / "hf", Options(include_mtp=True))
    plan.check()
    assert not [skip for skip in plan.skipped if "mtp" in skip.pattern]


def test_of_the_real_one_everything_is_used_or_a_copy(tmp_path):
    listing = LISTINGS["deepseek-ai/DeepSeek-R1"]
    tensors = {n: (dtype, tuple(shape)) for names, dtype, shape in listing["tensors"] for n in every_name(names)}
    write_checkpoint(tmp_path / "hf", listing["config"], tensors, shards=3)
    plan = plan_for(tmp_path / "hf", Options(include_mtp=True))
    plan.check()
    assert {skip.pattern for skip in plan.skipped} == {
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
    }
    own = {name: shape for name, (_, shape) in tensors.items() if name.startswith("model.layers.61.")}
    unique = sum(prod(shape) for name, shape in own.items() if name.endswith(".weight") and len(shape) < 3)
    copies = 2 * prod(tensors["lm_head.weight"][1])
    assert plan.parameters == listing["parameters"] + unique - copies
    assert (
        round((unique - copies) / 1e9, 1) == 11.6
    )  # the model's card says 11.5 with 0.9 + 0.9 of copies, and 14 in all

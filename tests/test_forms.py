"""Releases name and group the tensors of one model in many ways: one table of each family reads them all."""

import gzip
import json
import re
import runpy
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import released_code
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, plan_for, restore
from helpers.encoded import encoded, fp8
from helpers.experts import stacked
from helpers.families import CASES, FIRST, Case, hf_model
from helpers.sights import SIGHTS
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.types import Options
from tpuconv.errors import MappingError, UnsupportedConfig
from tpuconv.models.registry import get_family
from tpuconv.notation.spelling import Speller, by_template, respelled, rules_of

FROZEN = Path(__file__).parent / "data" / "frozen_tables.json.gz"
"""The 1,044 tables of the version before forms, which had one for each spelling: what each made of a tiny model. The
names that it supposed for a norm of DeepSeek V4's MTP layers, which transformers does not save, are corrected, and the
gate of GLM-5-Next's indexer has its new name."""
SAVED_BY_TRANSFORMERS = [
    case
    for case in FIRST.values()
    if not case.written_as and not case.traits.thinker_of and case.family not in released_code.MODELS
]
REFUSED = {"longcat_flash": "gate_up_proj"}
"""Families of which transformers saves a tensor that no row reads: with LongCat's experts it stacks those that have no
matrices in releases."""
SKIPPED_BEFORE = {"glm_ocr"}
"""Families whose layers for further tokens had no rows then."""
FAST = {"gemma3", "qwen3_5_moe", "mixtral", "kimi_linear", "molmo2", "olmo_hybrid", "deepseek_v4", "laguna"}

Tensors = dict[str, np.ndarray]


def some(cases: Iterable[Case], fast: Collection[str]) -> list[Any]:
    """Cases for `parametrize`: those of families that are not in `fast` are slow."""
    return [
        pytest.param(case, id=case.family, marks=[] if case.family in fast else [pytest.mark.slow]) for case in cases
    ]


@cache
def frozen() -> dict[str, Any]:
    return json.loads(gzip.decompress(FROZEN.read_bytes()))


def numbered_axes(layout: str) -> str:
    """A layout with numbers in place of letters and words, most of which had other names before."""
    numbers: dict[str, int] = {}
    return re.sub(r"[A-Za-z]\w*", lambda found: str(numbers.setdefault(found[0], len(numbers) + 2)), layout)


@pytest.mark.parametrize("name", frozen())
def test_every_table_before_is_read(name: str) -> None:
    entry = frozen()[name]
    family = get_family(entry["family"])
    for before in entry["tables"]:
        config = family.read_config(entry["config"], returns=before["returns"])
        names = [each for stacks, _, _ in before["bindings"] for stack in stacks for each in stack]
        table = family.table_for(names, config, before["returns"])
        found = {
            tuple(stack.names[0] for stack in binding.dst): (
                [list(stack.names) for stack in binding.src],
                numbered_axes(binding.row.layout),
            )
            for binding in table.bind(config, before["mtp"] and entry["family"] not in SKIPPED_BEFORE)
        }
        expected = {tuple(dst): (src, numbered_axes(layout)) for src, dst, layout in before["bindings"]}
        assert found == expected, before["variant"]
        again = family.table_of(table.release, config, before["returns"])  # as a manifest gives it
        assert again.fingerprint == table.fingerprint


@cache
def tool() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parent.parent / "tools" / "saved_names.py"))


@pytest.mark.parametrize("case", some(SAVED_BY_TRANSFORMERS, FAST))
def test_the_names_of_transformers_are_current(case: Case) -> None:
    """tools/saved_names.py writes them anew after an update of transformers."""
    models = tool()["models_by_family"]()[case.family]()
    found = replace(models.found(), release=models.release())
    assert found.to_json() == json.loads(tool()["FILE"].read_text())[models.family.name]


@pytest.mark.parametrize("case", some(SAVED_BY_TRANSFORMERS, FAST))
def test_what_transformers_saves_is_read(case: Case, tmp_path: Path) -> None:
    """As it saves by default, with the names of releases, and with those of its own modules."""
    import torch

    with warnings.catch_warnings():  # the rotary positions of llama4's vision tower are complex
        warnings.filterwarnings("ignore", "Casting complex values to real")
        model = hf_model(case).to(torch.bfloat16)
        for is_original in (True, False):
            model.save_pretrained(tmp_path / f"{is_original}", save_original_format=is_original)
    convert(tmp_path / "True", tmp_path / "True-out")
    if case.family in REFUSED:
        with pytest.raises(MappingError, match=REFUSED[case.family]):
            plan_for(tmp_path / "False").check()
        return
    plan = convert(tmp_path / "False", tmp_path / "False-out")
    assert_same(restore(tmp_path / "False-out"), restore(tmp_path / "True-out"))
    skipped = sum(skip.count for skip in plan.skipped)
    outside = any("alone is converted" in skip.reason for skip in plan.skipped)
    for name, form in (("False", None), ("True", "transformers"), ("False", "released")):
        out = tmp_path / f"{name}-as-{form}"
        api.export(tmp_path / f"{name}-out", out, form=form, with_skipped=tmp_path / name if outside else None)
        if form != "released" and not (form and outside):  # towers keep the names that they had
            theirs, ours = read_tensors(tmp_path / "False"), read_tensors(out)
            assert len(theirs) - len(ours) == (0 if outside else skipped)  # what is computed from config.json
            assert_same(ours, {tensor: theirs[tensor] for tensor in ours})
        convert(out, tmp_path / f"{form}-out")
        assert_same(restore(tmp_path / f"{form}-out"), restore(tmp_path / "True-out"))


def with_experts(name: str) -> Case:
    return next(case for case in CASES if case.id == name)


def rewritten(folder: Path, out: Path, change: Callable[[Tensors], Tensors]) -> Path:
    return write_checkpoint(out, json.loads((folder / "config.json").read_text()), change(read_tensors(folder)))


def is_even(front: str) -> bool:
    return int(re.findall(r"\d+", front)[0]) % 2 == 0


@pytest.mark.parametrize("name", ["qwen3_moe-few-experts", "qwen3_5_moe-plain", "deepseek_v3-groups"])
def test_layers_of_different_forms(name: str, hf: Any, orbax: Any, tmp_path: Path) -> None:
    case = with_experts(name)
    source = rewritten(hf(case), tmp_path / "hf", lambda tensors: stacked(tensors, is_even))
    assert len(read_tensors(source)) != len(read_tensors(hf(case)))
    plan = convert(source, tmp_path / "out")
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))
    (form,) = read_manifest(tmp_path / "out").release.forms.values()
    assert isinstance(form, Mapping)
    assert {"one", "stacked"} == set(form)
    outside = source if any("alone is converted" in skip.reason for skip in plan.skipped) else None
    api.export(tmp_path / "out", tmp_path / "back", with_skipped=outside)
    assert_same(read_tensors(tmp_path / "back"), read_tensors(source))
    convert(source, tmp_path / "some", Options(layers=range(1, 2)))
    layers = {name.split(".")[1] for name in restore(tmp_path / "some") if name.startswith("layers.")}
    assert layers == {"1"}
    with pytest.raises(UnsupportedConfig, match=r"cannot be stacked with them|cannot stack"):
        api.plan(source, scan_layers=True)


def test_a_target_of_layers_of_different_forms(hf: Any, tmp_path: Path) -> None:
    case = with_experts("qwen3_moe-few-experts")
    source = rewritten(hf(case), tmp_path / "hf", lambda tensors: stacked(tensors, is_even))
    for folder, out in ((hf(case), "one"), (source, "mixed")):
        api.convert(folder, tmp_path / out, target="maxtext")
    facts = [
        {name: (array["xxh3"], array["shape"]) for name, array in read_manifest(tmp_path / out).raw["arrays"].items()}
        for out in ("one", "mixed")
    ]
    assert facts[0] == facts[1]
    with pytest.raises(UnsupportedConfig, match="cannot be stacked with them"):
        api.plan(source, target="maxtext", scan_layers=True)


def test_stacked_experts_in_fp8(hf: Any, tmp_path: Path) -> None:
    """As transformers 5 has them: a parameter and its scales, without `.weight`."""
    case = with_experts("qwen3_moe-few-experts")
    encoded(hf(case), tmp_path / "one", fp8)

    def whole(tensors: Tensors) -> Tensors:
        scales = {n.removesuffix("_scale_inv"): x for n, x in tensors.items() if n.endswith("_scale_inv")}
        others = {n: x for n, x in tensors.items() if not n.endswith("_scale_inv")}
        made, of = stacked(others, is_even), stacked(scales, is_even)
        return made | {f"{n}_scale_inv": x for n, x in of.items()}

    source = rewritten(tmp_path / "one", tmp_path / "hf", whole)
    assert any(name.endswith("experts.gate_up_proj_scale_inv") for name in read_tensors(source))
    for encoding in ("dequantize", "keep"):
        outs = [tmp_path / f"{encoding}-{name}" for name in ("one", "hf")]
        for folder, out in zip((tmp_path / "one", source), outs, strict=True):
            convert(folder, out, Options(encoding=encoding))
        assert_same(restore(outs[1]), restore(outs[0]))
    api.export(tmp_path / "keep-hf", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(source))


def test_a_layer_that_is_spelled_apart(hf: Any, orbax: Any, tmp_path: Path) -> None:
    case = FIRST["qwen3"]

    def spelled(tensors: Tensors) -> Tensors:
        return {re.sub(r"^model\.layers\.1\.", "language_model.model.layers.1.", n): x for n, x in tensors.items()}

    source = rewritten(hf(case), tmp_path / "hf", spelled)
    convert(source, tmp_path / "out")
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))
    api.export(tmp_path / "out", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(source))


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_first_releases_of_mamba(name: str, hf: Any, orbax: Any, tmp_path: Path) -> None:
    """Their embedding has another name, and config.json need not have the width that follows from `expand`."""
    case = FIRST[name]
    raw = json.loads((hf(case) / "config.json").read_text())
    raw.pop("intermediate_size", None)
    tensors = {n.replace(".embeddings.", ".embedding."): x for n, x in read_tensors(hf(case)).items()}
    source = write_checkpoint(tmp_path / "hf", raw, tensors)
    assert "backbone.embedding.weight" in tensors
    convert(source, tmp_path / "out")
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))
    api.export(tmp_path / "out", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), tensors)


@pytest.mark.parametrize(
    "prefix",
    ["_orig_mod.", "module.", "base_model.model.", "pretrained_model.", "module._orig_mod.", "_forward_module.model."],
)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3"])
def test_prefixes_of_trainers(prefix: str, name: str, hf: Any, orbax: Any, tmp_path: Path) -> None:
    case = FIRST[name]
    source = rewritten(hf(case), tmp_path / "hf", lambda tensors: {prefix + n: x for n, x in tensors.items()})
    convert(source, tmp_path / "out")
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))


def _with_prefix(modules: Tensors, tensors: Tensors) -> Tensors:
    return {f"base_model.model.{n}": x for n, x in modules.items()}


def _released_with_prefix(modules: Tensors, tensors: Tensors) -> Tensors:
    return {f"_orig_mod.{n}": x for n, x in tensors.items()}


def _with_a_buffer(modules: Tensors, tensors: Tensors) -> Tensors:
    return {**tensors, "visual.rotary_pos_emb.inv_freq": np.ones(3, np.float32)}


def _half_as_modules(modules: Tensors, tensors: Tensors) -> Tensors:
    """The tensors with layer 1 under the names of modules."""
    return {n: x for n, x in tensors.items() if ".1." not in n} | {n: x for n, x in modules.items() if ".1." in n}


@pytest.mark.parametrize(
    "spelled",
    [
        pytest.param(_with_prefix, id="modules with a prefix"),
        pytest.param(_half_as_modules, id="a layer of modules"),
        pytest.param(_released_with_prefix, id="released names with a prefix", marks=pytest.mark.slow),
        pytest.param(_with_a_buffer, id="a buffer", marks=pytest.mark.slow),
    ],
)
def test_spellings_of_an_encoder(spelled: Callable[[Tensors, Tensors], Tensors], tmp_path: Path) -> None:
    """The text model alone skips it in all of them."""
    model = SIGHTS["qwen2_vl"]().model
    model.save_pretrained(tmp_path / "plain")
    modules = {name: x.numpy() for name, x in model.state_dict().items()}
    source = rewritten(tmp_path / "plain", tmp_path / "hf", lambda tensors: spelled(modules, tensors))
    api.convert(tmp_path / "plain", tmp_path / "wanted")
    api.convert(source, tmp_path / "out")
    wanted = restore(tmp_path / "wanted")
    assert any(name.startswith("vision.") for name in wanted)
    assert_same(restore(tmp_path / "out"), wanted)
    api.convert(source, tmp_path / "text", text_only=True)
    text = {name: x for name, x in wanted.items() if not name.startswith("vision.")}
    assert_same(restore(tmp_path / "text"), text)


ONE = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.rotary_emb.inv_freq", "computed from config.json"),
        ("model.layers.9.self_attn.rotary_emb.inv_freq", "computed from config.json"),
        ("_orig_mod.model.layers.9.self_attn.rotary_emb.cos_cached", "computed from config.json"),
        ("vision_tower.vision_model.embeddings.position_ids", "computed from config.json"),
        ("v_head.summary.weight", "the value head of a training by PPO, which no logits depend on"),
    ],
)
def test_tensors_that_no_model_reads(name: str, reason: str, hf: Any, tmp_path: Path) -> None:
    case = FIRST["gemma2"]
    source = rewritten(hf(case), tmp_path / "hf", lambda tensors: {**tensors, name: np.ones(4, np.float32)})
    plan = plan_for(source)
    plan.check()
    assert [skip.reason for skip in plan.skipped] == [reason]


@pytest.mark.parametrize(
    ("name", "change", "hint"),
    [
        ("of ZeRO 3", lambda tensors: {n: x[:0].ravel() if x.ndim == 2 else x for n, x in tensors.items()}, "ZeRO 3"),
        ("no tensors", lambda tensors: {}, "join the shards"),
        ("of FSDP", lambda tensors: {"_fsdp_wrapped_module._flat_param": np.ones(9, np.float32)}, "FULL_STATE_DICT"),
        ("with an adapter", lambda tensors: {**tensors, "base_model.model.x.lora_A.default.weight": ONE}, "of peft"),
        ("as saved modules", lambda tensors: {**tensors, "x.modules_to_save.default.weight": ONE}, "of peft"),
        ("with a prefix", lambda tensors: {f"foo.{n}": x for n, x in tensors.items()}, "with names without it"),
        ("with an average", lambda tensors: {**tensors, **{f"ema.{n}": x for n, x in tensors.items()}}, "check that"),
    ],
)
def test_weights_as_trainers_leave_them_are_explained(
    name: str, change: Callable[[Tensors], Tensors], hint: str, hf: Any, tmp_path: Path
) -> None:
    source = rewritten(hf(FIRST["llama"]), tmp_path / "hf", change)
    with pytest.raises(MappingError) as error:
        plan_for(source).check()
    assert hint in (error.value.hint or "")
    assert ("every name begins" in str(error.value)) == (name == "with a prefix")


def test_stacked_layers_of_two_dtypes_are_explained(hf: Any, tmp_path: Path) -> None:
    """As a merge of models leaves them."""
    source = rewritten(
        hf(FIRST["llama"]),
        tmp_path / "hf",
        lambda tensors: {n: x.astype(np.float16) if ".1." in n else x for n, x in tensors.items()},
    )
    plan_for(source).check()
    with pytest.raises(MappingError, match="another dtype than the tensors it is joined with") as error:
        plan_for(source, Options(scan_layers=True)).check()
    assert "in one dtype" in (error.value.hint or "")


def test_an_unknown_prefix_is_named(hf: Any, tmp_path: Path) -> None:
    source = rewritten(hf(FIRST["llama"]), tmp_path / "hf", lambda tensors: {f"foo.{n}": x for n, x in tensors.items()})
    with pytest.raises(MappingError, match=r"every name begins with 'foo\.', and all of them fit without it"):
        plan_for(source).check()


def test_an_unknown_prefix_of_a_multimodal_model_is_named(tmp_path: Path) -> None:
    SIGHTS["qwen2_vl"]().model.save_pretrained(tmp_path / "plain")
    spelled = rewritten(
        tmp_path / "plain", tmp_path / "hf", lambda tensors: {f"foo.{n}": x for n, x in tensors.items()}
    )
    with pytest.raises(MappingError, match=r"every name begins with 'foo\.', and all of them fit without it"):
        api.convert(spelled, tmp_path / "out")


def test_tensors_of_two_forms_are_refused(hf: Any, tmp_path: Path) -> None:
    case = with_experts("qwen3_moe-few-experts")
    source = rewritten(hf(case), tmp_path / "hf", lambda tensors: tensors | stacked(tensors, is_even))
    with pytest.raises(MappingError, match="has no row"):
        plan_for(source).check()


def changes(tensors: Tensors) -> dict[str, tuple[str, Tensors]]:
    """For each kind of tensor the name of one, and the tensors with that one lost, renamed, of another shape, or there
    in a second spelling."""
    out = {}
    for pattern, names in by_template(tensors).items():
        name = names[-1]
        rest = {n: x for n, x in tensors.items() if n != name}
        out[f"{pattern} lost"] = name, rest
        out[f"{pattern} renamed"] = name, rest | {f"{name}x": tensors[name]}
        out[f"{pattern} of another shape"] = name, rest | {name: np.concatenate([np.atleast_1d(tensors[name])] * 2)}
        out[f"{pattern} twice"] = name, tensors | {f"language_model.{name}": tensors[name]}
    return out


@pytest.mark.parametrize("case", some(FIRST.values(), {"qwen3_moe"}))
def test_nothing_is_lost_silently(case: Case, hf: Any, tmp_path: Path) -> None:
    """Every tensor is used once: where one is lost, renamed, of another shape or there twice, the plan says so."""
    folder = hf(case)
    raw, tensors, plan = json.loads((folder / "config.json").read_text()), read_tensors(folder), plan_for(folder)
    bound = {name for binding in plan.bindings for name in binding.src_shapes()}
    is_used = {info.name for name in bound for info in plan.tensors[name].stored}
    for number, (what, (name, changed)) in enumerate(changes(tensors).items()):
        if name in is_used:  # not skipped, and no copy
            assert plan_for(write_checkpoint(tmp_path / str(number), raw, changed)).faults, what


@pytest.mark.parametrize("index", ["{L}", "#"])
def test_a_family_says_other_names_of_its_modules(index: str) -> None:
    """With the index of its table, or as templates."""
    names = {"input_layernorm": "ln", "self_attn.q_proj": "mix.wq"}
    modules = {f"blocks.{index}.{new}": f"model.layers.{index}.{name}" for name, new in names.items()}
    qwen3 = get_family("qwen3")
    family = replace(qwen3, aliases=modules)
    config = family.read_config(json.loads(FIRST["qwen3"].hf_config().to_json_string()))
    released = [name for row in qwen3.table for name in row.hf_names]
    for new, name in {new: name for name, new in names.items()}.items():
        released = [each.replace(f"model.layers.{{L}}.{name}.", f"blocks.{{L}}.{new}.") for each in released]
    found = family.table_for([name.replace("{L}", str(layer)) for name in released for layer in range(2)], config)
    assert [name for row in found for name in row.hf_names] == released


def test_names_lead_to_those_of_the_table() -> None:
    known = ["model.embed_tokens.weight", "model.layers.#.mlp.up_proj.weight", "lm_head.weight"]
    speller = Speller(known)
    for given, want in {
        "language_model.model.layers.#.mlp.up_proj.weight": known[1],
        "model.language_model.layers.#.mlp.up_proj.weight_scale_inv": f"{known[1]}_scale_inv",
        "base_model.model.model.layers.#.mlp.up_proj.lora_A.weight": "model.layers.#.mlp.up_proj.lora_A.weight",
        "layers.#.mlp.up_proj.base_layer.weight": known[1],
        "_orig_mod.lm_head.weight": known[2],
        "model.layers.#.mlp.other.weight": None,
        "visual.blocks.#.mlp.up_proj.weight": None,
    }.items():
        assert speller.canonical(given) == want
    assert speller.spelled("layers.7.mlp.up_proj.weight") == "model.layers.7.mlp.up_proj.weight"
    assert speller.spelled("layers.#.mlp.up_proj.weight") is None  # a name that looks like a template


@pytest.mark.parametrize(
    "spelled",
    [
        {"model.a.w": "model.a.w", "model.b.w": "model.b.w"},
        {"model.a.w": "language_model.model.a.w", "lm_head.w": "language_model.lm_head.w"},
        {"model.a.w": "a.w", "model.b.w": "b.w", "lm_head.w": "lm_head.w"},
        {"a.w": "model.a.w", "b.w": "model.c.w", "head.w": "lm_head.w"},
        {"m.experts.e": "m.experts.e", "m.experts.bias": "m.gate.bias", "m.gate.w": "m.gate.w"},
        # a module with one below it, of which one alone has another name (the router of Step-3.7)
        {"l.moe": "l.mlp.gate", "l.moe.gate": "l.moe.gate", "norm": "norm"},
    ],
)
def test_rules_give_the_names_back(spelled: dict[str, str]) -> None:
    rules = rules_of(spelled)
    assert {name: respelled(name, rules) for name in spelled} == spelled
    assert len(rules) <= sum(ours != theirs for ours, theirs in spelled.items()) + 1


def test_a_rule_is_for_a_module_where_all_its_names_agree() -> None:
    layers = {f"model.{name}.w": f"language_model.model.{name}.w" for name in "abc"}
    mtp = {"mtp.fc.w": "mtp.fc.w", "mtp.norm.w": "mtp.norm.w"}
    assert rules_of(layers | mtp) == {"": "language_model", "mtp": "mtp"}

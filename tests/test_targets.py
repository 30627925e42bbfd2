"""Targets: the names and shapes that other programs expect, what they restore, and the way back."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import tpuconv
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import assert_same, flatten, restore, same_bits
from helpers.encoded import awq, encoded
from helpers.families import BY_ID, FIRST, Case, one_fast_of_each, save
from helpers.logits import forward
from helpers.released import GEMMA4, GEMMA4_SHARED, gemma3n
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import LayoutError, UnsupportedConfig, UsageError
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.registry import FAMILIES, find_family, get_family
from tpuconv.names import expand
from tpuconv.notation.arithmetic import Plus, Times
from tpuconv.notation.table import Map, MappingTable
from tpuconv.targets import registry
from tpuconv.targets.compose import target_table
from tpuconv.targets.listing import targets_of
from tpuconv.targets.registry import all_targets, get_target, target_names
from tpuconv.targets.target import LayerPlaces, Place, Target, Tree

HELPERS = Path(__file__).parent / "helpers"
LISTINGS = json.loads((HELPERS / "listings.json").read_text())
MAXTEXT = json.loads((HELPERS / "maxtext_shapes.json").read_text())
OTHERS = [name for name in target_names() if name != "tpuconv"]
OF_QWEN3 = [name for name in OTHERS if "qwen3" in (get_target(name).trees or ["qwen3"])]


# -- names and shapes -------------------------------------------------------------------------------------------------


def expected_of_maxtext(model: str, form: str) -> dict[str, tuple[int, ...]]:
    """MaxText's own listing. The correction bias of its router is in a collection of its own there, and found among the
    parameters by all that load a checkpoint."""
    out = {}
    for pattern, shape in MAXTEXT[model][form]:
        for name in expand(pattern):
            out["params.params." + name.partition("-")[2].replace("-", ".")] = tuple(shape)
    return out


@pytest.mark.parametrize(("model", "form"), [(m, form) for m in MAXTEXT for form in MAXTEXT[m] if "scanned" in form])
def test_names_and_shapes_are_those_of_maxtext(model, form):
    raw = MAXTEXT[model].get("config") or LISTINGS[MAXTEXT[model]["release"]]["config"]
    family = find_family(raw)
    table, config = target_table(
        get_target("maxtext"),
        family.name,
        raw["model_type"],
        family.table,
        family.read_config(raw),
        scan_layers=form == "scanned",
    )
    shapes = {name: shape for binding in table.bind(config) for name, shape in binding.dst_shapes().items()}
    expected = expected_of_maxtext(model, form)
    if model.startswith(("gemma2", "gemma3")):  # MaxText pads the vocabulary of Gemma 2, and cuts that of Gemma 3
        expected["params.params.token_embedder.embedding"] = (config.vocab_size, config.hidden_size)
    assert shapes == expected


# -- the way back -----------------------------------------------------------------------------------------------------


def back(src: Path, folder: Path, target: str, **options) -> dict[str, np.ndarray]:
    """The tensors that come back from a target: of a multimodal model those of its text model."""
    api.convert(src, folder / "out", target=target, **options)
    api.verify(folder / "out").check()
    manifest = read_manifest(folder / "out")
    if not any(is_outside(skip["reason"]) for skip in manifest.raw["skipped"]):
        api.export(folder / "out", folder / "back")
        return read_tensors(folder / "back")
    api.export(folder / "out", folder / "back", with_skipped=src)
    return {name: x for name, x in read_tensors(folder / "back").items() if name in manifest.source_names}


def has_table(target: str, case: Case) -> bool:
    trees = get_target(target).trees
    return trees is None or (case.written_as or case.model_type) in trees


FORMS = [
    pytest.param(case.values[0], target, scan, id=f"{case.id}-{target}{'-scanned' * scan}", marks=case.marks)
    for case in one_fast_of_each(FAMILIES)
    for target in OTHERS
    for scan in (False, True)
    if not get_target(target).is_safetensors  # which is no checkpoint to export: tests/test_huggingface.py
    and has_table(target, case.values[0])
    and not (scan and get_target(target).layer_axis is None)
]


@pytest.mark.parametrize(("case", "target", "scan"), FORMS)
def test_every_tensor_comes_back_as_it_was(case, target, scan, hf, tmp_path, small_cuts):
    """All that is converted, bit for bit, but for what is changed by a factor that is no power of two, or by 1."""
    try:
        found = back(hf(case), tmp_path, target, scan_layers=scan)
    except UnsupportedConfig as error:
        pytest.skip(f"{target} has no such model: {error.message}")
    source = read_tensors(hf(case))
    assert found.keys() == read_manifest(tmp_path / "out").source_names
    for name, values in found.items():
        if target == "maxtext" and is_changed(case, name):
            np.testing.assert_allclose(values, source[name], rtol=2e-7, atol=2e-7)
        else:
            assert same_bits(values, source[name]), name


def is_changed(case: Case, name: str) -> bool:
    """Whether MaxText has other values of a tensor."""
    if name.endswith("q_proj.weight"):
        return case.family in ("llama", "mixtral", "gemma2")
    return case.family.startswith("gemma") and ("norm" in name or "embed_tokens" in name)


def test_a_factor_that_is_a_power_of_two_changes_no_bit(tmp_path):
    config = qwen3_config(architectures=["LlamaForCausalLM"], model_type="llama", head_dim=16)
    source = random_checkpoint(tmp_path / "hf", config)
    tensors, found = read_tensors(source), back(source, tmp_path, "maxtext")
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_what_stays_encoded_comes_back_for_flax(tmp_path):
    """Quantized values and scales have the names that Flax gives them, and come back bit for bit."""
    from helpers.encoded import encoded, fp8

    encoded(random_checkpoint(tmp_path / "plain", qwen3_config()), tmp_path / "hf", fp8)
    tensors, found = read_tensors(tmp_path / "hf"), back(tmp_path / "hf", tmp_path, "nnx", encoding="keep")
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    arrays = read_manifest(tmp_path / "out").arrays
    assert {"layers.0.mlp.up.kernel.array.qvalue.value", "layers.0.mlp.up.kernel.array.scale.value"} <= arrays.keys()


def in_blocks(folder: Path, **changes) -> Path:
    """A Qwen3 as released in FP8, with scales for blocks of 128 x 128."""
    from helpers.encoded import encode_fp8

    sizes = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = qwen3_config(**sizes | {"intermediate_size": 384, "vocab_size": 64} | changes)
    tensors: dict[str, np.ndarray] = {}
    for name, x in read_tensors(random_checkpoint(folder / "plain", config)).items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"], _ = encode_fp8(x.astype("f4"), (128, 128))
        else:
            tensors[name] = x
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    write_checkpoint(folder / "hf", config | {"quantization_config": quantization}, tensors, 1)
    return folder / "hf"


@pytest.mark.parametrize("scan", [False, True])
def test_fp8_in_blocks_stays_for_maxtext(scan, tmp_path):
    """Values under the name of the kernel, scales under `kernel_scale`: one for each block of 128, or for each of fewer
    heads."""
    source = in_blocks(tmp_path)
    found = back(source, tmp_path, "maxtext", encoding="keep", scan_layers=scan)
    tensors = read_tensors(source)
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    arrays = read_manifest(tmp_path / "out").arrays
    front = "params.params.decoder.layers." if scan else "params.params.decoder.layers_0."
    shapes = {
        "mlp.wi_0.kernel": ((256, 384), (2, 3)),
        "self_attention.query.kernel": ((256, 2, 128), (2, 2, 1)),
        "self_attention.out.kernel": ((2, 128, 256), (2, 1, 2)),
    }
    for name, (values, scales) in shapes.items():
        qvalue, scale = arrays[front + name], arrays[f"{front}{name}_scale"]
        assert (qvalue.dtype, scale.dtype) == ("float8_e4m3fn", "float32")
        without_layers = [x.shape[:1] + x.shape[2:] if scan else x.shape for x in (qvalue, scale)]
        assert without_layers == [values, scales]


def test_fp8_that_maxtext_does_not_have_is_refused(tmp_path):
    """Heads of 64 share the scales of blocks of 128 in the release, and MaxText has one for each element."""
    source = in_blocks(tmp_path, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(UnsupportedConfig, match="maxtext has FP8 with a scale for each block of 128") as error:
        api.plan(source, target="maxtext", encoding="keep")
    assert any("self_attention.query.kernel" in line for line in error.value.details)


# -- what programs restore --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", one_fast_of_each(FAMILIES))
def test_flax_restores_into_the_state_of_a_model(case, hf, orbax, tmp_path):
    """The idiom of Flax's documentation."""
    import orbax.checkpoint as ocp
    from flax import nnx

    api.convert(hf(case), tmp_path / "out", target="nnx", text_only=True)
    model = tpuconv.load(orbax(case))
    graph, state = nnx.split(model)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "out" / "params", target=state)
    ids = np.random.default_rng(0).integers(3, 100, (1, 7))
    assert np.array_equal(forward(nnx.merge(graph, restored), ids), forward(model, ids))


def test_an_empty_place_of_the_tree_is_restored_as_none(tmp_path):
    """jax-llm-examples has a head of None where the embedding is used."""
    import orbax.checkpoint as ocp

    random_checkpoint(tmp_path / "hf", qwen3_config(tie_word_embeddings=True))
    api.convert(tmp_path / "hf", tmp_path / "out", target="jax-llm-examples")
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out")
    assert tree["lm_head"] is None
    assert set(tree) == {"embedding", "gamma_final", "layers", "lm_head"}
    assert (tmp_path / "out" / "config.json").exists()


# -- what is refused --------------------------------------------------------------------------------------------------

NO_BIASES = ("llama-plain", "qwen3-tied", "qwen3_moe-few-experts", "gemma3_text-released")
"""Models that may have biases, in programs that have none."""


@pytest.mark.parametrize(
    ("target", "config", "options", "message"),
    [
        ("maxtext", {"attention_bias": True}, {}, "maxtext has no place for layers.{L}.attn.q.bias of qwen3"),
        ("tunix", {"attention_bias": True}, {}, "tunix has no place for layers.{L}.attn.q.bias of qwen3"),
        ("tunix", {}, {"scan_layers": True}, "tunix has no stacked layers"),
        ("jax-llm-examples", {}, {"scan_layers": True}, "jax-llm-examples has no stacked layers"),
        (
            "maxtext",
            {},
            {"quantize": "int8_weight_only"},
            "the target maxtext has no parameters that are quantized by rules",
        ),
        ("tunix", {}, {"quantize": "int8_weight_only"}, "the target tunix has no quantized parameters"),
        ("tunics", {}, {}, "there is no target 'tunics'"),
    ],
)
def test_what_a_target_does_not_have_is_refused_before_a_byte_is_read(target, config, options, message, tmp_path):
    random_checkpoint(tmp_path / "hf", qwen3_config(**config))
    with pytest.raises((UnsupportedConfig, UsageError)) as error:
        api.convert(tmp_path / "hf", tmp_path / "out", target=target, **options)
    assert error.value.message == message
    assert not (tmp_path / "out").exists()


FULL, WINDOW = "full_attention", "sliding_attention"
OTHER_BASE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("target", "case", "changes", "message"),
    [
        *(("maxtext", case, {"attention_bias": True}, "no place for layers.{L}.attn.q.bias") for case in NO_BIASES),
        ("jax-llm-examples", "qwen3-tied", {"attention_bias": True}, "no place for layers.{L}.attn.q.bias"),
        ("maxtext", "deepseek_v32-few-tokens", {"attention_bias": False}, "dense layers before all others"),
        ("maxtext", "llama4_text-plain", {"moe_layers": [0]}, "experts in each n-th layer"),
        ("maxtext", "llama4_text-plain", {"no_rope_layers": [0, 1]}, "without rotary positions in each n-th"),
        ("maxtext", "qwen3_next-plain", {"layer_types": ["linear_attention", FULL, FULL, FULL]}, "in each n-th layer"),
        ("maxtext", "gemma3_text-released", {"query_pre_attn_scalar": 30}, "query_pre_attn_scalar=head_dim or"),
        ("maxtext", "gemma3_text-released", {"layer_types": [WINDOW, FULL] * 3 + [FULL]}, "the last of each 6"),
        ("tunix", "gemma3_text-released", {"layer_types": [WINDOW, FULL] * 3 + [FULL]}, "the last of each 6"),
        ("tunix", "gemma3_text-released", {"final_logit_softcapping": 30.0}, "no final_logit_softcapping"),
        ("maxtext", "gemma4_text-experts", {"tie_word_embeddings": True}, "the last of each 6"),
        ("maxtext", "gpt_oss-plain", {"layer_types": [FULL, WINDOW]}, "the last of each 2"),
        ("maxtext", "gpt_oss-plain", {"swiglu_alpha": 1.3}, "swiglu_alpha=1.702"),
        ("jax-llm-examples", "gpt_oss-plain", {"attention_bias": False}, "biases of attention"),
        ("maxtext", "olmo3-plain", {"layer_types": [WINDOW, FULL] * 2}, "the last of each 4"),
        ("maxtext", "qwen2-windows", {}, "no sliding windows"),
        ("tunix", "qwen2-windows", {}, "no sliding windows"),
        *(
            (target, "qwen3_moe-few-experts", {"norm_topk_prob": False}, "only with norm_topk_prob=true")
            for target in ("maxtext", "tunix", "jax-llm-examples")
        ),
        ("maxtext", "deepseek_v3-groups", {"norm_topk_prob": False}, "only with norm_topk_prob=true"),
        ("jax-llm-examples", "deepseek_v3-groups", {"norm_topk_prob": False}, "only with norm_topk_prob=true"),
        ("maxtext", "deepseek_v3-groups", {"n_shared_experts": 0}, "only with shared experts"),
        ("jax-llm-examples", "deepseek_v3-groups", {"n_shared_experts": 0}, "only with shared experts"),
        ("jax-llm-examples", "deepseek_v3-groups", {"rope_interleave": False}, "only with rope_interleave=true"),
        ("maxtext", "deepseek_v2-groups", {"attention_bias": False}, "only with no groups of experts"),
        ("maxtext", "mixtral-window", {"sliding_window": None}, "of type default or linear or yarn"),
        ("maxtext", "qwen3-yarn", {}, "the usual attention factor of YaRN, or 1"),
        ("tunix", "qwen2-yarn", {}, "rotary positions without scaling"),
        ("tunix", "qwen3-yarn", {}, "rotary positions without scaling"),
        (
            "tunix",
            "gemma-plain",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            "rope_theta=10000",
        ),
        ("jax-llm-examples", "llama-linear", {}, "rotary positions of type default or llama3"),
        ("jax-llm-examples", "llama4-lists", {"tie_word_embeddings": False}, "experts in each n-th layer"),
        *(
            (target, "gemma3_text-released", {"use_bidirectional_attention": True}, "to earlier tokens alone")
            for target in ("maxtext", "tunix", "gemma")
        ),
        ("jax-llm-examples", "qwen3-yarn", {}, "rotary positions without scaling"),
        ("gemma", "gemma3n_text-plain", {}, "for all later layers"),
        ("gemma", "gemma3n_text-widths", {"num_key_value_heads": 1}, "MLPs of one width and altup_active_idx=0"),
        *(
            (target, "gemma4_text-shared", {"vocab_size_per_layer_input": 70}, "vocab_size_per_layer_input=vocab_size")
            for target in ("tunix", "gemma")
        ),
    ],
)
def test_a_config_that_a_program_cannot_express_is_refused(target, case, changes, message):
    """MaxText numbers dense layers and layers with experts apart, and would run them in another order; what its code
    has no parameter or no setting for, it would leave out."""
    with pytest.raises(UnsupportedConfig, match=re.escape(message)):
        table_of(target, case, changes)


def table_of(target: str, case: str, changes: dict, **options: bool):
    """The table of a target for a case with some keys changed."""
    raw = replace(BY_ID[case], config={**BY_ID[case].config, **changes}).hf_config().to_diff_dict()
    family = find_family(raw)
    config = family.read_config(raw)
    return target_table(get_target(target), family.name, raw["model_type"], family.table, config, **options)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama4_text-plain", {"no_rope_layer_interval": 3}, "do not repeat with a period of 4"),
        *(
            (f"{family}-plain", {"full_attention_interval": interval}, "full attention in each 4th layer")
            for family in ("qwen3_next", "qwen3_5_moe_text")
            for interval in (1, 2)
        ),
    ],
)
def test_layers_that_maxtext_would_stack_in_another_way_are_refused(case, changes, message):
    """It has the same layers with rotary positions in each period of 4; and each 4th layer with full attention, or its
    period is another one."""
    changes = {"num_hidden_layers": 12, "interleave_moe_layer_step": 1} | changes
    table_of("maxtext", case, changes)
    with pytest.raises(UnsupportedConfig, match=message):
        table_of("maxtext", case, changes, scan_layers=True)


@pytest.mark.parametrize(
    ("target", "case", "message"),
    [
        ("maxtext", "llama-mistral", "maxtext computes the logits of llama only with no sliding windows"),
        ("maxtext", "llama-tied-llama3", "only with the rotary scaling of Llama 3.1"),
        ("maxtext", "olmo3-plain", ""),
        ("tunix", "llama-plain", "only with rope_theta=1000000: its logits will differ"),
        ("jax-llm-examples", "llama-plain", ""),
        ("jax-llm-examples", "llama-mistral-full", "only with rms_norm_eps=1e-06"),
        ("jax-llm-examples", "llama-mistral", "only with no sliding windows: its"),
        ("tunix", "llama-mistral", "no sliding windows"),
        ("nnx", "llama-mistral", ""),
    ],
)
def test_what_a_program_computes_otherwise_is_told(target, case, message, tmp_path):
    """The weights are right, and of use there."""
    source = random_checkpoint(tmp_path / "hf", BY_ID[case].hf_config().to_diff_dict(), dtype="float32")
    found = [note for note in api.plan(source, target=target).notes if "will differ" in note]
    assert len(found) == bool(message)
    assert message in "".join(found)
    done = api.convert(source, tmp_path / "out", target=target)
    assert [done.differs] == [done.to_json().get("differs", "")] == (found or [""])


def test_a_family_that_a_target_does_not_have_is_named(tmp_path):
    config = qwen3_config(architectures=["Olmo2ForCausalLM"], model_type="olmo2")
    del config["head_dim"]
    random_checkpoint(tmp_path / "hf", config)
    with pytest.raises(UnsupportedConfig, match="the target tunix has no table for olmo2"):
        api.plan(tmp_path / "hf", target="tunix")


@pytest.mark.parametrize("target", OF_QWEN3)
def test_a_checkpoint_for_another_program_is_quantized_and_compared_as_its_source(target, tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    api.convert(source, tmp_path / "out", target=target)
    for name, given in (("of-target", tmp_path / "out"), ("of-source", source)):
        api.quantize(given, tmp_path / name, config="int8_weight_only")
    assert_same(*(restore(tmp_path / name) for name in ("of-target", "of-source")))
    api.convert(source, tmp_path / "ours")
    assert api.compare_checkpoints(tmp_path / "ours", tmp_path / "out").statistics.mean_kl == 0


TILES = "qwix:\n  rules: [{module_path: 'layers/.*mlp/.*', weight_qtype: int8, tile_size: 16}]\n"
MINMAX = "qwix:\n  rules: [{module_path: 'layers/.*mlp/.*', weight_qtype: int8, weight_calibration_method: minmax}]\n"


@pytest.mark.parametrize(("rules", "message"), [(TILES, "scales of whole channels"), (MINMAX, r"no array\.zero_point")])
def test_jax_llm_examples_has_a_scale_for_each_channel_alone(rules, message, tmp_path):
    random_checkpoint(tmp_path / "hf", qwen3_config())
    (tmp_path / "mine.yaml").write_text(rules)
    with pytest.raises(UnsupportedConfig, match=message):
        api.convert(tmp_path / "hf", tmp_path / "out", target="jax-llm-examples", quantize=str(tmp_path / "mine.yaml"))
    assert not (tmp_path / "out").exists()


def test_jax_llm_examples_has_no_scales_of_blocks(tmp_path):
    from helpers.encoded import encoded, fp8

    encoded(random_checkpoint(tmp_path / "plain", qwen3_config()), tmp_path / "hf", fp8)
    with pytest.raises(UnsupportedConfig, match="scales of whole channels"):
        api.convert(tmp_path / "hf", tmp_path / "out", target="jax-llm-examples", encoding="keep")


@pytest.mark.parametrize(
    ("family", "modules", "message"),
    [
        ("qwen3", ".*", "does not read lm_head.kernel quantized"),
        ("qwen3", r"layers/\d+/attn/[qkv]", "quantize only some of what jax-llm-examples reads quantized"),
        ("qwen3", "layers/0/mlp/.*", "quantize only some of what jax-llm-examples reads quantized"),
        ("llama", r"layers/\d+/mlp/.*", "does not read layers.{0,1}.mlp.down.kernel"),
        ("deepseek_v3", r"layers/\d+/attn/o", "does not read layers.{0...3}.attn.o.kernel quantized"),
        ("deepseek_v3", r"layers/\d+/moe/(gate|up|down)", "quantize only some of what jax-llm-examples reads"),
    ],
)
def test_jax_llm_examples_is_told_what_is_quantized_by_switches(family, modules, message, hf, tmp_path):
    """Of attention, MLPs and experts; never of a head."""
    (tmp_path / "mine.yaml").write_text(f"qwix:\n  rules: [{{module_path: '{modules}', weight_qtype: int8}}]\n")
    case = FIRST[family] if family != "qwen3" else Case("qwen3-untied", "qwen3", "qwen3", {"head_dim": 20})
    with pytest.raises(UnsupportedConfig, match=re.escape(message)) as error:
        api.plan(hf(case), target="jax-llm-examples", quantize=str(tmp_path / "mine.yaml"))
    assert "rules" in str(error.value.hint)


def test_jax_llm_examples_has_tied_embeddings_in_one_program_alone(hf):
    assert api.plan(hf(BY_ID["qwen3-tied"]), target="jax-llm-examples")
    with pytest.raises(UnsupportedConfig, match="has llama only with a head of its own"):
        api.plan(hf(BY_ID["llama-tied-llama3"]), target="jax-llm-examples")


def test_an_axis_that_no_product_sums_stays_in_the_scales(tmp_path):
    """One head of keys is an axis of size 1 too."""
    random_checkpoint(tmp_path / "hf", qwen3_config(num_key_value_heads=1))
    (tmp_path / "mine.yaml").write_text("qwix:\n  rules: [{module_path: 'layers/.*attn/.*', weight_qtype: int8}]\n")
    api.convert(tmp_path / "hf", tmp_path / "out", target="jax-llm-examples", quantize=str(tmp_path / "mine.yaml"))
    arrays = read_manifest(tmp_path / "out").arrays
    assert arrays["layers.0.attn.k.scale"].axes == "K H"
    assert arrays["layers.0.attn.o.scale"].axes == "D"


@pytest.mark.parametrize("target", [name for name in OF_QWEN3 if not get_target(name).is_safetensors])
def test_the_card_says_how_a_checkpoint_is_loaded(target, tmp_path):
    random_checkpoint(tmp_path / "hf", qwen3_config())
    api.convert(tmp_path / "hf", tmp_path / "out", target=target)
    card = (tmp_path / "out" / "README.md").read_text()
    assert get_target(target).loading in card
    assert "tpuconv.load" not in card
    assert ("This folder" if target == "jax-llm-examples" else f"`{get_target(target).folder}/`") in card


# -- targets of others ------------------------------------------------------------------------------------------------

MINE = Target(
    name="mine",
    summary="a model of my own",
    loading="restore(OUT/weights)",
    trees={
        "qwen3": Tree(
            {"embed.embedding": "tokens", "norm.scale": Place("last.norm", arithmetic=Plus(-1.0))},
            (
                LayerPlaces(
                    {
                        "attn_norm.scale": "norm_1",
                        "mlp_norm.scale": "norm_2",
                        ("attn.k.kernel", "attn.v.kernel"): Place("kv", "D K H, D K H -> D K (H + H)"),
                        **{name: name.removesuffix(".kernel") for name in ("attn.q.kernel", "attn.o.kernel")},
                        **{f"mlp.{x}.kernel": Place(x, layer_axis=0) for x in ("gate", "up", "down")},
                        "attn.q_norm.scale": "qn",
                        "attn.k_norm.scale": Place("kn", arithmetic=Times("H", 0.5)),
                    },
                    apart="block_{L}",
                    stacked="blocks",
                ),
            ),
        )
    },
    folder="weights",
    layer_axis=1,
)


class Point:
    """An entry point."""

    def __init__(self, name, value):
        self.name, self.value, self.loaded = name, f"mine:{name}", value

    def load(self):
        return self.loaded


def test_other_packages_register_targets(monkeypatch, tmp_path):
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group: [*map(Point, ("mine", "wrong", "other", "tunix"), (MINE, 3, MINE, MINE))],
    )
    registry._plugins.cache_clear()
    try:
        assert target_names()[-3:] == ["mine", "wrong", "other"]
        with pytest.raises(UsageError, match="'other', mine:other, has the name 'mine'"):
            get_target("other")
        with pytest.raises(UsageError, match="'tunix' is taken several times: by tpuconv, mine:tunix"):
            get_target("tunix")
        # Broken ones stop nothing that does not need them.
        *_, mine, wrong, other = targets_of(get_family("qwen3"))
        assert (mine.supported, wrong.supported, other.supported) == (True, False, False)
        assert "is not a" in wrong.notes[0]
        assert all_targets()[-1] is MINE
        with pytest.raises(UsageError, match=r"is not a tpuconv\.targets\.target\.Target"):
            get_target("wrong")
        random_checkpoint(tmp_path / "hf", qwen3_config(tie_word_embeddings=True), dtype="float32")
        *_, wrong, other = api.recipe(tmp_path / "hf").targets
        assert "is not a" in wrong.refusal
        assert "has the name" in other.refusal
        source = read_tensors(tmp_path / "hf")
        for scan in (False, True):
            found = back(tmp_path / "hf", tmp_path / str(scan), "mine", scan_layers=scan)
            for name, values in source.items():
                if "norm" in name:
                    np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)
                else:
                    assert same_bits(found[name], values), name
        arrays = read_manifest(tmp_path / "True" / "out").arrays
        assert arrays["blocks.kv"].axes == "D L K (H + H)"
        assert arrays["blocks.gate"].axes == "L D F"
    finally:
        registry._plugins.cache_clear()


def test_the_example_of_the_documentation_works(monkeypatch, tmp_path):
    text = (HELPERS.parents[1] / "docs" / "targets.md").read_text()
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], names)
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point("mine", names["MINE"])])
    registry._plugins.cache_clear()
    try:
        random_checkpoint(tmp_path / "hf", qwen3_config(tie_word_embeddings=False), dtype="float32")
        found, source = back(tmp_path / "hf", tmp_path, "mine", scan_layers=True), read_tensors(tmp_path / "hf")
        assert found.keys() == source.keys()
        assert read_manifest(tmp_path / "out").arrays["blocks.gate"].axes == "L F D"
        for name, values in source.items():
            if "post_attention" in name:
                np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)
            else:
                assert same_bits(found[name], values), name
    finally:
        registry._plugins.cache_clear()


def test_a_row_whose_parameters_have_only_some_places_has_none():
    table = MappingTable([Map("x", ("layers.a", "layers.b"), "D (F + F) -> D F, D F")])
    config = replace(find_family(qwen3_config()).read_config(qwen3_config()))
    target = replace(MINE, trees={"qwen3": Tree({"layers.a": "a"}, ())})
    with pytest.raises(UnsupportedConfig, match=r"mine has no place for layers\.a, layers\.b"):
        target_table(target, "qwen3", "qwen3", table, config)


def test_a_place_must_begin_with_our_axes():
    table = MappingTable([Map("x", "a", "D F")])
    config = find_family(qwen3_config()).read_config(qwen3_config())
    target = replace(MINE, trees={"qwen3": Tree({"a": Place("b", "D H -> H D")}, ())})
    with pytest.raises(LayoutError, match="does not begin with D F"):
        target_table(target, "qwen3", "qwen3", table, config)


def test_parameters_that_the_way_back_rounds_are_told(hf, tmp_path):
    """MaxText multiplies the embedding of Gemma and adds 1 to its norms, which rounds in bfloat16."""
    folder = hf(BY_ID["gemma3_text-released"])
    plan = api.plan(folder, target="maxtext", dtype="bfloat16")
    (note,) = plan.notes
    assert re.fullmatch(r"\d+ of \d+ arrays have other values in maxtext, such as \S+; in bfloat16 the .*", note)
    done = api.convert(folder, tmp_path / "out", target="maxtext", dtype="bfloat16")
    assert done.rounded == note == done.to_json()["rounded"]
    for options in ({"target": "maxtext", "dtype": "float32"}, {"target": "nnx", "dtype": "bfloat16"}, {}):
        assert not api.plan(folder, **options).notes


@pytest.mark.parametrize("is_released", [True, False], ids=["of a release", "of transformers"])
@pytest.mark.parametrize("target", ["gemma", "tunix"])
def test_keys_and_values_that_no_layer_reads(target, is_released, tmp_path):
    """Both programs have arrays for them. A release has their tensors, which come back; what transformers saves has
    none: the tensors of the layer that is read instead stand for them."""
    case = Case("gemma4-shared", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_SHARED)
    save(case, source := tmp_path / "hf")
    tensors = read_tensors(source)
    last, rng = {5: 5, 11: 5}, np.random.default_rng(0)  # layers that see all tokens, and the one that they read
    unused = {
        f"model.layers.{i}.self_attn.{x}.weight": tensors[f"model.layers.{last.get(i, 4)}.self_attn.{x}.weight"]
        for i in range(6, 12)
        for x in ("k_proj", "v_proj", "k_norm")
    }
    if is_released:
        unused = {name: rng.normal(size=x.shape).astype(x.dtype) for name, x in unused.items()}
        write_checkpoint(source, json.loads((source / "config.json").read_text()), tensors | unused)
    assert not tensors.keys() & unused.keys()
    found = back(source, tmp_path, target)
    assert found.keys() == tensors.keys() | unused.keys()
    for name, values in found.items():
        assert same_bits(values, (tensors | unused)[name]), name
    assert same_logits(tmp_path / "back", source)


def test_matrices_that_stand_for_others_lie_as_they_do(tmp_path):
    """AWQ stores [in, out]."""
    case = Case("gemma4-shared", "gemma4_text", "gemma4_text", GEMMA4 | GEMMA4_SHARED)
    save(case, tmp_path / "plain")
    encoded(tmp_path / "plain", tmp_path / "hf", awq)
    api.convert(tmp_path / "hf", tmp_path / "out", target="tunix", dtype="float32")
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = dict(flatten(checkpointer.restore(tmp_path / "out" / "0" / "model_params")))
    for layer, other in ((6, 4), (11, 5)):
        unread, read = (arrays[f"layers.{i}.attn.kv_einsum.w.value"] for i in (layer, other))
        assert same_bits(unread, read)


def same_logits(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same logits to the bit, by our own model."""
    ids = np.arange(3, 15)[None]
    first, second = (np.asarray(forward(tpuconv.load(folder), ids)) for folder in (one, other))
    return same_bits(first, second)


@pytest.mark.parametrize("further", [0, 7])
def test_ids_without_embeddings_of_layers_have_an_array_of_their_own(further, tmp_path):
    """The ids of images and sounds of Gemma 3n, for which the library gemma has no rows."""
    save(gemma3n(further), source := tmp_path / "hf")
    tensors = read_tensors(source)
    found = back(source, tmp_path, "gemma")
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], values) for name, values in tensors.items())
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = dict(flatten(checkpointer.restore(tmp_path / "out" / "params")))
    whole = tensors["model.embed_tokens.weight"]
    assert same_bits(arrays["embedder.input_embedding"], whole[:101])
    assert ("embedder.further_embedding" in arrays) == bool(further)
    assert not further or same_bits(arrays["embedder.further_embedding"], whole[101:])

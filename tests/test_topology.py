"""Compilation for TPU slices without a TPU, by the real compiler: every family, models that do not fit, wrong
arguments."""

import io
import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers.checkpoints import qwen3_config, source_shapes
from helpers.commands import EXAMPLE, tpuconv
from helpers.families import CORE, FIRST, released_config
from helpers.tpu_compiler import answers_of, compiler
from tpuconv.api import Fit
from tpuconv.commands.fit import tables
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.registry import FAMILIES
from tpuconv.notation.sharding import (
    BY_BATCH,
    BY_HEAD,
    attention_rules,
    decoding_mesh,
    parse_mesh,
    partition,
    shard_shape,
)
from tpuconv.quantize.config import find_config
from tpuconv.verify.topology import request as tpu
from tpuconv.verify.topology.chips import CHIPS, Slice, parse_topologies
from tpuconv.verify.topology.hlo import Schedule
from tpuconv.verify.topology.instructions import values

ROOT = Path(__file__).parents[1]

MANY = """
import json, re, sys
from flax import nnx
from jax.stages import Lowered
from tpuconv.models import generate
from tpuconv.models.registry import find_family
from tpuconv.notation.sharding import decoding_mesh
from tpuconv.verify.topology.compile import _Compilation, compile_for
from tpuconv.verify.topology.chips import Slice
from tpuconv.verify.topology.request import CompileRequest

compiled, compile_it = [], Lowered.compile

def recorded(self, options):
    # Without how the weights lie: fit leaves that to the compiler, and writes it down for load.
    compiled.append([re.sub('mhlo.layout_mode = "[^"]*"(, )?', "", self.as_text()), options])
    return compile_it(self, options)

Lowered.compile = recorded
questions = [CompileRequest(json.loads(line), batch=2, context=32) for line in sys.stdin]
for question in questions:
    print(json.dumps(compile_for(question, Slice("v5e:2x2"))), flush=True)

# What `generate` would run there, compiled from shapes.
family = find_family(questions[0].config)
config = family.config.from_hf(questions[0].config)
shapes = _Compilation(questions[0], Slice("v5e:2x2"), family, config, decoding_mesh(config.sizes, 4))
model = nnx.merge(*nnx.split(shapes.generator.model))
generator = generate.Generator(model)
lies = generator.prefill(2, 32, 32).output_formats[1], generator.decode(2, 32).input_formats[0][2]
generate.TPU_OPTIONS = {"xla_tpu_unheard_of": "1"}
facts = {"alike": lies[0].layers == lies[1].layers, "kept": str(lies[1].layers), "programs": len(compiled[0][0]) > 1000}
facts["judged"] = [step in compiled[:2] for step in compiled[-2:]]
try:
    generate.Generator(model).decode(2, 32)
except Exception as e:
    print(json.dumps(facts | {"error": str(e)}))
"""


def answers_for(families):
    """Of one tiny model of each of these families, and of `generate`."""
    configs = [released_config(FIRST[family]) for family in families]
    return dict(zip([*families, "generate"], answers_of(MANY, configs), strict=True))


@pytest.fixture(scope="module")
def answers(chosen):
    return answers_for(chosen(family for family in FAMILIES if family in CORE))


@compiler
@pytest.mark.parametrize("family", [family for family in FAMILIES if family in CORE])
def test_every_family_compiles_for_a_slice(family, answers):
    assert_compiles(answers[family])


@compiler
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CORE])
def test_every_other_family_compiles_for_a_slice(family):
    assert_compiles(answers_for([family])[family])


def assert_compiles(answer):
    assert answer["why"] == ""
    assert [program["name"] for program in answer["programs"]] == ["decode", "prefill"]
    for program in answer["programs"]:
        assert program["hbm_read"] > 0
        assert 0 < program["floor"] < program["estimate"]
        assert program["products"]
    assert answer["memory"]["cache"] > 0


@compiler
def test_what_is_judged_is_what_generate_runs(answers):
    """The same two programs with the same options, and a cache that prefill leaves as decoding wants it: not in the
    order of its axes, by which heads, of which a chip has few, would fill tiles."""
    facts = answers["generate"]
    assert facts["programs"]
    assert facts["judged"] == [True, True]
    assert "xla_tpu_unheard_of" in facts["error"]
    assert facts["alike"]
    assert "major_to_minor=(0, 1, 2, 3)" not in facts["kept"]


def ask(folder, config, *args, code=0):
    (folder / "config.json").write_text(json.dumps(config))
    return tpuconv("fit", folder / "config.json", *args, code=code)


DENSE = qwen3_config(
    hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=3,
    head_dim=128, vocab_size=1024,
)  # fmt: skip


@compiler
def test_a_dense_layer_has_two_all_reduces(tmp_path):
    """And no other collective but the embedding's and the head's: heads and feed-forward are divided, nothing else."""
    facts = json.loads(ask(tmp_path, DENSE, "--topology", "v5e:2x2", "--batch", 4, "--json").stdout)
    (one,) = facts["slices"]
    assert (facts["fits"], facts["smallest"], one["mesh"]) == (True, "v5e:2x2", {"tensor": 4})
    decode = one["programs"]["decode"]
    counts = {entry["op"]: entry["count"] for entry in decode["collectives"]}
    assert counts["all-reduce"] == 2 * 3 + 1
    assert "all-to-all" not in counts
    assert decode["copies"] == []
    assert one["memory"]["peak"] + one["memory"]["headroom"] == one["memory"]["available"] == CHIPS["v5e"].hbm
    # A step reads every weight but the embedding, of which it reads rows, and the cache.
    embedding = 2 * 256 * 1024 // 4
    assert (
        one["memory"]["weights"] - embedding
        <= decode["hbm_read"]
        <= 1.3 * sum(one["memory"][kind] for kind in ("weights", "cache"))
    )


@compiler
def test_one_tokens_products_are_the_matrix_units(tmp_path):
    """Not loops over elements: seven products a layer, and the head's."""
    args = ("--topology", "v5e:1x1", "--batch", 1, "--context", 128, "--json")
    (one,) = json.loads(ask(tmp_path, DENSE, *args).stdout)["slices"]
    counts = [product["count"] for product in one["programs"]["decode"]["products"] if product["count"]]
    assert sum(counts) >= 3 * 7 + 1


@compiler
def test_experts_that_no_token_chose_are_not_read(tmp_path):
    """Three tokens, two experts each, choose at most 6 of 32."""
    config = DENSE | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 32,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    args = ("--topology", "v5e:2x2", "--batch", 3, "--context", 128, "--quantize", "int8_weight_only")
    (one,) = json.loads(ask(tmp_path, config, *args, "--json").stdout)["slices"]
    decode = one["programs"]["decode"]
    (kernel,) = (call for call in decode["custom_calls"] if call["kernel"] == "few_rows")
    experts = 3 * 3 * 32 * 256 * 512 // 4
    assert kernel["count"] == 3 * 3
    assert kernel["bytes"] >= experts
    assert kernel["expected_bytes"] <= 0.25 * experts
    assert decode["expected_floor"] < decode["floor"]
    assert "few_rows" not in {call["kernel"] for call in one["programs"]["prefill"]["custom_calls"]}


@compiler
@pytest.mark.parametrize(("context", "holders", "exchanges"), [(2048, 2, 0), (8192, 1, 2)])
def test_fewer_key_value_heads_than_chips(context, holders, exchanges, tmp_path):
    """Of 2 heads and 4 chips two have the same keys while these are few. Of many, each chip has those of half of the
    sequences, and no two the same."""
    config = DENSE | {"num_key_value_heads": 2}
    done = ask(tmp_path, config, "--topology", "v5e:2x2", "--batch", 4, "--context", context, "--json")
    (one,) = json.loads(done.stdout)["slices"]
    assert one["mesh"] == {"tensor": 2, "group": 2}
    keys_and_values = 3 * 2 * 4 * context * 2 * 128 * 2
    positions_and_count = 4 * (4 * context + 1)
    assert one["memory"]["cache"] == holders * keys_and_values // 4 + positions_and_count
    counts = {entry["op"]: entry["count"] for entry in one["programs"]["decode"]["collectives"]}
    assert counts["all-reduce"] == 2 * 3 + 1
    assert counts.get("all-to-all", 0) == exchanges * 3
    prefill = one["programs"]["prefill"]
    gathered = sum(entry["bytes"] for entry in prefill["collectives"] if entry["op"] == "all-gather")
    hidden_states = 2 * 4 * prefill["tokens"] * 256
    assert gathered < hidden_states  # of one layer: queries, keys and values are made of the same


@compiler
@pytest.mark.slow
def test_an_int8_cache_is_read_as_it_lies(tmp_path):
    """Half the bytes and the scales, in memory and in what a step reads: nothing is dequantized first."""
    ones = [
        json.loads(ask(tmp_path, DENSE, "--topology", "v5e:2x2", "--batch", 4, "--cache-dtype", dtype, "--json").stdout)
        for dtype in ("auto", "int8")
    ]
    assert [facts["cache_dtype"] for facts in ones] == ["bfloat16", "int8"]
    wide, narrow = (facts["slices"][0] for facts in ones)
    vectors = 3 * 2 * 4 * 2048  # of the one head on a chip
    saved = vectors * (2 * 128 - (128 + 4))
    assert wide["memory"]["cache"] - narrow["memory"]["cache"] == saved
    less = wide["programs"]["decode"]["hbm_read"] - narrow["programs"]["decode"]["hbm_read"]
    assert 0.9 * saved < less < 1.1 * saved
    assert narrow["programs"]["decode"]["copies"] == []


@compiler
@pytest.mark.slow
def test_a_decode_step_of_80_layers_waits_for_no_weights():
    """From the first layer to the last the compiler prefetches weights while it computes. With ids [B] instead of
    [B, 1] it stopped doing so at the ninth of 80 layers, and not at all in 60."""
    config = json.loads((ROOT / "benchmarks" / "configs" / "llama-3.3-70b.json").read_text())
    quantize = find_config("int8_weight_only").to_json()
    request = tpu.CompileRequest(config, 8, 2048, quantize=quantize, cache_dtype="int8", programs=("decode",))
    decode = next(tpu.ask(request, [[Slice("v5e:4x4")]])).program("decode")
    assert decode.estimate < 1.1 * decode.floor


VL = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": DENSE | {"model_type": "qwen3_vl_text", "rope_parameters": {"mrope_section": [24, 20, 20]}},
    "vision_config": {
        "depth": 2, "hidden_size": 128, "num_heads": 2, "intermediate_size": 256, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 256,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [0],
    },
    "image_token_id": 96, "video_token_id": 97, "vision_start_token_id": 98, "vision_end_token_id": 99,
}  # fmt: skip
"""Its tower makes 32 x 32 features of an image of 1024 x 1024 pixels."""


@pytest.mark.slow
@compiler
def test_images_are_read_before_the_prefill(tmp_path):
    """Their encoder's weights, its program and its features are added; the other programs stay."""
    args = ("--topology", "v5e:1x1", "--context", 4096, "--json")
    (plain,) = json.loads(ask(tmp_path, VL, *args).stdout)["slices"]
    facts = json.loads(ask(tmp_path, VL, *args, "--images", 2).stdout)
    (one,) = facts["slices"]
    see, prefill = one["programs"]["see"], one["programs"]["prefill"]
    assert (facts["images"], see["tokens"]) == (2, 2 * 32 * 32)
    assert prefill["temporaries"] == plain["programs"]["prefill"]["temporaries"]
    assert one["memory"]["weights"] - plain["memory"]["weights"] > 2 * 2 * 12 * 128**2 / 2
    most = max(program["temporaries"] for program in one["programs"].values())
    assert (
        one["memory"]["temporaries"] - most >= 2 * 2 * see["tokens"] * 256
    )  # features for the text and its first layer
    assert see["estimate"] > see["floor"] > 0
    assert "The images take about" in one["verdict"]
    assert "exceed 1 sequence of 1,024 tokens" in (
        ask(tmp_path, VL, "--topology", "v5e:1x1", "--context", 1024, "--images", 2, code=2).stderr
    )


@compiler
@pytest.mark.slow
def test_a_checkpoint_with_an_encoder_is_asked_about(whole):
    from tpuconv import api

    src, out = whole("qwen3_vl")
    found = [api.fit(out, ["v5e:1x1"], context=64), api.fit(src, ["v5e:1x1"], context=64, dtype="float32")]
    weights = [each.reports[0].memory.weights for each in found]
    assert weights[0] > weights[1]
    assert found[0].reports[0].layouts.keys() == found[1].reports[0].layouts.keys()


def test_images_for_a_model_that_sees_none(tmp_path):
    answer = ask(tmp_path, DENSE, "--topology", "v5e:1x1", "--images", 1, code=2).stderr
    assert "has no encoder of images" in answer


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ONE = ("--topology", "v5e:1x1", "--batch", 2, "--context", 64, "--encoding", "keep", "--json")


def asked_as_kept(folder, config):
    """Its answer, and the elements of the whole model."""
    facts = json.loads(ask(folder, config, *ONE).stdout)
    assert facts["quantization"] == "as released"
    return facts["slices"][0], sum(map(prod, source_shapes(config).values()))


@compiler
def test_a_release_is_asked_as_it_would_be_kept(tmp_path):
    """FP8 in blocks, from config.json alone: a byte a weight and a float32 for each block, and products with codes."""
    one, elements = asked_as_kept(tmp_path, DENSE | {"num_hidden_layers": 1, "quantization_config": FP8})
    matrices = 256 * (2 * 8 * 128 + 2 * 4 * 128 + 3 * 512)
    assert one["memory"]["weights"] == 2 * (elements - matrices) + matrices + 4 * matrices // 128**2
    products = one["programs"]["decode"]["products"]
    assert sum(product["count"] for product in products if "f8e4m3fn" in product["stored"]) == 7


@compiler
def test_experts_are_asked_as_they_would_be_kept(tmp_path):
    """In MXFP4: four bits a weight and a bfloat16 for 32 of them; nothing else of gpt-oss is encoded."""
    config = json.loads(FIRST["gpt_oss"].hf_config().to_json_string())
    config |= {"hidden_size": 128, "intermediate_size": 64, "num_local_experts": 4, "num_hidden_layers": 1}
    config["layer_types"] = config["layer_types"][:1]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    one, elements = asked_as_kept(tmp_path, config)
    experts = 4 * 3 * 128 * 64
    assert one["memory"]["weights"] == 2 * (elements - experts) + experts // 2 + 2 * experts // 32


NOT_KEPT = {
    "nothing": (None, UsageError, "is not encoded: there are no quantized values and scales"),
    "an unknown encoding": ({"quant_method": "aqlm", "bits": 4}, UnsupportedConfig, "quant_method='aqlm'"),
    "a pattern that is none": (FP8 | {"modules_to_not_convert": ["("]}, ConfigError, "is not a regular expression"),
}


@pytest.mark.parametrize("case", NOT_KEPT)
def test_what_cannot_be_kept_cannot_be_asked(case):
    quantization, error, message = NOT_KEPT[case]
    with pytest.raises(error, match=message):
        tpu.source_passthrough("org/name", DENSE | {"quantization_config": quantization})


@compiler
def test_what_does_not_fit_is_an_answer(tmp_path):
    large = DENSE | {"hidden_size": 8192, "intermediate_size": 65536, "num_hidden_layers": 24}
    done = ask(tmp_path, large, "--topology", "v5e:2x2", code=3)
    assert "GateError" in done.stderr
    assert "weights and cache alone need" in done.stderr
    assert "--topology v5e:2x4" in done.stderr
    assert "--quantize int8_weight_only" in done.stderr
    facts = json.loads(ask(tmp_path, large, "--topology", "v5e:2x2", "--json", code=3).stdout)
    assert (facts["fits"], facts["smallest"], facts["slices"][0]["programs"]) == (False, None, {})


@compiler
def test_what_the_compiler_cannot_place_is_an_answer_too(tmp_path):
    """Weights and cache would fit, the attention scores of the prefill do not."""
    one_layer = DENSE | {"num_hidden_layers": 1}
    done = ask(tmp_path, one_layer, "--topology", "v5e:1x1", "--context", 1 << 20, code=3)
    assert "prefill does not fit" in done.stderr
    assert "exceeds available HBM" in done.stderr


@compiler
@compiler
def test_the_slice_that_is_compiled_for_is_told(monkeypatch):
    from tpuconv import api

    stages: list[str] = []
    report = SimpleNamespace(fits=True)
    monkeypatch.setattr(tpu, "_ask_child", lambda asked, topology: report)
    api.fit(EXAMPLE, ["v5e,v6e:1x1"], progress=lambda told: stages.append(told.stage))
    first, _, last, _ = stages
    slices = 1 + len(CHIPS["v5e"].slices)
    assert first == f"compiling 2 programs for v5e:1x1, 1 of {slices} slices"
    assert last == f"compiling 2 programs for v6e:1x1, {slices} of {slices} slices"


def test_the_smallest_slice_is_found(tmp_path):
    large = DENSE | {"hidden_size": 4096, "intermediate_size": 1 << 20, "num_hidden_layers": 1}
    facts = json.loads(ask(tmp_path, large, "--topology", "v5e,v6e:1x1", "--context", 16, "--json").stdout)
    fits = [(one["topology"], one["fits"]) for one in facts["slices"]]
    assert fits == [("v5e:1x1", False), ("v5e:2x2", True), ("v6e:1x1", True)]
    assert facts["smallest"] == "v6e:1x1"


MISTAKES = {
    "a chip": (("--topology", "v9:2x2"), "chips are v4, v5e"),
    "a shape": (("--topology", "v5e:2x2x2"), "a slice of v5e has 2 sizes"),
    "a size of 0": (("--topology", "v5e:0x4"), "2 sizes, each of 1 or more"),
    "an axis": (("--topology", "v5e:2x2", "--mesh", "model=4"), "axes are data, tensor, group, expert"),
    "a size": (("--topology", "v5e:2x2", "--mesh", "tensor"), "axes are data, tensor, group, expert"),
    "a batch": (("--topology", "v5e:2x2", "--batch", "0"), "--batch"),
    "nothing to keep": (("--topology", "v5e:2x2", "--encoding", "keep"), "is not encoded"),
    "kept and quantized": (
        ("--topology", "v5e:2x2", "--encoding", "keep", "--quantize", "int8_default"),
        "exclude each other",
    ),
    "kept without a slice": (("--encoding", "keep"), "Missing option '--topology'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_an_answer_that_helps(mistake):
    args, answer = MISTAKES[mistake]
    assert answer in tpuconv("fit", EXAMPLE, *args, code=2).stderr


@compiler
@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (("--topology", "v5e:3x3"), "the slices of v5e are 1x1, 2x2, 2x4"),
        (("--topology", "v5e:2x2", "--mesh", "tensor=8"), "the mesh tensor=8 has 8 devices, v5e:2x2 has 4"),
    ],
)
def test_what_libtpu_does_not_know_is_a_mistake_too(args, answer):
    assert answer in tpuconv("fit", EXAMPLE, *args, code=2).stderr


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    from tpuconv.verify.topology import request as tpu

    monkeypatch.setattr(tpu.libtpu, "is_installed", lambda: False)
    with pytest.raises(UsageError, match=r"\[tpu\]"):
        next(tpu.ask(tpu.CompileRequest({}), [[Slice("v5e:2x2")]]))


# -- names and letters -------------------------------------------------------------------------------------------------


def test_the_tables_can_be_read_on_a_narrow_terminal():
    collectives = [{"op": "all-reduce", "count": 160, "bytes": 10_200_000}]
    products = [{"multiplied": "bf16 x int8", "stored": "bf16 x int8", "count": 560}]
    program = tpu.Program("prefill", 2048, 12, 0, 0, 0, 1, 1, 1e-3, 1e-3, 2e-3, collectives, products, (), ())
    answer = tpu.FitReport("v5e:4x4", 16, {"tensor": 16}, tpu.Memory(1, 0, 0, 0, 0), programs=[program])
    console = Console(width=80, record=True, file=io.StringIO())
    for table in tables(Fit("model", tpu.CompileRequest({}), [answer], None, 2048)):
        console.print(table)
    text = console.export_text()
    assert "160 all-reduce, 10.2 MB" in text
    assert "560 bf16 x int8 (bf16 x int8)" in text


def test_topologies_are_read():
    groups = parse_topologies(["V5E:4x4,v6e:2x4", "v5p"])
    assert [[one.name for one in group] for group in groups[:2]] == [["v5e:4x4"], ["v6e:2x4"]]
    assert [one.name for one in groups[2]][:3] == ["v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x2"]
    assert (Slice("v5e:4x4").devices, Slice("tpu7x:2x2x1").devices) == (16, 8)
    assert Slice("v5e:4x4").next == Slice("v5e:4x8")
    assert Slice("v5e:16x16").next is None
    assert parse_mesh("tensor=8, expert=2") == {"tensor": 8, "expert": 2}


GB = 10**9


def report_of(topology, floor=1e-3, communication=0.0, estimate=2e-3, weights=4, temporaries=1, why=""):
    """Of a slice whose devices have 16 GB; times in seconds, memory in GB."""
    program = tpu.Program("decode", 1, 1, 0, 0, 0, 1, 1, floor, floor, estimate, (), (), (), (), communication)
    memory = tpu.Memory(16 * GB, weights * GB, 1 * GB, temporaries * GB, 0)
    return tpu.FitReport(topology, 4, {}, memory, why, [] if why else [program], batch=8)


def test_a_verdict_says_what_fits_how_fast_and_what_limits_it():
    verdict = report_of("v5e:2x2").verdict()
    assert verdict == (
        "v5e:2x2: fits, with 10 GB of 16 GB left on each device. Decoding makes about 500 tokens/s for each sequence, "
        "4,000 in all, limited by memory bandwidth."
    )
    assert "limited by communication" in report_of("v5e:2x2", communication=1.5e-3).verdict()
    assert "limited by compute" in report_of("v5e:2x2", estimate=5e-3).verdict()
    assert "left on each device (the smaller v5e:1x1 may do). Dec" in report_of("v5e:2x2", weights=2).verdict()
    assert report_of("v5e:2x2", weights=2, temporaries=5).smaller is None
    assert report_of("v5e:1x1", weights=1).smaller is None
    assert report_of("v5e:2x2", why="too large").verdict() == "v5e:2x2: does not fit: too large."
    facts = report_of("v5e:2x2").to_json()
    assert (facts["tokens_per_second_per_sequence"], facts["tokens_per_second"]) == (500, 4000)
    assert report_of("v5e:2x2", why="too large").to_json()["tokens_per_second"] is None


LLAMA_70B = {"D": 8192, "N": 64, "K": 8, "G": 8, "H": 128, "F": 28672, "V": 128256}
DEEPSEEK = {"D": 7168, "N": 128, "K": 128, "G": 1, "C": 512, "E": 256, "M": 2048, "V": 129280}


@pytest.mark.parametrize(
    ("sizes", "devices", "mesh"),
    [
        (LLAMA_70B, 8, {"tensor": 8}),
        (LLAMA_70B, 16, {"tensor": 8, "group": 2}),
        (LLAMA_70B, 1, {"tensor": 1}),
        (DEEPSEEK, 64, {"tensor": 8, "expert": 8}),
        (DEEPSEEK, 8, {"tensor": 8}),
        (LLAMA_70B | {"E": 16, "M": 8192}, 16, {"tensor": 8, "expert": 2}),
        (LLAMA_70B | {"E": 6, "M": 512}, 16, {"tensor": 2, "group": 4, "expert": 2}),
    ],
)
def test_the_default_mesh(sizes, devices, mesh):
    assert decoding_mesh(sizes, devices) == mesh


@pytest.mark.parametrize(
    ("axes", "shape", "mesh", "parts"),
    [
        ("D N H", (8192, 64, 128), {"tensor": 8, "group": 2}, (None, ("tensor", "group"), None)),
        ("D (K G) H", (8192, 64, 128), {"tensor": 8, "group": 2}, (None, ("tensor", "group"), None)),
        ("D K H", (8192, 8, 128), {"tensor": 8, "group": 2}, (None, "tensor", None)),
        ("D N H", (5120, 40, 128), {"tensor": 8, "group": 2}, (None, "tensor", None)),
        ("E D M", (256, 7168, 2048), {"tensor": 8, "expert": 8}, ("expert", None, "tensor")),
        ("D M", (7168, 2048), {"tensor": 8, "expert": 8}, (None, ("tensor", "expert"))),
        ("D F", (1024, 64), {"data": 2, "tensor": 4}, ("data", "tensor")),
    ],
)
def test_parameters_are_divided_by_letters(axes, shape, mesh, parts):
    assert partition(axes, shape, mesh) == parts


@pytest.mark.parametrize(
    ("axes", "shape", "mesh", "parts"),
    [
        ("B S K H", (8, 64, 8, 128), {"tensor": 8, "group": 2}, ("group", None, "tensor", None)),
        ("B S K H", (1, 64, 8, 128), {"tensor": 8, "group": 2}, (None, None, "tensor", None)),
        ("B T K G H", (1, 1, 8, 8, 128), {"tensor": 8, "group": 2}, (None, None, "tensor", "group", None)),
        ("B S C", (64, 64, 512), {"tensor": 8, "expert": 8}, (("expert", "tensor"), None, None)),
        ("B S C", (8, 64, 512), {"tensor": 8, "expert": 8}, ("expert", None, None)),
    ],
)
def test_the_cache_is_divided_by_heads_then_by_the_batch(axes, shape, mesh, parts):
    assert partition(axes, shape, mesh, BY_BATCH) == parts
    assert all(size >= 1 for size in shard_shape(shape, parts, mesh))


@pytest.mark.parametrize(
    ("axes", "shape", "nbytes", "rules"),
    [
        ("B S K H", (8, 2048, 8, 128), 2 * 8 * 2048 * 8 * 128, BY_HEAD),  # of Llama 70B in int8, 4 MB on a chip
        ("B S K H", (8, 2048, 8, 128), 4 * 8 * 2048 * 8 * 128, BY_BATCH),  # in bfloat16
        ("B S C", (8, 512, 512), 2 * 8 * 512 * 576, BY_HEAD),  # of DeepSeek R1
        ("B S C", (64, 4096, 512), 2 * 64 * 4096 * 576, BY_BATCH),
    ],
)
def test_a_small_cache_is_divided_by_heads_alone(axes, shape, nbytes, rules):
    assert attention_rules(axes, shape, nbytes, {"tensor": 8, "group": 2}) is rules


# -- the text of a compiled program ------------------------------------------------------------------------------------

HLO = """HloModule small, is_scheduled=true

%body (p: (s32[], bf16[16,256])) -> (s32[], bf16[16,256]) {
  %p = (s32[], bf16[16,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[16,256]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %all-reduce.1 = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), to_apply=%sum
  %fusion.1 = bf16[16,256]{1,0:T(8,128)(2,1)} fusion(%all-reduce.1, %x), calls=%product, "estimated_cycles":"1500"
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %out = (s32[], bf16[16,256]{1,0:T(8,128)(2,1)}) tuple(%i, %fusion.1)
}

%condition (p: (s32[], bf16[16,256])) -> pred[] {
  %p = (s32[], bf16[16,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%product (a: bf16[16,256], w: s8[256,256]) -> bf16[16,256] {
  %a = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %w = s8[256,256]{1,0:T(8,128)(4,1)} parameter(1)
  %wide = bf16[256,256]{1,0:T(8,128)(2,1)} convert(%w)
  ROOT %conv = bf16[16,256]{1,0:T(8,128)(2,1)} convolution(%a, %wide), dim_labels=bf_io->bf
}

%update (cache: bf16[4096,256], new: bf16[8,256], at: s32[]) -> bf16[4096,256] {
  %cache = bf16[4096,256]{1,0:T(8,128)(2,1)} parameter(0)
  %new = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %at = s32[] parameter(2)
  ROOT %dus = bf16[4096,256]{1,0:T(8,128)(2,1)} dynamic-update-slice(%cache, %new, %at, %at)
}

ENTRY %main (x: bf16[16,256], big: bf16[4096,256], w: s8[256,256]) -> bf16[4096,256] {
  %x = bf16[16,256]{1,0:T(8,128)(2,1)} parameter(0)
  %big = bf16[4096,256]{1,0:T(8,128)(2,1)} parameter(1)
  %w = s8[256,256]{1,0:T(8,128)(4,1)} parameter(2)
  %zero = s32[]{:S(6)} constant(0)
  %start = (bf16[4096,256]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%big)
  %init = (s32[], bf16[16,256]{1,0:T(8,128)(2,1)}) tuple(%zero, %x)
  %while.1 = (s32[], bf16[16,256]{1,0:T(8,128)(2,1)}) while(%init), condition=%condition, body=%body
  %done = bf16[4096,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  %fusion.2 = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %w), kind=kOutput, calls=%product
  %copy.7 = bf16[4096,256]{0,1:T(8,128)(2,1)} copy(%big), metadata={op_name="jit(step)/relayout"}
  %copy.8 = bf16[4096,256]{0,1:T(8,128)(2,1)} copy(%big)
  %copy.9 = bf16[4096,256]{0,1:T(8,128)(2,1)} copy(%big)
  ROOT %fusion.3 = bf16[4096,256]{1,0:T(8,128)(2,1)} fusion(%big, %x, %zero), kind=kLoop, calls=%update
}
"""


def test_a_schedule_is_read_with_its_loops():
    schedule = Schedule(HLO)
    small, large, weight, row = 16 * 256 * 2, 4096 * 256 * 2, 256 * 256, 8 * 256 * 2
    assert schedule.collectives() == [{"op": "all-reduce", "count": 5, "bytes": 5 * small}]
    assert schedule.products()[0]["count"] == 6
    assert {"multiplied": "bf16 x bf16", "stored": "bf16 x s8", "count": 6} in schedule.products()
    assert schedule.copies() == [
        {"source": "copy", "count": 2, "bytes": 4 * large},
        {"source": "jit(step)/relayout", "count": 1, "bytes": 2 * large},
    ]
    read, written = schedule.hbm
    # the prefetch; five turns of the loop; the product with the weight; three copies; what is updated in place reads x
    assert read == large + 5 * small + (small + weight) + 3 * large + small
    assert written == 5 * small + 3 * large + row
    assert schedule.estimate(819e9, 45e9, 1.5e9).seconds > (read + written) / 819e9


@pytest.mark.parametrize(
    ("text", "dtype", "space", "nbytes"),
    [
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", "bf16", 1, 2048),
        ("f32[3,100]{1,0:T(8,128)}", "f32", 0, 8 * 128 * 4),
        ("s4[7,256]{1,0:T(8,128)(8,1)}", "s4", 0, 8 * 256 // 2),
        ("f8e4m3fn[128,32]{0,1:T(8,128)(4,1)}", "f8e4m3fn", 0, 128 * 32),
        ("pred[]", "pred", 0, 1),
    ],
)
def test_shapes_know_their_memory_and_padding(text, dtype, space, nbytes):
    (value,) = values(text)
    assert (value.dtype, value.space, value.nbytes) == (dtype, space, nbytes)

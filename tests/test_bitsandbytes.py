"""bitsandbytes against its definitions: every quantized value with every scale, what its own writer writes, what is
kept, and what is refused.

`data/bitsandbytes` was written by bitsandbytes 0.50.2 and transformers 5.23 on a CPU: a Qwen3 of one layer with random
weights. `dequantized.json` has the SHA-256 of what bitsandbytes itself makes of each weight, in two dtypes.
"""

import hashlib
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, plan_for, restore, same_bits
from helpers.encoded import assert_came_back, dequantized, quantized
from helpers.families import Case, save
from helpers.schemes import BF16, BNB_TABLES, bitsandbytes, llm_int8, nf4_nested
from tpuconv import api
from tpuconv.convert.plan.proposal import propose_family
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.passthrough import without_factor
from tpuconv.encodings.reshaped import shaped
from tpuconv.encodings.schemes import groups
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import ConfigError, MappingError, SourceError, UsageError
from tpuconv.models.registry import get_family
from tpuconv.names import QVALUE, SCALE
from tpuconv.sources.source import open_source

WRITTEN = Path(__file__).parent / "data" / "bitsandbytes"
NF4, FP4, INT8 = "nf4_nested", "fp4", "int8"


def values_of(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype) -> dict[str, np.ndarray]:
    source = open_source(folder)
    tensors, faults = decode_names(source.tensors, source.encoding)
    assert not faults
    out = {}
    with closing(source.open()) as reader:
        for name, tensor in shaped(tensors, shapes).items():
            if tensor.scheme is not None:
                values = np.empty(tensor.size, dtype)
                with np.errstate(over="ignore"):
                    tensor.read(reader, 0, np.empty(tensor.values.nbytes, np.uint8), values)
                out[name] = values.reshape(tensor.shape)
    return out


def weights(folder: Path, dtype: np.dtype = BF16) -> dict[str, np.ndarray]:
    """Every encoded weight of what was written, with the shape that the family's table wants."""
    family, raw = get_family("qwen3"), json.loads((folder / "config.json").read_text())
    shapes = {n: s for b in family.table.bind(family.read_config(raw)) for n, s in b.src_shapes().items()}
    return values_of(folder, shapes, dtype)


SCALES = np.array([0, 1, -0.37, 6e-8, 0.0123, 3e38, 2**-140], "f4")


@pytest.mark.parametrize("dtype", [BF16, np.dtype("f4")], ids=str)
@pytest.mark.parametrize("kind", BNB_TABLES)
def test_every_value_with_every_scale(kind, dtype, tmp_path):
    """A block of 64 values has each of the 16 four times; nested scales take all 256 numbers of their table."""
    stored, config, _ = bitsandbytes(np.random.default_rng(0), 64, 512, kind, nested=True)
    codes = np.resize(np.arange(16, dtype=np.uint8), 64 * 512)
    stored["w.weight"] = (codes[0::2] << 4 | codes[1::2])[:, None]
    numbers, outer = np.linspace(-1, 1, 256).astype("f4"), np.array([0.37, 0], "f4")
    stored |= {"w.weight.absmax": np.arange(512).astype(np.uint8)[::-1].copy(), "w.weight.nested_absmax": outer}
    stored["w.weight.nested_quant_map"] = numbers
    nested = (numbers[stored["w.weight.absmax"]] * np.repeat(outer, 256)).astype("f4") + np.float32(1.25)
    plain = {name: x for name, x in stored.items() if "nested" not in name}
    plain["w.weight.absmax"] = np.resize(SCALES, 512)
    state = json.dumps({"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": [64, 512]})
    plain[f"w.weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(state.encode(), np.uint8)
    for own, scales in ((stored, nested), (plain, plain["w.weight.absmax"])):
        folder = write_checkpoint(tmp_path, {"quantization_config": config}, own)
        with np.errstate(over="ignore"):
            want = (BNB_TABLES[kind][codes].reshape(-1, 64) * scales[:, None]).reshape(64, 512).astype(dtype)
        assert same_bits(values_of(folder, {"w.weight": (64, 512)}, dtype)["w.weight"], want)


def test_every_value_of_llm_int8(tmp_path):
    stored, config, _ = llm_int8(np.random.default_rng(0), len(SCALES), 256)
    stored["w.weight"] = np.resize(np.arange(-128, 128).astype(np.int8), (len(SCALES), 256))
    stored["w.SCB"] = SCALES
    del stored["w.weight_format"]  # which some files lack
    with np.errstate(over="ignore"):
        want = stored["w.weight"].astype("f4") * SCALES[:, None] * np.float32(7.874015718698502e-3)
    folder = write_checkpoint(tmp_path, {"quantization_config": config}, stored)
    assert same_bits(values_of(folder, {}, np.dtype("f4"))["w.weight"], want)


@pytest.mark.parametrize("form", [NF4, *(pytest.param(form, marks=pytest.mark.slow) for form in (FP4, INT8))])
def test_what_bitsandbytes_writes_is_what_it_reads(form, tmp_path):
    facts = json.loads((WRITTEN / form / "dequantized.json").read_text())
    for dtype in (np.dtype("f4"), BF16):
        have = weights(WRITTEN / form, dtype)
        assert have.keys() == facts.keys()
        assert {n: hashlib.sha256(x.tobytes()).hexdigest() for n, x in have.items()} == {
            name: hashes[dtype.name] for name, hashes in facts.items()
        }
    plan = convert(WRITTEN / form, tmp_path / "out")
    assert plan.mapped == len(plan.source.tensors)
    config = json.loads((WRITTEN / form / "config.json").read_text())
    plain = {name: x for name, x in read_tensors(WRITTEN / form).items() if "_proj." not in name} | have
    write_checkpoint(tmp_path / "plain", {k: v for k, v in config.items() if k != "quantization_config"}, plain)
    convert(tmp_path / "plain", tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))


def nf4_decoded(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Kept NF4 as its numbers."""
    numbers = {n: BNB_TABLES["nf4"][x] for n, x in arrays.items() if n.endswith(QVALUE) and x.dtype == np.uint8}
    return dequantized(arrays | numbers)


def test_nf4_is_kept_as_qwix_has_it(tmp_path):
    kept = convert(WRITTEN / NF4, tmp_path / "kept", Options(encoding="keep"))
    convert(WRITTEN / NF4, tmp_path / "out")
    arrays, facts = restore(tmp_path / "kept"), kept.passthrough["layers.0.mlp.up.kernel"].to_json()
    assert (facts["qtype"], facts["tiles"], facts["bits"]) == ("nf4", [64, 1], 4.5)
    assert {str(x.dtype) for n, x in arrays.items() if n.endswith(SCALE) and "norm" not in n} == {"float32"}
    assert_same(nf4_decoded(arrays), restore(tmp_path / "out"))
    with pytest.raises(UsageError, match="as bitsandbytes NF4, which no export writes"):
        api.export(tmp_path / "kept", tmp_path / "back")
    with pytest.raises(UsageError, match="as bitsandbytes NF4, which no export writes"):
        api.convert(WRITTEN / NF4, tmp_path / "back", target="huggingface", encoding="keep")
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_a_kept_nf4_computes_what_the_dequantized_one_does(tmp_path):
    ids = np.arange(3, 20)[None]
    logits = []
    for encoding in ("dequantize", "keep"):
        api.convert(WRITTEN / NF4, tmp_path / encoding, encoding=encoding)
        logits.append(np.asarray(api.load(tmp_path / encoding, "float32")(ids)))
    # Of a dequantized one the weights are rounded to bfloat16.
    assert np.abs(logits[0] - logits[1]).max() < 0.02 * np.abs(logits[0]).max()


@pytest.mark.slow
def test_nf4_is_kept_where_nf4_is_asked_for(tmp_path):
    rules = "qwix: {rules: [{module_path: 'layers/.*/mlp/.*', weight_qtype: nf4, tile_size: 64}]}"
    quantized(WRITTEN / NF4, tmp_path / "out", rules)
    convert(WRITTEN / NF4, tmp_path / "kept", Options(encoding="keep"))
    have, kept = restore(tmp_path / "out"), restore(tmp_path / "kept")
    names = [name for name in have if ".mlp." in name]
    assert len(names) == 6
    assert not [name for name in names if not same_bits(have[name], kept[name])]


def test_llm_int8_is_kept_and_comes_back(tmp_path):
    """Its scales are then divided by 127 before values are multiplied, which float32 rounds otherwise."""
    plan = convert(WRITTEN / INT8, tmp_path / "kept", Options(encoding="keep"))
    assert_came_back(WRITTEN / INT8, tmp_path / "kept", plan)
    convert(WRITTEN / INT8, tmp_path / "out", Options(dtype="float32"))
    have, want = restore(tmp_path / "kept"), restore(tmp_path / "out")
    for name, qvalues in have.items():
        if name.endswith(QVALUE):
            base = name.removesuffix(QVALUE)
            np.testing.assert_array_max_ulp(qvalues.astype("f4") * have[base + SCALE], want[base], 1)


def test_a_factor_is_undone():
    factor = np.float32(1 / 127)
    scales = np.random.default_rng(0).uniform(1e-4, 60, 1 << 16).astype("f4")
    halves = scales.astype(np.float16).astype("f4")
    assert same_bits(without_factor(halves * factor, factor), halves)
    assert same_bits(without_factor(scales * factor, factor) * factor, scales * factor)


FAULTS = {
    "no scales": (lambda t: t.pop("w.weight.absmax"), "has no weight.absmax"),
    "scales of other blocks": (
        lambda t: t.update({"w.weight.absmax": np.ones(9, np.uint8)}),
        "should be [8] by the block",
    ),
    "no scales of scales": (lambda t: t.pop("w.weight.nested_absmax"), "has no weight.nested_absmax"),
    "fewer scales of scales": (
        lambda t: t.update({"w.weight.nested_absmax": np.ones(2, "f4")}),
        "w.weight.nested_absmax  F32 [2] (1 tensor) should be F32 [1]",
    ),
    "another table": (lambda t: t.pop("w.weight.quant_map"), "has no weight.quant_map"),
    "no text": (lambda t: t.pop("w.weight.quant_state.bitsandbytes__nf4"), "has no weight.quant_state"),
    "a long text": (
        lambda t: t.update({"w.weight.quant_state.bitsandbytes__nf4": np.zeros(5000, np.uint8)}),
        "should be U8, of 4096 bytes at most",
    ),
    "no values": (lambda t: t.pop("w.weight"), "w.weight.absmax  U8 [8] (1 tensor) has no values that it belongs to"),
    "scales in half precision": (lambda t: t.update({"w.weight.absmax": np.ones(8, "f2")}), "should be one of F32, U8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_belong_together_are_named(fault, tmp_path):
    spoil, message = FAULTS[fault]
    stored, config, _ = bitsandbytes(np.random.default_rng(0), 8, 64, nested=True)
    spoil(stored)
    source = open_source(write_checkpoint(tmp_path, {}, stored))
    assert message in "\n".join(decode_names(source.tensors, config)[1])


def state(**changes):
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 64]}
    facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5} | changes
    text = json.dumps({key: value for key, value in facts.items() if value is not None})
    return {"w.weight.quant_state.bitsandbytes__nf4": np.frombuffer(text.encode(), np.uint8)}


CONTRADICTIONS = {
    "another shape": (state(shape=[64, 8]), r"says the shape \[64, 8\], but config.json wants \[8, 64\]"),
    "another block": (state(blocksize=32), r"says blocks of 32, which are 16, but w.weight.absmax holds 8 scales"),
    "another type": (state(quant_type="fp4"), r"quant_type must be 'nf4', not 'fp4'"),
    "scales of scales in another dtype": (
        state(nested_dtype="float16"),
        r"nested_dtype must be 'float32', not 'float16'",
    ),
    "a large offset": (state(nested_offset=1e39), r"w.weight.absmax\[0\] is inf, which is not a valid scale"),
    "no offset": (state(nested_offset=None), r"nested_offset must be a number, and is absent"),
    "an unknown key": (state(rotation=1), r"rotation must be absent: the key is unknown"),
    "no JSON": ({"w.weight.quant_state.bitsandbytes__nf4": np.zeros(9, np.uint8)}, "is not valid JSON"),
    "another table": (
        {"w.weight.quant_map": BNB_TABLES["fp4"]},
        r"quant_map\[0\] is 0.0, not -1.0 as for bitsandbytes NF4",
    ),
    "a number of the table": (
        {"w.weight.quant_map": np.where(np.arange(16) == 15, np.float32(np.nan), BNB_TABLES["nf4"])},
        r"w.weight.quant_map\[15\] is nan, not 1.0 as for bitsandbytes NF4",
    ),
}


@pytest.mark.parametrize("fault", CONTRADICTIONS)
def test_what_contradicts_the_description_is_named(fault, tmp_path):
    changes, message = CONTRADICTIONS[fault]
    stored, config, _ = bitsandbytes(np.random.default_rng(0), 8, 64, nested=True)
    folder = write_checkpoint(tmp_path, {"quantization_config": config}, stored | changes)
    with pytest.raises(SourceError, match=message) as e:
        values_of(folder, {"w.weight": (8, 64)}, BF16)
    assert e.value.hint


def test_another_order_of_llm_int8_is_named(tmp_path):
    stored, config, _ = llm_int8(np.random.default_rng(0), 8, 64)
    stored["w.weight_format"] = np.array(1, np.uint8)  # col32, for one GPU
    folder = write_checkpoint(tmp_path, {"quantization_config": config}, stored)
    with pytest.raises(SourceError, match=r"w.weight_format is 1, not 0 as for LLM.int8"):
        values_of(folder, {}, BF16)
    stored["w.weight_format"] = np.array([0], np.uint8)
    assert (
        "w.weight_format  U8 [1] (1 tensor) should be U8 []"
        in decode_names(open_source(write_checkpoint(tmp_path, {}, stored)).tensors, config)[1]
    )


@pytest.mark.parametrize("encoding", ["dequantize", "keep"])
def test_another_order_of_llm_int8_is_named_by_a_conversion(encoding, tmp_path):
    tensors = read_tensors(WRITTEN / INT8)
    name = next(name for name in tensors if name.endswith(".weight_format"))
    tensors[name] = np.array(1, np.uint8)
    write_checkpoint(tmp_path / "hf", json.loads((WRITTEN / INT8 / "config.json").read_text()), tensors)
    with pytest.raises(SourceError, match=rf"{name} is 1, not 0 as for LLM.int8"):
        convert(tmp_path / "hf", tmp_path / "out", Options(encoding=encoding))


def test_what_no_array_holds_is_not_kept(tmp_path):
    with pytest.raises(
        MappingError, match=r"up_proj.weight  cannot stay encoded: .* FP4 are a table that no type"
    ) as e:
        plan_for(WRITTEN / FP4, Options(encoding="keep")).check()
    assert e.value.hint == '`encoding="dequantize"` decodes them'
    encoded_mlp(tmp_path, "down_proj")  # rows of 80 values
    plan_for(tmp_path).check()
    with pytest.raises(MappingError, match=r"down_proj.weight  cannot stay encoded: its blocks go over the ends of"):
        plan_for(tmp_path, Options(encoding="keep")).check()


def encoded_mlp(folder: Path, projection: str) -> None:
    """A checkpoint with one kind of matrices in NF4."""
    rng, tensors = np.random.default_rng(0), {}
    for name, x in read_tensors(random_checkpoint(folder, qwen3_config())).items():
        if name.endswith(f"{projection}.weight"):
            stored, config, _ = bitsandbytes(rng, *x.shape)
            tensors |= {part.replace("w", name.removesuffix(".weight"), 1): y for part, y in stored.items()}
        else:
            tensors[name] = x
    write_checkpoint(folder, qwen3_config(quantization_config=config), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_blocks_of_complete_rows_are_kept(scan_layers, tmp_path, small_cuts):
    encoded_mlp(tmp_path / "hf", "up_proj")  # rows of 32 values
    for encoding in ("keep", "dequantize"):
        plan = convert(tmp_path / "hf", tmp_path / encoding, Options(encoding=encoding, scan_layers=scan_layers))
        assert all(facts.group_shape[-2:] == (32, 2) for facts in plan.passthrough.values())
    assert_same(nf4_decoded(restore(tmp_path / "keep")), restore(tmp_path / "dequantize"))


@pytest.mark.parametrize("form", [NF4, FP4, INT8])
def test_config_json_alone_says_what_is_stored(form):
    family, raw = get_family("qwen3"), json.loads((WRITTEN / form / "config.json").read_text())
    have = source_from_config("x", raw, family.table, family.read_config(raw)).tensors
    want = open_source(WRITTEN / form).tensors
    assert have.keys() == want.keys()
    for name, info in want.items():
        about = (have[name].dtype, have[name].shape)
        if ".quant_state." in name:  # a text
            assert about[0] == info.dtype
        elif not name.endswith(".SCB"):
            assert about == (info.dtype, info.shape), name


MOE = Case(
    "qwen3_moe-wide",
    "qwen3_moe",
    "qwen3_moe",
    {"hidden_size": 64, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [nf4_nested, llm_int8])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_experts(scan_layers, encoder, tmp_path, small_cuts):
    """Each is a matrix of its own, and they become one array."""
    rng, tensors, values = np.random.default_rng(0), {}, {}
    for name, x in read_tensors(save(MOE, tmp_path / "plain", "bfloat16")).items():
        values[name] = x
        if ".experts." not in name:
            tensors[name] = x
            continue
        stored, config, own = encoder(rng, *x.shape)
        tensors |= {part.replace("w", name.removesuffix(".weight"), 1): y for part, y in stored.items()}
        values[name] = own.astype(BF16)
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    write_checkpoint(tmp_path / "plain", raw, values)
    write_checkpoint(tmp_path / "hf", raw | {"quantization_config": config}, tensors, shards=3)
    for name, folder, how in (("want", "plain", {}), ("have", "hf", {}), ("kept", "hf", {"encoding": "keep"})):
        convert(tmp_path / folder, tmp_path / name, Options(scan_layers=scan_layers, **how))
    assert_same(restore(tmp_path / "have"), restore(tmp_path / "want"))
    kept = restore(tmp_path / "kept")
    assert sum(name.endswith(QVALUE) for name in kept) == (3 if scan_layers else 6)
    if encoder is nf4_nested:
        assert_same(nf4_decoded(kept), restore(tmp_path / "want"))


@pytest.mark.slow
def test_the_nearest_family_explains_every_matrix():
    proposal = propose_family(open_source(WRITTEN / NF4))
    assert (proposal.nearest.name, proposal.left, proposal.nearest.missing) == ("qwen3", (), ())


def test_which_modules_a_description_names():
    config = {"load_in_4bit": True}  # as the first versions had it
    (group,) = groups(config)
    assert [group.takes(name) for name in ("layers.0.mlp.up_proj", "lm_head")] == [True, False]
    (group,) = groups(config | {"llm_int8_skip_modules": ["layers.0.mlp", "k_proj"]})
    names = ("layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "layers.1.self_attn.k_proj", "lm_head")
    assert [group.takes(name) for name in names] == [False, True, False, True]


def test_a_key_that_is_not_known_is_an_error():
    with pytest.raises(ConfigError, match="bnb_4bit_rotation must be absent: the key is unknown"):
        groups({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_rotation": True})


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", BNB_TABLES)
def test_bitsandbytes_itself(kind, nested, tmp_path):
    """Matrices of many sizes, by the library if it is installed: odd rows, and blocks that end in the middle of one."""
    library = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes, which is not a part of `dev`")
    for rows, columns, block in ((48, 160, 64), (7, 30, 32), (300, 257 * 2, 64), (5, 64, 4096)):
        weight = torch.randn(rows, columns, dtype=torch.bfloat16)
        packed, quant_state = library.functional.quantize_4bit(weight, None, None, block, nested, kind)
        stored = {f"w.weight.{name}": x.numpy() for name, x in quant_state.as_dict(packed=True).items()}
        config = bitsandbytes(np.random.default_rng(0), 1, 2, kind, nested)[1]
        folder = write_checkpoint(tmp_path, {"quantization_config": config}, stored | {"w.weight": packed.numpy()})
        theirs = library.functional.dequantize_4bit(packed, quant_state).view(torch.int16).numpy().view(BF16)
        ours = values_of(folder, {"w.weight": (rows, columns)}, BF16)["w.weight"]
        assert same_bits(ours, theirs)

"""Whole checkpoints in each encoding, the values that they stand for, and the way back."""

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from helpers import quantizing
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import export_checkpoint, same_bits
from helpers.families import CASES, Case
from helpers.schemes import AWQ_ORDER, BF16, FP4, FP8, compressed_config, fp8_config, in_words, packed
from helpers.schemes import nvfp4 as random_nvfp4
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.export.array_source import released_config
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.tensors import decode_names
from tpuconv.models.registry import get_family
from tpuconv.names import QVALUE, SCALE, ZERO_POINT
from tpuconv.quantize.config import parse_config
from tpuconv.sources.headers import DTYPES
from tpuconv.sources.source import open_source


def expanded(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """As a QArray does it: each axis is a multiple of that of the scales."""
    for axis, (n, s) in enumerate(zip(shape, scales.shape, strict=True)):
        assert n % s == 0
        scales = np.repeat(scales, n // s, axis)
    return scales


def decoded(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> np.ndarray:
    values = codes.astype("f4") if zeros is None else codes.astype("f4") - expanded(zeros, codes.shape).astype("f4")
    return (values * expanded(scales, codes.shape).astype("f4")).astype(BF16)


def encode_fp8(x, block=(5, 7), scale_dtype="f4"):
    grid = tuple(-(-n // b) for n, b in zip(x.shape, block, strict=True))
    scales = np.random.default_rng(x.size).uniform(0.5, 2, grid) * np.abs(x).max() / 448
    if np.dtype(scale_dtype) == DTYPES["F8_E8M0"]:
        scales = 2.0 ** np.ceil(np.log2(scales))
    scales = scales.astype(scale_dtype)
    every = np.repeat(np.repeat(scales.astype("f4"), block[0], 0), block[1], 1)[tuple(map(slice, x.shape))]
    codes = (x / every).clip(-448, 448).astype(FP8)
    return codes, scales, codes.astype("f4") * every


def fp8(name, x):
    codes, scales, values = encode_fp8(x)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, values


def fp8_powers_of_two(name, x):
    codes, scales, values = encode_fp8(x, (8, 4), ml_dtypes.float8_e8m0fnu)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, values


def fp8_channel(name, x):
    codes, scales, values = encode_fp8(x, (1, x.shape[1]), BF16)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, values


def fp8_tensor(name, x):
    codes, scales, values = encode_fp8(x, x.shape)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales.reshape(1)}, values


def int4(name, x):
    if x.shape[1] % 8:
        return {f"{name}.weight": x.astype(BF16)}, x
    groups = -(-x.shape[1] // 16)
    scales = (np.random.default_rng(x.size).uniform(0.5, 2, (x.shape[0], groups)) * np.abs(x).max() / 7).astype(BF16)
    every = np.repeat(scales.astype("f4"), 16, 1)[:, : x.shape[1]]
    values = np.round(x / every).clip(-8, 7) + 0.0  # no negative zero
    stored = {
        f"{name}.weight_packed": packed(values + 8, 4),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": np.array(x.shape, np.int64),
    }
    return stored, values * every


def int8(name, x):
    if x.shape[1] % 4:
        return {f"{name}.weight": x.astype(BF16)}, x
    scales = (np.abs(x).max(1, keepdims=True) / 120).astype(BF16)
    values = np.round(x / scales.astype("f4")) + 0.0
    stored = {f"{name}.weight_packed": packed(values + 128, 8), f"{name}.weight_scale": scales}
    return stored, values * scales.astype("f4")


def affine(x, group, low, high):
    """Codes [in, out] between `low` and `high`, zero points and scales, in half precision and of either sign."""
    rng, rows = np.random.default_rng(x.size), np.arange(x.shape[1]) // group
    grid = (rows[-1] + 1, x.shape[0])
    scales = (rng.uniform(0.5, 2, grid) * rng.choice([-1, 1], grid) * np.abs(x).max() / 7).astype(np.float16)
    zeros = rng.integers(low, high + 1, grid)
    codes = (np.round(x.T / scales[rows].astype("f4")) + zeros[rows]).clip(0, 15)
    values = (codes - zeros[rows]).astype("f4") * scales[rows].astype("f4")
    return codes, zeros, scales, values.T


def awq(name, x):
    if x.shape[0] % 8:
        return {f"{name}.weight": x.astype(BF16)}, x
    codes, zeros, scales, values = affine(x, 16, 0, 15)
    parts = {"qweight": codes, "qzeros": zeros}
    stored = {f"{name}.{part}": in_words(x, 4, 1, AWQ_ORDER) for part, x in parts.items()}
    return stored | {f"{name}.scales": scales}, values


def gptq(name, x, symmetric=True):
    if x.shape[0] % 8 or x.shape[1] % 8:
        return {f"{name}.weight": x.astype(BF16)}, x
    codes, zeros, scales, values = affine(x, 8, *((8, 8) if symmetric else (0, 15)))
    return {
        f"{name}.qweight": in_words(codes, 4, 0),
        f"{name}.qzeros": in_words((zeros - 1) % 16, 4, 1),
        f"{name}.scales": scales,
        f"{name}.g_idx": (np.arange(x.shape[1]) // 8).astype(np.int32),
    }, values


def gptq_asymmetric(name, x):
    return gptq(name, x, symmetric=False)


def int4_asymmetric(name, x):
    if x.shape[1] % 8:
        return {f"{name}.weight": x.astype(BF16)}, x
    codes, zeros, scales, values = affine(x, 16, 0, 15)
    scales = np.abs(scales).astype(BF16)
    columns = np.arange(x.shape[1]) // 16
    values = (codes - zeros[columns]).T.astype("f4") * scales.T[:, columns].astype("f4")
    return {
        f"{name}.weight_packed": in_words(codes.T, 4, 1),
        f"{name}.weight_scale": np.ascontiguousarray(scales.T),
        f"{name}.weight_zero_point": in_words(zeros.T, 4, 0),
        f"{name}.weight_shape": np.array(x.shape, np.int64),
    }, values


def nvfp4(name, x, divided=False):
    """As writers do it: matrices that servers join have one scale of the tensor, which fits the largest block of all.
    The others have no scale of a block near 448."""
    if x.shape[1] % 16:
        return {f"{name}.weight": x.astype(BF16)}, x
    joined = re.sub(r"(q|k|v|gate|up)_proj$", "", name)
    whole = np.random.default_rng(crc32(joined.encode())).uniform(1e-5, 1e-3) ** (-1 if divided else 1)
    rng = np.random.default_rng(crc32(name.encode()))
    codes, scales, values = random_nvfp4(rng, *x.shape, largest=126 - 7 * rng.integers(6))
    tensor_scale = np.array(whole, "f4")
    every = np.repeat((np.divide if divided else np.multiply)(scales.astype("f4"), tensor_scale), 16, 1)
    ending, tensor_scale = ("_global_scale", tensor_scale[None]) if divided else ("_scale_2", tensor_scale)
    return {
        f"{name}.weight{'_packed' if divided else ''}": codes,
        f"{name}.weight_scale": scales,
        f"{name}.weight{ending}": tensor_scale,
    }, values * every


def nvfp4_divided(name, x):
    return nvfp4(name, x, divided=True)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
INT4 = compressed_config(type="int", num_bits=4, strategy="group", group_size=16, symmetric=True)
ENCODINGS = {
    fp8: fp8_config(5, 7),
    fp8_powers_of_two: fp8_config(8, 4),
    fp8_channel: compressed_config(type="float", num_bits=8, strategy="channel"),
    fp8_tensor: compressed_config(type="float", num_bits=8, strategy="tensor"),
    int4: INT4,
    int8: compressed_config(type="int", num_bits=8, strategy="channel"),
    awq: {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 16, "zero_point": True},
    gptq: GPTQ,
    gptq_asymmetric: GPTQ | {"sym": False},
    int4_asymmetric: compressed_config(type="int", num_bits=4, strategy="group", group_size=16, symmetric=False),
}
NVFP4 = {
    nvfp4: {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    nvfp4_divided: compressed_config(type="float", num_bits=4, strategy="tensor_group", group_size=16),
}
"""Encodings with a scale for each tensor besides those of blocks, of 16 inputs: most tiny cases have others."""
IN_PROJ = tuple(f"in_proj_{part}" for part in ("qkvz", "ba", "qkv", "z", "b", "a"))
OF_NEOX = (".query_key_value", ".Wqkv", ".wqkv", ".dense", ".dense_h_to_4h", ".dense_4h_to_h", ".fc1", ".fc2")
OF_DEEPSEEK = (".w1", ".w2", ".w3", ".wq_a", ".wq_b", ".wk", ".wkv", ".wgate", ".wo_a", ".wo_b")
OF_MISTRAL = (".wq", ".wo", ".wkv_b")
OF_STREAMS = (
    *(".linear_left", ".linear_right", "_coefs", *(f"_projections.{i}" for i in range(3))),
    *("_mix_weight_down", "_mix_weight_up", "_inject_weight"),
)
OF_OTHERS = (".fc_in", ".fc_out", ".input_linear", ".output_linear", ".linear_gate", ".output_gate", ".W_down", ".W_up")
OF_MOLMO = (".attn_out", ".ff_out")
OF_COSMOS = (".to_q", ".to_k", ".to_v", ".to_out")
OF_TELECHAT = (".query", ".key_value")
OF_STEP = (".sparse_indexer_q", ".sparse_indexer_k")
OF_CTRL = (".Wq", ".Wk", ".Wv", ".ffn.0", ".ffn.2")
OF_MODERNBERT = (".Wi", ".Wo")
OF_ZAYA = ("_proj_current", "_proj_delayed")
OF_INKLING = (".wq_du", ".wk_dv", ".wv_dv", ".wo_ud", ".wr_du", ".gate_attn")
OF_GRIFFIN = tuple(f".temporal_block.linear_{part}" for part in ("x", "y", "out"))
PARTS = (
    *(
        *OF_OTHERS,
        ".c_fc",
        ".c_fc_0",
        ".c_fc_1",
        ".c_attn",
        "_proj",
        "_mqa",
        "_input_gate",
        "_exit_gate",
        "_projection",
    ),
    *(
        *OF_DEEPSEEK,
        *OF_MISTRAL,
        *OF_MOLMO,
        *OF_STREAMS,
        *OF_NEOX,
        *OF_GRIFFIN,
        *OF_INKLING,
        *OF_COSMOS,
        *OF_STEP,
        *OF_CTRL,
        *OF_TELECHAT,
        *OF_MODERNBERT,
        *OF_ZAYA,
        *IN_PROJ,
    ),
)
UNENCODED = ("vision", "indexer.weights_proj", "mlp.gate.")


def fp8_stacked(name, x):
    """Experts in one tensor, as Step-3.5 has them: blocks lie within each of them."""
    each = [fp8(name, matrix) for matrix in x]
    stored = {part: np.stack([own[part] for own, _ in each]) for part in each[0][0]}
    return stored, np.stack([values for _, values in each])


OF_STACKS = {fp8: fp8_stacked}
"""The encodings in which releases have experts in one tensor."""


def encoded(plain: Path, folder: Path, encoding, shards: int = 3) -> dict[str, np.ndarray]:
    """Writes the checkpoint `plain` with its matrices encoded, and gives the values that they stand for. A weight and
    its scales lie in different shards."""
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    source, described = read_tensors(plain), (ENCODINGS | NVFP4)[encoding]
    if described["quant_method"] in ("compressed-tensors", "awq", "gptq"):
        source = one_by_one(source)
    for name, x in source.items():
        base = name.removesuffix(".weight")
        is_matrix = x.ndim == 2 or encoding in OF_STACKS
        is_part = base.endswith(PARTS) or "_adapter_list." in base or re.search(r"layers\.\d+\.linear$", base)
        if base != name and is_matrix and is_part and not any(part in name for part in UNENCODED):
            stored, own = (encoding if x.ndim == 2 else OF_STACKS[encoding])(base, x.astype("f4"))
            tensors |= stored
            values[name] = own.astype(BF16)
        else:
            tensors[name] = values[name] = x
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": described}
    write_checkpoint(folder, config, tensors, shards)
    return values


def one_by_one(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Llama 4's experts as its quantized releases have them: each a matrix [out, in] of its own."""
    out = {}
    for name, x in tensors.items():
        base, _, kind = name.rpartition(".")
        if base.endswith("feed_forward.experts"):
            parts = {"down_proj": x}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(x, 2, axis=2), strict=True))
            out |= {f"{base}.{e}.{part}.weight": each[e].T for part, each in parts.items() for e in range(len(x))}
        else:
            out[name] = x
    return out


def mxfp4(plain: Path, folder: Path) -> dict[str, np.ndarray]:
    """The same of gpt-oss with random experts in MXFP4."""
    rng, tensors = np.random.default_rng(3), read_tensors(plain)
    values = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape  # of the plain form, which is transposed
        blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 127, (experts, columns, rows // 32)).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        own = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1).reshape(experts, columns, rows)
        values[name] = (own * np.repeat(np.exp2(scales.astype("f4") - 127), 32, -1)).astype(BF16)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    write_checkpoint(folder, config, tensors, 2)
    return values


GPT_OSS = [
    replace(
        case,
        id=f"{case}-wide",
        config={**case.config, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4},
    )
    for case in CASES
    if case.family == "gpt_oss"
]


def write_encoded(case: Case, encoding, saved, folder: Path) -> dict[str, np.ndarray]:
    return mxfp4(saved(case), folder) if encoding is mxfp4 else encoded(saved(case), folder, encoding)


def dequantized(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {name: x for name, x in arrays.items() if not name.endswith((QVALUE, SCALE, ZERO_POINT))}
    for name, qvalues in arrays.items():
        if name.endswith(QVALUE):
            base = name.removesuffix(QVALUE)
            out[base] = decoded(qvalues, arrays[base + SCALE], arrays.get(base + ZERO_POINT))
    return out


def decoded_values(folder: Path, dtype: Any) -> dict[str, np.ndarray]:
    """Every encoded weight of a checkpoint, each decoded in one read."""
    source = open_source(folder)
    tensors, faults = decode_names(source.tensors, source.encoding)
    assert not faults
    out = {}
    with closing(source.open()) as reader:
        for name, tensor in tensors.items():
            if tensor.scheme is not None:
                values = np.empty(tensor.size, dtype)
                tensor.read(reader, 0, np.empty(4 * tensor.size + 64, np.uint8), values)
                values = values.reshape(tensor.shape)
                out[name] = np.ascontiguousarray(values.T) if tensor.scheme.input_first else values
    return out


def exported(ckpt: Path, out: Path) -> dict[str, np.ndarray]:
    manifest = read_manifest(ckpt)
    family = get_family(manifest.family)
    config = family.read_config(released_config(manifest), tensors=manifest.arrays)
    done = [at.done for at in export_checkpoint(manifest, family.table_of(manifest.release, config), config, out)]
    assert done == sorted(done)
    return read_tensors(out)


def assert_came_back(folder: Path, out: Path, plan) -> None:
    """What was not skipped, bit for bit."""
    want, have = read_tensors(folder), exported(out, out.with_name("back"))
    gone = want.keys() - have.keys()
    assert have.keys() <= want.keys()
    assert len(gone) == sum(skip.count for skip in plan.skipped)
    assert not [name for name in have if not same_bits(have[name], want[name])]
    again = json.loads((out.with_name("back") / "config.json").read_text())
    assert again == json.loads((folder / "config.json").read_text())


def quantized(folder: Path, out: Path, text: str, options: Options | None = None) -> Any:
    """In one pass from the source, as `convert --quantize` does it."""
    rules = parse_config(text.encode(), "mine", "mine.yaml")
    quantizing.quantize_source(folder, out, rules, options)
    return rules

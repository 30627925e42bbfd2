"""Encoded tensors by the definition of each scheme, and the values that they stand for."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def fp8_config(rows: int, columns: int) -> dict:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}


def compressed_config(**weights) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def expand(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    scales = np.repeat(np.repeat(scales.astype(np.float32), block[0], 0), block[1], 1)
    return scales[: shape[0], : shape[1]]


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")  # OCP MX v1.0, table 5
FP4 = np.concatenate([FP4, -FP4])


def fp8_blocks(rng, rows, columns, block=(4, 6), scale_dtype="f4"):
    codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = (2.0 ** rng.integers(-9, 3, grid)).astype(scale_dtype)
    if np.dtype(scale_dtype) == np.float32:
        scales *= rng.uniform(1, 2, grid).astype("f4")
    # As the official code does it: torch's own cast, a float32 product.
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    stored = {"w.weight": codes.view(FP8), "w.weight_scale_inv": scales}
    return stored, fp8_config(*block), values * expand(scales, block, values.shape)


def fp8_bf16_scales(rng, rows, columns):
    return fp8_blocks(rng, rows, columns, (3, 5), BF16)


def fp8_e8m0_scales(rng, rows, columns):
    return fp8_blocks(rng, rows, columns, (3, 5), ml_dtypes.float8_e8m0fnu)


def fp8_small_blocks(rng, rows, columns):
    """What Qwen3.8-Flash-Next stores: powers of two for blocks of 32x32."""
    return fp8_blocks(rng, rows, columns, (32, 32), ml_dtypes.float8_e8m0fnu)


def fp8_beside_fp4(rng, rows, columns):
    """What DeepSeek V4 stores of weights that are no experts."""
    stored, config, values = fp8_blocks(rng, rows, columns, (3, 5), E8M0)
    stored["w.scale"] = stored.pop("w.weight_scale_inv")
    return stored, config | {"expert_dtype": "fp4"}, values


def fp4_experts(rng, rows, columns):
    """What DeepSeek V4 stores of experts."""
    columns = -(-columns // 32) * 32
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    scales = (2.0 ** rng.integers(-9, 3, (rows, columns // 32))).astype(E8M0)
    stored = {"w.weight": (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8), "w.scale": scales}
    config = fp8_config(128, 128) | {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}
    return stored, config, FP4[codes] * np.repeat(scales.astype("f4"), 32, 1)


def fp8_channel(rng, rows, columns):
    stored, _, _ = fp8_blocks(rng, rows, columns, (1, columns))
    scales = stored.pop("w.weight_scale_inv").astype(BF16)
    stored["w.weight_scale"] = scales
    codes = stored["w.weight"].astype(np.float32)
    return stored, compressed_config(type="float", num_bits=8, strategy="channel"), codes * scales.astype("f4")


def fp8_tensor(rng, rows, columns):
    stored, _, _ = fp8_blocks(rng, rows, columns)
    stored.pop("w.weight_scale_inv")
    stored["w.weight_scale"] = np.array([0.37], "f4")
    values = stored["w.weight"].astype(np.float32) * np.float32(0.37)
    return stored, compressed_config(type="float", num_bits=8, strategy="tensor"), values


def int4_groups(rng, rows, columns):
    groups = -(-columns // 32)
    values = rng.integers(-8, 8, (rows, groups * 32))
    scales = rng.uniform(0.001, 2, (rows, groups)).astype(BF16)
    stored = {
        "w.weight_packed": packed(values + 8, 4),
        "w.weight_scale": scales,
        "w.weight_shape": np.array(values.shape, np.int32),
    }
    config = compressed_config(type="int", num_bits=4, strategy="group", group_size=32, symmetric=True)
    return stored, config, values.astype(np.float32) * np.repeat(scales.astype("f4"), 32, 1)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes [O, I] in words of 32 bits, the first one lowest."""
    n, words = 32 // bits, np.zeros((codes.shape[0], codes.shape[1] * bits // 32), np.uint32)
    for i in range(n):
        words |= codes[:, i::n].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def in_words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Unsigned codes as a stream of bits along an axis, in words of 32, the first one lowest."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint8)
    if order:
        codes = codes.reshape(*codes.shape[:-1], -1, 8)[..., order].reshape(codes.shape)
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little").reshape(codes.shape[0], -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    words = np.packbits(stream, axis=-1, bitorder="little").view("<i4")
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def affine_parts(rng, rows, columns, grid, bits, low=0):
    """Codes, zero points and scales, some of them negative or zero."""
    codes, zeros = rng.integers(0, 1 << bits, (rows, columns)), rng.integers(low, 1 << bits, grid)
    scales = rng.uniform(-2, 2, grid).astype(np.float16)
    scales.reshape(-1)[0] = 0
    return codes, zeros, scales


def awq(rng, rows, columns, group=16):
    """[in, out]: (q - z) * s, the outputs of a word in AWQ's order."""
    columns = -(-columns // 8) * 8
    codes, zeros, scales = affine_parts(rng, rows, columns, (-(-rows // group), columns), 4)
    groups = np.arange(rows) // group
    values = (codes - zeros[groups]).astype("f4") * scales[groups].astype("f4")
    order = {"axis": 1, "order": AWQ_ORDER}
    stored = {"w.qweight": in_words(codes, 4, **order), "w.qzeros": in_words(zeros, 4, **order), "w.scales": scales}
    return (
        stored,
        {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True},
        values,
    )


def gptq(rng, rows, columns, group=16, bits=4, stored_as="gptq", ordered=False):
    """[in, out]: (q - (z + 1)) * s in the first format, in the second without the 1; the group of a row by `g_idx`."""
    rows, columns = -(-rows // 32) * 32, -(-columns // 32) * 32
    codes, zeros, scales = affine_parts(rng, rows, columns, (-(-rows // group) if group > 0 else 1, columns), bits)
    groups = np.arange(rows, dtype=np.int32) // (group if group > 0 else rows)
    if ordered:
        groups = rng.permutation(groups)
    values = (codes - zeros[groups]).astype("f4") * scales[groups].astype("f4")
    kept = (zeros - (stored_as == "gptq")) % (1 << bits)
    stored = {"w.qweight": in_words(codes, bits, 0), "w.qzeros": in_words(kept, bits, 1), "w.scales": scales}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": False}
    return stored | {"w.g_idx": groups}, config | {"checkpoint_format": stored_as}, values


def gptq_v2(rng, rows, columns):
    return gptq(rng, rows, columns, bits=8, stored_as="gptq_v2")


def gptq_any_order(rng, rows, columns):
    return gptq(rng, rows, columns, ordered=True)


def gptq_3_bits(rng, rows, columns):
    return gptq(rng, rows, columns, bits=3)


def gptq_2_bits_by_channel(rng, rows, columns):
    stored, config, values = gptq(rng, rows, columns, group=-1, bits=2)
    return {name: x for name, x in stored.items() if name != "w.g_idx"}, config, values


def int4_asymmetric(rng, rows, columns, bits=4, group=32):
    """[out, in]: zero points packed along the rows, by the definition of compressed-tensors."""
    columns = -(-columns // 32) * 32
    blocks = columns // group if group else 1
    codes, zeros, scales = affine_parts(rng, rows, columns, (rows, blocks), bits)
    scales = np.abs(scales).astype(BF16) + BF16.type(0.01)
    every = columns // blocks
    values = (codes - np.repeat(zeros, every, 1)).astype("f4") * np.repeat(scales.astype("f4"), every, 1)
    stored = {
        "w.weight_packed": in_words(codes, bits, 1),
        "w.weight_scale": scales,
        "w.weight_zero_point": in_words(zeros, bits, 0),
        "w.weight_shape": np.array(codes.shape, np.int64),
    }
    how = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return stored, compressed_config(type="int", num_bits=bits, symmetric=False, **how), values


def short_rows(rng, rows, columns, bits, group=0):
    """[out, in] with inputs that fill no words, by the definition of compressed-tensors: zeros in the rest."""
    columns += not columns % (32 // bits)
    codes, _, scales = affine_parts(rng, rows, columns, (rows, -(-columns // group) if group else 1), bits)
    scales, middle = scales.astype(BF16), 1 << (bits - 1)
    stored = {
        "w.weight_packed": in_words(codes, bits, 1),
        "w.weight_scale": scales,
        "w.weight_shape": np.array(codes.shape, np.int64),
    }
    how = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    values = (codes - middle).astype("f4") * np.repeat(scales.astype("f4"), group or columns, 1)[:, :columns]
    return stored, compressed_config(type="int", num_bits=bits, symmetric=True, **how), values


def int4_short_rows(rng, rows, columns):
    return short_rows(rng, rows, columns, 4)


def int4_short_rows_in_groups(rng, rows, columns):
    return short_rows(rng, rows, columns, 4, 6)


def int8_short_rows(rng, rows, columns):
    return short_rows(rng, rows, columns, 8)


def int8_asymmetric_channel(rng, rows, columns):
    return int4_asymmetric(rng, rows, columns, bits=8, group=0)


def int8_packed(rng, rows, columns):
    columns = 4 * columns
    values = rng.integers(-128, 128, (rows, columns))
    scales = rng.uniform(0.001, 2, (rows, 1)).astype(BF16)
    stored = {"w.weight_packed": packed(values + 128, 8), "w.weight_scale": scales}
    config = compressed_config(type="int", num_bits=8, strategy="channel", symmetric=True)
    return stored, config, values.astype("f4") * scales.astype("f4")


def int8_tensor(rng, rows, columns):
    values = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    stored = {"w.weight": values, "w.weight_scale": np.array([0.37], "f4")}
    config = compressed_config(type="int", num_bits=8, strategy="tensor")
    return stored, config, values.astype("f4") * np.float32(0.37)


def fp4_groups(rng, rows, columns):
    """Scales in powers of two, as bytes."""
    groups = -(-columns // 32)
    codes, scales = rng.integers(0, 256, (rows, groups * 16)), rng.integers(100, 150, (rows, groups))
    values = np.stack([FP4[codes & 15], FP4[codes >> 4]], -1).reshape(rows, -1)
    stored = {"w.weight_packed": codes.astype(np.uint8), "w.weight_scale": scales.astype(np.uint8)}
    config = compressed_config(type="float", num_bits=4, strategy="group", group_size=32)
    return stored, config, values * np.repeat(np.exp2(scales.astype("f4") - 127), 32, 1)


def fp8_modelopt_channel(rng, rows, columns):
    stored, _, values = fp8_blocks(rng, rows, columns, (1, columns))
    stored["w.weight_scale"] = stored.pop("w.weight_scale_inv").reshape(rows)
    return stored, {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, values


def mxfp8_modelopt(rng, rows, columns):
    stored, _, values = fp8_blocks(rng, rows, 32 * -(-columns // 32), (1, 32), E8M0)
    stored["w.weight_scale"] = stored.pop("w.weight_scale_inv").view(np.uint8)
    return stored, {"quant_method": "modelopt", "quant_algo": "MXFP8"}, values


def mxfp8(rng, rows, columns):
    """As MiniMax-M3 is released."""
    stored, _, values = fp8_blocks(rng, rows, 32 * -(-columns // 32), (1, 32), E8M0)
    stored["w.weight_scale_inv"] = stored["w.weight_scale_inv"].view(np.uint8)
    return stored, {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}, values


def nvfp4(rng, rows, columns, largest=126):
    """Codes, scales of 16 values in FP8, up to the number `largest`, and the values without the scale of the tensor."""
    groups = -(-columns // 16)
    codes, scales = (
        rng.integers(0, 256, (rows, groups * 8)).astype(np.uint8),
        rng.integers(1, largest + 1, (rows, groups)),
    )
    values = np.stack([FP4[codes & 15], FP4[codes >> 4]], -1).reshape(rows, -1)
    return codes, scales.astype(np.uint8).view(FP8), values


def nvfp4_modelopt(rng, rows, columns):
    """ModelOpt's formula: codes times the product of both scales, in float32."""
    codes, scales, values = nvfp4(rng, rows, columns)
    whole = np.float32(rng.uniform(1e-5, 1e-3))
    stored = {"w.weight": codes, "w.weight_scale": scales, "w.weight_scale_2": np.array(whole)}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return stored, config, values * np.repeat(scales.astype("f4") * whole, 16, 1)


def nvfp4_awq(rng, rows, columns):
    """The same, with inputs that are multiplied by a scale each."""
    stored, config, values = nvfp4_modelopt(rng, rows, columns)
    inputs = rng.uniform(0.1, 10, values.shape[1]).astype(BF16)
    return stored | {"w.pre_quant_scale": inputs}, config | {"quant_algo": "NVFP4_AWQ"}, values * inputs.astype("f4")


def nvfp4_compressed(rng, rows, columns):
    """That of compressed-tensors: the scale of the tensor divides."""
    codes, scales, values = nvfp4(rng, rows, columns)
    whole = np.float32(rng.uniform(1e3, 1e5))
    stored = {"w.weight_packed": codes, "w.weight_scale": scales, "w.weight_global_scale": np.array([whole])}
    config = compressed_config(type="float", num_bits=4, strategy="tensor_group", group_size=16)
    return stored, config, values * np.repeat(scales.astype("f4") / whole, 16, 1)


def fp8_modelopt_blocks(rng, rows, columns):
    """The scales of [rows, columns] in blocks have four axes, of which those within a block are 1."""
    stored, _, values = fp8_blocks(rng, rows, columns, (4, 4))
    grid = stored.pop("w.weight_scale_inv")
    stored["w.weight_scale"] = grid.reshape(grid.shape[0], 1, grid.shape[1], 1)
    return stored, {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "group_size": 4}, values


def modelopt_awq(rng, rows, columns, group=16, algorithm="W4A16_AWQ"):
    """Two rows in one of bytes, in two's complement; the inputs are multiplied by a scale each."""
    rows, columns = 2 * -(-rows // 2), group * -(-columns // group)
    codes = rng.integers(-8, 8, (rows, columns))
    scales = rng.uniform(0.001, 2, (rows, columns // group)).astype("f4")
    inputs = rng.uniform(0.1, 10, columns).astype(BF16)
    stored = {
        "w.weight": (codes[0::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8),
        "w.weight_scale": scales,
        "w.pre_quant_scale": inputs,
    }
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": group, "has_zero_point": False}
    return stored, config, codes.astype("f4") * np.repeat(scales, group, 1) * inputs.astype("f4")


def modelopt_w4a8(rng, rows, columns):
    """A second scale brings the weights to the range of FP8, for the product alone."""
    stored, config, values = modelopt_awq(rng, rows, columns, algorithm="W4A8_AWQ")
    del config["group_size"]  # config.json does not say it
    return stored | {"w.weight_scale_2": np.array(0.01, "f4")}, config, values


NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
    + [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    "f4",
)  # QLoRA, appendix E
BNB_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], "f4") / np.float32(12)
BNB_TABLES = {"nf4": NF4, "fp4": np.concatenate([BNB_FP4, -BNB_FP4])}


def bitsandbytes(rng, rows, columns, kind="nf4", nested=False, block=64):
    """Values of the flattened matrix, the first of two in the high half; scales perhaps as numbers of a table, times a
    scale of 256 of them, plus an offset."""
    columns, table = 2 * -(-columns // 2), BNB_TABLES[kind]
    codes = rng.integers(0, 16, rows * columns).astype(np.uint8)
    count = -(-codes.size // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    stored = {"w.weight": (codes[0::2] << 4 | codes[1::2])[:, None], "w.weight.quant_map": table}
    scales = rng.uniform(0, 2, count).astype("f4")
    if nested:
        numbers, of_scales = np.sort(rng.uniform(-1, 1, 256)).astype("f4"), rng.integers(0, 256, count).astype(np.uint8)
        outer, offset = rng.uniform(0.5, 2, -(-count // 256)).astype("f4"), np.float32(1.25)
        scales = numbers[of_scales] * np.repeat(outer, 256)[:count] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        stored |= {"w.weight.absmax": of_scales, "w.weight.nested_absmax": outer, "w.weight.nested_quant_map": numbers}
    else:
        stored["w.weight.absmax"] = scales
    stored[f"w.weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    values = (table[codes] * np.repeat(scales, block)[: codes.size]).reshape(rows, columns)
    return stored, config | {"bnb_4bit_use_double_quant": nested}, values


def nf4_nested(rng, rows, columns):
    return bitsandbytes(rng, rows, columns, nested=True)


def fp4_bitsandbytes(rng, rows, columns):
    return bitsandbytes(rng, rows, columns, "fp4", block=32)


def llm_int8(rng, rows, columns):
    """value * scale / 127, where 1 / 127 is rounded to float32 first."""
    codes = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    scales = rng.uniform(0, 60, rows).astype(np.float16).astype("f4")
    stored = {"w.weight": codes, "w.SCB": scales, "w.weight_format": np.array(0, np.uint8)}
    values = codes.astype("f4") * scales[:, None] * np.float32(7.874015718698502e-3)
    return stored, {"quant_method": "bitsandbytes", "load_in_8bit": True}, values


def fp8_named_otherwise(rng, rows, columns):
    stored, _, values = fp8_tensor(rng, rows, columns)
    stored["w.weight_scale_inv"] = stored.pop("w.weight_scale").reshape(())
    return stored, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, values


def fp8_stacked(rng, rows, columns):
    """Experts in one tensor: blocks lie within each of them."""
    each = [fp8_blocks(rng, rows, columns, (3, 4)) for _ in range(3)]
    stored = {name: np.stack([one[name] for one, _, _ in each]) for name in each[0][0]}
    return stored, each[0][1], np.stack([values for _, _, values in each])


def encode(folder: Path, block: tuple[int, int], shards: int = 1) -> dict[str, np.ndarray]:
    """Makes an FP8 checkpoint of a plain one; gives the values that it stands for."""
    rng, tensors, values = np.random.default_rng(1), {}, {}
    for name, x in read_tensors(folder).items():
        if name.endswith("_proj.weight"):
            grid = tuple(-(-n // b) for n, b in zip(x.shape, block, strict=True))
            scales = rng.uniform(0.001, 0.1, grid).astype("f4")
            every = expand(scales, block, x.shape)
            codes = (x.astype("f4") / every).clip(-448, 448).astype(FP8)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            values[name] = (codes.astype("f4") * every).astype(BF16)
        else:
            tensors[name] = values[name] = x
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": fp8_config(*block)}
    # Dealt in turn, a weight and its scales lie in different shards.
    write_checkpoint(folder, config, tensors, shards)
    return values


def fp8_modelopt(rng, rows, columns):
    stored, _, values = fp8_tensor(rng, rows, columns)
    return stored | {"w.weight_scale": stored["w.weight_scale"].reshape(())}, None, values


BY_MODULE = {
    **{f"self_attn.{x}_proj": (fp8_modelopt, {"quant_algo": "FP8"}) for x in "qkvo"},
    **{f"mlp.{x}_proj": (fp8_modelopt_blocks, {"quant_algo": "FP8_PB_WO", "group_size": 4}) for x in ("gate", "down")},
    "mlp.up_proj": (nvfp4_modelopt, {"quant_algo": "NVFP4", "group_size": 16}),
}
MODELOPT = {
    "FP8": {"quant_algo": "FP8"},
    "FP8_PB_WO": {"quant_algo": "FP8_PB_WO", "group_size": 4},
    "NVFP4": {"quant_algo": "NVFP4", "group_size": 16},
    "MIXED_PRECISION": {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {f"model.layers.{i}.{name}": how for i in range(3) for name, (_, how) in BY_MODULE.items()},
    },
}


def modelopt(algorithm: str, folder: Path) -> dict[str, np.ndarray]:
    """A release whose config.json says nothing of its encoding, and a file beside it does; the values."""
    encoders, rng = {how["quant_algo"]: encode for encode, how in BY_MODULE.values()}, np.random.default_rng(2)
    tensors: dict[str, np.ndarray] = {}
    values = {}
    for name, x in read_tensors(random_checkpoint(folder, qwen3_config())).items():
        base = name.removesuffix(".weight")
        if base.endswith("_proj"):
            module = base.split(".", 3)[3]
            encode = BY_MODULE[module][0] if algorithm == "MIXED_PRECISION" else encoders[algorithm]
            stored, _, own = encode(rng, *x.shape)
            tensors |= {part.replace("w", base, 1): y for part, y in stored.items()}
            tensors[f"{base}.input_scale"] = np.array(0.5, "f4")
            values[name] = own.astype(BF16)
        else:
            tensors[name] = values[name] = x
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.array(1, "f4")
    write_checkpoint(folder, qwen3_config(), tensors)
    told = {"kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head*"], **MODELOPT[algorithm]}
    file = {"producer": {"name": "modelopt", "version": "0.27.0"}, "quantization": told}
    (folder / "hf_quant_config.json").write_text(json.dumps(file))
    return values

"""As `schemes`: encoded tensors of MLX, BitNet and Quark by their definitions."""

import numpy as np

from helpers.schemes import AWQ_ORDER, BF16, in_words


def mlx(rng, rows, columns, bits=3, group=32):
    """[out, in]: q * scale + offset in float32."""
    columns = -(-columns // group) * group
    codes = rng.integers(0, 1 << bits, (rows, columns))
    scales = rng.uniform(-2, 2, (rows, columns // group)).astype(BF16)
    offsets = rng.uniform(-2, 2, scales.shape).astype(BF16)
    stored = {"w.weight": in_words(codes, bits, 1).view(np.uint32), "w.scales": scales, "w.biases": offsets}
    every = [np.repeat(x.astype("f4"), group, 1) for x in (scales, offsets)]
    config = {"quant_method": "mlx", "bits": bits, "group_size": group, "mode": "affine"}
    return stored, config, codes.astype("f4") * every[0] + every[1]


def mlx_6_bits(rng, rows, columns):
    return mlx(rng, rows, columns, 6, 64)


def mlx_stacked(rng, rows, columns):
    """The matrices of three experts."""
    stored, config, values = mlx(rng, 3 * rows, columns, 4)
    return {n: x.reshape(3, rows, -1) for n, x in stored.items()}, config, values.reshape(3, rows, -1)


def bitnet(rng, rows, columns, kind="autobitlinear"):
    """Four numbers in a byte, each of another quarter of the rows."""
    codes = rng.integers(0, 3, (4, rows, columns)).astype(np.uint8)
    scale = rng.uniform(0.1, 3, 1).astype(BF16)
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    numbers = codes.reshape(-1, columns).astype("f4") - 1
    values = numbers / scale.astype("f4") if kind == "bitlinear" else numbers * scale.astype("f4")
    return {"w.weight": packed, "w.weight_scale": scale}, {"quant_method": "bitnet", "linear_class": kind}, values


def bitnet_divided(rng, rows, columns):
    return bitnet(rng, rows, columns, "bitlinear")


def quark_int4(rng, rows, columns, group=16):
    """[in, out] in two's complement, eight outputs in a word in AWQ's order, beside zero points that are 0."""
    rows, columns = -(-rows // group) * group, -(-columns // 8) * 8
    codes = rng.integers(-8, 8, (rows, columns))
    scales = rng.uniform(0.01, 2, (rows // group, columns)).astype(BF16)
    stored = {
        "w.weight": in_words(codes & 15, 4, 1, AWQ_ORDER),
        "w.weight_scale": scales,
        "w.weight_zero_point": np.zeros((rows // group, columns // 8), np.int32),
    }
    weight = {"dtype": "int4", "qscheme": "per_group", "group_size": group, "symmetric": True}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    return stored, config, codes.astype("f4") * np.repeat(scales.astype("f4"), group, 0)


def quark_mxfp4(rng, rows, columns):
    groups = -(-columns // 32)
    codes, scales = rng.integers(0, 256, (rows, groups * 16)), rng.integers(100, 150, (rows, groups))
    halves = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")
    numbers = np.concatenate([halves, -halves])
    values = np.stack([numbers[codes & 15], numbers[codes >> 4]], -1).reshape(rows, -1)
    stored = {"w.weight": codes.astype(np.uint8), "w.weight_scale": scales.astype(np.uint8)}
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    config = {"quant_method": "quark", "global_quant_config": {"weight": [weight]}}
    return stored, config, values * np.repeat(np.exp2(scales.astype("f4") - 127), 32, 1)


PACKED = (mlx, mlx_6_bits, mlx_stacked, bitnet, bitnet_divided, quark_int4, quark_mxfp4)

"""Products of quantized values with scales of groups: the formula for few tokens against the plain one, and as compiled
by the TPU compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.checkpoints import qwen3_config
from helpers.tpu_compiler import answers_of, compiler
from tpuconv.quantize.tiled import einsum, is_for

SIZES = {"B": 2, "T": 3, "D": 256, "N": 6, "H": 128, "h": 128, "F": 96, "C": 384}
PRODUCTS = {  # tiles of each axis of the second operand
    "BTD,DF->BTF": [(128, 1), (128, 32), (256, 1), (64, 1)],
    "BTD,DNH->BTNH": [(128, 1, 1), (128, 1, 64), (128, 2, 128)],
    "BTNH,NHD->BTD": [(1, 128, 1), (1, 128, 128), (2, 128, 1), (6, 64, 1)],
    "BTNh,NhD->BTD": [(2, 128, 1), (1, 64, 1)],  # small letters are axes too
    "BTNH,CNH->BTNC": [(128, 1, 128), (1, 1, 64)],
}


@settings(deadline=None, max_examples=30)
@given(
    case=st.sampled_from([(equation, tiles) for equation, own in PRODUCTS.items() for tiles in own]),
    kind=st.sampled_from(["int8", "float8_e4m3fn", "int4"]),
    seed=st.integers(0, 99),
)
def test_scales_after_the_products_are_the_same_as_before(case, kind, seed):
    (equation, tiles), rng = case, np.random.default_rng(seed)
    left, right = equation.split("->")[0].split(",")
    shape = tuple(SIZES[letter] for letter in right)
    x = jnp.asarray(rng.standard_normal([SIZES[letter] for letter in left]), "float32")
    codes = jnp.asarray(rng.standard_normal(shape) * 4, kind)
    scale = jnp.asarray(rng.uniform(0.5, 2, [n // tile for n, tile in zip(shape, tiles, strict=True)]), "float32")
    matrix = np.asarray(codes.astype(jnp.float32), np.float64)
    whole = np.asarray(scale)
    for axis, tile in enumerate(tiles):
        whole = whole.repeat(tile, axis=axis)
    exact = np.einsum(equation, np.asarray(x, np.float64), matrix * whole)
    y = einsum(equation, x, codes, scale)
    assert y.dtype == x.dtype
    assert np.abs(np.asarray(y) - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("tokens", "tiles", "pays"),
    [(64, (128, 1), True), (65, (128, 1), False), (8, (32, 1), False), (8, (256, 1), False), (128, (256, 1), False)],
)
def test_when_it_pays(tokens, tiles, pays):
    x, codes = jax.ShapeDtypeStruct((1, tokens, 256), "bfloat16"), jax.ShapeDtypeStruct((256, 96), "int8")
    scale = jax.ShapeDtypeStruct((256 // tiles[0], 96 // tiles[1]), "float32")
    assert is_for("BTD,DF->BTF", x, codes, scale) == pays


ASK = """
import json, sys
from tpuconv.quantize.config import parse_config
from tpuconv.verify.topology.compile import compile_for
from tpuconv.verify.topology.chips import Slice
from tpuconv.verify.topology.request import CompileRequest

for line in sys.stdin:
    config, tile = json.loads(line)
    rule = "{module_path: 'layers/.*', weight_qtype: int4, tile_size: %d}" % tile
    rules = parse_config(f"qwix: {{rules: [{rule}]}}".encode(), "c", "c.yaml").to_json()
    question = CompileRequest(config, batch=8, context=128, quantize=rules, programs=("decode",))
    (program,) = compile_for(question, Slice("v5e:2x2"))["programs"]
    print(json.dumps(program["estimate"]), flush=True)
"""


@compiler
def test_on_a_tpu_scales_of_deep_tiles_are_not_spread_out():
    """A step takes half of the time of one with tiles that are too shallow for it, which has a little more to read."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = qwen3_config(**sizes, head_dim=128, num_hidden_layers=2, vocab_size=1024)
    deep, shallow = answers_of(ASK, [(config, 128), (config, 32)])
    assert deep <= 0.5 * shallow

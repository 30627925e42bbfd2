"""Grouped products: the kernel for few rows against the formula, and as compiled by the TPU compiler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.tpu_compiler import answers_of, compiler
from tpuconv.models.kernels import grouped
from tpuconv.models.kernels.grouped import (
    DEPTH,
    FEW_ROWS,
    FP4_TYPE,
    KINDS,
    by_xla,
    difference,
    expected_groups,
    few_rows,
    grouped_matmul,
)
from tpuconv.verify.topology.chips import CHIPS

SHAPES = [(128, 256), (384, 128), (96, 360), (1440, 720)]
TILES = [None, ("D", 1), ("D", "M"), (8, 1), (32, 1), (32, 40), (96, 1), (128, 128), (288, 1)]
"""Of scales, as deep and wide."""
TILED = [
    (shape, tile and tuple(dict(zip("DM", shape, strict=True)).get(size, size) for size in tile))
    for shape in SHAPES
    for tile in TILES
]
TILED = [(shape, tile) for shape, tile in TILED if not tile or not (shape[0] % tile[0] or shape[1] % tile[1])]
LIMIT = 1e-5  # of the largest: products are exact, or in float32, and added up in float32


@settings(deadline=None, max_examples=10)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 3, 8, 60, 128, 150]), min_size=1, max_size=9),
    others=st.integers(0, 40),
    tiled=st.sampled_from(TILED),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_the_kernel_multiplies_each_row_with_its_groups_matrix(counts, others, tiled, kind, seed):
    rows, (shape, tile) = sum(counts) + others, tiled
    assume(0 < rows <= FEW_ROWS)
    rng, (D, M), E = np.random.default_rng(seed), shape, len(counts)
    x = jnp.asarray(rng.standard_normal((rows, D)), "float32" if kind == "float32" else "bfloat16")
    kernel = jnp.asarray(rng.standard_normal((E, D, M)) * {"int8": 40, "int4": 3}.get(kind, 1), kind)
    matrices, scale = np.asarray(kernel.astype(jnp.float32)), None
    multiplied = matrices
    if tile is not None:
        deep, wide = tile
        scale = jnp.asarray(rng.uniform(0.5, 2, (E, D // deep, M // wide)), "float32")
        matrices = multiplied = matrices * np.asarray(scale).repeat(deep, axis=1).repeat(wide, axis=2)
        if deep < DEPTH:  # as the matrix unit has them
            multiplied = matrices.astype(x.dtype)
    operands = x, kernel, jnp.asarray(counts, jnp.int32), scale
    parts = np.split(np.asarray(x, np.float64), np.cumsum(counts))[:E]
    for y, used in ((few_rows(*operands, groups=E, interpret=True), multiplied), (by_xla(*operands), matrices)):
        exact = np.concatenate([part @ matrix.astype(np.float64) for part, matrix in zip(parts, used, strict=True)])
        assert y.dtype == jnp.float32
        assert np.abs(np.asarray(y)[: len(exact)] - exact).max(initial=0) <= LIMIT * np.abs(exact).max(initial=1)


def test_a_row_that_is_no_number_spoils_no_other():
    x = jnp.ones((6, 128), jnp.bfloat16).at[2].set(jnp.nan)
    y = few_rows(x, jnp.ones((3, 128, 128), jnp.int8), jnp.asarray([2, 3, 1]), groups=3, interpret=True)
    assert np.isnan(y).any(axis=1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("kind", ["float32", "int8", "int8 in blocks"])
def test_models_with_experts_can_be_trained_on_few_rows(kind):
    """Gradients of rows, and of matrices or scales, are as with a product for each group."""
    rng, (counts, D, M) = np.random.default_rng(0), ((3, 0, 5, 2), 64, 32)
    x = jnp.asarray(rng.standard_normal((sum(counts), D)), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((4, D, M)) * 9, "float32" if kind == "float32" else "int8")
    deep = {"float32": None, "int8": D, "int8 in blocks": 16}[kind]
    scale = None if deep is None else jnp.asarray(rng.uniform(0.5, 2, (4, D // deep, M)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((sum(counts), M)), jnp.float32)
    changed = scale if kernel.dtype == jnp.int8 else kernel

    def of_groups(x, changed):
        matrices = changed if deep is None else kernel * changed.repeat(deep, axis=1)
        parts = jnp.split(x, np.cumsum(counts)[:-1])
        return (weights * jnp.concatenate([a @ b for a, b in zip(parts, matrices, strict=True)])).sum()

    def of_grouped(x, changed):
        operands = (x, changed) if deep is None else (x, kernel)
        y = grouped_matmul(*operands, jnp.asarray(counts), groups=4, scale=None if deep is None else changed)
        return (weights * y).sum()

    with jax.default_matmul_precision("highest"):
        have, want = (jax.jit(jax.grad(each, (0, 1)))(x, changed) for each in (of_grouped, of_groups))
    for ours, exact in zip(have, want, strict=True):
        assert np.abs(ours - exact).max() <= LIMIT * np.abs(exact).max()


@pytest.mark.parametrize(
    ("rows", "shape", "kind"),
    [(FEW_ROWS + 1, (2, 128, 128), "int8"), (4, (2, 90, 128), "int8"), (512, (2, 1 << 15, 128), "int8"),
     (4, (2, 128, 128), "float16"), (4, (1, 1 << 17, 128), "bfloat16")],
)  # fmt: skip
def test_what_the_kernel_cannot_do_xla_does(rows, shape, kind):
    shapes = jax.ShapeDtypeStruct((rows, shape[1]), "bfloat16"), jax.ShapeDtypeStruct(shape, kind)
    traced = jax.make_jaxpr(lambda *a: grouped_matmul(*a, groups=2))(*shapes, jax.ShapeDtypeStruct(shape[:1], "int32"))
    assert "pallas_call" not in str(traced)


def test_how_many_groups_have_rows():
    rng = np.random.default_rng(0)
    for rows, here, groups in ((8, 4, 16), (64, 32, 256), (1, 3, 3)):
        drawn = [len({g for g in rng.integers(0, groups, rows) if g < here}) for _ in range(4000)]
        assert abs(expected_groups(rows, here, groups) - np.mean(drawn)) <= 0.05 * np.mean(drawn)


COMPILE = """
import json, sys
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tpuconv.models.generate import compiler_options
from tpuconv.models.kernels.grouped import grouped_matmul
from tpuconv.verify.topology.hlo import Schedule

for line in sys.stdin:
    topology, kind, tile = json.loads(line)
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    D, M, E, R = 1024, 512, 16, 24
    where = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((R, D), "float32" if kind == "float32" else "bfloat16", sharding=where)
    up, down = (jax.ShapeDtypeStruct((E, *shape), kind, sharding=where) for shape in ((D, M), (M, D)))
    counts = jax.ShapeDtypeStruct((E,), "int32", sharding=where)

    def scale(kernel):
        if tile:
            shape = E, kernel.shape[1] // tile[0], kernel.shape[2] // tile[1]
            return jax.ShapeDtypeStruct(shape, "float32", sharding=where)

    def feed(x, up, down, up_scale, down_scale, counts):
        x = grouped_matmul(x, up, counts, groups=64, scale=up_scale).astype(x.dtype)
        return grouped_matmul(x, down, counts, groups=64, scale=down_scale)

    compiled = jax.jit(feed).lower(x, up, down, scale(up), scale(down), counts).compile(compiler_options("tpu"))
    print(json.dumps(Schedule(compiled.as_text()).custom_calls()), flush=True)
"""


@compiler
def test_every_chip_has_the_kernel_and_no_matrix_is_fetched_ahead():
    topologies = [f"{name}:{chip.slices[1]}" for name, chip in CHIPS.items()]
    asked = [(topologies[0], kind, (32, 1) if kind == FP4_TYPE else None) for kind in KINDS]
    asked += [(topology, "int8", None) for topology in topologies[1:]]
    asked += [(topology, FP4_TYPE, (32, 1)) for topology in topologies[3:]]
    asked += [(topologies[1], "float8_e4m3fn", (128, 128)), (topologies[3], "int4", (32, 1))]
    for (_, kind, tile), calls in zip(asked, answers_of(COMPILE, asked), strict=True):
        (kernel,) = (call for call in calls if call["kernel"] == "few_rows")
        matrices = 2 * 16 * 1024 * 512 * jax.dtypes.itemsize_bits(jnp.dtype(kind)) // 8
        matrices += 2 * 16 * 1024 * 512 * 4 // np.prod(tile) if tile else 0
        assert kernel["count"] == 2
        assert kernel["bytes"] >= matrices  # operands of the kernel where they lie, in HBM
        assert kernel["expected_bytes"] <= 0.35 * matrices


# -- the check on the device -------------------------------------------------------------------------------------------

INTERPRETED = partial(few_rows, interpret=True)


def off_by_one_group(x, kernel, counts, *scale, groups):
    return few_rows(x, jnp.roll(kernel, 1, axis=0), counts, *scale, groups=groups, interpret=True)


def one_wrong_number(*operands, groups):
    return few_rows(*operands, groups=groups, interpret=True).at[2, 5].mul(3)


def without_scales(x, kernel, counts, *scale, groups):
    return few_rows(x, kernel, counts, groups=groups, interpret=True)


def not_a_number(*operands, groups):
    return few_rows(*operands, groups=groups, interpret=True).at[1, 3].set(jnp.nan)


def failing(*operands, groups):
    raise RuntimeError("Mosaic failed to compile TPU kernel\nwith many lines")


@pytest.mark.parametrize(
    ("kind", "tile"),
    [("bfloat16", None), ("int8", None), ("int8", (128, 1)), ("float8_e4m3fn", (128, 1)), (FP4_TYPE, (32, 1))],
)
def test_a_right_kernel_passes_its_check(kind, tile):
    x = (24, 256), "float32" if kind == "float32" else "bfloat16"
    scale = tile and ((3, 256 // tile[0], 128 // tile[1]), "float32")
    assert difference(x, ((3, 256, 128), kind), scale, 3, INTERPRETED) is None


@pytest.mark.parametrize(
    ("sabotaged", "words"),
    [(off_by_one_group, "where jax.lax.ragged_dot gives"), (one_wrong_number, "where jax.lax.ragged_dot gives"),
     (without_scales, "where jax.lax.ragged_dot gives"), (not_a_number, "it gives nan where"),
     (failing, "it fails with RuntimeError: Mosaic failed to compile TPU kernel")],
)  # fmt: skip
def test_a_wrong_kernel_fails_its_check(sabotaged, words):
    shapes = ((24, 128), "bfloat16"), ((4, 128, 128), "int8"), ((4, 4, 1), "float32")
    assert words in difference(*shapes, 4, sabotaged)


@pytest.fixture
def on_tpu(monkeypatch):
    """What jax says of the machine while a model is traced, and kernels that have not been checked."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    grouped._is_correct.cache_clear()
    yield
    grouped._is_correct.cache_clear()


def traced(E):
    shapes = jax.ShapeDtypeStruct((8, 128), "bfloat16"), jax.ShapeDtypeStruct((E, 128, 128), "int8")
    return str(jax.make_jaxpr(lambda *a: grouped_matmul(*a, groups=E))(*shapes, jax.ShapeDtypeStruct((E,), "int32")))


def test_on_a_tpu_a_kernel_is_checked_once_for_each_shape(on_tpu, monkeypatch, recwarn):
    checked = []
    monkeypatch.setattr(grouped, "few_rows", INTERPRETED)
    monkeypatch.setattr(grouped, "difference", lambda *a: checked.append(a) or difference(*a))
    for E in (2, 3, 2, 3):
        assert "pallas_call" in traced(E)
    assert [kernel for _, kernel, *_ in checked] == [((2, 128, 128), "int8"), ((3, 128, 128), "int8")]
    assert not recwarn.list


@pytest.mark.parametrize(("sabotaged", "words"), [(one_wrong_number, "it gives"), (failing, "it fails with Runtime")])
def test_on_a_tpu_a_wrong_kernel_is_not_used(on_tpu, monkeypatch, sabotaged, words):
    monkeypatch.setattr(grouped, "few_rows", sabotaged)
    shape = r"rows \[8, 128\] in bfloat16 and matrices \[2, 128, 128\] in int8: " + words
    with pytest.warns(UserWarning, match=shape) as warned:
        programs = [traced(2), traced(2)]
    assert len(warned) == 1
    assert all("ragged_dot" in program and "pallas_call" not in program for program in programs)


def test_ahead_of_time_no_kernel_is_checked(monkeypatch):
    monkeypatch.setattr(grouped, "difference", failing)
    assert "pallas_call" in traced(2)

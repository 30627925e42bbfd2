"""Grouped products: the kernel for few rows against the plain formula, and what the TPU's compiler makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpu_compiler import answers_of, compiler

from tpuconv.models.grouped import FEW_ROWS, KINDS, expected_groups, few_rows, product
from tpuconv.verify.tpu import CHIPS

SHAPES = [(128, 256), (384, 128), (96, 360), (2880, 1440)]
LIMIT = 1e-5  # of the largest: products are exact, or in float32, and added up in float32


@settings(deadline=None, max_examples=12)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 3, 8, 60, 128, 150]), min_size=1, max_size=9),
    others=st.integers(0, 40),
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_the_kernel_multiplies_each_row_with_its_groups_matrix(counts, others, shape, kind, seed):
    rows = sum(counts) + others
    if not 0 < rows <= FEW_ROWS:
        return
    rng, (D, M) = np.random.default_rng(seed), shape
    x = jnp.asarray(rng.standard_normal((rows, D)), "float32" if kind == "float32" else "bfloat16")
    kernel = jnp.asarray(rng.standard_normal((len(counts), D, M)) * {"int8": 40, "int4": 3}.get(kind, 1), kind)
    y = few_rows(x, kernel, jnp.asarray(counts, jnp.int32), groups=len(counts), interpret=True)
    group = np.repeat(np.arange(len(counts)), counts)
    exact = np.einsum(
        "rd,rdm->rm", np.asarray(x, np.float64)[: len(group)], np.asarray(kernel.astype(jnp.float32), np.float64)[group]
    )
    assert y.dtype == jnp.float32
    assert np.abs(np.asarray(y)[: len(group)] - exact).max(initial=0) <= LIMIT * np.abs(exact).max(initial=1)


def test_a_row_that_is_no_number_spoils_no_other():
    x = jnp.ones((6, 128), jnp.bfloat16).at[2].set(jnp.nan)
    y = few_rows(x, jnp.ones((3, 128, 128), jnp.int8), jnp.asarray([2, 3, 1]), groups=3, interpret=True)
    assert np.isnan(y).any(axis=1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("rows", "shape", "kind"),
    [(FEW_ROWS + 1, (2, 128, 128), "int8"), (4, (2, 90, 128), "int8"), (512, (2, 1 << 15, 128), "int8"),
     (4, (2, 128, 128), "float16"), (4, (1, 1 << 17, 128), "bfloat16")],
)  # fmt: skip
def test_what_the_kernel_cannot_do_xla_does(rows, shape, kind):
    shapes = jax.ShapeDtypeStruct((rows, shape[1]), "bfloat16"), jax.ShapeDtypeStruct(shape, kind)
    traced = jax.make_jaxpr(lambda *a: product(*a, groups=2))(*shapes, jax.ShapeDtypeStruct(shape[:1], "int32"))
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
from tpuconv.models.grouped import product
from tpuconv.verify.hlo import Schedule

for line in sys.stdin:
    topology, kind = json.loads(line)
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    D, M, E, R = 1024, 512, 16, 24
    where = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((R, D), "float32" if kind == "float32" else "bfloat16", sharding=where)
    up, down = (jax.ShapeDtypeStruct((E, *shape), kind, sharding=where) for shape in ((D, M), (M, D)))
    counts = jax.ShapeDtypeStruct((E,), "int32", sharding=where)

    def feed(x, up, down, counts):
        return product(product(x, up, counts, groups=64).astype(x.dtype), down, counts, groups=64)

    compiled = jax.jit(feed).lower(x, up, down, counts).compile(compiler_options("tpu"))
    print(json.dumps(Schedule(compiled.as_text()).custom_calls()), flush=True)
"""


@compiler
def test_every_chip_has_the_kernel_and_no_matrix_is_fetched_ahead():
    topologies = [f"{name}:{chip.slices[1]}" for name, chip in CHIPS.items()]
    asked = [(topologies[0], kind) for kind in KINDS] + [(topology, "int8") for topology in topologies[1:]]
    for (_, kind), calls in zip(asked, answers_of(COMPILE, asked), strict=True):
        (kernel,) = (call for call in calls if call["kernel"] == "few_rows")
        matrices = 2 * 16 * 1024 * 512 * jax.dtypes.itemsize_bits(jnp.dtype(kind)) // 8
        assert kernel["count"] == 2
        assert kernel["bytes"] >= matrices  # operands of the kernel where they lie, in HBM
        assert kernel["expected_bytes"] <= 0.35 * matrices

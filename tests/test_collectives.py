"""The collectives of programs that the TPU's compiler makes: how many there are, their bytes, and their times."""

import pytest

from helpers.tpu_compiler import answers_of, compiler

COMPILE = """
import json, sys
import jax
from jax import lax
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tpuconv.verify.topology.hlo import Schedule

described = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
ROUND = [(i, (i + 1) % 8) for i in range(8)]
CALLS = {
    "all-reduce": lambda x, axis: lax.psum(x, axis),
    "all-gather": lambda x, axis: lax.all_gather(x, axis, tiled=True),
    "reduce-scatter": lambda x, axis: lax.psum_scatter(x, axis, tiled=True),
    "all-to-all": lambda x, axis: lax.all_to_all(x, axis, 1, 0, tiled=True),
    "collective-permute": lambda x, axis: lax.ppermute(x, axis, ROUND),
}
for line in sys.stdin:
    op, sizes, axis, rows, options, beside = json.loads(line)
    devices = mesh_utils.create_device_mesh(sizes, described.devices, allow_split_physical_axes=True)
    mesh = Mesh(devices, ("t", "g"))
    axis = tuple(axis) if len(axis) > 1 else axis
    shapes = [(rows, 1024)] + [(2048, 4096), (4096, 4096)] * beside

    def program(x, *product):
        return CALLS[op](x, axis) * 2, *([product[0] @ product[1]] if beside else [])

    whole = P()
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(whole,) * len(shapes), out_specs=whole, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, whole)) for shape in shapes]
    schedule = Schedule(jax.jit(mapped).lower(*arguments).compile(options).as_text())
    ends = [step.collective.end for step in schedule.all_steps if step.collective]
    step = next(step for step in schedule.all_steps if step.collective)
    found, written = step.collective, step.instruction.op
    facts = [found.group, found.moved, written, ends, found.seconds(45e9), *schedule.estimate(819e9, 45e9, 1.5e9)]
    print(json.dumps([schedule.collectives(), *facts]))
"""

ROW = 2 * 1024
"""Bytes of a row."""
ASYNC_REDUCE = {
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
}
ASYNC_TO_ALL = {"xla_tpu_enable_async_all_to_all": "true"}
RING, SQUARE = (8, 2), (4, 4)

CASES = {
    # name: op, mesh, axes, rows on a device; rows of the undivided array, rows that a device sends, links
    "all-reduce": ("all-reduce", RING, "t", 2048, 2048, 2 * 7 / 8 * 2048, 2),
    "all-reduce over both axes": ("all-reduce", RING, "tg", 2048, 2048, 2 * 15 / 16 * 2048, 2),
    "all-reduce of two": ("all-reduce", RING, "g", 2048, 2048, 2048, 1),
    "all-gather": ("all-gather", RING, "t", 256, 2048, 7 / 8 * 2048, 2),
    "reduce-scatter": ("reduce-scatter", RING, "t", 2048, 2048, 7 / 8 * 2048, 2),
    "reduce-scatter as a fusion": ("reduce-scatter", SQUARE, "t", 8192, 8192, 3 / 4 * 8192, 2),
    "all-to-all": ("all-to-all", RING, "t", 256, 256, 2 * 256, 2),
    "all-to-all of two": ("all-to-all", RING, "g", 256, 256, 128, 1),
    "collective-permute": ("collective-permute", RING, "t", 256, 256, 256, 1),
}
ASYNC = {
    "all-reduce": ASYNC_REDUCE,
    "all-gather": {},
    "all-to-all": ASYNC_TO_ALL,
    "collective-permute": {},
}
"""Collectives that begin before a product and end after it, and the options with which the compiler does so."""


@pytest.fixture(scope="module")
def answers():
    alone = [(*case[:4], {}, False) for case in CASES.values()]
    beside = [(*CASES[op][:4], options, True) for op, options in ASYNC.items()]
    found = answers_of(COMPILE, [*alone, *beside])
    return dict(zip([*CASES, *(f"{op} beside a product" for op in ASYNC)], found, strict=True))


@compiler
@pytest.mark.parametrize("name", CASES)
def test_a_collective_has_the_bytes_that_are_known_by_hand(name, answers):
    op, sizes, axes, _, whole, sent, links = CASES[name]
    counts, group, moved, written, _, seconds, *_ = answers[name]
    (counted,) = (entry for entry in counts if entry["op"] == op)
    is_fusion = name.endswith("fusion")  # which pads each shard
    assert (counted["count"], written == "fusion") == (1, is_fusion)
    assert op == "collective-permute" or group == {"t": sizes[0], "g": sizes[1], "tg": sizes[0] * sizes[1]}[axes]
    padding = 0.02 if is_fusion else 0
    assert counted["bytes"] == pytest.approx(whole * ROW, rel=padding)
    assert moved == pytest.approx(sent * ROW, rel=padding)
    hops = 6 * 0.25e-6 * (2 if op == "all-reduce" else 1)
    assert seconds == pytest.approx(hops + moved / (links * 45e9))


@compiler
@pytest.mark.parametrize("op", ASYNC)
def test_a_collective_beside_a_product_takes_no_time(op, answers):
    """It is found at both ends, counted once, and over before the product is, which takes more than 0.2 ms."""
    counts, group, moved, _, ends, _, seconds, communication = answers[f"{op} beside a product"]
    assert ends == ["start", "done"]
    assert [(entry["op"], entry["count"]) for entry in counts] == [(op, 1)]
    assert (counts, group, moved) == tuple(answers[op][:3])
    assert communication == 0
    assert seconds > 0.2e-3


@compiler
@pytest.mark.parametrize("op", ["all-reduce", "all-to-all"])
def test_a_collective_alone_takes_its_time(op, answers):
    *_, ends, alone, seconds, communication = answers[op]
    assert ends == [""]
    assert communication == pytest.approx(alone)
    assert seconds > communication

"""Whatever an input holds, it is read or refused: with an exit code that is meant, in little time and memory.

The inputs are those of `mutations`; the same seed makes the same one again:

    PYTHONPATH=tests python -m helpers.attacks.mutations FOLDER KIND SEED 1 [KIND SEED 1 ...]
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.attacks import made, mutations
from helpers.attacks.counts import count
from helpers.attacks.simulated import simulated
from tpuconv.convert.plan.types import Options

TESTS = Path(__file__).parent.parent
TRIALS = {
    "config.json": (12, 8_000),
    "index": (25, 13_000),
    "header": (30, 20_000),
    "quantization_config": (25, 8_000),
    "end tokens": (30, 15_000),
    "tpuconv.json": (25, 8_000),
    "tpuconv.json, loaded": (0, 1_000),
    "zarr.json and layouts.json": (25, 7_000),
    "YAML": (30, 9_000),
    "journal": (25, 5_000),
    "journal in a bucket": (20, 4_000),
    "adapter": (25, 8_000),
}
"""Fast, and at full size: 106,000."""
FAST_SEED, BATCH = 10**9, 2500


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """What the kinds of inputs are mutations of."""
    base = tmp_path_factory.mktemp("prepared")
    made.source(base / "source")
    made.source(base / "two-shards", shards=2)
    made.convert(base / "source", base / "checkpoint")
    made.with_layouts(base / "checkpoint")
    made.quantize(base / "checkpoint", base / "quantized")
    made.convert(made.encoded_source(base / "encoded"), base / "kept", Options(encoding="keep"))
    made.convert_for("maxtext", base / "source", base / "maxtext", scan_layers=True)
    made.export(base / "checkpoint", base / "export")
    made.convert_for("huggingface", base / "source", base / "serving", quantize="int8_weight_only")
    made.adapter(base / "an-adapter", base / "source")
    with simulated() as whole:
        made.convert(base / "two-shards", base / "result")
    published = next(i for i, (name, path) in enumerate(whole.calls) if name == "rename" and path.endswith("/out"))
    half = next(i for i, (_, path) in enumerate(whole.calls) if "hash-00000.done" in path) + 5
    for name, at in (("begun", half), ("ready", published)):
        with simulated(at) as it:
            made.convert(base / "two-shards", base / name / "out")
        assert it.is_dead
        assert not (base / name / "out").exists()
    assert (base / "ready/.out.tpuconv/complete.done").exists()
    return base


def attacked(prepared: Path, kinds: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """How inputs of some kinds ended in one process, each kind with its first seed and the number of seeds."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Threads would each reserve addresses for memory of their own, which count as used.
    env = os.environ | {"PYTHONPATH": path, "MALLOC_ARENA_MAX": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", mutations.__name__, prepared, *itertools.chain(*kinds)]
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, f"one of {kinds}: {done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"ends"')]


def check(name: str, result: dict[str, Any]) -> None:
    for end, number in result["ends"].items():
        count(f"mutated {name}", end, number)
    failures = result["failures"]
    assert not failures, f"{len(failures)} of {sum(result['ends'].values())}:\n" + "\n".join(failures[:20])


FEW = [name for name, (few, _) in TRIALS.items() if few]


@pytest.fixture(scope="module")
def few(prepared: Path) -> dict[str, dict[str, Any]]:
    results = attacked(prepared, [(name, FAST_SEED, TRIALS[name][0]) for name in FEW])
    return dict(zip(FEW, results, strict=True))


@pytest.mark.parametrize("name", FEW)
def test_a_few_mutations(name, few):
    assert sum(few[name]["ends"].values()) == TRIALS[name][0]
    check(name, few[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_mutations(name, prepared):
    for start in range(0, TRIALS[name][1], BATCH):
        (result,) = attacked(prepared, [(name, start, min(BATCH, TRIALS[name][1] - start))])
        check(name, result)

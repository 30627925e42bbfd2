"""Weight maps: any tree of a model to any other one, on arrays in memory."""

from pathlib import Path

import jax
import numpy as np
import pytest

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same
from helpers.families import CASES, Case
from tpuconv import api
from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.registry import FAMILIES
from tpuconv.targets.registry import get_target, target_names

TREES = [name for name in target_names() if not get_target(name).is_safetensors]

pytestmark = pytest.mark.usefixtures("quick_compiler")


def arrays_of(out: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by the names of its target."""
    from helpers.trainers import trained_tree

    flat = jax.tree_util.tree_flatten_with_path(trained_tree(out))[0]
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path): np.asarray(x) for path, x in flat
    }


def on_host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in tree.items()}


# -- every family and tree --------------------------------------------------------------------------------------------


def forms() -> list:
    first = {case.family: case for case in reversed(CASES) if case.family in FAMILIES}
    fast = {
        *("llama-plain-maxtext-scanned", "llama-plain-tunix", "qwen3_moe-few-experts-maxtext-scanned"),
        *("qwen3_moe-few-experts-tunix", "qwen3-tied-jax-llm-examples", "deepseek_v3-groups-nnx"),
        "gpt_oss-plain-tpuconv-scanned",
    }
    out = []
    for case in first.values():
        for tree in TREES:
            trees = get_target(tree).trees
            if trees is not None and (case.written_as or case.model_type) not in trees:
                continue
            for scan in (False, True) if get_target(tree).layer_axis is not None else (False,):
                name = f"{case.id}-{tree}{'-scanned' * scan}"
                out.append(pytest.param(case, tree, scan, id=name, marks=[] if name in fast else [pytest.mark.slow]))
    return out


@pytest.mark.parametrize(("case", "tree", "scan"), forms())
def test_a_map_makes_what_convert_and_export_write(case: Case, tree, scan, hf, tmp_path):
    """Bit for bit, as one program and as a stream; and back."""
    try:
        api.convert(hf(case), tmp_path / "out", target=tree, scan_layers=scan)
    except UnsupportedConfig as error:
        with pytest.raises(UnsupportedConfig):
            api.weight_map(hf(case), "huggingface", tree, scan_layers=scan)
        pytest.skip(f"{tree} has no such model: {error.message}")
    wanted = arrays_of(tmp_path / "out")
    there = api.weight_map(hf(case), "huggingface", tree, scan_layers=scan)
    source = {name: x for name, x in read_tensors(hf(case)).items() if name in there.source.shapes}
    assert_same(on_host(jax.jit(there)(source)), wanted)
    assert_same(on_host(there.stream(source)), wanted)
    released = exported(tmp_path / "out", hf(case), tmp_path / "back")
    assert_same(on_host(jax.jit(there.inverse)(wanted)), {name: released[name] for name in there.source.shapes})
    assert_same(on_host(there.inverse.stream(wanted)), {name: released[name] for name in there.source.shapes})
    rounded = {name for row in there.rows if not row.exact for name in row.released}
    if not rounded:
        assert_same({name: released[name] for name in source}, source)


def exported(out: Path, source: Path, folder: Path) -> dict[str, np.ndarray]:
    """What `export` writes of a checkpoint; with the tensors of its source that the checkpoint lacks."""
    from tpuconv.checkpoint.manifest import read_manifest

    skipped = any(is_outside(skip["reason"]) for skip in read_manifest(out).raw["skipped"])
    api.export(out, folder, with_skipped=source if skipped else None)
    return read_tensors(folder)

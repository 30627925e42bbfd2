"""DeepSeek V4 in MaxText, which has trained norms of its streams and tables of experts as float32: the way back."""

from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same, same_bits
from helpers.families import BY_ID, Case
from helpers.trainers import arrays_of, changed_leaf, save_standard, trained_tree
from tpuconv import api
from tpuconv.errors import UnsupportedConfig

CASE = BY_ID["deepseek_v4-released"]
PARTS = {"mhc_attention": "hc_attn_fn", "mhc_mlp": "hc_ffn_fn"}


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.slow, id="apart"), pytest.param(True, id="scanned")]
)
def trained(request, hf, tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A run whose norms of streams were trained, with tables as MaxText has them; and the norms by the tensor of the
    release that they are multiplied into."""
    folder = tmp_path_factory.mktemp("v4")
    api.convert(hf(CASE), folder / "out", target="maxtext", scan_layers=request.param)
    tree, norms, random = trained_tree(folder / "out"), {}, np.random.default_rng(0)
    for name, values in arrays_of(folder / "out").items():
        if name.endswith("tid2eid"):
            tree = changed_leaf(tree, name, values.astype(np.float32))
        if not name.endswith("mhc_norm.scale"):
            continue
        assert (values == 1).all()
        new = random.uniform(0.5, 1.5, values.shape).astype(np.float32)
        tree = changed_leaf(tree, name, new)
        front, part, *_ = name.split("decoder.")[1].rsplit(".", 3)
        tensor = PARTS[part]
        if "scanned" in front:
            place = int(front[-1])
            norms |= {f"layers.{3 + place + 2 * i}.{tensor}": new[:, i] for i in range(new.shape[1])}
        else:
            norms[f"layers.{front.removeprefix('layers_')}.{tensor}"] = new
    assert len(norms) == 2 * CASE.config["num_hidden_layers"]
    return save_standard(folder / "run", tree), norms


def test_trained_norms_are_multiplied_into_the_matrices_behind_them(trained, hf, tmp_path):
    run, norms = trained
    api.export(run, tmp_path / "back", config=hf(CASE))
    source, found = read_tensors(hf(CASE)), read_tensors(tmp_path / "back")
    assert_same(found, source | {name: source[name] * factors for name, factors in norms.items()})


def test_a_map_multiplies_them_too(trained, hf, tmp_path):
    run, _ = trained
    api.export(run, tmp_path / "back", config=hf(CASE))
    wanted, arrays = read_tensors(tmp_path / "back"), arrays_of_run(run)
    is_scanned = any("scanned_blocks" in name for name in arrays)
    there = api.weight_map(hf(CASE), "maxtext", "huggingface", scan_layers=is_scanned)
    for made in (there(arrays), there.stream(arrays)):
        assert made.keys() == wanted.keys()
        different = [n for n, x in made.items() if not same_bits(np.asarray(x), wanted[n].astype(x.dtype))]
        assert different == []
    factors = [row for row in there.rows if row.source.changes == ("* mhc_norm.scale",)]
    assert factors
    assert all(any(name.endswith("mhc_norm.scale") for name in row.source.names) for row in factors)


def test_the_same_tree_in_the_other_form_has_the_same_values(trained, hf, tmp_path):
    run, _ = trained
    is_scanned = any("scanned_blocks" in name for name in arrays_of_run(run))
    api.reshard(run, tmp_path / "other", config=hf(CASE), mesh={"fsdp": 2}, scan_layers=not is_scanned)
    api.export(tmp_path / "other", tmp_path / "there")
    api.export(run, tmp_path / "back", config=hf(CASE))
    assert_same(read_tensors(tmp_path / "there"), read_tensors(tmp_path / "back"))


def arrays_of_run(run: Path) -> dict[str, np.ndarray]:
    """The arrays of a run by name."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        flat = jax.tree_util.tree_flatten_with_path(checkpointer.restore(run.absolute()))[0]
    return {".".join(str(key.key) for key in path): np.asarray(x) for path, x in flat}


@pytest.mark.parametrize(
    ("changes", "scan", "why"),
    [
        ({"hc_mult": 2}, False, "hc_mult=4"),
        ({"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 128}}, False, "0, 4"),
        ({"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}, True, "128 and 4"),
        ({"mlp_layer_types": ["moe", "hash_moe", *["moe"] * 5]}, False, "before all others"),
    ],
)
def test_what_maxtext_does_not_have_is_refused(changes, scan, why, hf):
    case = Case("other", CASE.family, CASE.model_type, dict(CASE.config) | changes)
    with pytest.raises(UnsupportedConfig, match=why):
        api.weight_map(hf(case), "huggingface", "maxtext", scan_layers=scan)

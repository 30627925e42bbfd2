"""`tpuconv.save`: a changed model becomes a checkpoint that every command takes."""

import jax
import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.conversions import assert_same, convert, restore
from helpers.families import BY_ID, FIRST, Case, one_fast_of_each
from helpers.logits import forward
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.types import Options
from tpuconv.errors import OutputError, SourceError, UsageError


def trained(model):
    """Every parameter changed a little, in its dtype."""
    for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf[...] = (leaf[...] * 1.25).astype(leaf[...].dtype)
    return model


@pytest.mark.parametrize("case", one_fast_of_each())
def test_a_model_is_saved_as_it_is(case: Case, orbax, tmp_path):
    """Unchanged it gives the arrays of the checkpoint bit for bit, with the same checksums."""
    tpuconv.save(tpuconv.load(orbax(case)), tmp_path / "out", like=orbax(case))
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))
    sums = [{a.name: a.xxh3 for a in read_manifest(out).arrays.values()} for out in (tmp_path / "out", orbax(case))]
    assert sums[0] == sums[1]


def test_tables_of_numbers_are_saved_too(orbax, tmp_path):
    """DeepSeek V4 has experts by token, which are no parameters of the model."""
    case = BY_ID["deepseek_v4-plain"]
    tpuconv.save(trained(tpuconv.load(orbax(case))), tmp_path / "out", like=orbax(case))
    assert api.verify(tmp_path / "out").passed
    found, former = (restore(out) for out in (tmp_path / "out", orbax(case)))
    table = "layers.0.moe.experts_of_token"
    np.testing.assert_array_equal(found[table], former[table])
    assert not np.array_equal(found["embed.embedding"], former["embed.embedding"])


def test_a_changed_model_goes_all_the_way(orbax, tmp_path):
    model = trained(tpuconv.load(orbax(BY_ID["llama-plain"])))
    tpuconv.save(model, tmp_path / "out", like=orbax(BY_ID["llama-plain"]))
    assert api.verify(tmp_path / "out").passed
    again = tpuconv.load(tmp_path / "out")
    ids = np.array([[3, 1, 4, 1, 5]])
    np.testing.assert_array_equal(np.asarray(forward(again, ids)), np.asarray(forward(model, ids)))
    exported = api.export(tmp_path / "out", tmp_path / "hf")
    api.convert(exported.out, tmp_path / "back")
    assert_same(restore(tmp_path / "back"), restore(tmp_path / "out"))
    api.quantize(tmp_path / "out", tmp_path / "int8", config="int8_weight_only")
    source = read_manifest(tmp_path / "out").raw["source"]
    assert source["changed"]
    assert "may differ" in source["verified"]
    assert "Saved from a model since" in (tmp_path / "out" / "README.md").read_text()


def test_saving_again_finds_it_there_and_other_weights_are_refused(orbax, tmp_path):
    model = tpuconv.load(orbax(BY_ID["llama-plain"]))
    for _ in range(2):
        tpuconv.save(model, tmp_path / "out", like=orbax(BY_ID["llama-plain"]))
    with pytest.raises(OutputError):
        tpuconv.save(trained(model), tmp_path / "out", like=orbax(BY_ID["llama-plain"]))
    tpuconv.save(model, tmp_path / "out", like=orbax(BY_ID["llama-plain"]), overwrite=True)
    assert api.verify(tmp_path / "out").passed


def test_stacked_layers_in_another_dtype_and_on_a_mesh(hf, tmp_path):
    convert(hf(BY_ID["llama-plain"]), tmp_path / "stacked", Options(scan_layers=True))
    mesh = jax.make_mesh((1,), ("tensor",))
    model = tpuconv.load(tmp_path / "stacked", "bfloat16", mesh)
    tpuconv.save(model, tmp_path / "out", like=tmp_path / "stacked")
    arrays = restore(tmp_path / "out")
    assert {x.dtype.name for x in arrays.values()} == {"bfloat16"}
    again = {name: x.astype("bfloat16") for name, x in restore(tmp_path / "stacked").items()}
    assert_same(arrays, again)


def test_arrays_of_mtp_layers_come_from_the_checkpoint(with_mtp, tmp_path):
    convert(with_mtp, tmp_path / "like", Options(include_mtp=True))
    with pytest.warns(UserWarning, match="not loaded"):
        model = tpuconv.load(tmp_path / "like")
    tpuconv.save(model, tmp_path / "out", like=tmp_path / "like")
    have, want = restore(tmp_path / "out"), restore(tmp_path / "like")
    assert {name for name in want if name.startswith("mtp.")}
    # The model holds a router's correction in float32, whatever it is stored in.
    assert_same({name: x.astype(want[name].dtype) for name, x in have.items()}, want)


def test_another_model_is_refused(orbax, tmp_path):
    other = FIRST["olmo2"]
    with pytest.raises(UsageError, match="does not match") as error:
        tpuconv.save(tpuconv.load(orbax(other)), tmp_path / "out", like=orbax(BY_ID["llama-plain"]))
    assert error.value.details
    assert not (tmp_path / "out").exists()


def test_a_quantized_model_is_refused(orbax, tmp_path):
    api.quantize(orbax(BY_ID["llama-plain"]), tmp_path / "int8", config="int8_weight_only")
    model = tpuconv.load(tmp_path / "int8")
    for like in (orbax(BY_ID["llama-plain"]), tmp_path / "int8"):
        with pytest.raises(UsageError):
            tpuconv.save(model, tmp_path / "out", like=like)


def test_a_model_whose_training_diverged_is_refused(orbax, tmp_path):
    model = tpuconv.load(orbax(BY_ID["llama-plain"]))
    model.norm.scale[...] = model.norm.scale[...].at[3].set(np.nan)
    with pytest.raises(SourceError, match=r"norm\.scale is not finite") as error:
        tpuconv.save(model, tmp_path / "out", like=orbax(BY_ID["llama-plain"]))
    assert "the training diverged" in str(error.value)
    assert not (tmp_path / "out").exists()
    tpuconv.save(
        tpuconv.load(orbax(BY_ID["llama-plain"])), tmp_path / "out", like=orbax(BY_ID["llama-plain"]), overwrite=True
    )

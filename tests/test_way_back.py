"""The way back of a trainer's checkpoint: Orbax checkpoints without a manifest of tpuconv, exported by `--config`."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tpuconv
from helpers.attacks.simulated import contents
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors
from helpers.commands import EXAMPLE
from helpers.commands import tpuconv as command
from helpers.conversions import assert_same, same_bits
from helpers.families import BY_ID, CASES, FIRST, Case
from helpers.hub_server import HubServer
from helpers.trainers import adam_state, changed_leaf, save_pytree, save_standard, save_step, trained_tree
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.export import files as export_files
from tpuconv.errors import MappingError, SourceError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.registry import FAMILIES
from tpuconv.targets.registry import get_target, target_names

TREES = [name for name in target_names() if not get_target(name).is_safetensors]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    """A source in bfloat16."""
    return random_checkpoint(tmp_path_factory.mktemp("qwen3") / "hf", qwen3_config())


def exported(ckpt: Path, config: Path | str, **options) -> tuple[dict[str, np.ndarray], api.Export]:
    done = api.export(ckpt, ckpt.parent / "back", config=config, **options)
    return read_tensors(ckpt.parent / "back"), done


# -- every family and target ------------------------------------------------------------------------------------------


def forms(families) -> list:
    first = {case.family: case for case in reversed(CASES) if case.family in families}
    first |= {family: BY_ID[f"{family}-released"] for family in ("gemma3_text", "gemma4_text", "deepseek_v4")}
    fast = {"llama-plain-maxtext-scanned", "mixtral-plain-nnx"}
    out = []
    for case in first.values():
        for target in TREES:
            trees = get_target(target).trees
            if trees is not None and (case.written_as or case.model_type) not in trees:
                continue
            for scan in (False, True) if get_target(target).layer_axis is not None else (False,):
                name = f"{case.id}-{target}{'-scanned' * scan}"
                marks = [] if name in fast else [pytest.mark.slow]
                out.append(pytest.param(case, target, scan, id=name, marks=marks))
    return out


@pytest.mark.parametrize(("case", "target", "scan"), forms(FAMILIES))
def test_what_was_not_trained_further_comes_back_as_it_was(case: Case, target, scan, hf, tmp_path):
    """The target is found, too. The model of the run is that of the checkpoint that was trained."""
    try:
        api.convert(hf(case), tmp_path / "out", target=target, scan_layers=scan)
    except UnsupportedConfig as error:
        pytest.skip(f"{target} has no such model: {error.message}")
    tree = trained_tree(tmp_path / "out")
    save_step(tmp_path / "run", 7, tree) if scan else save_standard(tmp_path / "run", tree)
    found, done = exported(tmp_path / "run", hf(case))
    assert done.target == target
    assert all(is_outside(skip.reason) for skip in done.skipped)  # parts of a multimodal model
    if target == "maxtext":  # which scales queries, and adds 1 to norms
        api.export(tmp_path / "out", tmp_path / "known", with_skipped=hf(case) if done.skipped else None)
        known = read_tensors(tmp_path / "known")
        assert len(known) - len(found) == sum(skip.count for skip in done.skipped)
        assert_same(found, {name: known[name] for name in found})
    else:
        source = read_tensors(hf(case))
        assert not [name for name in found if not same_bits(found[name], source[name])]
    assert (tmp_path / "back" / "config.json").read_bytes() == (hf(case) / "config.json").read_bytes()
    known = hf(case) if target == "tpuconv" else tmp_path / "out"  # ours are loaded as they are, stacked or not
    have, want = parameters(tpuconv.load(tmp_path / "run", config=hf(case))), parameters(tpuconv.load(known))
    assert have.keys() == want.keys()
    assert not [name for name in have if not same_bits(have[name], want[name])]


# -- how it was saved -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def maxtext(qwen3, tmp_path_factory) -> dict:
    """The tree of a Qwen3 for MaxText, with scanned layers."""
    out = tmp_path_factory.mktemp("maxtext") / "out"
    api.convert(qwen3, out, target="maxtext", scan_layers=True)
    return trained_tree(out)


@pytest.mark.parametrize("options", [{"use_ocdbt": a, "use_zarr3": b} for a in (True, False) for b in (True, False)])
def test_every_form_of_storage_is_read(options, maxtext, qwen3, tmp_path):
    found, done = exported(save_pytree(tmp_path / "ckpt", maxtext, **options), qwen3)
    assert_same(found, read_tensors(qwen3))
    assert done.arrays == tmp_path / "ckpt"


@pytest.mark.parametrize(
    ("folder", "item"),
    [
        ("run", ""),
        pytest.param("run", "state", marks=pytest.mark.slow),
        pytest.param("run", "model_params", marks=pytest.mark.slow),
        pytest.param("run", "model", marks=pytest.mark.slow),
        ("run/checkpoints", "items"),
    ],
)
def test_the_latest_step_of_a_run_is_found(folder, item, maxtext, qwen3, tmp_path):
    run = tmp_path / folder
    save_step(run, 3, changed_leaf(maxtext, "params.params.decoder.decoder_norm.scale", np.zeros(48)), item)
    save_step(run, 12, maxtext, item)
    found, done = exported(tmp_path / "run", qwen3)
    assert_same(found, read_tensors(qwen3))
    assert done.arrays == run / "12" / (item or "default")


def test_a_path_that_goes_up_from_a_link(maxtext, qwen3, tmp_path, monkeypatch):
    """The system follows the link first: `..` is the folder in which its target lies."""
    save_standard(tmp_path / "disk" / "ckpt", maxtext)
    (tmp_path / "link").symlink_to("disk/ckpt")
    monkeypatch.chdir(tmp_path)
    tensors, _ = exported(Path("link/../ckpt"), qwen3)
    assert_same(tensors, read_tensors(qwen3))


@pytest.mark.filterwarnings("ignore:Use `save` instead:DeprecationWarning")
@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("save", "state"),
        ("save_pytree", "state"),
        ("save_checkpointables", "model"),
        ("Checkpointer.save", "12/state"),
        ("Checkpointer.save_pytree", "12/state"),
        ("Checkpointer.save_checkpointables", "12/model"),
    ],
)
def test_what_orbax_v1_saved_is_read(way, place, maxtext, qwen3, tmp_path):
    """Beside the state of an optimizer, in the tree or in an item of its own."""
    from orbax.checkpoint import v1

    optimizer = adam_state(maxtext["params"])
    if way.endswith("checkpointables"):
        tree = {"model": maxtext, "optimizer": optimizer}
    else:
        tree = {"params": maxtext["params"], "opt_state": optimizer}
    if way.startswith("Checkpointer."):
        with v1.training.Checkpointer(tmp_path / "run") as checkpointer:
            for step in (3, 12):
                getattr(checkpointer, way.removeprefix("Checkpointer."))(step, tree)
    else:
        getattr(v1, way)(tmp_path / "run", tree)
    found, done = exported(tmp_path / "run", qwen3)
    assert_same(found, read_tensors(qwen3))
    assert done.arrays == tmp_path / "run" / place
    reasons = set() if way.endswith("checkpointables") else {"arrays of an optimizer's state"}
    assert {skip.reason for skip in done.skipped} == reasons


def test_items_with_other_names_are_named(maxtext, qwen3, tmp_path):
    save_step(tmp_path / "run", 12, maxtext, "weights")
    for folder in ("run", "run/12"):
        with pytest.raises(UsageError) as info:
            exported(tmp_path / folder, qwen3)
        assert info.value.hint == f"give the item with the parameters: {tmp_path}/run/12/weights"


def test_a_train_state_of_maxtext(maxtext, qwen3, tmp_path):
    """Its optimizer's state is left out, with its number of arrays."""
    state = {"step": np.int32(3), "params": maxtext["params"], "opt_state": adam_state(maxtext["params"])}
    save_step(tmp_path / "run", 3, state, "items")
    found, done = exported(tmp_path / "run", qwen3)
    assert_same(found, read_tensors(qwen3))
    counts: dict[str, int] = {}
    for skip in done.skipped:
        counts[skip.reason] = counts.get(skip.reason, 0) + skip.count
    arrays = len(list(leaves(maxtext)))
    assert counts == {"arrays of an optimizer's state": 2 * arrays + 1, "arrays with the number of a step": 1}


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["apart", "scanned"])
@pytest.mark.parametrize("place", ["nnx_aux.model", "params.MoEBiasVar"])
def test_what_maxtext_does_not_train_is_found_where_it_saves_it(place, scan, hf, tmp_path):
    """Its trainer and its own converter do not put the biases of routers among the parameters."""
    source = hf(BY_ID["deepseek_v3-groups"])
    api.convert(source, tmp_path / "out", target="maxtext", scan_layers=scan)
    tree = trained_tree(tmp_path / "out")
    biases = [name for name in read_manifest(tmp_path / "out").arrays if name.endswith(".gate.bias")]
    assert biases
    for name in biases:
        values = get_leaf(tree, name)
        tree = changed_leaf(changed_leaf(tree, name, None), name.replace("params.params", place), values)
    found, done = exported(save_standard(tmp_path / "run", tree), source)
    assert (done.target, done.skipped) == ("maxtext", ())
    assert_same(found, read_tensors(source))


def get_leaf(tree, path: str):
    for key in path.split("."):
        tree = tree[key]
    return tree


def leaves(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


@pytest.mark.slow
def test_the_state_of_a_model_of_flax(qwen3, tmp_path):
    """`nnx.state` of the model that `load` gives, saved directly, beside an optimizer of Flax."""
    import optax
    from flax import nnx

    import tpuconv

    api.convert(qwen3, tmp_path / "out")
    model = tpuconv.load(tmp_path / "out")
    save_standard(tmp_path / "state", nnx.state(model))
    found, done = exported(tmp_path / "state", qwen3)
    assert done.target == "nnx"
    assert_same(found, read_tensors(qwen3))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    save_step(tmp_path / "run", 1, {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    shutil.rmtree(tmp_path / "back")
    found, done = exported(tmp_path / "run", qwen3)
    assert_same(found, read_tensors(qwen3))
    assert {skip.reason for skip in done.skipped} == {"arrays of an optimizer's state"}


def test_three_processes_export_their_parts(maxtext, qwen3, tmp_path, monkeypatch):
    monkeypatch.setattr(export_files, "SHARD_BYTES", 20_000)
    ckpt = save_pytree(tmp_path / "ckpt", maxtext)
    parts = [ProcessPart(index, 3) for index in range(3)]
    done = [api.export(ckpt, tmp_path / "back", config=qwen3, part=part) for part in parts]
    assert [each.published for each in done] == [False, False, True]
    assert_same(read_tensors(tmp_path / "back"), read_tensors(qwen3))
    api.export(ckpt, tmp_path / "alone", config=qwen3)
    assert contents(tmp_path / "back") == contents(tmp_path / "alone")


def test_a_changed_array_comes_through(maxtext, qwen3, tmp_path):
    """All others are as they were."""
    path = "params.params.decoder.layers.mlp.wo.kernel"
    kernel = maxtext["params"]["params"]["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    values = np.asarray(kernel) * np.asarray(2, kernel.dtype)
    found, _ = exported(save_standard(tmp_path / "ckpt", changed_leaf(maxtext, path, values)), qwen3)
    for name, tensor in read_tensors(qwen3).items():
        factor = 2 if name.endswith("down_proj.weight") else 1
        assert same_bits(found[name], tensor * np.asarray(factor, tensor.dtype)), name


def test_another_dtype_is_named_in_the_config(maxtext, qwen3, tmp_path):
    import jax

    (tmp_path / "config").mkdir()
    stated = json.loads((qwen3 / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config" / "config.json").write_text(json.dumps(stated))
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), maxtext)
    found, _ = exported(save_standard(tmp_path / "ckpt", tree), tmp_path / "config")
    source = read_tensors(qwen3)
    assert all(same_bits(found[name], source[name].astype(np.float32)) for name in source)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == stated | {"dtype": "float32"}


def test_a_config_without_weights_is_enough(maxtext, qwen3, tmp_path):
    (tmp_path / "config").mkdir()
    shutil.copy(qwen3 / "config.json", tmp_path / "config")
    (tmp_path / "config" / "tokenizer.json").write_text("{}")
    found, _ = exported(save_standard(tmp_path / "ckpt", maxtext), tmp_path / "config")
    assert_same(found, read_tensors(qwen3))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    api.verify(tmp_path / "back").check()


@pytest.mark.slow
def test_layers_that_predict_further_tokens(with_mtp, tmp_path):
    """They are exported if they were converted, and saved."""
    api.convert(with_mtp, tmp_path / "out", include_mtp=True)
    tree = trained_tree(tmp_path / "out")
    found, _ = exported(save_standard(tmp_path / "ckpt", tree), with_mtp)
    api.export(tmp_path / "out", tmp_path / "known")
    assert_same(found, read_tensors(tmp_path / "known"))
    assert any(".layers.3." in name for name in found)


@pytest.mark.slow
def test_of_the_hub_headers_and_small_files_are_read(maxtext, qwen3, tmp_path, monkeypatch):
    from huggingface_hub import close_session, constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    ckpt = save_standard(tmp_path / "ckpt", maxtext)
    with HubServer({"org/tiny": qwen3}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        found, _ = exported(ckpt, "org/tiny")
        close_session()
    assert_same(found, read_tensors(qwen3))
    source = json.loads((tmp_path / "back" / "tpuconv.json").read_text())["source"]
    assert (source["repo"], source["changed"]) == ("org/tiny", True)
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_rows_of_padding_are_dropped_and_named(maxtext, qwen3, tmp_path):
    embedding = np.asarray(maxtext["params"]["params"]["token_embedder"]["embedding"])
    padded = np.concatenate([embedding, np.ones((27, embedding.shape[1]), embedding.dtype)])
    tree = changed_leaf(maxtext, "params.params.token_embedder.embedding", padded)
    found, done = exported(save_standard(tmp_path / "ckpt", tree), qwen3)
    assert_same(found, read_tensors(qwen3))
    (skip,) = done.skipped
    assert (skip.pattern, skip.count) == ("params.params.token_embedder.embedding", 27)
    assert skip.reason == "rows of padding after the vocabulary"


# -- what is refused --------------------------------------------------------------------------------------------------


def refusal(ckpt: Path, config: Path, **options) -> TpuconvError:
    with pytest.raises(TpuconvError) as error:
        api.export(ckpt, ckpt.parent / "back", config=config, **options)
    assert not (ckpt.parent / "back").exists()
    return error.value


def test_a_missing_and_an_unknown_array_are_named(maxtext, qwen3, tmp_path):
    lacking = changed_leaf(maxtext, "params.params.decoder.layers.mlp.wi_0.kernel", None)
    error = refusal(save_standard(tmp_path / "a", lacking), qwen3)
    assert isinstance(error, MappingError)
    assert error.details == ("params.params.decoder.layers.mlp.wi_0.kernel: missing",)
    assert "in the form of maxtext with scanned layers it has 1 missing array and 0 unknown ones" in error.message
    more = changed_leaf(maxtext, "params.params.decoder.lora.kernel", np.zeros(3))
    error = refusal(save_standard(tmp_path / "b", more), qwen3)
    assert error.details == ("params.params.decoder.lora.kernel: not a parameter of the model, and no known state",)


def test_two_trees_of_parameters_are_not_guessed_between(maxtext, qwen3, tmp_path):
    tree = {"params": maxtext["params"], "ema_params": maxtext["params"]}
    error = refusal(save_standard(tmp_path / "ckpt", tree), qwen3)
    assert all(line.startswith("ema_params.params.") for line in error.details if "more" not in line)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 64}, "does not match the config in [0-9]+ arrays"),
        ({"num_hidden_layers": 5}, "does not match the config in [0-9]+ arrays"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "is not a checkpoint of this llama"),
    ],
)
def test_another_model_is_refused(changes, message, maxtext, tmp_path):
    other = random_checkpoint(tmp_path / "other", qwen3_config(**changes))
    ckpt = save_standard(tmp_path / "ckpt", maxtext)
    with pytest.raises(MappingError, match=message):
        api.export(ckpt, tmp_path / "back", config=other)


def test_a_config_of_more_layers_is_told_which_are_missing(qwen3, tmp_path):
    deeper = random_checkpoint(tmp_path / "other", qwen3_config(num_hidden_layers=9))
    api.convert(qwen3, tmp_path / "ours")
    ckpt = save_standard(tmp_path / "ckpt", trained_tree(tmp_path / "ours"))
    error = refusal(ckpt, deeper)
    assert "in the form of tpuconv" in error.message
    assert error.details[0].startswith("layers.{")
    assert "...8}." in error.details[0]
    assert not any("not a parameter" in line for line in error.details)


def test_one_tensor_of_two_dtypes_is_refused(hf, orbax, tmp_path):
    """DeepSeek V3 has one tensor for keys and values, which are two parameters."""
    case = FIRST["deepseek_v3"]
    tree = trained_tree(orbax(case))
    kernel = tree["layers"]["0"]["attn"]["k_b"]["kernel"]
    tree = changed_leaf(tree, "layers.0.attn.k_b.kernel", np.asarray(kernel, np.float16))
    error = refusal(save_standard(tmp_path / "ckpt", tree), hf(case))
    assert "with float16, float32 in one tensor of the release" in error.details[0]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
def test_quantized_arrays_without_scales_are_refused(dtype, qwen3, tmp_path):
    """Their codes would be written as weights."""
    api.convert(qwen3, tmp_path / "ours")
    tree = trained_tree(tmp_path / "ours")
    kernel = np.asarray(tree["layers"]["0"]["mlp"]["up"]["kernel"], np.float32)
    tree = changed_leaf(tree, "layers.0.mlp.up.kernel", (kernel * 99).astype(dtype))
    error = refusal(save_standard(tmp_path / "ckpt", tree), qwen3)
    assert isinstance(error, MappingError)
    assert error.details == (f"layers.0.mlp.up.kernel: cannot be exported, of dtype {np.dtype(dtype).name}",)
    assert error.message.endswith("in 1 array")
    assert "floats" in error.hint


def test_options_and_folders_that_do_not_fit(maxtext, qwen3, tmp_path):
    ckpt = save_standard(tmp_path / "ckpt", maxtext)
    cases = [
        (ckpt, {"config": None}, UsageError, "is a checkpoint of Orbax without tpuconv.json"),
        (ckpt, {"config": None, "target": "maxtext"}, UsageError, "`target=` .*: it is only for a trainer's"),
        (ckpt, {"config": qwen3, "with_skipped": qwen3}, UsageError, "`with_skipped=` .*: it needs the manifest"),
        (ckpt, {"config": qwen3, "target": "huggingface"}, UsageError, "has no arrays of Orbax"),
        (ckpt, {"config": qwen3, "target": "tunix"}, MappingError, "no array of .* as tunix has it"),
        (qwen3, {"config": qwen3}, UsageError, "holds no Orbax checkpoint"),
        ("az://bucket/run", {"config": qwen3}, UsageError, "Azure Blob Storage, which TensorStore does not read"),
    ]
    for place, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            api.export(place, tmp_path / "back", **options)
    for place in (ckpt / "back", qwen3, qwen3 / "back"):
        with pytest.raises(UsageError, match="lies in the source folder"):
            api.export(ckpt, place, config=qwen3, overwrite=True)
    api.convert(qwen3, tmp_path / "ours")
    for place, options in [
        (tmp_path / "ours", {}),
        (tmp_path / "ours" / "params" / "back", {}),
    ]:
        with pytest.raises(UsageError, match="lies in the source folder"):
            api.export(tmp_path / "ours", place, overwrite=True, **options)
    api.verify(tmp_path / "ours").check()
    with pytest.raises(UsageError, match="has a manifest of tpuconv"):
        api.export(tmp_path / "ours", tmp_path / "back", config=qwen3)


def test_a_lost_chunk_is_no_zeros(maxtext, qwen3, tmp_path):
    """Orbax stores chunks of zeros too, so that a missing one is damage."""
    ckpt = save_pytree(tmp_path / "ckpt", maxtext, use_ocdbt=False)
    (chunk,) = (path for path in (ckpt / "params.params.decoder.decoder_norm.scale").iterdir() if path.name[0] != ".")
    chunk.unlink()
    error = refusal(ckpt, qwen3)
    assert isinstance(error, SourceError)
    assert "params.params.decoder.decoder_norm.scale" in error.message


def test_names_that_lead_out_of_the_folder_are_refused(maxtext, qwen3, tmp_path):
    ckpt = save_pytree(tmp_path / "ckpt", maxtext, use_ocdbt=False)
    text = (ckpt / "_METADATA").read_text().replace('"key": "token_embedder"', '"key": "../../token_embedder"')
    (ckpt / "_METADATA").write_text(text)
    assert "no name of a folder" in refusal(ckpt, qwen3).message


def test_a_tree_that_changes_while_it_is_read_is_refused(maxtext, qwen3, tmp_path, monkeypatch):
    from tpuconv.checkpoint.orbax_tree import TrainedTree

    ckpt = save_standard(tmp_path / "ckpt", maxtext)
    read = TrainedTree.read

    def read_and_touch(self, name, box):
        (ckpt / "commit_success.txt").write_text("again")
        return read(self, name, box)

    monkeypatch.setattr(TrainedTree, "read", read_and_touch)
    error = refusal(ckpt, qwen3)
    assert isinstance(error, SourceError)
    assert "was changed while it was read" in error.message


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_read_and_left_out(maxtext, qwen3, tmp_path):
    save_step(tmp_path / "run", 5, {"params": maxtext["params"], "step": np.int32(5)})
    said = command("export", "run", "back", "--config", qwen3, cwd=tmp_path).stdout
    assert "read as maxtext: run/5/default" in said
    assert "not exported: 1 array with the number of a step: step" in said
    facts = json.loads(command("export", "run", "back", "--config", qwen3, "--json", cwd=tmp_path).stdout)
    assert (facts["target"], facts["arrays"]) == ("maxtext", "run/5/default")
    assert facts["skipped"] == [{"pattern": "step", "count": 1, "reason": "arrays with the number of a step"}]


# -- the model of a checkpoint for another program --------------------------------------------------------------------


def parameters(model) -> dict[str, np.ndarray]:
    from flax import nnx

    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize(("case", "target", "scan"), [each for each in forms(FAMILIES) if each.values[1] != "tpuconv"])
def test_the_model_of_a_target_is_loaded(case: Case, target, scan, hf, tmp_path):
    """As the release is; MaxText scales queries and adds 1 to norms, which rounds as its export does."""
    try:
        api.convert(hf(case), tmp_path / "out", target=target, scan_layers=scan)
    except UnsupportedConfig as error:
        pytest.skip(f"{target} has no such model: {error.message}")
    known = hf(case)
    if target == "maxtext":
        known = tmp_path / "known"
        skipped = read_manifest(tmp_path / "out").raw["skipped"]
        api.export(tmp_path / "out", known, with_skipped=hf(case) if skipped else None)
    text_only = not read_manifest(tmp_path / "out").parts
    have, want = parameters(tpuconv.load(tmp_path / "out")), parameters(tpuconv.load(known, text_only=text_only))
    assert have.keys() == want.keys()
    assert not [name for name in have if not same_bits(have[name], want[name])]


def test_commands_run_the_model_of_a_target(tmp_path):
    api.convert(EXAMPLE, tmp_path / "out", target="maxtext", scan_layers=True)
    assert api.compare(tmp_path / "out", prompts=["Once upon a time"]).passed
    assert api.benchmark(tmp_path / "out", prompt_length=[4], new_tokens=[2], repeats=1).checkpoint == tmp_path / "out"
    api.convert(EXAMPLE, tmp_path / "int8", target="nnx", quantize="int8_default")
    assert tpuconv.load(tmp_path / "int8") is not None
    with pytest.raises(UsageError, match="is quantized for nnx"):
        api.compare(tmp_path / "int8")
    path = next((tmp_path / "out").rglob("c.*"))
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(TpuconvError, match=r"cannot be read|checksum"):
        tpuconv.load(tmp_path / "out")

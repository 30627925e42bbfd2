"""Multimodal models whole, against transformers: logits of texts with images or sounds, several in a row, padded on the
left, then with a cache; the way back to safetensors."""

import json
import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.logits import forward
from helpers.sights import IMAGE, MINICPM_O, MINICPM_V, SIGHTS
from helpers.whole_sights import EACH, difference, logits, made
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, GateError, UnsupportedConfig, UsageError
from tpuconv.models import registry
from tpuconv.models.common.beside import modality_of
from tpuconv.models.registry import get_family
from tpuconv.models.stored import model_config
from tpuconv.models.towers.conformer.family import CONFORMER
from tpuconv.models.towers.gemma4.family import GEMMA4_VIT, USM
from tpuconv.models.towers.inkling.family import FOLDING_MLP
from tpuconv.models.towers.llama4.family import LLAMA4_VIT
from tpuconv.models.towers.molmo.family import MOLMO_VIT
from tpuconv.models.towers.moonvit.family import MOONVIT, MOONVIT2, MUSE_VIT
from tpuconv.models.towers.muse_audio.family import MUSE_AUDIO_ENCODER
from tpuconv.models.towers.qwen_audio.family import QWEN3_AUDIO
from tpuconv.models.towers.qwen_vit.family import QWEN3_VIT
from tpuconv.models.towers.sanm.family import SANM
from tpuconv.models.towers.vibevoice.family import VIBEVOICE
from tpuconv.models.towers.wav2vec2.family import WAV2VEC2
from tpuconv.models.towers.whisper.family import VOXTRAL_WHISPER
from tpuconv.names import OWN_TARGET
from tpuconv.targets.listing import targets_of
from tpuconv.text import format_count

WITHOUT_EXAMPLES = {"video_llava": ("video",), "diffusion_gemma": ("canvas",)}
"""The parts that `compare` names and does not compare."""


SPELLED = {
    "gemma3": r"^vision_tower\..*layers\.1\.",
    "voxtral": r"^audio_tower\.layers\.1\.",
    "llava": r"^vision_tower\..*layers\.1\.",
}
"""Cases, and the beginnings of the names of one layer of their encoders."""

OF_NO_IMAGE = (("inkling", "vision"), ("inkling_of_many_layers", "vision"))
"""Parts whose features do not say of which image they are."""

OF_NO_TYPE = {
    **{
        name: name
        for name in (
            "kimi_k3",
            "kimi_vl",
            "dots_ocr",
            "phi3_v",
            "mimo_v2",
            "ovis2_5",
            "ovis2_6",
            "ovis2_6_moe",
            "opencua",
        )
    },
    **{name: name for name in ("step3_vl", "step_robotics", "step3p5v")},
    **{"nvlm_d": "NVLM_D", "keye_vl": "Keye", "keye_vl_1_5": "KeyeVL1_5"},
    "nemotron_nano_vl": "NemotronH_Nano_VL_V2",
    "llama_nemotron_nano_vl": "Llama_Nemotron_Nano_VL",
    **dict.fromkeys(MINICPM_V, "minicpmv"),
    **dict.fromkeys(MINICPM_O, "minicpmo"),
}
"""Cases that transformers has no model of, and their types."""

AS_USERS_COMPILE = ("glm5_next",)
"""Cases whose layers double rounding errors: by float64 transformers errs by 8.5e-6, and tpuconv by 5.7e-6 with XLA's
optimizations and 8.6e-6 without them. The sum is more than the tolerance."""


@EACH
def test_logits_with_images_or_sounds(name, whole, record_property, request):
    if name in AS_USERS_COMPILE:
        request.getfixturevalue("users_compiler")
    case = made(name)
    ids_BT, mask_BT = case.ids_BT, case.mask_BT
    want = case.reference(ids_BT, mask_BT, case.features)[mask_BT]
    model: Any = tpuconv.load(whole(name)[1])
    seen = model.see(ids_BT, mask_BT, **case.features)
    have = np.asarray(forward(model, ids_BT, mask_BT, seen=seen))[mask_BT]
    record_property("logits", difference(have, want))
    assert difference(have, want) < case.tolerance
    assert (have.argmax(axis=-1) == want.argmax(axis=-1)).all()
    without = np.asarray(forward(model, jnp.where(seen.slot_BT < 0, ids_BT, 0), mask_BT))[mask_BT]
    assert difference(without, want) > 0.01  # the reference has seen something

    cache = model.init_cache(*(len(ids_BT), ids_BT.shape[1] + 2), jnp.float32)
    have, cache = forward(model, ids_BT, mask_BT, cache=cache, seen=seen)
    cached = [difference(np.asarray(have)[mask_BT], want)]
    later_BT = np.array(case.later)[: len(ids_BT)]
    longer_BT = np.concatenate([ids_BT, later_BT], axis=1)
    want = case.reference(longer_BT, np.pad(mask_BT, ((0, 0), (0, 2)), constant_values=True), case.features)[:, -2:]
    for token in range(2):
        have, cache = forward(model, later_BT[:, token : token + 1], cache=cache)
        cached.append(difference(have[:, 0], want[:, token]))
    record_property("with the cache", max(cached))
    assert max(cached) < case.tolerance


@EACH
def test_every_tensor_comes_back(name, whole, tmp_path, record_property):
    src, out = whole(name)
    manifest, parts = read_manifest(out), set(made(name).parts)
    assert set(manifest.parts) == parts
    targets = (each for each in targets_of(get_family(manifest.family)) if each.target != OWN_TARGET)
    record_property("targets", ", ".join(each.target for each in targets if parts <= set(each.parts)))
    api.export(out, tmp_path / "back")
    source, back = read_tensors(src), read_tensors(tmp_path / "back")
    expected = {each for each in source if not re.search(made(name).derived, each)}
    assert back.keys() == expected
    assert all(np.array_equal(source[each], back[each]) for each in expected)
    left = len(source) - len(expected)
    record_property("export whole", f"but for {format_count(left, 'tensor')}" if left else "yes")


@EACH
def test_stacked_layers_see_the_same(name, whole, tmp_path):
    case, folder = made(name), tmp_path / "out"
    if model_config(read_manifest(whole(name)[1])).unscannable:
        with pytest.raises(UnsupportedConfig, match="scan_layers"):
            api.convert(whole(name)[0], folder, scan_layers=True)
        return
    api.convert(whole(name)[0], folder, scan_layers=True)
    apart, stacked = tpuconv.load(whole(name)[1]), tpuconv.load(folder)
    assert difference(logits(case, stacked), logits(case, apart)) < case.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kimi_k25", "kimi_k3", "mimo_v2", "muse_glimmer", "muse_spark"])
def test_frames_of_clips_are_those_of_the_reference(name, whole):
    """Whole models of the reference take clips as videos alone."""
    import torch

    grids = np.array([(2, 6, 4), (2, 4, 8)])
    shape = (3, 4, 4) if name.startswith("kimi") else (96,)
    patches = np.random.default_rng(2).standard_normal((int(grids.prod(axis=1).sum()), *shape)).astype(np.float32)
    reference: Any = made(name).model
    with torch.no_grad():
        if name in ("kimi_k3", "mimo_v2"):
            want = reference.features(torch.tensor(patches), torch.tensor(grids)).numpy()
        elif name == "kimi_k25":  # a feature is the mean over the frames
            found = reference.model.vision_tower(torch.tensor(patches), grid_thw=torch.tensor(grids))
            want = reference.model.mm_projector(found.pooler_output)[:, 0].numpy()
        else:
            found = reference.model.get_image_features(torch.tensor(patches), torch.tensor(grids))
            want = torch.cat(found.pooler_output).numpy()
    model: Any = tpuconv.load(whole(name)[1])
    ids_BT = np.full((1, len(want)), IMAGE)
    seen = model.see(ids_BT, pixel_values=patches, image_grid_thw=grids)
    assert difference(seen.features_XD[: len(want)], want) < 1e-5


@pytest.mark.slow
def test_names_of_kimi_releases(whole, tmp_path):
    """Releases have two names that transformers, which reads them, does not write."""
    src, out = whole("kimi_k25")
    written = {"vision_tower.encoder.patch_embed": "vision_tower.patch_embed", "model.mm_projector": "mm_projector"}
    tensors = {}
    for name, tensor in read_tensors(src).items():
        front = next((front for front in written if name.startswith(front)), "")
        tensors[written.get(front, "") + name.removeprefix(front)] = tensor
    assert set(tensors) != set(read_tensors(src))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "config.json").write_text((src / "config.json").read_text())
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    api.convert(tmp_path / "src", tmp_path / "out")
    arrays = (read_manifest(folder).arrays for folder in (out, tmp_path / "out"))
    assert len({tuple(sorted(each)) for each in arrays}) == 1
    api.export(tmp_path / "out", tmp_path / "back")
    assert read_tensors(tmp_path / "back").keys() == tensors.keys()


@pytest.mark.slow
def test_releases_of_molmo_count_layers_without_tensors(whole, tmp_path):
    """They have older names of keys, and count layers from the last of those that config.json has."""
    src, out = whole("molmo2")
    config = json.loads((src / "config.json").read_text())
    older = {"image_size": "image_default_input_size", "patch_size": "image_patch_size"}
    vision = {older.get(key, key): value for key, value in config.pop("vision_config").items()}
    config["vit_config"] = vision | {"num_hidden_layers": 5}
    config["adapter_config"]["vit_layers"] = [-3, -5]
    del config["adapter_config"]["vision_feature_layer"]
    write_checkpoint(tmp_path / "src", config, read_tensors(src))
    api.convert(tmp_path / "src", tmp_path / "out")
    have, want = (logits(made("molmo2"), tpuconv.load(folder)) for folder in (tmp_path / "out", out))
    assert np.array_equal(have, want)
    assert api.compare(tmp_path / "out", source=tmp_path / "src").passed


@pytest.mark.slow
def test_crops_of_molmo_must_have_the_patches_of_features(whole):
    case, model = made("molmo2"), tpuconv.load(whole("molmo2")[1])
    crops, pooled = case.features["pixel_values"], case.features["image_token_pooling"]
    for changed, fault in (
        ({"pixel_values": crops[:, 1:]}, r"crops of \(14, 48\), the model of 15 patches"),
        ({"pixel_values": crops[:3]}, r"the patch \d+, and the crops have 45"),
        ({"image_token_pooling": pooled[1:]}, "16 features, image_grids 17"),
    ):
        with pytest.raises(UsageError, match=fault):
            model.see(case.ids_BT, case.mask_BT, **{**case.features, **changed})


@pytest.mark.slow
def test_tiles_of_deepseek_ocr_must_have_their_grids(whole):
    case, model = made("deepseek_ocr"), tpuconv.load(whole("deepseek_ocr")[1])
    grids, counts = case.features["patches_grid"], case.features["num_local_patches"]
    assert grids.tolist() == [[3, 2], [1, 1], [1, 2]]
    for changed, fault in (
        ({"patches_grid": grids[:, :1] * [2, 2]}, r"columns and rows \[\[6, 6\], .* of \[6, 0, 2\] tiles"),
        ({"patches_grid": -grids}, "columns and rows"),
        ({"patches_grid": grids[:2]}, "columns and rows"),
        ({"num_local_patches": counts[::-1] + [0, 0, 1]}, "num_local_patches has 9 tiles of 3 images"),
    ):
        with pytest.raises(UsageError, match=fault):
            model.see(case.ids_BT, case.mask_BT, **{**case.features, **changed})
    missing = {name: x for name, x in case.features.items() if name != "patches_grid"}
    with pytest.raises(UsageError, match="the feature patches_grid is missing"):
        model.see(case.ids_BT, case.mask_BT, **missing)


def test_text_alone_is_what_it_was(whole, tmp_path):
    """Bit for bit, and the same program is compiled."""
    import jax

    src, out = whole("qwen3_vl")
    api.convert(src, tmp_path / "text", text_only=True)
    assert not read_manifest(tmp_path / "text").parts
    ids_BT, programs, found = jnp.asarray([[5, 9, 3, 11]]), [], []
    for folder in (out, tmp_path / "text"):
        model: Any = tpuconv.load(folder)
        for part in read_manifest(folder).parts:
            delattr(model, part)
        found.append(forward(model, ids_BT))
        graph, state = nnx.split(model)
        programs.append(jax.jit(lambda state, ids, graph=graph: nnx.merge(graph, state)(ids)).lower(state, ids_BT))
    assert (found[0] == found[1]).all()
    assert programs[0].as_text() == programs[1].as_text()


def test_features_that_do_not_fit_are_refused(whole):
    case, model = made("qwen3_vl"), tpuconv.load(whole("qwen3_vl")[1])
    patches, grids = case.features["pixel_values"], case.features["image_grid_thw"]
    with pytest.raises(UsageError, match=r"31 placeholders.*and the features of vision need 23"):
        model.see(case.ids_BT, case.mask_BT, pixel_values=patches[:92], image_grid_thw=grids[:2])
    with pytest.raises(UsageError, match="does not read the features input_features"):
        model.see(case.ids_BT, case.mask_BT, input_features=np.zeros(3))
    with pytest.raises(UsageError, match="image_grid_thw is missing"):
        model.see(case.ids_BT, case.mask_BT, pixel_values=patches)
    with pytest.raises(UsageError, match=r"vision cannot take features of these shapes: pixel_values \[124, 48\]"):
        model.see(case.ids_BT, case.mask_BT, pixel_values=patches[:, :48], image_grid_thw=grids)


def test_inputs_of_another_kind_are_refused(whole):
    case, model = made("gemma3"), tpuconv.load(whole("gemma3")[1])
    ids_BT, mask_BT, pixels = case.ids_BT, case.mask_BT, case.features["pixel_values"]
    for ids, mask in ((ids_BT[0], mask_BT[0]), (ids_BT, mask_BT[:, 1:])):
        with pytest.raises(UsageError, match="ids_BT has shape"):
            model.see(ids, mask, pixel_values=pixels)
    with pytest.raises(UsageError, match="not numbers"):
        model.see(ids_BT, mask_BT, pixel_values=pixels.astype(str))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hyperclovax_vision_v2", "paddleocr_vl", "gemma4_unified"])
def test_encoders_with_the_names_of_modules(name, whole, tmp_path):
    """`save_original_format=False` leaves names as the modules of transformers have them."""
    made(name).model.save_pretrained(tmp_path / "src", save_original_format=False)
    assert read_tensors(tmp_path / "src").keys() != read_tensors(whole(name)[0]).keys()
    api.convert(tmp_path / "src", tmp_path / "out")
    have, want = (tpuconv.load(folder) for folder in (tmp_path / "out", whole(name)[1]))
    assert np.array_equal(logits(made(name), have), logits(made(name), want))
    api.export(tmp_path / "out", tmp_path / "back")
    assert read_tensors(tmp_path / "back").keys() == read_tensors(tmp_path / "src").keys()


@pytest.mark.slow
def test_an_image_without_pixels_is_named(whole):
    case, model = made("smolvlm"), tpuconv.load(whole("smolvlm")[1])
    none = np.zeros_like(case.features["pixel_attention_mask"])
    with pytest.raises(UsageError, match="has no pixels of image 0"):
        model.see(case.ids_BT, case.mask_BT, **{**case.features, "pixel_attention_mask": none})


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGHTS)
def test_a_batch_without_images_or_sounds_has_no_features(name, whole):
    """Processors return arrays without rows for it."""
    case, model = made(name), tpuconv.load(whole(name)[1])
    with pytest.raises(UsageError, match="there are no features"):
        model.see(np.array([[5, 6]]), **{key: value[:0] for key, value in case.features.items()})


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gemma3" else [pytest.mark.slow]) for n in SIGHTS])
def test_encoders_run_on_explicit_meshes(name, whole):
    """Meshes of `jax.make_mesh` are explicit; a mesh of one device has the same types as a larger one."""
    case, mesh = made(name), jax.make_mesh((1,), ("tensor",))
    on_mesh, alone = (tpuconv.load(whole(name)[1], mesh=each) for each in (mesh, None))
    want = alone.see(case.ids_BT, case.mask_BT, **case.features)
    with jax.sharding.set_mesh(mesh):
        have = on_mesh.see(case.ids_BT, case.mask_BT, **case.features)
    assert difference(have.features_XD, np.asarray(want.features_XD)) < case.tolerance


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gemma3" else [pytest.mark.slow]) for n in SPELLED])
def test_a_layer_of_an_encoder_that_is_spelled_apart(name, whole, tmp_path):
    src, out = whole(name)
    tensors = {re.sub(SPELLED[name], r"model.\g<0>", each): tensor for each, tensor in read_tensors(src).items()}
    assert tensors.keys() != read_tensors(src).keys()
    write_checkpoint(tmp_path / "src", json.loads((src / "config.json").read_text()), tensors)
    api.convert(tmp_path / "src", tmp_path / "out")
    found, want = (read_manifest(folder).arrays for folder in (tmp_path / "out", out))
    assert {array: facts.xxh3 for array, facts in found.items()} == {array: facts.xxh3 for array, facts in want.items()}
    api.export(tmp_path / "out", tmp_path / "back")
    back = read_tensors(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(tensors[each], back[each]) for each in tensors)


@EACH
def test_a_comparison_has_images_and_sounds(name, whole, record_property):
    src, out = whole(name)
    for part, own in model_config(read_manifest(out)).parts.items():
        record_property("hears by" if part == "audio" else "sees by", own.modality.tower.summary)
    if name in OF_NO_TYPE:
        with pytest.raises(UnsupportedConfig, match=f"has no model of type '{OF_NO_TYPE[name]}'"):
            api.compare(out, source=src)
        return
    found = api.compare(out, source=src)
    assert tuple(found.unseen) == WITHOUT_EXAMPLES.get(name, ())
    assert [sight.part for sight in found.sights] == [p for p in made(name).parts if p not in found.unseen]
    assert found.passed
    if found.sights:
        record_property("features", max(sight.features for sight in found.sights))
    assert all(sight.features < 1e-5 for sight in found.sights)
    assert all(sight.items == 2 for sight in found.sights if (name, sight.part) not in OF_NO_IMAGE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGHTS)
def test_layers_are_compared_one_by_one_with_images_and_sounds(name, whole):
    """The numbers are those of the complete models."""
    src, out = whole(name)
    if model_config(read_manifest(out)).inseparable:
        with pytest.raises(UsageError, match="cannot be compared layer by layer"):
            api.compare(out, source=src, layerwise=True)
        return
    if name in OF_NO_TYPE:
        with pytest.raises(UnsupportedConfig, match=f"has no model of type '{OF_NO_TYPE[name]}'"):
            api.compare(out, source=src, layerwise=True)
        return
    found, complete = (api.compare(out, source=src, layerwise=layerwise) for layerwise in (True, False))
    assert found.passed
    assert found.unseen == complete.unseen
    assert [(sight.part, sight.items) for sight in found.sights] == [(s.part, s.items) for s in complete.sights]
    assert all(sight.features < 1e-5 for sight in found.sights)
    assert max(layer.own_error for layer in found.layers) < 1e-5


def test_a_broken_tower_is_seen(whole, tmp_path):
    """The text alone would be right."""
    src, out = whole("qwen3_vl")
    tensors = read_tensors(src)
    name = "model.visual.blocks.1.mlp.linear_fc1.bias"
    config = json.loads((src / "config.json").read_text())
    write_checkpoint(tmp_path / "src", config, {**tensors, name: tensors[name] + 1})
    found = api.compare(out, source=tmp_path / "src")
    assert found.statistics.passed
    assert found.failures[0].startswith("with vision: the error of the features is")
    with pytest.raises(GateError):
        found.check()


@EACH
def test_rules_for_all_layers_leave_towers_alone(name, whole, tmp_path):
    out = whole(name)[1]
    api.quantize(out, tmp_path / "int8", config="int8_default.yaml")
    plain, rounded = read_manifest(out).arrays, read_manifest(tmp_path / "int8").arrays
    parts = tuple(f"{part}." for part in made(name).parts)
    towers = {array: facts.xxh3 for array, facts in plain.items() if array.startswith(parts)}
    assert towers == {array: facts.xxh3 for array, facts in rounded.items() if array.startswith(parts)}
    assert plain.keys() != rounded.keys()
    assert np.isfinite(logits(made(name), tpuconv.load(tmp_path / "int8"))).all()


def test_a_trained_model_is_saved_whole(whole, tmp_path):
    out = whole("qwen3_vl")[1]
    model: Any = tpuconv.load(out)
    model.vision.patch.bias[...] += 1
    api.save(model, tmp_path / "saved", out)
    again: Any = tpuconv.load(tmp_path / "saved")
    assert (again.vision.patch.bias[...] == model.vision.patch.bias[...]).all()


SEMANTIC = "semantic_tokenizer_encoder_config"


@pytest.mark.parametrize(
    ("tower", "keys", "fault"),
    [
        (QWEN3_VIT, {"num_heads": 0}, "num_heads=0"),
        (GEMMA4_VIT, {"num_attention_heads": 12, "num_key_value_heads": 5}, "no multiple of 5"),
        (GEMMA4_VIT, {"hidden_size": -1}, "hidden_size=-1 is negative"),
        (USM, {"attention_chunk_size": 10}, "attention_chunk_size=10"),
        (VOXTRAL_WHISPER, {"intermediate_size": 5000}, "intermediate_size=5000"),
        (QWEN3_AUDIO, {"n_window": 40}, "n_window=40"),
        (LLAMA4_VIT, {"hidden_size": 1408, "patch_size": 0}, "patch_size=0"),
        (MOONVIT, {"merge_kernel_size": [2, 3]}, "merge_kernel_size"),
        (MOONVIT2, {"qkv_hidden_size": 1000}, "qkv_hidden_size=1000"),
        (MUSE_VIT, {"layer_types": ["full_attention"]}, "layer_types"),
        (MUSE_AUDIO_ENCODER, {"depths": [1, 0, 2, 2]}, "depths"),
        (SANM, {"num_attention_heads": 0}, "num_attention_heads=0"),
        (FOLDING_MLP, {"patch_size": 0}, "(2, 0, 3) frames"),
        (FOLDING_MLP, {"n_layers": 65}, "num_hidden_layers=65"),
        (CONFORMER, {"context_size": 513}, "context_size=513"),
        (CONFORMER, {"cat_hidden_layers": [10]}, "cat_hidden_layers has 10"),
        (MOLMO_VIT, {"image_default_input_size": [378]}, "image_size=[378]"),
        (MOLMO_VIT, {"num_key_value_heads": 5}, "no multiple of num_key_value_heads=5"),
        (WAV2VEC2, {"conv_stride": [5, 2]}, "'conv_stride': 2"),
        (WAV2VEC2, {"conv_kernel": [10, 3, 3, 3, 3, 2, 0]}, "no taps"),
        (WAV2VEC2, {"num_conv_pos_embeddings": 127}, "num_conv_pos_embeddings=127 is odd"),
        (WAV2VEC2, {"num_attention_heads": 15}, "no multiple of num_attention_heads=15"),
        (VIBEVOICE, {"acoustic_tokenizer_chunk_size": 5000}, "no multiple of 3200 samples"),
        (VIBEVOICE, {SEMANTIC: {"downsampling_ratios": [2, 2, 4, 5, 5, 9]}}, "3200 samples in one encoder, of 3600"),
        (VIBEVOICE, {SEMANTIC: {"depths": [3]}}, "depths=[3] are not of 7 stages"),
        (VIBEVOICE, {SEMANTIC: {"downsampling_ratios": []}}, "1 to 12 positive numbers"),
    ],
)
def test_configs_of_encoders_that_contradict_themselves(tower, keys, fault):
    with pytest.raises(ConfigError) as caught:
        tower.config.from_hf(keys)
    assert any(fault in detail for detail in caught.value.details)


def test_values_of_encoders_that_are_not_implemented():
    with pytest.raises(UnsupportedConfig, match="attention_context_right=2"):
        USM.config.from_hf({"attention_context_right": 2})


HIERA = replace(get_family("llava.llama").modalities[0], tower_types=("hiera",))


def test_other_packages_register_encoders(whole, tmp_path, monkeypatch):
    """One of a type that the family does not know."""
    src, out = whole("llava")
    config = json.loads((src / "config.json").read_text())
    config["vision_config"]["model_type"] = "hiera"
    write_checkpoint(tmp_path / "src", config, read_tensors(src))
    points = [EntryPoint("llava.llama", f"{__name__}:HIERA", registry.MODALITIES)]
    points.append(EntryPoint("llava.qwen2", "math:pi", registry.MODALITIES))
    points.append(EntryPoint("gemma3", "no_such_module:VISION", registry.MODALITIES))
    with pytest.raises(UnsupportedConfig, match="type 'hiera' is not implemented"):
        api.convert(tmp_path / "src", tmp_path / "out")
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.MODALITIES else [])
    registry._modality_points.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"is not a tpuconv\.models\.common\.beside\.Modality"):
            get_family("llava.qwen2")
        with pytest.raises(UsageError, match="for the family 'gemma3' cannot be imported from no_such_module"):
            get_family("gemma3")
        api.convert(tmp_path / "src", tmp_path / "out")
        have, want = (logits(made("llava"), tpuconv.load(folder)) for folder in (tmp_path / "out", out))
        assert np.array_equal(have, want)
        api.export(tmp_path / "out", tmp_path / "back")
        assert read_tensors(tmp_path / "back").keys() == read_tensors(tmp_path / "src").keys()
    finally:
        registry._modality_points.cache_clear()


def test_another_tower_is_refused():
    """With the way to convert the text model alone."""
    modalities = get_family("llava.llama").modalities
    with pytest.raises(UnsupportedConfig, match="encoder of the type 'hiera'") as caught:
        modality_of(modalities, "vision", {"vision_config": {"model_type": "hiera"}})
    assert "text_only" in str(caught.value.hint)
    outer = {"vision_config": {"num_hidden_layers": 3}, "vision_feature_layer": [-9, 1]}
    with pytest.raises(ConfigError, match=r"no hidden states \[-9\], it has 4"):
        modalities[0].read(outer, SimpleNamespace(hidden_size=8))
    with pytest.raises(UnsupportedConfig, match="projector_hidden_act='mish'"):
        modalities[0].read({"projector_hidden_act": "mish"}, SimpleNamespace(hidden_size=8))

"""Encoders of images and sounds for other programs: the names and shapes that MaxText lists, the way back, and what
MaxText's and Tunix's own modules compute from our arrays beside our own encoders. Those tests are slow: they make
environments of Python 3.12 and 3.11."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.conversions import flatten, same_bits
from helpers.families import Case
from helpers.maxtext_settings import settings
from helpers.oracles import ask
from helpers.sights import SIGHTS, TEXT, Sight, noise, tiny
from helpers.trainers import save_standard, trained_tree
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UnsupportedConfig
from tpuconv.models.registry import find_family
from tpuconv.names import expand
from tpuconv.notation.sizes import configs_by_part
from tpuconv.targets.compose import target_table
from tpuconv.targets.listing import supported
from tpuconv.targets.registry import get_target
from tpuconv.targets.trees import placed_parts

WITH_TREES = ("maxtext", "tunix", "jax-llm-examples")
LISTED = json.loads((Path(__file__).parent / "helpers" / "maxtext_whole.json").read_text())


# -- names and shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", LISTED)
def test_names_and_shapes_of_whole_models_are_those_of_maxtext(model):
    raw, target = LISTED[model]["config"], get_target("maxtext")
    family = find_family(raw)
    own = family.in_targets(raw["model_type"])

    def read(parts):
        return family.read_config(raw, parts=parts)

    parts = placed_parts(target, *own, [each.part for each in family.modalities], read)
    whole = read(parts)
    table, config = target_table(target, *own, family.table_without_release(parts=whole.parts), whole)
    shapes = {name: shape for binding in table.bind(config) for name, shape in binding.dst_shapes().items()}
    expected = {
        "params.params." + name.partition("-")[2].replace("-", "."): tuple(shape)
        for pattern, shape in LISTED[model]["whole"]
        for name in expand(pattern)
    }
    if model.startswith("gemma3"):  # MaxText cuts the vocabulary
        expected["params.params.token_embedder.embedding"] = (config.vocab_size, config.hidden_size)
    assert shapes == expected


def test_targets_list_their_encoders():
    found = {name: supported(get_target(name)) for name in WITH_TREES}
    assert not [each for several in found.values() for each in several if len(set(each.notes)) < len(each.notes)]
    listed = {name: {each.name: each.parts for each in families if each.parts} for name, families in found.items()}
    images = ("gemma3", "gemma4", "llama4", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe")
    maxtext = {**dict.fromkeys(images, ("vision",)), "qwen3_omni_moe": ("vision", "audio")}
    assert listed == {"maxtext": maxtext, "tunix": {"gemma3": ("vision",)}, "jax-llm-examples": {}}


# -- the way back -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> Callable[[str], Path]:
    """The folder of a tiny model of the tests of images and sounds."""

    def save(name: str) -> Path:
        SIGHTS[name]().model.save_pretrained(tmp_path / "hf")
        return tmp_path / "hf"

    return save


def assert_back(source: Path, folder: Path) -> None:
    tensors, back = read_tensors(source), read_tensors(folder)
    assert tensors.keys() == back.keys()
    assert not [name for name in tensors if not same_bits(tensors[name], back[name])]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_vl",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_vl_moe", "qwen3_omni_moe", "llama4")),
    ],
)
def test_every_tensor_comes_back_from_maxtext(name, saved, tmp_path):
    """Also from what MaxText saved, without a manifest of tpuconv."""
    source = saved(name)
    api.convert(source, tmp_path / "out", target="maxtext")
    assert set(read_manifest(tmp_path / "out").parts) == set(SIGHTS[name]().parts)
    api.export(tmp_path / "out", tmp_path / "back")
    assert_back(source, tmp_path / "back")
    save_standard(tmp_path / "run", trained_tree(tmp_path / "out"))
    done = api.export(tmp_path / "run", tmp_path / "again", config=source)
    assert (done.target, done.skipped) == ("maxtext", ())
    assert_back(source, tmp_path / "again")


@pytest.mark.slow
def test_layers_are_stacked_beside_an_encoder(saved, tmp_path):
    source = saved("qwen3_5_moe")
    api.convert(source, tmp_path / "out", target="maxtext", scan_layers=True)
    assert read_manifest(tmp_path / "out").parts == ("vision",)
    api.export(tmp_path / "out", tmp_path / "back")
    assert_back(source, tmp_path / "back")


def test_layers_that_take_features_of_images_are_not_stacked_for_maxtext(saved, tmp_path):
    source = saved("qwen3_vl")
    with pytest.raises(UnsupportedConfig, match="maxtext has no stacked layers beside the vision of this") as error:
        api.convert(source, tmp_path / "out", target="maxtext", scan_layers=True)
    assert "text_only" in str(error.value.hint)
    plan = api.plan(source, target="maxtext", scan_layers=True, text_only=True).plan
    assert {skip.reason for skip in plan.skipped} == {"vision encoder: the text model alone is converted"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_with_sound"])
def test_without_the_encoder_of_a_model_the_text_is_converted(name, tmp_path):
    """MaxText has Gemma's encoders without a head, without limits, and with as many heads of keys as of queries."""
    other = SIGHTS[name]().model
    raw = json.loads(other.config.to_json_string())
    kinds = [*["sliding_attention"] * 5, "full_attention"]  # as MaxText has them
    raw["text_config"] |= {"num_hidden_layers": 6, "layer_types": kinds, "per_layer_config": None}
    tiny(type(other), type(other.config).from_dict(raw)).save_pretrained(tmp_path / "hf")
    plan = api.plan(tmp_path / "hf", target="maxtext").plan
    assert not configs_by_part(plan.config).keys() - {""}
    assert any("the text model alone is converted" in skip.reason for skip in plan.skipped)


# -- what other programs compute --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seer:
    """A tiny model with the sizes that another program takes.

    Attributes:
        model: of transformers.
        features: for our encoders.
        given: the same for MaxText's, by part.
        settings: MaxText's.
        tolerance: of features, by the largest.
    """

    model: Any
    features: Mapping[str, np.ndarray]
    given: Mapping[str, np.ndarray]
    settings: Mapping[str, object]
    tolerance: float = 5e-5


def sized(
    family: str, model: Any, name: str, keys: Mapping[str, Any] | None = None, **vit: object
) -> dict[str, object]:
    """MaxText's settings of a whole model; `keys` are those of its text model that transformers does not keep."""
    text = deepcopy(model.config.get_text_config())
    text.tie_word_embeddings = getattr(model.config, "tie_word_embeddings", False)
    own = settings(Case("", family, family, keys or {}), text)
    vision = {f"{key}_for_vit": str(value).replace(" ", "") for key, value in vit.items()}
    common = {"model_name": name, "use_multimodal": "true", "scan_layers": "false", "dtype_mm": "float32"}
    return {**own, **common, "attention_for_vit": "dot_product", **vision}


def gemma3(sliding_window: int = 6) -> Seer:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": sliding_window}
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 128,
        "patch_size": 4,
        "vision_use_head": False,
    }
    model = tiny(Gemma3ForConditionalGeneration, Gemma3Config(text_config=text, vision_config=vision))
    pixels_BCYX = noise(2, 3, 128, 128)
    sizes = {**{key: vision[key] for key in list(vision)[:-1]}, "conv_stride": 4}
    given = {"vision": pixels_BCYX.transpose(0, 2, 3, 1)[:, None]}
    return Seer(model, {"pixel_values": pixels_BCYX}, given, sized("gemma3_text", model, "gemma3-4b", **sizes))


def gemma4() -> Seer:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    from helpers.sights_sounds import GEMMA4_TOKENS, gemma4_text, limited, placed

    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 16,
        "standardize": True,
    }
    layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    text = gemma4_text(**layers, hidden_size_per_layer_input=0, attention_k_eq_v=True, final_logit_softcapping=30.0)
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **GEMMA4_TOKENS)
    model = limited(tiny(Gemma4ForConditionalGeneration, config))
    pixels_BYXC = np.random.default_rng(4).random((2, 24, 48, 3)).astype(np.float32)
    patches = pixels_BYXC.reshape(2, 6, 4, 12, 4, 3).swapaxes(2, 3).reshape(2, 72, 48)
    features = {"pixel_values": patches, "image_position_ids": placed((6, 12), (6, 12), patches=72)}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    sizes = {name: vision[name] for name in names}
    own = sized("gemma4_text", model, "gemma4-31b", text, **sizes, conv_stride=4, num_position_embeddings=16)
    own |= {"image_size_for_vit": "[24,48]", "vision_output_length": 8}
    return Seer(model, features, {"vision": pixels_BYXC[:, None]}, own)


def llama4() -> Seer:
    model = SIGHTS["llama4"]().model
    pixels_BCYX = noise(2, 3, 24, 24)
    vision = model.config.vision_config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    sizes = {name: getattr(vision, name) for name in (*names, "projector_input_dim", "projector_output_dim")}
    own = sized("llama4_text", model, "llama4-17b-16e", **sizes, tile_size=24, vision_output_dim=40)
    return Seer(model, {"pixel_values": pixels_BCYX}, {"vision": pixels_BCYX[None]}, own)


def qwen(family: str, model: Any, name: str, **more: Any) -> Seer:
    """A model with the tower of Qwen3-VL. MaxText's activations are approximations."""
    vision = model.config.thinker_config.vision_config if "omni" in name else model.config.vision_config
    grid = np.array([(1, 6, 10)] * 2)
    patches = noise(120, 3 * 2 * 4 * 4)
    names = ("hidden_size", "intermediate_size", "patch_size", "temporal_patch_size", "spatial_merge_size")
    sizes = {
        **{name: getattr(vision, name) for name in (*names, "out_hidden_size", "num_position_embeddings")},
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.num_heads,
        "deepstack_visual_indexes": list(getattr(vision, "deepstack_visual_indexes", [])),
        "image_size": 40,
    }
    features = {"pixel_values": patches, "image_grid_thw": grid, **more.get("features", {})}
    given = {"vision": patches.reshape(2, 3, 2, 24, 40), **more.get("given", {})}
    sections = model.config.get_text_config().rope_parameters["mrope_section"]
    own = sized(family, model, name, **sizes) | {"mrope_section": str(sections).replace(" ", "")}
    own |= more.get("settings", {})
    return Seer(model, features, given, own, tolerance=5e-4)


def qwen3_omni_moe() -> Seer:
    model = SIGHTS["qwen3_omni_moe"]().model
    audio = model.config.thinker_config.audio_config
    sound = noise(1, 10, 100, seed=3)  # one chunk: MaxText's attention does not go beyond it
    sizes = {
        "use_audio": "true",
        "d_model_for_audio": audio.d_model,
        "encoder_layers_for_audio": audio.encoder_layers,
        "encoder_attention_heads_for_audio": audio.encoder_attention_heads,
        "encoder_ffn_dim_for_audio": audio.encoder_ffn_dim,
        "num_mel_bins_for_audio": audio.num_mel_bins,
        "downsample_hidden_size_for_audio": audio.downsample_hidden_size,
        "output_dim_for_audio": audio.output_dim,
        "n_window_for_audio": audio.n_window,
    }
    features = {"input_features": sound, "feature_attention_mask": np.ones((1, 100), bool)}
    more = {"features": features, "given": {"audio": sound}, "settings": sizes}
    return qwen("qwen3_moe", model, "qwen3-omni-30b-a3b", **more)


SEERS: Mapping[str, Callable[[], Seer]] = {
    "gemma3": gemma3,
    "gemma4": gemma4,
    "llama4": llama4,
    "qwen3_vl": lambda: qwen("qwen3", SIGHTS["qwen3_vl"]().model, "qwen3-vl-2b"),
    "qwen3_vl_moe": lambda: qwen("qwen3_moe", SIGHTS["qwen3_vl_moe"]().model, "qwen3-vl-30b-a3b"),
    "qwen3_5_moe": lambda: qwen("qwen3_5_moe_text", SIGHTS["qwen3_5_moe"]().model, "qwen3.5-35b-a3b"),
    "qwen3_omni_moe": qwen3_omni_moe,
}


def our_features(folder: Path, features: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of our own encoders by part, and those for the first layers of the text."""
    model: Any = tpuconv.load(folder)
    out = {}
    for part in read_manifest(folder).parts:
        encoder = getattr(model, part)
        prepared = encoder.prepare({name: features[name] for name in encoder.takes if name in features})
        values, deep = encoder(*prepared.arrays)
        named = {part: values} | {f"deep_{i}": each for i, each in enumerate(deep)}
        out |= {name: np.asarray(x).reshape(-1, x.shape[-1])[prepared.rows] for name, x in named.items()}
    return out


@pytest.fixture(scope="module")
def encoded(tmp_path_factory) -> Callable[[str], tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]]:
    """For each model MaxText's features and ours, and the tolerance."""
    base = tmp_path_factory.mktemp("maxtext")
    requests, ours = [], {}
    for name, make in SEERS.items():
        seer, folder = make(), base / name
        seer.model.save_pretrained(folder / "hf")
        api.convert(folder / "hf", folder / "own")
        api.convert(folder / "hf", folder / "out", target="maxtext")
        ours[name] = our_features(folder / "own", seer.features), seer.tolerance
        np.savez(folder / "given.npz", **seer.given)
        files = {"items": folder / "out" / "0" / "items", "features": folder / "given.npz", "out": folder / "out.npz"}
        requests.append({key: str(path) for key, path in files.items()} | {"settings": seer.settings})
    ask("maxtext", "maxtext_models.py", requests)

    def found(name: str):
        path = base / name / "out.npz"
        error = path.with_suffix(".error")
        assert not error.exists(), error.read_text()
        theirs = {key: values.reshape(-1, values.shape[-1]) for key, values in np.load(path).items()}
        return theirs, *ours[name]

    return found


@pytest.mark.slow
@pytest.mark.oracles
@pytest.mark.parametrize("name", SEERS)
def test_maxtext_computes_our_features(name, encoded):
    theirs, ours, tolerance = encoded(name)
    assert theirs.keys() == ours.keys()
    for part, values in ours.items():
        assert np.abs(theirs[part] - values).max() / np.abs(values).max() < tolerance, part


@pytest.mark.slow
@pytest.mark.oracles
def test_maxtext_computes_the_logits_of_texts_with_images(tmp_path):
    """Of Gemma 3, whose window is longer than an image: MaxText's masks of images do not have the window."""
    import torch

    seer = gemma3(sliding_window=400)
    placeholder = seer.model.config.image_token_id
    rows = [[5, 9, 3, *[placeholder] * 256, 11, 7], [8, *[placeholder] * 256, 4, 6, 2, 9]]
    ids_BT = np.array(rows)
    seer.model.save_pretrained(tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out", target="maxtext")
    np.save(tmp_path / "ids.npy", ids_BT)
    np.save(tmp_path / "images.npy", seer.given["vision"])
    files = {"items": "out/0/items", "ids": "ids.npy", "images": "images.npy", "out": "logits.npy"}
    own = seer.settings | {"max_target_length": ids_BT.shape[1], "sliding_window_size": 400}
    ask(
        "maxtext",
        "maxtext_models.py",
        [{key: str(tmp_path / path) for key, path in files.items()} | {"settings": own}],
    )
    error = tmp_path / "logits.error"
    assert not error.exists(), error.read_text()
    factor = seer.model.config.text_config.hidden_size**0.5
    head = (seer.model.lm_head.weight * factor).bfloat16().float() / factor  # as MaxText computes tied logits
    seer.model.lm_head.weight = torch.nn.Parameter(head)
    case = Sight(seer.model, rows, seer.features, {"token_type_ids": {placeholder: 1}})
    want = case.reference(ids_BT, case.mask_BT, seer.features)
    assert np.abs(np.load(tmp_path / "logits.npy") - want).max() / np.abs(want).max() < 5e-5


@pytest.mark.slow
@pytest.mark.oracles
def test_tunix_restores_an_encoder_and_computes_our_features(tmp_path):
    """Every array, bit for bit."""
    import orbax.checkpoint as ocp

    seer, text = gemma3(), {}
    seer.model.save_pretrained(tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "own")
    api.convert(tmp_path / "hf", tmp_path / "out", target="tunix")
    config = seer.model.config.text_config
    text = {
        "num_layers": config.num_hidden_layers,
        "num_embed": config.vocab_size,
        "embed_dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_key_value_heads,
        "sliding_window_size": config.sliding_window,
        "param_dtype": "float32",
    }
    vision = seer.model.config.vision_config
    images = {
        "num_mm_tokens_per_image_prepool": 1024,
        "image_height": vision.image_size,
        "image_width": vision.image_size,
        "patch_size": [vision.patch_size] * 2,
        "width": vision.hidden_size,
        "depth": vision.num_hidden_layers,
        "mlp_dim": vision.intermediate_size,
        "num_heads": vision.num_attention_heads,
    }
    np.save(tmp_path / "images.npy", seer.given["vision"])
    request = {
        "root": str(tmp_path / "out"),
        "images": str(tmp_path / "images.npy"),
        "out": str(tmp_path / "restored.npz"),
        "module": "tunix.models.gemma3.model",
        "model": "Gemma3",
        "settings": text | {"vision_config": images},
    }
    ask("tunix", "tunix_models.py", [request])
    error = tmp_path / "restored.error"
    assert not error.exists(), error.read_text()
    theirs = dict(np.load(tmp_path / "restored.npz"))
    features, ours = theirs.pop("features"), our_features(tmp_path / "own", seer.features)["vision"]
    assert np.abs(features.reshape(ours.shape) - ours).max() / np.abs(ours).max() < 5e-5
    with ocp.StandardCheckpointer() as checkpointer:
        written = dict(flatten(checkpointer.restore(tmp_path / "out" / "0" / "model_params")))
    assert {f"{name}.value" for name in theirs} == written.keys()
    assert not [name for name, values in theirs.items() if not same_bits(values, written[f"{name}.value"])]
    api.export(tmp_path / "out", tmp_path / "back")
    assert_back(tmp_path / "hf", tmp_path / "back")

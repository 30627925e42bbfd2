"""Encoders of timm: the settings of releases, and what is refused of Perception LM and FastVLM."""

from typing import Any

import pytest

from tpuconv import api
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig
from tpuconv.models.registry import find_family
from tpuconv.models.towers.fastvit.family import FASTVIT
from tpuconv.notation.table import MappingTable

ARGS = {"global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1, "img_size": [448, 448]}
LARGE = {"architecture": "vit_pe_core_large_patch14_336", "model_args": ARGS}
GIGANTIC = {"architecture": "vit_pe_core_gigantic_patch14_448", "model_args": ARGS}


FAST = {"architecture": "fastvit_mci3", "hidden_size": 3072, "model_args": {"inference_mode": True}}


def read(vision: dict[str, Any], model_type: str = "perception_lm", text: str = "llama", **keys: Any) -> Any:
    outer = {"model_type": model_type, "vision_config": vision, "text_config": {"model_type": text}, **keys}
    return find_family(outer).read_config(outer, parts=("vision",)).parts["vision"]


def test_the_settings_of_releases() -> None:
    large, gigantic = read(LARGE, projector_pooling_ratio=2), read(GIGANTIC, vision_use_cls_token=False)
    assert [large.sizes[letter] for letter in "DFHLP"] == [1024, 4096, 64, 24, 1025]
    assert [gigantic.sizes[letter] for letter in "DFHLP"] == [1536, 8960, 96, 50, 1024]


def with_args(**changes: Any) -> dict[str, Any]:
    return {**LARGE, "model_args": {**ARGS, **changes}}


@pytest.mark.parametrize(
    ("vision", "keys", "kind", "fault"),
    [
        ({"architecture": "vit_base"}, {}, UnsupportedConfig, "architecture='vit_base'"),
        (with_args(num_reg_tokens=4), {}, UnsupportedConfig, "model_args={'num_reg_tokens': 4}"),
        (with_args(global_pool="map"), {}, UnsupportedConfig, "global_pool='map'"),
        (with_args(ref_feat_shape=[24, 24]), {}, ConfigError, "ref_feat_shape=[24, 24], and images have 32 x 32"),
        (with_args(img_size=[448, 336]), {}, UnsupportedConfig, "img_size=[448, 336]"),
        (LARGE, {"vision_use_cls_token": False}, ConfigError, "vision_use_cls_token=False, and the encoder has class"),
        (LARGE, {"projector_pooling_ratio": 3}, UnsupportedConfig, "projector_pooling_ratio=3 of 32 x 32 patches"),
        (LARGE, {"projector_pooling_ratio": 0}, UnsupportedConfig, "projector_pooling_ratio=0"),
    ],
)
def test_what_is_not_implemented_is_refused(
    vision: dict[str, Any], keys: dict[str, Any], kind: type[TpuconvError], fault: str
) -> None:
    with pytest.raises(kind) as caught:
        read(vision, **keys)
    assert fault in "\n".join([caught.value.message, *caught.value.details])


def read_fast(**keys: Any) -> Any:
    return read({**FAST, "model_args": {**FAST["model_args"], **keys.pop("args", {})}}, "fast_vlm", "qwen2", **keys)


def test_fastvit_has_the_parameters_of_timm() -> None:
    from helpers.timm_models import with_timm

    with_timm()
    import timm

    config = read_fast()
    rows = MappingTable(FASTVIT.rows).bind(config)
    have = {name: shape for row in rows for name, shape in row.src_shapes().items()}
    want = timm.create_model("fastvit_mci3", num_classes=0, inference_mode=True).state_dict()
    assert have == {name: tuple(x.shape) for name, x in want.items()}


def test_no_number_of_layers_takes_memory() -> None:
    found = read_fast(args={"layers": [10**9] * 5})
    assert sum(map(len, found.layer_sets.values())) == 5 * 10**9


@pytest.mark.parametrize(
    ("keys", "kind", "fault"),
    [
        ({"args": {"inference_mode": False}}, UnsupportedConfig, "inference_mode=False"),
        ({"args": {"mlp_ratios": [3] * 5}}, UnsupportedConfig, "model_args={'mlp_ratios': [3, 3, 3, 3, 3]}"),
        ({"args": {"layers": [1, 2]}}, ConfigError, "layers=[1, 2] are not 5 positive numbers"),
        ({"args": {"embed_dims": [8, 12, 32, 64, 1536]}}, ConfigError, "each must be a multiple of the one before"),
        ({"args": {"embed_dims": [8, 16, 24, 48, 1536]}}, ConfigError, "stage 3 is no multiple of 32"),
        ({"args": {"embed_dims": [8, 16, 32, 64, 128]}}, ConfigError, "hidden_size=3072 is not twice the last"),
        ({"vision_feature_layer": -2}, UnsupportedConfig, "vision_feature_layer=-2"),
        ({"vision_feature_select_strategy": "default"}, UnsupportedConfig, "vision_feature_select_strategy='default'"),
    ],
)
def test_what_is_not_implemented_of_fastvit_is_refused(
    keys: dict[str, Any], kind: type[TpuconvError], fault: str
) -> None:
    with pytest.raises(kind) as caught:
        read_fast(**keys)
    assert fault in "\n".join([caught.value.message, *caught.value.details])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"), [("gemma3n", ("vision", "audio")), ("perception_lm", ("vision",)), ("fast_vlm", ("vision",))]
)
def test_without_timm_the_text_alone_is_compared(
    name: str, parts: tuple[str, ...], whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out = whole(name)
    monkeypatch.setattr("transformers.utils.is_timm_available", lambda: False)
    for layerwise in (False,) if name == "gemma3n" else (False, True):  # whose layers pass on several streams
        found = api.compare(out, source=src, layerwise=layerwise)
        assert found.passed
        assert not found.sights
        assert found.unseen == dict.fromkeys(
            parts, "transformers needs the packages timm and torchvision to read its encoder of images"
        )

"""Encoders and projectors of Perception LM that are refused."""

from typing import Any

import pytest

from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig
from tpuconv.models.registry import find_family

ARGS = {"global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1, "img_size": [448, 448]}
LARGE = {"architecture": "vit_pe_core_large_patch14_336", "model_args": ARGS}
GIGANTIC = {"architecture": "vit_pe_core_gigantic_patch14_448", "model_args": ARGS}


def read(vision: dict[str, Any], **keys: Any) -> Any:
    outer = {"model_type": "perception_lm", "vision_config": vision, "text_config": {"model_type": "llama"}, **keys}
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

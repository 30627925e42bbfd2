"""The arguments with which transformers makes an encoder of timm."""

from collections.abc import Collection, Mapping
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.common.key_types import object_of


def timm_args(raw: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns `model_args` of a `vision_config`, what timm's `create_model` is called with.

    Raises:
        UnsupportedConfig: some have other names than the `known` ones.
        ConfigError: it is not an object.
    """
    args = dict(object_of(raw, "model_args"))
    if unknown := {name: value for name, value in args.items() if name not in known}:
        raise UnsupportedConfig(f"model_args={short(unknown)} of an encoder is not implemented", hint=TEXT_ALONE)
    return args

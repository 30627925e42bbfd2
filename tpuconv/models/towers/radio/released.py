"""The config of RADIO in releases with its authors' code: `args` of a training program, by which the code builds it."""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.common.key_types import object_of

WIDTHS = {
    "vit_small_patch16_224": (384, 12, 6),
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch16_224": (1024, 24, 16),
    "vit_huge_patch16_224": (1280, 32, 16),
}
"""By the name of timm: width, layers and heads. The MLPs are four times as wide."""


def in_keys_of_radio(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `vision_config` in the keys of transformers, which win over `args`.

    Raises:
        ConfigError: a value in `args` has a wrong type.
        UnsupportedConfig: `args` name another model, or a norm behind its last layer.
    """
    args = object_of(vision, "args")
    found: dict[str, Any] = {}
    if (model := args.get("model")) is not None:
        if not isinstance(model, str) or model not in WIDTHS:
            raise UnsupportedConfig(f"vision_config.args.model={short(model)} is not implemented", hint=TEXT_ALONE)
        found |= dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads"), WIDTHS[model], strict=True))
    if args.get("model_norm"):
        raise UnsupportedConfig("vision_config.args.model_norm=true is not implemented", hint=TEXT_ALONE)
    if (side := args.get("cpe_max_size")) is not None:
        found["max_img_size"] = side
    if "teachers" in args:
        found |= _first_tokens(args)
    return {**vision, **{key: value for key, value in found.items() if vision.get(key) is None}}


def _first_tokens(args: Mapping[str, Any]) -> dict[str, Any]:
    """The learned tokens before patches: one for each teacher, or one for all, and registers, so many or up to the next
    multiple of a number."""
    teachers = args["teachers"]
    if not isinstance(teachers, list) or not all(isinstance(each, Mapping) and "name" in each for each in teachers):
        raise ConfigError(f"config.json: vision_config.args.teachers={short(teachers)} are no objects with names")
    multiple, registers = (args.get(key) or 0 for key in ("register_multiple", "cpe_num_registers"))
    if not all(type(number) is int and number >= 0 for number in (multiple, registers)):
        raise ConfigError(
            f"config.json: vision_config.args have register_multiple={short(multiple)} and "
            f"cpe_num_registers={short(registers)}, not numbers of tokens"
        )
    names = [str(each["name"]) for each in teachers]
    classes = len(set(names)) if args.get("cls_token_per_teacher") else 1
    found = {"num_cls_tokens": classes, "num_registers": registers or (multiple and multiple - classes % multiple)}
    if args.get("cls_token_per_teacher"):
        found["summary_idxs"] = [i for i, each in enumerate(teachers) if each.get("use_summary", True)]
    return found

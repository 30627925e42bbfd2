"""timm without torchvision, of which it imports much and its models use nothing. Wheels of torchvision work with torch
of the same build alone, so that timm is installed without what it requires."""

import sys
from functools import cache
from importlib import import_module
from unittest.mock import MagicMock

import pytest

IMPORTED = ("ops.misc", "transforms.functional", "datasets", "models.feature_extraction")
"""The modules of torchvision that timm imports."""

IMPORTING = (
    "timm_wrapper.modeling_timm_wrapper",
    "timm_wrapper.configuration_timm_wrapper",
    "gemma3n.configuration_gemma3n",
)
OF_CONFIGS = ("ImageNetInfo", "infer_imagenet_subset")
"""Modules of transformers that import timm, and what they import of it."""


@cache
def with_timm() -> None:
    """Makes transformers find timm in this process, and no torchvision. Skips the test where there is no timm."""
    import torch
    from transformers.utils import import_utils

    if import_utils.is_timm_available():
        return
    names = {".".join(["torchvision", *path.split(".")[:n]]) for path in IMPORTED for n in range(3)}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, MagicMock(__spec__=None))
        sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = torch.nn.Identity  # type: ignore[attr-defined]
        timm = pytest.importorskip("timm")
        import_module("timm.data")
    import_utils.is_timm_available.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_torchvision_available", lambda: True)
        assert import_utils.is_timm_available()
    for name in IMPORTING:
        module = import_module(f"transformers.models.{name}")  # which another test may have imported without timm
        vars(module).update(timm=timm, **{each: getattr(timm.data, each) for each in OF_CONFIGS})

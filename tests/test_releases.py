"""Public checkpoints: config.json, names and size as their indices have them."""

import json
from math import prod
from pathlib import Path

import pytest

from tpuconv.models.registry import find_family
from tpuconv.names import expand
from tpuconv.sources.headers import TensorInfo

RELEASES = json.loads((Path(__file__).parent / "data" / "releases.json").read_text())
"""Of each the parsed config.json, the patterns of its names, and the size of all tensors in bytes; 0 where its index
says none."""
OTHER_SIZE = {
    "minimax-m1": "some tensors are in float32",
    "deepseek-ocr-2": "the index says 1 MB more than all its tensors have in two bytes a number",
}
"""Checkpoints whose size is not compared, and why."""


@pytest.mark.parametrize("name", RELEASES)
def test_each_tensor_is_read_and_has_its_size(name):
    release = RELEASES[name]
    names = {each for pattern in release["names"] for each in expand(pattern)}
    tensors = {each: TensorInfo(each, "BF16", (1,), "model.safetensors", 0, 2) for each in names}
    family = find_family(release["config"])
    returns = family.returns(release["config"], tensors)
    parts = family.parts_among(tensors)
    config = family.check_config(release["config"], (), tensors, returns, parts).config
    table, has_mtp = family.table_for(tensors, config, returns), any("mtp" in each for each in names)
    shapes = {each: shape for row in table.bind(config, has_mtp) for each, shape in row.src_shapes().items()}
    shapes |= {copy: shapes[original] for copy, original in table.copies_of(config).items() if copy in names}
    assert shapes.keys() == names
    if release["bytes"] and name not in OTHER_SIZE:
        assert 2 * sum(map(prod, shapes.values())) == release["bytes"]

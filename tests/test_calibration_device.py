"""A calibration computes on jax's default device: an accelerator, where there is one."""

import os
import subprocess
import sys

import pytest

from helpers.commands import EXAMPLE

WATCHED = """
import sys
import jax
from tpuconv import api
from tpuconv.quantize.calibrate.layers import LayerRunner

devices, seen = set(), set()

def watched(name, method):
    def call(*args, **kwargs):
        found = method(*args, **kwargs)
        seen.add(name)
        arrays = [x for x in jax.tree.leaves((args, kwargs, found)) if isinstance(x, jax.Array)]
        devices.update(device.id for array in arrays for device in array.devices())
        return found
    return call

for name in ("read", "_read_input", "logits_weights"):
    setattr(LayerRunner, name, watched(name, getattr(LayerRunner, name)))
plan = LayerRunner.__init__
def init(self, *args):
    plan(self, *args)
    for name in ("_run", "_pull", "_observe", "_largest", "_pull_logits"):
        setattr(self, name, watched(name, getattr(self, name)))
LayerRunner.__init__ = init
source, config, out = sys.argv[1:]
with jax.default_device(jax.devices()[2]):
    api.quantize(source, out, config=config, samples=2, length=32)
print(*devices)
print(*seen)
"""
"""Notes the devices of the arrays that a runner of layers reads, and of what its functions take and return."""

RULE = "qwix: {rules: [{module_path: 'layers/.*(attn|mlp).*', weight_qtype: int4, tile_size: 32}]}\n"
CALIBRATIONS = {
    "{method: gptq, propagate: 0.5, distill: 1}": {"_observe", "_run", "_pull", "_pull_logits", "logits_weights"},
    "{method: awq, kv_cache: fp8}": {"_observe", "_run", "_largest"},
}
"""By a calibration: the functions of a runner that it calls, besides those that read weights."""


@pytest.mark.slow
@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_all_arrays_are_on_the_default_device(calibration, tmp_path):
    """None is on the first device, where jax puts what names no other."""
    config = tmp_path / "config.yaml"
    config.write_text(f"{RULE}calibration: {calibration}\n")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    words = [sys.executable, "-c", WATCHED, str(EXAMPLE), str(config), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    devices, seen = (set(line.split()) for line in done.stdout.splitlines()[-2:])
    assert devices == {"2"}
    assert CALIBRATIONS[calibration] | {"read", "_read_input"} <= seen

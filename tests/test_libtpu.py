"""libtpu on a host without a TPU: jax uses the other devices, and stderr stays empty."""

import os
import subprocess
import sys

import pytest

from helpers.checkpoints import qwen3_config, random_checkpoint
from tpuconv import libtpu

PLAIN = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", *libtpu.VARIABLES)}
without_tpu = pytest.mark.skipif(libtpu.may_have_tpu(), reason="there is a TPU, or a sign of one")


def run(*args, **variables):
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=PLAIN | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@without_tpu
def test_jax_falls_back_in_silence():
    code = "from tpuconv import libtpu; libtpu.hide_without_tpu(); import jax; print(jax.default_backend())"
    done = run("-c", code)
    assert done.stdout.strip() in ("cpu", "gpu")
    assert done.stderr == ""


@without_tpu
def test_a_command_that_computes_says_nothing_of_libtpu(tmp_path):
    source = random_checkpoint(tmp_path / "hf", qwen3_config())
    done = run("-m", "tpuconv", "convert", source, tmp_path / "out", "--quantize", "int8_default")
    assert done.stderr == ""


PCI = "sys/bus/pci/devices/0000:00:04.0"
HIDE = "import os, sys; from tpuconv import libtpu; libtpu.hide_without_tpu(); "


@pytest.mark.parametrize(
    "variables", [{"JAX_PLATFORMS": "tpu"}, {"JAX_PLATFORMS": ""}, {"JAX_FORCE_TPU_INIT": "1"}, {"TPU_NAME": "a"}]
)
def test_it_is_not_hidden_where_somebody_chose(variables):
    assert run("-c", HIDE + "print('libtpu' in sys.modules)", **variables).stdout == "False\n"


@without_tpu
@pytest.mark.skipif(not libtpu.is_installed(), reason="libtpu is not installed")
def test_hidden_it_still_counts_as_installed():
    code = HIDE + "print(sys.modules['libtpu'], libtpu.is_installed(), 'JAX_PLATFORMS' in os.environ)"
    assert run("-c", code).stdout == "None True False\n"


def test_importing_the_package_hides_nothing():
    assert run("-c", "import sys, tpuconv; print('libtpu' in sys.modules)").stdout == "False\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"dev/accel0": ""}, True),
        ({"dev/vfio/0": ""}, True),
        ({"dev/vfio/vfio": ""}, False),
        ({f"{PCI}/vendor": "0x1ae0\n", f"{PCI}/class": "0x120000\n"}, True),
        ({f"{PCI}/vendor": "0x1ae0\n", f"{PCI}/class": "0x020000\n"}, False),
        ({f"{PCI}/vendor": "0x10de\n", f"{PCI}/class": "0x030200\n"}, False),
        ({f"{PCI}/vendor": "0x1ae0\n"}, False),
    ],
)  # fmt: skip
def test_signs_of_a_tpu(files, expected, tmp_path, monkeypatch):
    for name in libtpu.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert libtpu.may_have_tpu(tmp_path) is expected

"""Hides libtpu from jax on hosts without a TPU, where loading it prints errors on stderr."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

MODULE = "libtpu"

DEVICES = ("dev/accel*", "dev/vfio/[0-9]*")
"""Device files of TPUs, relative to the root folder."""

GOOGLE = "0x1ae0"
"""The PCI vendor of TPUs, and of network cards and disks of Google Cloud."""

STORAGE_AND_NETWORK = ("0x01", "0x02")
"""Prefixes of the PCI classes of disks and network cards."""

VARIABLES = ("JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_NAME")
"""Environment variables of TPU hosts, which may be set although no device is visible."""


def is_installed() -> bool:
    """Returns whether libtpu is installed, hidden or not: `tpuconv fit` compiles with it in a child process."""
    return PathFinder.find_spec(MODULE) is not None


def may_have_tpu(root: Path = Path("/")) -> bool:
    """Returns whether this host may have a TPU: it has a device file, a PCI device or an environment variable of one.
    True in doubt, since an unused TPU is worse than a message on stderr."""
    if any(variable in os.environ for variable in VARIABLES) or any(any(root.glob(each)) for each in DEVICES):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        try:
            kind = vendor.with_name("class").read_text()
            if vendor.read_text().strip() == GOOGLE and not kind.startswith(STORAGE_AND_NETWORK):
                return True
        except OSError:  # the device was removed, or is not readable
            continue
    return False


def hide_without_tpu() -> None:
    """On a host without a TPU, makes jax choose its devices as if libtpu were not installed. Must be called before jax
    initializes its devices. Has no effect if JAX_PLATFORMS is set, and none on child processes."""
    if "JAX_PLATFORMS" not in os.environ and MODULE not in sys.modules and not may_have_tpu():
        sys.modules[MODULE] = None  # type: ignore[assignment]  # makes the import fail

"""Whether the TPU's library is used: on a host without a TPU jax would load it, and it reports that on stderr."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

MODULE = "libtpu"

DEVICES = ("dev/accel*", "dev/vfio/[0-9]*")
"""Files of a TPU that a host or a container has, below the root folder."""

GOOGLE = "0x1ae0"
"""The PCI vendor of TPUs. Network cards and disks of Google Cloud have it too."""

STORAGE_AND_NETWORK = ("0x01", "0x02")
"""How the PCI classes of those begin."""

VARIABLES = ("JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_NAME")
"""Set by whoever provides a TPU, also where its device is not visible."""


def is_installed() -> bool:
    """Whether libtpu is installed, hidden or not: `verify --topology` compiles with it in a child process."""
    return PathFinder.find_spec(MODULE) is not None


def may_have_tpu(root: Path = Path("/")) -> bool:
    """Whether anything points to a TPU: a device file, a PCI device or an environment variable. If in doubt, true: a
    TPU that is not used is worse than a message."""
    if any(variable in os.environ for variable in VARIABLES) or any(any(root.glob(each)) for each in DEVICES):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        try:
            kind = vendor.with_name("class").read_text()
            if vendor.read_text().strip() == GOOGLE and not kind.startswith(STORAGE_AND_NETWORK):
                return True
        except OSError:  # a device that has just been removed, or that may not be read
            continue
    return False


def hide_without_tpu() -> None:
    """Makes jax choose its devices as if libtpu were not installed, where there is no TPU. Call it before jax asks for
    devices. It does nothing where JAX_PLATFORMS is set, and nothing to child processes."""
    if "JAX_PLATFORMS" not in os.environ and MODULE not in sys.modules and not may_have_tpu():
        sys.modules[MODULE] = None  # type: ignore[assignment]  # Python's own way to make an import fail

"""Modules that leave a trace where they are imported."""

from pathlib import Path

CANARIES = ("json", "re", "signal", "numpy", "jax", "sitecustomize", "usercustomize", "encodings", "collections")


def canaries(folder: Path) -> Path:
    """Modules of the current folder that leave a trace where they are imported."""
    for name in CANARIES:
        (folder / f"{name}.py").write_text(f"open({str(folder / f'{name}.run')!r}, 'w')\n")
    return folder

"""Checkpoints that several tests read are written once a run, whichever of its processes needs them first."""

import fcntl
from collections.abc import Callable
from pathlib import Path


class Shared:
    """Folders by name under one root, which the workers of a run have in common."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)

    def __call__(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder of a name; `make` writes it where it is not there. A test that changes it copies it first."""
        folder = self.root / name
        with open(self.root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                made = self.root / f"{name}.made"
                make(made)
                made.rename(folder)
        return folder

"""Checkpoints in files of tensor-parallel ranks."""

from pathlib import Path
from shutil import copy

import numpy as np
from safetensors.numpy import save_file

from helpers.checkpoints import read_tensors

RANKS = 4


def write_ranked(whole: Path, folder: Path) -> Path:
    """Writes a checkpoint of Grok anew: the experts of each layer in a file of each rank, all else in two files."""
    folder.mkdir(exist_ok=True)
    copy(whole / "config.json", folder)
    experts, common = {}, {}
    for name, tensor in read_tensors(whole).items():
        (experts if ".experts." in name else common)[name] = tensor
    for number in range(2):
        part = dict(list(common.items())[number::2])
        save_file(part, folder / f"pytorch_model-{number:05}-TP-common.safetensors")
    for layer in {name.split(".")[2] for name in experts}:
        own = {name: x for name, x in experts.items() if name.split(".")[2] == layer}
        for rank in range(RANKS):
            pieces = {name: np.split(x, RANKS, axis=int("w2" in name))[rank].copy() for name, x in own.items()}
            save_file(pieces, folder / f"pytorch_model-{2 + int(layer):05}-TP-{rank:03}.safetensors")
    return folder

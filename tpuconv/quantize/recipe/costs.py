"""The costs of the groups of a checkpoint, in a file beside it: measured once, and reused while all inputs of the
measurement are the same."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.errors import OutputError, TpuconvError
from tpuconv.jsonfile import MAX_BYTES, check, parse, read_bytes
from tpuconv.quantize.calibrate.data import CalibrationData
from tpuconv.quantize.calibration_settings import Calibration
from tpuconv.quantize.recipe.layerwise import DTYPE
from tpuconv.quantize.recipe.search import ParamGroup, SearchSpace
from tpuconv.storage.disk import replace_file
from tpuconv.storage.hashes import hash_bytes

COSTS_SCHEMA = {"facts": dict, "costs": [[float]]}


class KeptCosts:
    """The costs of one checkpoint, in the file `.<CHECKPOINT>.sensitivity.json` beside it. Nothing is kept of one in a
    bucket or of a release, nor where the file cannot be written.

    Args:
        manifest: the checkpoint, or the planned one of a release.
        space: the groups and their options.
        prompts: the token ids of each prompt.
        calibration: the settings of GPTQ and its data; None if weights are rounded to nearest.
    """

    def __init__(
        self,
        manifest: Manifest,
        space: SearchSpace,
        prompts: Sequence[Sequence[int]],
        calibration: tuple[Calibration, CalibrationData] | None,
    ):
        folder = manifest.folder
        self.path = None
        if isinstance(folder, Path) and manifest.sealed.identity:
            folder = folder.absolute()
            self.path = folder.with_name(f".{folder.name}.sensitivity.json")
        self._space = space
        self._facts: Mapping[str, Any] = {
            "tpuconv": version("tpuconv"),
            "jax": version("jax"),
            "checkpoint": manifest.sealed.identity,
            "dtype": DTYPE,
            "prompts": hash_bytes(json.dumps(list(map(list, prompts))).encode())["xxh3_128"],
            "rounding": {**calibration[0].to_json(), **calibration[1].to_json()} if calibration else "nearest",
            "groups": [
                [group.pattern, *(f"{option} {option.bits} {option.method}" for option in group.options)]
                for group in space.groups
            ],
        }

    def read(self) -> list[ParamGroup] | None:
        """Returns the groups with the costs that were kept; None if there are none, or of something else."""
        groups = self._space.groups
        try:
            data = read_bytes(self.path, MAX_BYTES, OutputError) if self.path else b""
            kept = check(parse(data, str(self.path), OutputError), COSTS_SCHEMA, str(self.path), OutputError)
        except (OSError, TpuconvError):
            return None
        sizes = [len(group.options) for group in groups]
        if kept["facts"] != self._facts or [len(costs) for costs in kept["costs"]] != sizes:
            return None
        return [
            replace(group, options=tuple(replace(o, kl=kl) for o, kl in zip(group.options, costs, strict=True)))
            for group, costs in zip(groups, kept["costs"], strict=True)
        ]

    def write(self, groups: Sequence[ParamGroup]) -> None:
        """Keeps the costs of the groups, in the place of those that were kept before."""
        if self.path is None:
            return
        costs = [[option.kl for option in group.options] for group in groups]
        with suppress(OSError, TpuconvError):  # measured again the next time
            replace_file(self.path, json.dumps({"facts": self._facts, "costs": costs}).encode())

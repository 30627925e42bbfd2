"""Compares `tpuconv convert` of a multimodal model with text models of the same size, and all with copies.

    python benchmarks/whole.py [--folder DIR] [--rounds N]

Makes a checkpoint of the shape of Qwen3-VL-2B with 12 layers of text (2.7 GB in bfloat16, 0.8 GB of it the encoder),
one of the shape of Qwen3-1.7B with 20 layers, and one of Qwen3 with as many arrays as the first: what a file costs
beside its bytes is the same then. Each round copies and converts each. The files that a run reads are dropped from the
page cache before it. Ratios are to the copy of the same files in the same round.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert import CONFIG, Run, make_checkpoint, measure, spread
from here import here

from tpuconv.checkpoint.manifest import read_manifest

VISION = {
    "model_type": "qwen3_vl",
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
    "hidden_act": "gelu_pytorch_tanh",
}
TEXT = {
    **{key: value for key, value in CONFIG.items() if key != "architectures"},
    "model_type": "qwen3_vl_text",
    "num_hidden_layers": 12,
    "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
}
WHOLE = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": TEXT,
    "vision_config": VISION,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "tie_word_embeddings": True,
}
NARROW = {
    **{"hidden_size": 1280, "intermediate_size": 4096, "num_hidden_layers": 50},
    **{"num_key_value_heads": 16, "head_dim": 80},
}
MODELS: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "text": (CONFIG | {"num_hidden_layers": 20}, ()),
    "text of small arrays": (CONFIG | NARROW, ()),
    "whole": (WHOLE, ("vision",)),
}
"""The config.json of each model, and its parts beside the text model."""


def drop_from_cache(folder: Path) -> None:
    """Drops the files of a folder from the page cache, and no others: the machine may have other work."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; three times the checkpoint must fit")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    runs: dict[tuple[str, str], list[Run]] = {}
    arrays: dict[str, int] = {}
    try:
        sizes = {name: make_checkpoint(work / name, *model) for name, model in MODELS.items()}
        convert = [sys.executable, "-m", "tpuconv", "convert"]
        for _ in range(args.rounds):
            for name in MODELS:
                for what, command in (("copy", ["cp", "-r"]), ("convert", convert)):
                    drop_from_cache(work / name)
                    run = measure([*command, str(work / name), str(work / "out")])
                    if what == "convert":
                        arrays[name] = len(read_manifest(work / "out").arrays)
                    shutil.rmtree(work / "out")
                    runs.setdefault((name, what), []).append(run)
                    print(f"  {what} {name}: {run.wall:.2f} s", file=sys.stderr)
    finally:
        shutil.rmtree(work)
    report(runs, sizes, arrays)


def report(runs: Mapping[tuple[str, str], Sequence[Run]], sizes: Mapping[str, int], arrays: Mapping[str, int]) -> None:
    """Prints a table. Rates are bytes in a second."""
    print(f"{here()}\n")
    columns = ("model", "GB", "arrays", "copy s", "convert s", "convert / copy", "rate / rate of whole", "cpu s / GB")
    print(f"| {' | '.join(columns)} | private MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    seconds = {name: [run.wall / size for run in runs[name, "convert"]] for name, size in sizes.items()}
    for name, size in sizes.items():
        copies, own = runs[name, "copy"], runs[name, "convert"]
        ratios = spread([run.wall / copy.wall for run, copy in zip(own, copies, strict=True)])
        rates = spread([b / a for a, b in zip(seconds[name], seconds["whole"], strict=True)])
        walls = " | ".join(spread([run.wall for run in each]) for each in (copies, own))
        cpu, private = spread([run.cpu * 1e9 / size for run in own]), max(run.private for run in own) / 1e6
        print(f"| {name} | {size / 1e9:.2f} | {arrays[name]} | {walls} | {ratios} | {rates} | {cpu} | {private:.0f} |")


if __name__ == "__main__":
    main()

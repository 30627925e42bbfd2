"""Compares `convert --target maxtext` with MaxText's own converter of Hugging Face checkpoints.

    python benchmarks/to_maxtext.py --python PATH [--folder DIR] [--pairs N]

PATH is the Python of an environment with MaxText 0.2.5 and torch for the CPU: that of the slow tests of this target,
`build/oracles/maxtext/bin/python`, after `pip install torch`. Makes a checkpoint of the shape of Qwen2.5-1.5B (3.1 GB
in bfloat16), which MaxText's converter knows. In each round, with an empty page cache (as root), with scanned layers:

    tpuconv    convert --target maxtext --scan-layers
    lazy       maxtext.checkpoint_conversion.to_maxtext, tensor by tensor, as it does by default
    eager      the same with --lazy_load_tensors=false: all tensors first

Prints wall time and processor time, their ratios to tpuconv in the same round, and peak memory. Then prints how many
arrays of the first round are the same, bit for bit.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from convert import CONFIG, Run, empty_page_cache, make_checkpoint, measure, spread

MODEL = "qwen2.5-1.5b"
SIZES = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_theta": 1_000_000.0,
}
TO_MAXTEXT = """
import runpy, sys
from pathlib import Path
import maxtext
source, out, lazy, model = sys.argv[1:]
base = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
given = {"model_name": model, "base_output_directory": out, "scan_layers": "true", "hardware": "cpu",
         "skip_jax_distributed_system": "true"}
sys.argv = ["to_maxtext", str(base), *(f"{key}={value}" for key, value in given.items()),
            f"--hf_model_path={source}", f"--lazy_load_tensors={lazy}"]
runpy.run_module("maxtext.checkpoint_conversion.to_maxtext", run_name="__main__")
"""


def restored(folder: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by name."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = checkpointer.metadata(folder).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored)
        tree = checkpointer.restore(folder, restore_args=args)

    def flat(node: Any, front: str) -> dict[str, np.ndarray]:
        if not isinstance(node, dict):
            return {front: np.asarray(node)}
        return {name: x for key, child in node.items() for name, x in flat(child, f"{front}/{key}").items()}

    return flat(tree, "")


def compare(own: Path, theirs: Path) -> str:
    """Says how many arrays are the same."""
    a, b = restored(own), restored(theirs)
    same = sum(name in b and a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in a)
    return f"{same} of {len(a)} arrays are equal bit for bit; only one has {sorted(a.keys() ^ b.keys()) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python of an environment with MaxText and torch")
    parser.add_argument("--folder", type=Path, help="where to work; four times the checkpoint must fit")
    parser.add_argument("--pairs", type=int, default=2)
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "DECOUPLE_GCLOUD": "TRUE", "TQDM_DISABLE": "1"}
    CONFIG.update(SIZES)
    work = Path(tempfile.mkdtemp(dir=args.folder))
    source, cold = work / "hf", True
    runs: dict[str, list[Run]] = {}
    try:
        total = make_checkpoint(source)
        for index in range(args.pairs):
            own = [sys.executable, "-m", "tpuconv", "convert", str(source), str(work / "tpuconv")]
            peer = [args.python, "-c", TO_MAXTEXT, str(source)]
            commands = {
                "tpuconv": [*own, "--target", "maxtext", "--scan-layers"],
                "lazy": [*peer, str(work / "lazy"), "true", MODEL],
                "eager": [*peer, str(work / "eager"), "false", MODEL],
            }
            for name, command in commands.items():
                cold = empty_page_cache() and cold
                runs.setdefault(name, []).append(measure(command))
                print(f"  {name}: {runs[name][-1].wall:.2f} s", file=sys.stderr)
                if index == 0 and name != "tpuconv":
                    print(f"{name}: {compare(work / 'tpuconv' / '0' / 'items', work / name / '0' / 'items')}")
                if name != "tpuconv":
                    shutil.rmtree(work / name)
            shutil.rmtree(work / "tpuconv")
    finally:
        shutil.rmtree(work)
    print(f"\n{total / 1e9:.2f} GB, {args.pairs} rounds, {'cold' if cold else 'warm'}, {os.cpu_count()} processors\n")
    print("| what | wall s | wall / tpuconv | cpu s | cpu / tpuconv | private MB | resident MB |")
    print("|---|---|---|---|---|---|---|")
    for name, found in runs.items():
        cells = []
        for key in ("wall", "cpu"):
            cells.append(spread([getattr(run, key) for run in found]))
            pairs = zip(found, runs["tpuconv"], strict=True)
            cells.append(spread([getattr(a, key) / getattr(b, key) for a, b in pairs]))
        cells += [f"{max(getattr(run, key) for run in found) / 1e6:.0f}" for key in ("private", "resident")]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

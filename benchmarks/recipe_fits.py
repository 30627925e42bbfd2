"""Asks the TPU compiler, without a TPU, for the smallest slices that the models of docs/recipes fit. Writes
docs/recipe_fits.json, whose rows `python docs/make_recipes.py` puts on the pages.

    python benchmarks/recipe_fits.py                   # all models: some hours of two processors
    python benchmarks/recipe_fits.py Qwen/Qwen3-8B     # the rows of these models alone
    python benchmarks/recipe_fits.py --decode MODEL    # without the prefill, which takes most of the time

Weights and cache are those of the complete model. Two depths are compiled, which include each kind of layer: memory of
programs and the time of a decode step of the complete model are extrapolated. For Qwen3-8B the step differs by at most
9% from a compilation of the complete model, and the memory by 2%. Without the prefill a share of the memory stays free
for it: `SPARE`.
"""

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from here import here
from topology import cut, sizes

from tpuconv.api.recipe_facts import SPARE
from tpuconv.api.recipe_steps import FIT_BATCH, FIT_CONTEXT
from tpuconv.quantize.config import find_config
from tpuconv.verify.topology.chips import CHIPS, Slice
from tpuconv.verify.topology.request import ENVIRONMENT, CompileRequest, source_passthrough

DOCS = Path(__file__).parent.parent / "docs"
FITS = DOCS / "recipe_fits.json"
KINDS = ("v5e", "v6e", "tpu7x")
PERIODS = {"gemma2": 2, "gpt_oss": 2, "qwen3_next": 4, "qwen3_5": 4, "gemma3": 6, "gemma4": 6}
"""After how many layers their kinds repeat, by the beginning of `model_type`; otherwise after one."""
MOST_SECONDS = 600
"""The time of one processor that a row may take."""


def depths_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the two numbers of layers that are compiled: the dense layers before experts, and one or two periods."""
    text = config.get("text_config", config)
    period = next((n for name, n in PERIODS.items() if config["model_type"].startswith(name)), 1)
    step = max(period, 2)
    first = text.get("first_k_dense_replace") or 0
    return first + step, first + 2 * step


def question(config: Mapping[str, Any], form: str, *programs: str) -> CompileRequest:
    """Returns the request of a form: `as released`, or a packaged config."""
    is_kept = form == "as released"
    quantize = source_passthrough("", config) if is_kept else find_config(form).to_json()
    return CompileRequest(config, FIT_BATCH, FIT_CONTEXT, quantize=quantize, programs=programs)


def row(config: dict[str, Any], form: str, shape: Slice, prefills: bool) -> dict[str, Any] | None:
    """Returns the memory and the decode step on a slice; None if the model does not fit. Run in its own process."""
    from tpuconv.verify.topology.compile import compile_for

    weights, cache = sizes(question(config, form), shape)
    most = shape.chip.hbm * (1 if prefills else 1 - SPARE)
    if weights + cache > most:
        return None
    layers, (few, more) = config.get("text_config", config)["num_hidden_layers"], depths_of(config)
    less = compile_for(question(cut(config, few), form, "decode", *["prefill"] * prefills), shape)
    if less["why"]:
        return None
    longer = compile_for(question(cut(config, more), form, "decode"), shape)
    (decode, *prefill), (deeper,) = less["programs"], longer["programs"]

    def whole(key: str) -> float:
        return decode[key] + (deeper[key] - decode[key]) * (layers - few) / (more - few)

    code = int(whole("code")) + sum(each["code"] for each in prefill) * layers // few
    temporaries = max(each["temporaries"] for each in (decode, deeper, *prefill))
    if weights + cache + temporaries + code > most:
        return None
    return {
        "slice": shape.name,
        "mesh": less["mesh"],
        "weights": weights,
        "cache": cache,
        "programs": temporaries + code,
        "available": shape.chip.hbm,
        "decode_ms": round(1e3 * whole("estimate"), 2),
        "compiled": [few, more],
        "layers": layers,
        "prefill": prefills,
    }


def ask(config: dict[str, Any], form: str, kind: str, smallest: str | None, prefills: bool) -> dict[str, Any]:
    """Returns the row of the smallest slice that fits, from `smallest` on; its `why` says why there is none."""
    names = [f"{kind}:{shape}" for shape in CHIPS[kind].slices]
    tried = names[names.index(smallest) :] if smallest else []
    for name in tried:
        command, asked = [sys.executable, __file__, "--row"], json.dumps([config, form, name, prefills])
        env = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(command, input=asked, env=env, capture_output=True, text=True, check=False)
        if done.returncode == -signal.SIGXCPU:
            return {"slice": name, "why": f"the compilation takes more than {MOST_SECONDS // 60} minutes"}
        if done.returncode:
            return {"slice": name, "why": f"the compiler fails: {done.stderr.strip().splitlines()[-1][:200]}"}
        if found := json.loads(done.stdout.splitlines()[-1]):
            return found
    return {"slice": kind, "why": "no slice is large enough"}


def main(chosen: list[str], prefills: bool) -> None:
    """Writes the rows of the chosen models."""
    maker = runpy.run_path(str(DOCS / "make_recipes.py"))
    for model in chosen or maker["found_recipes"]():
        found, _ = maker["found_recipes"]()[model]()
        form = maker["asked_form"](found)
        about = {"form": form.name, "date": f"{datetime.now(UTC):%Y-%m-%d}", "libtpu": version("libtpu")}
        about |= {"jax": version("jax"), "commit": here().rpartition(" ")[2]}
        rows: list[dict[str, Any]] = []
        for kind in KINDS:
            began = time.monotonic()
            rows.append(ask(maker["config_of"](model), form.name, kind, form.slices[kind], prefills))
            print(model, rows[-1], f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            facts = {**json.loads(FITS.read_text()), model: {**about, "rows": rows}}
            FITS.write_text(json.dumps(dict(sorted(facts.items())), indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--row"]:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS + 5))
        config, form, name, prefills = json.load(sys.stdin)
        print(json.dumps(row(config, form, Slice(name), prefills)))
    else:
        main([name for name in sys.argv[1:] if name != "--decode"], "--decode" not in sys.argv)

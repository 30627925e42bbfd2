"""The answers of a script that runs vLLM: one for each case of its request. Such scripts import it, in the environment
of vLLM."""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def answer_each(cases: str, run: Callable[[dict, dict], dict]) -> None:
    """Reads a request from the input, writes what `run` returns for each of its `cases`, or the error, to the file
    `results`, and ends the process."""
    request = json.load(sys.stdin)
    results = []
    for case in request[cases]:
        try:
            results.append(run(case, request))
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
        gc.collect()
        Path(request["results"]).write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # threads of vLLM would keep the process

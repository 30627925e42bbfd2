"""What tests change in the workers of a Ray cluster."""

import os
import time
from pathlib import Path
from typing import Any

HALT = "TPUCONV_TEST_HALT"
"""The variable with the name of a file: the first task whose journal has two new entries writes the id of its node into
it, and does nothing more."""


def set_up() -> None:
    """Called in each worker before its first task."""
    from tpuconv.convert.plan import sizes
    from tpuconv.storage.journal import Journal

    sizes.CHUNK_BYTES, sizes.SLAB_BYTES, sizes.UNIT_BYTES = 1500, 3000, 6000
    record, made = Journal.record, []

    def halting(self: Any, part: str, facts: Any, files: Any = ()) -> None:
        record(self, part, facts, files)
        made.append(part)
        if HALT in os.environ and len(made) > 5:
            _halt(Path(os.environ[HALT]))

    Journal.record = halting  # type: ignore[method-assign]


def _halt(path: Path) -> None:
    import ray

    try:
        file = path.open("x")
    except FileExistsError:
        return
    with file:
        file.write(ray.get_runtime_context().get_node_id())
    time.sleep(600)

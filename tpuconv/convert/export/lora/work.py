"""Writes an adapter, as the engine makes every output: complete or not at all."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tpuconv.convert.export.contents import ExportContents
from tpuconv.convert.export.files import safetensors_header
from tpuconv.convert.export.lora.peft import PeftAdapter, peft_adapter
from tpuconv.convert.export.lora.tree import PairTree, explain_pairs, read_pairs
from tpuconv.convert.export.orbax_arrays import check_made_from
from tpuconv.convert.export.way_back import Reading
from tpuconv.convert.run.engine import WORKING, RunProgress, Work
from tpuconv.convert.run.stamps import Stale
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location
from tpuconv.models.common.saved import is_transposed_by_peft, release_of_modules
from tpuconv.models.registry import Family
from tpuconv.names import MANIFEST
from tpuconv.notation.pairs import Pair
from tpuconv.notation.spelling import copies_in_layers
from tpuconv.notation.table import EXPERTS
from tpuconv.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tpuconv.storage.entries import RunJournal
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.sealed import MANIFEST_FORMAT, SAFETENSORS, Sealed, check_file_sizes, seal

WEIGHTS_ENTRY = "adapter"
"""The journal's entry of the file of weights."""


def trained_adapter(
    tree: PairTree,
    family: Family,
    raw: Mapping[str, Any],
    known: Sequence[Reading],
    target: str | None,
    base: str,
    alpha: float,
) -> ExportContents:
    """The adapter in a trainer's tree. Its pairs are read.

    Args:
        tree: what was saved.
        family, raw: of the model, and its parsed config.json.
        known: readings of the model.
        target: whose tree it is; None: of each target in turn.
        base: the model that was trained, as the adapter names it.
        alpha: of the training.
    """
    by_modules = [
        (family.table_of(release_of_modules(family.name), config, table.returns), config) for table, config in known
    ]
    pairs = explain_pairs(tree, family, raw["model_type"], by_modules, target)
    form = pairs.form
    names = [name for binding in form.table.bind(form.config) for stack in binding.src for name in stack.names]
    # PEFT has a pair for each layer, also where layers share a matrix.
    copies = copies_in_layers(form.table.copies_of(form.config))
    is_whole = not any(isinstance(value, Mapping) and "model_type" in value for value in raw.values())
    rows = read_pairs(tree, pairs, alpha)
    released: dict[str, Pair] = {}
    for row, own in rows:
        swaps = is_transposed_by_peft(family.name, row)
        released |= {name: pair.transposed if swaps else pair for name, pair in row.released(own).items()}
    released |= {copy: released[original] for copy, original in copies.items() if original in released}
    input_first = any(row.binding.row.input_first for row, _ in rows)
    adapter = peft_adapter(
        released,
        [*names, *copies],
        base,
        alpha,
        whole=is_whole,
        input_first=input_first,
        has_experts=bool(form.config.sizes.get(EXPERTS)),
        is_causal=not getattr(form.config, "canvas_length", 0),  # which configs of targets do not have
    )
    facts = {"family": family.name, "target": form.target.name}
    return ExportContents(
        checkpoint=tree.folder,
        arrays=tree.folder,
        skipped=pairs.skipped,
        files=[adapter.tensors],
        encoding=None,
        work=lambda _: AdapterWork(tree, adapter, facts),
        **facts,
    )


class AdapterWork(Work):
    """The adapter of a trainer's tree. Its progress counts bytes of tensors.

    Args:
        tree: what was trained.
        adapter: what is written.
        facts: of its family, target and base, for the manifest.
    """

    def __init__(self, tree: PairTree, adapter: PeftAdapter, facts: Mapping[str, Any]):
        self.tree, self.adapter = tree, adapter
        self.source, self.nbytes = tree.folder, adapter.nbytes
        self.facts = {
            "format": MANIFEST_FORMAT,
            "kind": SAFETENSORS,
            "checkpoint": tree.identity,
            "adapter": dict(adapter.config),
            **facts,
        }
        self.fingerprint = hash_bytes(json.dumps(self.facts).encode())["xxh3_128"]

    @property
    def names(self) -> tuple[str, ...]:
        """See `Work`."""
        return ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST

    @property
    def entries(self) -> tuple[str, ...]:
        """See `Work`."""
        return (WEIGHTS_ENTRY,)

    @property
    def stamps(self) -> dict[str, str]:
        """See `Work`."""
        return self.tree.stamps

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """See `Work`."""
        return self.tree.stamps_for_hosts

    def stale(self, journal: RunJournal, changed: set[str]) -> Stale:
        """See `Work`."""
        return Stale([WEIGHTS_ENTRY] if journal.done(WEIGHTS_ENTRY) else [], [])

    def check_made(self, out: Location, elsewhere: Sealed | None = None) -> Iterator[RunProgress]:
        """See `Work`."""
        made = elsewhere or check_file_sizes(out)
        if self.stamps:
            yield from check_made_from(self.tree.folder, self.stamps, out, made)

    def opened(self, journal: RunJournal) -> AbstractContextManager[None]:
        """See `Work`: nothing."""
        return nullcontext()

    def do(self, journal: RunJournal, part: ProcessPart | None) -> Iterator[RunProgress]:
        """See `Work`: the first process writes the file."""
        journal.sink.check_room(self.nbytes, "the adapter")
        journal.share()
        resumed = 0 if journal.done(WEIGHTS_ENTRY) is None else self.nbytes
        if (part is None or not part.index) and not resumed:
            written = 0
            with journal.sink.writer(ADAPTER_WEIGHTS) as file:
                file.write(safetensors_header(self.adapter.tensors))
                for tensor in self.adapter.tensors:
                    file.write(np.ascontiguousarray(tensor.values).reshape(-1).view(np.uint8).data)
                    written += tensor.nbytes
                    yield RunProgress(written, self.nbytes, 0, WORKING)
            journal.sink.sync(["."])
            journal.record(WEIGHTS_ENTRY, {"facts": file.facts()}, [ADAPTER_WEIGHTS])
        yield RunProgress(self.nbytes, self.nbytes, resumed, WORKING)

    def write_rest(self, journal: RunJournal) -> None:
        """See `Work`: adapter_config.json and the manifest."""
        self.tree.check_unchanged()
        weights, text = journal.required(WEIGHTS_ENTRY)["facts"], json.dumps(self.adapter.config, indent=2)
        files = {ADAPTER_WEIGHTS: weights, **journal.sink.write_all({ADAPTER_CONFIG: text.encode()})}
        journal.sink.write(MANIFEST, seal({**self.facts, "fingerprint": self.fingerprint, "files": files}))

"""Freezes what tpuconv makes of every tiny model of the tests, or compares it with what was frozen.

    python tools/freeze.py write FILE [--family NAME]... [--part N/M] [--facts bindings,configs,logits]
    python tools/freeze.py check FILE [--family NAME]... [--part N/M] [--facts bindings,configs,logits]

Run `write` before a change of the structure and `check` after it: nothing of what a change leaves alone may differ. A
case is frozen as hashes: of its source; of its bindings (names, layouts, shapes, axes, buffers); of what each key of
config.json leads to when it is absent or wrong; of each file of each output (manifests without the fields that name
the table); and of its logits in float32. A refusal is frozen as its message. All cases take about an hour on two
processors, with `--part 0/2` and `--part 1/2` beside each other; `--facts` does a part of it. Logits are equal on
processors of one kind only.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import tpuconv
from helpers.conversions import plan_for
from helpers.families import CASES, PROMPTS, Case, save
from tpuconv import api
from tpuconv.checkpoint.manifest import MANIFEST
from tpuconv.commands.flags import with_flags
from tpuconv.errors import TpuconvError
from tpuconv.models.logits import forward
from tpuconv.models.registry import find_family
from tpuconv.targets.registry import target_names

OF_THE_TABLE = ("table", "fingerprint", "tpuconv", "seal", "variant", "forms", "spelling", "apart")
"""Fields of a manifest that name the table or the release of tpuconv."""
QUANTIZED = {
    "int8": "qwix: {rules: [{module_path: '.*', weight_qtype: int8, act_qtype: int8}]}",
    "int4": "qwix: {rules: [{module_path: '.*(attn|mlp).*', weight_qtype: int4, tile_size: 2}]}",
}
"""Rules of quantizations, with groups that the sizes of most tiny models allow."""
WRONG = (None, "x", -1, 3, 0.5, True, [])
"""Values that each key of config.json is tried with."""


def sha(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def outcome(make: Callable[[], Any], folder: Path) -> str:
    """The hash of what a function returns, or the message of its refusal as the commands show it, without the name of
    the folder."""
    try:
        made = make()
    except TpuconvError as error:
        text = with_flags(str(error)).replace(f"{folder}/", "")
        return f"refused: {sha(text.encode())} {text}".partition("\n")[0][:120]
    return made if isinstance(made, str) else sha(repr(made).encode())


def files(folder: Path) -> str:
    """The hash of all files of an output, by name."""
    return sha(*(part for path in sorted(folder.rglob("*")) if path.is_file() for part in _file(path, folder)))


def _file(path: Path, folder: Path) -> Iterator[bytes]:
    yield str(path.relative_to(folder)).encode()
    yield _manifest(path) if path.name == MANIFEST else path.read_bytes()


def _manifest(path: Path) -> bytes:
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in OF_THE_TABLE}
    return json.dumps(kept, sort_keys=True).encode()


def bindings(source: Path) -> str:
    plan = plan_for(source)
    return sha(
        *sorted(
            repr(
                (
                    [stack.names for stack in binding.src],
                    binding.src_shapes(),
                    binding.dst_shapes(),
                    binding.dst_axes(),
                    str(binding.layout),
                    binding.row.buffer,
                    str(binding.arithmetic),
                )
            ).encode()
            for binding in plan.bindings
        )
    )


def configs(source: Path) -> str:
    """The hash of the config without each of its keys, and with wrong values of it, or of the refusals."""
    raw = json.loads((source / "config.json").read_text())
    family = find_family(raw)

    def read(changed: Mapping[str, Any]) -> str:
        return outcome(lambda: repr(family.read_config(dict(changed))), source.parent)

    absent = [{name: value for name, value in raw.items() if name != key} for key in raw]
    wrong = [{**raw, key: value} for key in raw for value in WRONG]
    return sha(*(read(changed).encode() for changed in (raw, *absent, *wrong)))


def logits(out: Path) -> str:
    found = forward(tpuconv.load(out, "float32"), PROMPTS, "float32")()
    return sha(*(np.ascontiguousarray(x).tobytes() for x in found))


def frozen(case: Case, folder: Path, wanted: Collection[str] = ()) -> dict[str, str]:
    """The hashes of a case, whose files are written to a folder: all, or the wanted ones."""
    source = save(case, folder / "hf", "bfloat16")

    def of(make: Callable[[], str]) -> str:
        return outcome(make, folder)

    def converted(name: str, **options: Any) -> Callable[[], str]:
        def make() -> str:
            api.convert(source, folder / name, **options)
            return files(folder / name)

        return make

    def exported(name: str) -> Callable[[], str]:
        def make() -> str:
            api.export(folder / name, folder / f"{name}-back")
            return files(folder / f"{name}-back")

        return make

    def computed() -> str:
        if not (folder / "plain").exists():
            api.convert(source, folder / "plain")
        return logits(folder / "plain")

    facts = {
        "source": lambda: files(source),
        "bindings": lambda: bindings(source),
        "configs": lambda: configs(source),
        "plain": converted("plain"),
        "scanned": converted("scanned", scan_layers=True),
        "exported": exported("plain"),
        "scanned, exported": exported("scanned"),
        **{target: converted(target, target=target) for target in target_names()[1:]},
    }
    for name, rules in QUANTIZED.items():
        (path := folder / f"{name}.yaml").write_text(rules)
        facts[name] = converted(name, quantize=path)
        facts[f"{name}, huggingface"] = converted(f"{name}-hf", quantize=path, target="huggingface")
    facts["logits"] = computed
    found = {}
    for name, make in facts.items():
        if (not wanted or name in wanted) and (name != "scanned, exported" or (folder / "scanned").exists()):
            found[name] = outcome(make, folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--family", action="append", help="freeze or check the cases of this family only")
    parser.add_argument("--part", default="0/1", help="of M processes, do the part of process N: N/M")
    parser.add_argument("--facts", type=lambda text: text.split(","), default=(), help="freeze or check these alone")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    cases = [case for case in CASES if not args.family or case.family in args.family][part::parts]
    known = json.loads(args.file.read_text()) if args.file.exists() else {}
    differing = 0
    for number, case in enumerate(cases, 1):
        with tempfile.TemporaryDirectory() as folder:
            found = frozen(case, Path(folder), args.facts)
        if args.command == "write":
            known[case.key] = found
            args.file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            print(f"{number}/{len(cases)} {case.key}", flush=True)
            continue
        was = {name: hash for name, hash in known.get(case.key, {}).items() if not args.facts or name in args.facts}
        now = found
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        differing += bool(names)
        print(f"{number}/{len(cases)} {case.key}: {'equal' if not names else ''}", flush=True)
        for name in names:
            print(f"  {name}\n    frozen {was.get(name)}\n    now    {now.get(name)}", flush=True)
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main())

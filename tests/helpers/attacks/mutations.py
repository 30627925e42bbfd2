"""Mutated inputs: how each kind is made from a seed, and the code that it goes through.

As a program (`python mutations.py FOLDER KIND FIRST COUNT`) it tries some seeds in a process whose memory is limited,
and prints what failed and how the others ended as JSON. FOLDER holds what `test_mutations` prepares.
"""

import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from tpuconv.errors import TpuconvError
from tpuconv.storage.sealed import seal

SECONDS, BYTES = 10, 1 << 30
"""What one input may take: of the processor, and of the clock, on a machine that others use too, six times that."""

Try = Callable[[], None]
Kind = Callable[[Path], Callable[[random.Random], tuple[Any, Try]]]
"""Gives, for the prepared folder, what makes of a random generator an input, as it is shown, and the attempt to use
it."""


# -- mutations --------------------------------------------------------------------------------------------------------

DEEP, HUGE, TWICE = "@@deep@@", "@@huge@@", "@@twice@@"
"""Stand for what `json` does not write: deep nesting, long numbers, a key that stands twice."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 10**4, 10**6, 10**9, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1.5, -1.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "0",
        "1",
        "int8",
        "int4",
        "bfloat16",
        "float32",
        "F32",
        "/",
        "..",
        "../../etc/passwd",
        "/dev/zero",
        "a\0b",
    ),
    *(
        "\x1b[31m\x1b]0;x\x07",
        "\ud800",
        "\u202e",
        "[/bold]",
        "<script>",
        "{0...99999999999}",
        "re:.*",
        "re:(",
        "*" * 300,
    ),
    *("x" * 100_000, [], {}, [[]], [{}], [None], [0], [1, 1], ["x"], {"a": 1}, {"": {}}, {"x": []}, [0] * 1000),
    *(DEEP, HUGE),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value within a value, the value itself first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, own in items:
        yield from places(own, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def near(rng: random.Random, value: Any) -> Any:
    """A value of the same type that differs a little."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, value // 2, value + 2**32, value * 10**6))
    if isinstance(value, float):
        return rng.choice((-value, value * 1e10, value / 1e10, int(value) if abs(value) < 1e9 else 0))
    if isinstance(value, str):
        i = rng.randrange(len(value) + 1)
        return rng.choice((value[:i], value + value, value[:i] + "\x1b" + value[i:], value.upper(), value[::-1]))
    if isinstance(value, list):
        return rng.choice((value * 2, value[:-1], value[::-1]))
    return dict(list(value.items())[:-1]) if isinstance(value, dict) else 0


def structured(rng: random.Random, value: Any) -> Any:
    """A copy with one to three changes."""
    value = deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        all_places = list(places(value))
        path = rng.choice(all_places)
        if not path:
            if rng.random() < 0.05:
                return deepcopy(rng.choice(VALUES))
            continue
        inside, key = at(value, path[:-1]), path[-1]
        match rng.randrange(8):
            case 0 | 1 | 2:
                inside[key] = deepcopy(rng.choice(VALUES))
            case 3:
                inside[key] = near(rng, inside[key])
            case 4:
                inside[key] = deepcopy(at(value, rng.choice(all_places)))
            case 5:
                del inside[key]
            case 6 if isinstance(inside, dict):
                name = rng.choice((*map(str, VALUES[:3]), TWICE + key, key + "x", "\x1b[0m", "\ud800", ""))
                inside[name] = deepcopy(inside[key])
            case _:
                other = rng.choice(all_places)
                if other and other[: len(path)] != path and path[: len(other)] != other:
                    theirs = at(value, other[:-1])
                    inside[key], theirs[other[-1]] = theirs[other[-1]], inside[key]
    return value


def text_of(rng: random.Random, value: Any) -> bytes:
    """As JSON, with what stands for more written out."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.8, indent=rng.choice((None, 1)))
    depth = rng.choice((30, 1000, 100_000))
    text = text.replace(json.dumps(DEEP), rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)))
    text = text.replace(json.dumps(HUGE), rng.choice(("9" * 5000, "-" + "9" * 90, "1e400", "1" * 90, "-0")))
    return text.replace(TWICE, "").encode(errors="surrogatepass")


def raw(rng: random.Random, data: bytes) -> bytes:
    """Bytes with one to three changes: flipped, cut, inserted, doubled, overwritten."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        i, n = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 8, 64))
        match rng.randrange(6):
            case 0 | 1 if i < len(out):
                out[i] ^= 1 << rng.randrange(8)
            case 2:
                del out[i : i + n]
            case 3:
                out[i:i] = rng.choice(
                    (rng.randbytes(n), b"\0" * n, b'"', b"}", b"{", b"[" * n, b"\xef\xbb\xbf", b"\xff\xfe")
                )
            case 4:
                out[i:i] = out[i : i + n]
            case _:
                del out[i:]
    return bytes(out)


def mutated(rng: random.Random, value: Any) -> bytes:
    """A JSON text, changed in its values or in its bytes."""
    if rng.random() < 0.3:
        return raw(rng, json.dumps(value, indent=rng.choice((None, 1))).encode())
    return text_of(rng, structured(rng, value))


# -- what is tried ----------------------------------------------------------------------------------------------------


def drain(items: Any) -> None:
    for _ in items:
        pass


def plan_of(folder: Path, encoding: str = "dequantize") -> Any:
    """All that `convert` does before it reads a weight."""
    from tpuconv.convert.plan.coverage import make_plan
    from tpuconv.convert.plan.types import Options
    from tpuconv.models.registry import find_family
    from tpuconv.sources.source import open_source

    source = open_source(folder)
    family = find_family(source.config)
    config = family.config.from_hf(source.config)
    plan = make_plan(source, family.name, family.table, config, Options(encoding=encoding))
    json.dumps(plan.to_json(0))
    return plan


def run_plan(plan: Any, out: Path, overwrite: bool = False) -> None:
    from tpuconv.convert.run.conversion import run
    from tpuconv.convert.run.sizing import Limits

    try:
        drain(run(plan, out, Limits(jobs=1, max_memory=2**30), overwrite=overwrite))
    finally:
        shutil.rmtree(out.parent / f".{out.name}.tpuconv", ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)


def scratch(base: Path, name: str, source: str) -> Path:
    """A folder of this process, with what `source` holds."""
    folder = base / f"{name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base / source, folder)
    return folder


def config_json(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    from helpers.configs import NAMES, config_json
    from helpers.configs import plan_of as plan_of_config
    from tpuconv.sources.config import read_config

    folder = scratch(base, "config", "source")
    path = folder / "config.json"
    original = json.loads(path.read_bytes())

    def make(rng: random.Random) -> tuple[Any, Try]:
        name = rng.choice([*NAMES, "qwen3", "qwen3"])
        is_whole = name == "qwen3"
        data, runs = mutated(rng, original if is_whole else config_json(name)), rng.random() < 0.1

        def go() -> None:
            path.write_bytes(data)
            if is_whole:
                plan = plan_of(folder)
                if runs:
                    run_plan(plan, folder.parent / f"out-{os.getpid()}")
            else:
                plan_of_config(read_config(path))

        return data, go

    return make


def index_json(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    folder = scratch(base, "index", "two-shards")
    path = folder / "model.safetensors.index.json"
    original = json.loads(path.read_bytes())

    def make(rng: random.Random) -> tuple[Any, Try]:
        data = mutated(rng, original)

        def go() -> None:
            path.write_bytes(data)
            plan_of(folder)

        return data, go

    return make


def header(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    import safetensors

    from tpuconv.sources.headers import read_header

    folder = scratch(base, "header", "source")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    original, values = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    original["__metadata__"] = {"format": "pt"}

    def make(rng: random.Random) -> tuple[Any, Try]:
        text = mutated(rng, original)
        text += b" " * rng.choice((-len(text) % 8, 0))
        sizes = (len(text), len(text) - 1, len(text) + 1, 0, 2**63, 2**64 - 1, 100 << 20, len(whole))
        size = rng.choice((*[len(text)] * 30, *sizes))
        end = rng.choice((*[len(values)] * 30, 0, len(values) - 1))
        data, runs = struct.pack("<Q", size) + text + values[:end], rng.random() < 0.05

        def go() -> None:
            path.write_bytes(data)
            read_header(path)
            safetensors.deserialize(data)  # whatever is read is what the library would read
            plan = plan_of(folder)
            if runs:
                run_plan(plan, folder.parent / f"out-{os.getpid()}")

        return data[: 8 + len(text)], go

    return make


def quantization_config(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    from helpers.configs import ENCODINGS, config_json
    from helpers.configs import plan_of as plan_of_config
    from tpuconv.encodings.tensors import decode_names
    from tpuconv.sources.config import read_config

    folder = scratch(base, "encoding", "source")
    path, beside = folder / "config.json", folder / "hf_quant_config.json"

    def make(rng: random.Random) -> tuple[Any, Try]:
        method = rng.choice(list(ENCODINGS))
        name = "gpt_oss" if method == "mxfp4" else "llama"
        if is_beside := method.startswith("modelopt") and rng.random() < 0.5:
            data = mutated(rng, ENCODINGS[method])
            raw_config = json.dumps(config_json(name)).encode()
        else:
            data = mutated(rng, {"quant_method": method, **ENCODINGS[method]})
            raw_config = json.dumps(config_json(name, quantization_config="@@")).encode().replace(b'"@@"', data)

        def go() -> None:
            path.write_bytes(raw_config)
            beside.unlink(missing_ok=True)
            if is_beside:
                beside.write_bytes(data)
            config = read_config(path)
            with suppress(TpuconvError):
                decode_names({}, config["quantization_config"])
            plan_of_config(config)

        return data, go

    return make


def end_tokens(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    from tpuconv.models.tokenizer import end_tokens

    folder = scratch(base, "ends", "source")
    whole = {"eos_token_id": [1, 2], "text_config": {"eos_token_id": 3}, "bos_token_id": 0, "temperature": 0.6}

    def make(rng: random.Random) -> tuple[Any, Try]:
        name = rng.choice(("generation_config.json", "config.json"))
        data = mutated(rng, whole)

        def go() -> None:
            (folder / "generation_config.json").unlink(missing_ok=True)
            (folder / name).write_bytes(data)
            ends = end_tokens(folder)
            assert isinstance(json.loads(data), dict)
            assert all(type(token) is int and token >= 0 for token in ends)

        return (name, data), go

    return make


FORMS = ("checkpoint", "quantized", "kept", "maxtext", "export", "serving")
LOADED = FORMS[:3]
EXPORTED = FORMS[4:]


def read_all(folder: Path) -> None:
    """What the commands do with a checkpoint before they trace its model or read its weights."""
    from tpuconv.api import export, inspect, verify
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.reader import open_checkpoint
    from tpuconv.convert.export.array_source import released_config
    from tpuconv.convert.plan.coverage import make_plan
    from tpuconv.convert.plan.types import Options
    from tpuconv.models.registry import get_family
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.quantize.report import report, report_page
    from tpuconv.verify.checksums import check_checkpoint

    if folder.name.startswith(EXPORTED):
        verify(folder)
        return
    manifest = read_manifest(folder)
    family = get_family(manifest.family)
    inspect(folder, mesh={"tensor": 2})
    assert isinstance(manifest.dtype, str)
    drain(check_checkpoint(manifest))
    if manifest.is_rounded and manifest.quantization is not None:
        QuantConfig.from_json(manifest.quantization)
        report(manifest.raw)
        report_page(manifest.raw)
    config = family.config.from_hf(released_config(manifest))
    if manifest.quantization is None and manifest.target == "tpuconv":
        source = open_checkpoint(folder)
        options = Options(scan_layers=manifest.scan_layers, layers=manifest.layer_range)
        make_plan(source, family.name, source.table(), config, options).check()
    out = folder.parent / f"released-{os.getpid()}"
    try:
        export(folder, out)
    finally:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.parent / f".{out.name}.tpuconv", ignore_errors=True)


def manifests(
    base: Path, use: Callable[[Path], None] = read_all, forms: Sequence[str] = FORMS
) -> Callable[[random.Random], tuple[Any, Try]]:
    folders = {form: scratch(base, form, form) for form in forms}
    originals = {form: json.loads((folder / "tpuconv.json").read_bytes()) for form, folder in folders.items()}

    def make(rng: random.Random) -> tuple[Any, Try]:
        form = rng.choice(forms)
        whole = {key: value for key, value in originals[form].items() if key != "seal"}
        how = rng.choice(("bytes", "sealed", "sealed", "format 1"))
        if how == "bytes":
            data = raw(rng, (base / form / "tpuconv.json").read_bytes())
        elif how == "sealed":
            value = structured(rng, whole)
            data = seal(value) if isinstance(value, dict) and value else text_of(rng, value)
        else:
            data = mutated(rng, whole | {"format": 1})

        def go() -> None:
            (folders[form] / "tpuconv.json").write_bytes(data)
            use(folders[form])

        return (form, how, data), go

    return make


def load(folder: Path) -> None:
    import warnings

    import tpuconv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tpuconv.load(folder)


def loaded_manifests(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    """The same, of which the model is made and the weights are restored."""
    import tpuconv.restore  # noqa: F401  (before the memory is limited)

    for form in LOADED:
        load(base / form)
    return manifests(base, load, LOADED)


def array_files(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    """zarr.json, in a checkpoint of the first format, which holds no hash of it, and layouts.json."""
    from tpuconv.checkpoint.device_layouts import layouts_of
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.storage.sealed import write_listed
    from tpuconv.verify.checksums import check_checkpoint

    folder, old = scratch(base, "layouts", "checkpoint"), scratch(base, "zarr", "checkpoint")
    facts = json.loads((old / "tpuconv.json").read_bytes())
    del facts["files"]
    (old / "tpuconv.json").write_text(json.dumps(facts | {"format": 1}))
    zarr = old / "params" / next(iter(facts["arrays"])) / "zarr.json"
    originals = {path: json.loads(path.read_bytes()) for path in (folder / "layouts.json", zarr)}

    def make(rng: random.Random) -> tuple[Any, Try]:
        path = rng.choice(list(originals))
        data = mutated(rng, originals[path])

        def go() -> None:
            if path == zarr:
                path.write_bytes(data)
                faults = {checked.name for checked in check_checkpoint(read_manifest(old)) if checked.fault}
                assert faults or strict(data) == originals[zarr]
            else:
                write_listed(folder, "layouts.json", data)
                layouts_of(path, data, "TPU v5 lite", {"tensor": 8})

        return (path.name, data), go

    return make


def strict(data: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(data)
    return None


YAML = {
    "summary": "some",
    "qwix": {
        "use_abstract_model": True,
        "scale_dtype": "bfloat16",
        "rules": [
            {"module_path": "layers/.*/attn/.*", "weight_qtype": "int8", "act_qtype": "int8", "op_names": ["einsum"]},
            {"module_path": "layers/.*", "weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "rms,7"},
            {"module_path": ".*", "weight_qtype": "mxfp4", "tile_size": 32, "act_calibration_method": "fixed,-1,1"},
        ],
    },
    "gates": {"top1": 0.9, "mean_kl": 0.00001},
    "calibration": {"method": "gptq", "damping": 0.01, "act_order": True, "refine": 1, "propagate": 0.0},
}
SIGNS = [
    b"&a ",
    b"*a",
    b"!!python/object:os.system ",
    b"? ",
    b"- ",
    b": ",
    b"\t",
    b"# ",
    b"|\n",
    b"010",
    b"no",
    b"1:30",
]


def yaml_config(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    import yaml

    from tpuconv.models.registry import find_family
    from tpuconv.quantize.config import QuantConfig, parse_config
    from tpuconv.quantize.matches import check_rules

    raw_config = json.loads((base / "source/config.json").read_bytes())
    family = find_family(raw_config)
    modules = list(family.table.modules(family.config.from_hf(raw_config)))

    def make(rng: random.Random) -> tuple[Any, Try]:
        value = structured(rng, YAML) if rng.random() < 0.7 else YAML
        data = (
            text_of(rng, value) if rng.random() < 0.5 else yaml.safe_dump(value, width=10**9).encode(errors="replace")
        )
        if rng.random() < 0.3:
            i = rng.randrange(len(data) + 1)
            data = raw(rng, data) if rng.random() < 0.5 else data[:i] + rng.choice(SIGNS) + data[i:]
        matches = rng.random() < 0.1

        def go() -> None:
            config = parse_config(data, "mine", "mine.yaml")
            yaml.safe_load(data)
            again = QuantConfig.from_json(json.loads(json.dumps(config.to_json())))
            assert again.to_json() == config.to_json()
            if matches:
                check_rules(config, modules)

        return data, go

    return make


def journal(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    """An entry of a work folder, with its seal or sealed again, of a conversion that is half done or not yet published:
    it goes on and ends as if nothing was, or is refused."""
    from helpers.attacks.simulated import contents
    from tpuconv.storage.entries import ENTRY_KEY

    folders = {state: base / state for state in ("begun", "ready")}
    plan, right = plan_of(base / "two-shards"), contents(base / "result")
    entries = {state: sorted(folder.glob(".out.tpuconv/*.done")) for state, folder in folders.items()}

    def make(rng: random.Random) -> tuple[Any, Try]:
        state = rng.choice(list(folders))
        entry, overwrite = rng.choice(entries[state]), rng.random() < 0.2
        whole = json.loads(entry.read_bytes())
        how = rng.choice(("bytes", "sealed", "another's", "gone"))
        if how == "bytes":
            data: bytes | None = raw(rng, entry.read_bytes())
        elif how == "sealed":
            value = structured(rng, {key: own for key, own in whole.items() if key != "seal"})
            data = seal(value) if isinstance(value, dict) and value else text_of(rng, value)
        else:
            data = rng.choice(entries[state]).read_bytes() if how == "another's" else None
        is_forged = how == "sealed" and (strict(data or b"") or {}) != whole

        def go() -> None:
            folder = scratch(base, "work", state)
            path = folder / ".out.tpuconv" / entry.name
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
            code = 0
            try:
                run_plan_there(plan, folder / "out", overwrite)
            except TpuconvError as error:
                code = error.exit_code
                raise
            finally:
                assert code in ((0,) if how == "gone" else (0, 9, 10))
            found = contents(folder / "out")
            assert is_forged or found == right, sorted(k for k in right.keys() | found if right.get(k) != found.get(k))
            assert ENTRY_KEY in whole

        return (state, entry.name, how, overwrite, data), go

    return make


def run_plan_there(plan: Any, out: Any, overwrite: bool) -> None:
    from tpuconv.convert.run.conversion import run
    from tpuconv.convert.run.sizing import Limits

    drain(run(plan, out, Limits(jobs=1, max_memory=2**30), overwrite=overwrite))


def adapter(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    """adapter_config.json, and the header of an adapter's weights."""
    from tpuconv.api import plan
    from tpuconv.sources.adapter import read_adapter
    from tpuconv.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

    folder = scratch(base, "adapter", "an-adapter")
    config, weights = (folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    files = {path: path.read_bytes() for path in (config, weights)}
    settings = json.loads(files[config])
    (length,) = struct.unpack("<Q", files[weights][:8])
    names, values = json.loads(files[weights][8 : 8 + length]), files[weights][8 + length :]

    def make(rng: random.Random) -> tuple[Any, Try]:
        path, is_planned = rng.choice((config, config, weights)), rng.random() < 0.2
        data = mutated(rng, settings if path == config else names)
        whole = data if path == config else struct.pack("<Q", len(data)) + data + values

        def go() -> None:
            for each, bytes_ in files.items():
                each.write_bytes(whole if each == path else bytes_)
            read_adapter(str(folder))
            if is_planned:
                plan(base / "source", adapter=[str(folder)])

        return (path.name, data), go

    return make


def bucket_journal(base: Path) -> Callable[[random.Random], tuple[Any, Try]]:
    """A work object in a bucket, or its claim, as `journal` does it on a disk: an output that is not the right one is
    none, or that of a forged entry."""
    from helpers.buckets import ROOT, Killed, MemoryBucket, objects
    from tpuconv import buckets
    from tpuconv.location import to_location
    from tpuconv.storage import claim

    plan, out = plan_of(base / "two-shards"), to_location(f"{ROOT}/out")

    def begin(at: int | None) -> MemoryBucket:
        buckets.OPEN[ROOT] = bucket = MemoryBucket()
        bucket.at = at
        with suppress(Killed):
            run_plan_there(plan, out, False)
        bucket.at = None
        return bucket

    log, right = begin(None).log, objects(f"{ROOT}/out")
    ready = max(i for i, what in enumerate(log) if "put out.tpuconv/claim" in what and "copy" in " ".join(log[i:]))
    stops = {"begun": ready // 2, "ready": ready}
    states = {}
    for state, at in stops.items():
        begin(at)
        states[state] = objects(ROOT)
    claim.HEARTBEAT_SECONDS = 3600

    def make(rng: random.Random) -> tuple[Any, Try]:
        state, overwrite = rng.choice(list(states)), rng.random() < 0.2
        there = states[state]
        entries = sorted(name for name in there if name.endswith((".done", "/claim")))
        entry, how = rng.choice(entries), rng.choice(("bytes", "sealed", "another's", "gone"))
        whole = json.loads(there[entry])
        if how == "bytes":
            data: bytes | None = raw(rng, there[entry])
        elif how == "sealed":
            value = structured(rng, {key: own for key, own in whole.items() if key != "seal"})
            data = seal(value) if isinstance(value, dict) and value else text_of(rng, value)
        else:
            data = there[rng.choice(entries)] if how == "another's" else None
        is_forged = how == "sealed" and (strict(data or b"") or {}) != whole

        def go() -> None:
            buckets.OPEN[ROOT] = bucket = MemoryBucket()
            for name, held in there.items():
                bucket.put(name, held)
            if data is None:
                bucket.delete([entry])
            else:
                bucket.put(entry, data)
            code = 0
            try:
                run_plan_there(plan, out, overwrite)
            except TpuconvError as error:
                code = error.exit_code
                raise
            finally:
                assert code in (0, 9, 10), code
            found = objects(f"{ROOT}/out")
            assert is_forged or found == right, sorted(k for k in right.keys() | found if right.get(k) != found.get(k))

        return (state, entry, how, overwrite, data), go

    return make


KINDS: dict[str, Kind] = {
    "config.json": config_json,
    "index": index_json,
    "header": header,
    "quantization_config": quantization_config,
    "end tokens": end_tokens,
    "tpuconv.json": manifests,
    "tpuconv.json, loaded": loaded_manifests,
    "zarr.json and layouts.json": array_files,
    "YAML": yaml_config,
    "journal": journal,
    "journal in a bucket": bucket_journal,
    "adapter": adapter,
}


# -- one process ------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """An input took longer than it may."""


def attempt(
    make: Callable[[random.Random], tuple[Any, Try]], name: str, seed: int, seconds: float = SECONDS
) -> tuple[str, str | None]:
    """How an input ended, and what was wrong with that."""

    def stop(*_: object) -> None:
        raise TooLong

    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, stop)
    shown, go = make(random.Random(f"{name} {seed}"))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 6 * seconds)
    try:
        go()
    except TpuconvError as e:
        if not 2 <= e.exit_code <= 10 or len(str(e)) > 20_000 or isinstance(e.__cause__, MemoryError):
            return "failed", f"{name} {seed}: exit {e.exit_code}: {str(e)[:300]!r} of {short(shown)}"
        return f"refused, exit {e.exit_code}", None
    except (Exception, TooLong) as e:
        frame = e.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
        return "failed", f"{name} {seed}: {type(e).__name__}: {str(e)[:300]} at {where} of {short(shown)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "accepted", None


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 600 else f"{text[:300]} ... {text[-300:]}"


def limit_memory(more: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))


def attack(base: Path, name: str, first: int, count: int) -> None:
    """Prints how the inputs of some seeds ended."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # of the kind before
    make = KINDS[name](base)
    attempt(make, name, -1, 10 * SECONDS)  # imports what it needs
    limit_memory(BYTES if "loaded" not in name else 8 * BYTES)
    began, ends, failures = time.monotonic(), Counter[str](), []
    for seed in range(first, first + count):
        end, failure = attempt(make, name, seed)
        ends[end] += 1
        failures += [failure] if failure else []
    print(json.dumps({"ends": ends, "failures": failures, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    for first in range(2, len(sys.argv), 3):
        attack(Path(sys.argv[1]), sys.argv[first], *map(int, sys.argv[first + 1 : first + 3]))

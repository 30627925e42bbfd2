"""The model card of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from tpuconv.convert.plan.quantization import REPORT
from tpuconv.sources.companions import SOURCE_CARD
from tpuconv.targets.target import OWN, Target
from tpuconv.text import code, format_size, markdown


def _quantized(rules: Mapping[str, Any]) -> str:
    if "rules" not in rules:
        return f"{markdown(rules['summary'])}; nothing was quantized again"
    return f"quantized by {code(rules['name'])} ({markdown(rules['summary'])}): `{REPORT}` shows what it cost"


def _changed(source: Mapping[str, Any]) -> str:
    return " Saved from a model since: its weights may differ from the source's." if source.get("changed") else ""


_OWN_LOADING = """```python
import tpuconv

model = tpuconv.load(".")          # a Flax NNX model
logits_BTV = model(ids_BT)         # float32
```

```python
import orbax.checkpoint as ocp     # or the arrays alone, with Orbax as it is

params = ocp.StandardCheckpointer().restore(path_of_params)
```"""


def _loading(target: Target) -> str:
    """Returns the text on loading the checkpoint in its target."""
    if target is OWN:
        return _OWN_LOADING
    return f"""It is for {code(target.name)} ({markdown(target.summary)}), where this folder, OUT, is loaded by:

```
{target.loading}
```

`tpuconv families --target {target.name}` says what to know about it."""


def model_card(manifest: Mapping[str, Any], target: Target = OWN) -> str:
    """Returns the README.md of a checkpoint with this manifest, for this target."""
    source, arrays = manifest["source"], manifest["arrays"]
    at_commit = f"{markdown(source['repo'] or '')} at commit {markdown(source['commit'] or '')}"
    origin = at_commit if source["repo"] else f"the folder {code(source['name'])}"
    dtypes = ", ".join(sorted({array["dtype"] for array in arrays.values()}))
    place = "This folder" if target.folder == "." else f"`{target.folder}/`"
    part, rules = manifest["options"]["layers"], manifest.get("quantization")
    skipped = "".join(f"- {code(s['pattern'])} ({s['count']}): {markdown(s['reason'])}\n" for s in manifest["skipped"])
    lines = [
        f"{manifest['parameters']:,} parameters in {len(arrays)} arrays, {format_size(manifest['bytes'])}, {dtypes}",
        f"layers {'stacked in one array each' if manifest['options']['scan_layers'] else 'as arrays of their own'}",
        *([f"only layers {part[0]} to {part[1]}: a part of the model, for trials"] if part else []),
        *([_quantized(rules)] if rules else []),
    ]
    return f"""# {markdown(source["name"])} for JAX

Converted by tpuconv from {origin}, family {code(manifest["family"])}.{_changed(source)}

{"".join(f"- {line}{chr(10)}" for line in lines)}
{place} is an Orbax checkpoint; `tpuconv.json` says for every array its shape, its axes, its source and its checksum.
`{SOURCE_CARD}`, where there is one, is the card of the original, whose licence applies.

{_loading(target)}

`tpuconv verify .` checks every array against its checksum.
{f"{chr(10)}Not converted:{chr(10)}{chr(10)}{skipped}" if skipped else ""}"""

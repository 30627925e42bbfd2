"""What a checkpoint carries beside its weights: the files copied from the source, and a model card."""

from collections.abc import Mapping
from typing import Any

from tpuconv.convert.plan import REPORT
from tpuconv.convert.source import CONFIG_FILE, ENCODING_FILE
from tpuconv.sizes import format_size

COPIED = (
    CONFIG_FILE,
    ENCODING_FILE,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.tekken.json",
    "chat_template*",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
SOURCE_CARD = "README.source.md"


def _quantized(rules: Mapping[str, Any]) -> str:
    if "rules" not in rules:
        return f"{rules['summary']}; nothing was quantized again"
    return f"quantized by `{rules['name']}` ({rules['summary']}): `{REPORT}` shows what it cost"


def model_card(manifest: Mapping[str, Any]) -> str:
    """The README.md of a checkpoint with this manifest."""
    source, arrays = manifest["source"], manifest["arrays"]
    origin = f"{source['repo']} at commit {source['commit']}" if source["repo"] else f"the folder `{source['name']}`"
    dtypes = ", ".join(sorted({array["dtype"] for array in arrays.values()}))
    part, rules = manifest["options"]["layers"], manifest.get("quantization")
    skipped = "".join(f"- `{s['pattern']}` ({s['count']}): {s['reason']}\n" for s in manifest["skipped"])
    lines = [
        f"{manifest['parameters']:,} parameters in {len(arrays)} arrays, {format_size(manifest['bytes'])}, {dtypes}",
        f"layers {'stacked in one array each' if manifest['options']['scan_layers'] else 'as arrays of their own'}",
        *([f"only layers {part[0]} to {part[1]}: a part of the model, for trials"] if part else []),
        *([_quantized(rules)] if rules else []),
    ]
    return f"""# {source["name"]} for JAX

Converted by tpuconv from {origin}, family `{manifest["family"]}`.

{"".join(f"- {line}{chr(10)}" for line in lines)}
`params/` is an Orbax checkpoint; `tpuconv.json` says for every array its shape, its axes, its source and its checksum.
`{SOURCE_CARD}`, where there is one, is the card of the original, whose licence applies.

```python
import tpuconv

model = tpuconv.load(".")          # a Flax NNX model
logits_BTV = model(ids_BT)         # float32
```

```python
import orbax.checkpoint as ocp     # or the arrays alone, with Orbax as it is

params = ocp.StandardCheckpointer().restore(path_of_params)
```

`tpuconv verify .` checks every array against its checksum.
{f"{chr(10)}Not converted:{chr(10)}{chr(10)}{skipped}" if skipped else ""}"""

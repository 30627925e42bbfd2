"""The model card of a checkpoint."""

import json
from collections.abc import Mapping
from math import log10
from shlex import quote
from types import MappingProxyType
from typing import Any

from tpuconv.checkpoint.manifest import add_statistics
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.convert.run.card_metadata import front_matter
from tpuconv.models.common.heads import DRAFTS_AHEAD
from tpuconv.notation.sizes import HasSizes
from tpuconv.sources.companions import SOURCE_CARD
from tpuconv.targets.target import OWN, Target
from tpuconv.text import code, format_size, markdown


def _quantized(rules: Mapping[str, Any]) -> str:
    if "rules" not in rules:
        return f"{markdown(rules['summary'])}; nothing was quantized again"
    return f"quantized by {code(rules['name'])} ({markdown(rules['summary'])}): `{REPORT}` shows what it cost"


def _statistics(rules: Mapping[str, Any]) -> list[str]:
    """Returns a line for each type of quantized values: how many there are, and the noise of their rounding."""
    sums: dict[str, dict[str, float]] = {}
    for facts in rules["parameters"].values():
        add_statistics(sums.setdefault(facts["qtype"], {}), facts["figures"])
    return [
        f"{code(qtype)}: {int(total['count']):,} values, signal to noise {_decibels(total)}"
        for qtype, total in sorted(sums.items())
    ]


def _decibels(total: Mapping[str, float]) -> str:
    if not total["signal"] or not total["noise"]:
        return "not limited: nothing was rounded"
    return f"{10 * log10(total['signal'] / total['noise']):.1f} dB"


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
```

For vLLM, SGLang and transformers, `tpuconv export . OUT` writes safetensors."""


def _loading(target: Target, options: Mapping[str, Any]) -> str:
    """Returns the text on loading a checkpoint with these options in its target."""
    if options.get("keep_adapter"):
        return f"""It holds LoRA alone, for {code(target.name)}, where this folder, OUT, is loaded by:

```
{target.pairs.loading}
```"""
    if target is OWN:
        return _OWN_LOADING
    return f"""It is for {code(target.name)} ({markdown(target.summary)}), where this folder, OUT, is loaded by:

```
{target.loading_of(options.get("pathways", False))}
```

`tpuconv families --target {target.name}` says what to know about it."""


def model_card(
    manifest: Mapping[str, Any], target: Target = OWN, kept: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Returns the README.md of a checkpoint.

    Args:
        manifest: of the checkpoint.
        target: the program that it is for.
        kept: the metadata of the source's card that holds for the checkpoint too.
    """
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
        *(_statistics(rules) if rules and "rules" in rules else []),
    ]
    tags = ("jax", "orbax", "tpu", "tpuconv", *([] if target is OWN else [target.name]))
    return f"""{front_matter(manifest, kept, tags, library=target.name)}# {markdown(source["name"])} for JAX

Converted by tpuconv from {origin}, family {code(manifest["family"])}.{_changed(source)}

{"".join(f"- {line}{chr(10)}" for line in lines)}
{place} is an Orbax checkpoint; `tpuconv.json` says for every array its shape, its axes, its source and its checksum.
`{SOURCE_CARD}`, where there is one, is the card of the original, whose licence applies.

{_loading(target, manifest["options"])}

`tpuconv verify .` checks every array against its checksum.
{f"{chr(10)}Not converted:{chr(10)}{chr(10)}{skipped}" if skipped else ""}"""


LOADED_MODEL = """
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("OUT")
```
"""
WHERE_SERVED = ("this folder, or its name on the Hub", "on a TPU: by the models of vLLM")
"""Comments on the commands of `serve_commands`."""
METHODS_OF_VLLM = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark", "gemma4_assistant": "mtp"}
"""vLLM's names for the methods of families of drafts."""


def drafts_of(config: HasSizes) -> int:
    """Returns the number of tokens that a draft with this config drafts in a step."""
    drafts: int = getattr(config, "drafts", DRAFTS_AHEAD)
    return drafts


def serve_commands(family: str, out: str, drafts: int) -> tuple[str, ...]:
    """Returns the commands that serve quantized safetensors by vLLM: anywhere, and on a TPU; of a draft, beside its
    target.

    Args:
        family: of the model.
        out: the folder, or its name on the Hub.
        drafts: see `drafts_of`.
    """
    if by := METHODS_OF_VLLM.get(family):
        draft = json.dumps({"method": by, "model": out, "num_speculative_tokens": drafts})
        return (f"vllm serve TARGET --speculative-config {quote(draft)}",)
    return f"vllm serve {quote(out)}", f"MODEL_IMPL_TYPE=vllm vllm serve {quote(out)}"


def _served(family: str, drafts: int) -> str:
    """Returns the part of a README.md that serves quantized safetensors."""
    commands = serve_commands(family, "OUT", drafts)
    if len(commands) == 1:
        return f"```bash\n{commands[0]}\n```\n"
    shown = "".join(f"{command:38} # {where}\n" for command, where in zip(commands, WHERE_SERVED, strict=True))
    return f"```bash\n{shown}```\n{LOADED_MODEL}"


def served_card(manifest: Mapping[str, Any], method: str, kept: Mapping[str, Any], drafts: int) -> str:
    """Returns the README.md of quantized safetensors.

    Args:
        manifest: of the checkpoint that they are made of.
        method: the `quant_method` of config.json.
        kept: the metadata of the source's card that holds for them too.
        drafts: see `drafts_of`.
    """
    source, rules = manifest["source"], manifest["quantization"]
    origin = (
        f"{markdown(source['repo'])} at commit {markdown(source['commit'] or '')}" if source["repo"] else "a folder"
    )
    return f"""{front_matter(manifest, kept, (method, "vllm", "tpuconv"))}# {markdown(source["name"])}, quantized

{markdown(rules["summary"])}, in the format of {code(method)}. Quantized by tpuconv from {origin}.{_changed(source)}
`{SOURCE_CARD}`, where there is one, is the card of the original, whose licence applies.

{_served(manifest["family"], drafts)}
`tpuconv verify .` checks every file against its hash.
"""

"""Lists the language models of the installed transformers that tpuconv refuses, and what is new in each.

    python tools/refused_types.py [MODEL_TYPE]...

A type that the package leaves out has its reason. For another one, and for types that are named, a small model is
written without weights, and `propose_family` compares it with all families: the nearest one, the tensors that it
lacks, and the keys of config.json that it does not read.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
)

from tpuconv.convert.plan.proposal import FamilyProposal, propose_family
from tpuconv.models.families import DRAFT_FAMILIES
from tpuconv.models.left_out import MODELS_LEFT_OUT
from tpuconv.models.registry import all_families, get_family
from tpuconv.models.wrappers import WRAPPERS
from tpuconv.sources.source import open_source

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.checkpoints import write_checkpoint

LAYERS = 6
"""The layers of the small model: enough for each kind of layer of most models."""
MOST = 12
"""Names that are printed of each list."""


def refused_types() -> list[str]:
    """Returns the types of models that return logits and that no family reads, those left out too."""
    families = (*all_families(), *map(get_family, DRAFT_FAMILIES))
    known = {kind for family in families for kind in family.architectures.values()} | WRAPPERS.keys()
    kinds = (*MODEL_FOR_CAUSAL_LM_MAPPING, *MODEL_FOR_MULTIMODAL_LM_MAPPING)
    names = {str(kind.model_type) for kind in kinds} & {*CONFIG_MAPPING}
    return sorted(names - known)


def small_config(model_type: str) -> Any:
    """Returns transformers' config of a type with few layers, if it can have few."""
    try:
        config = AutoConfig.for_model(model_type, num_hidden_layers=LAYERS)
        if (text := config.get_text_config()) is not config:
            config = AutoConfig.for_model(model_type, text_config=text.to_dict() | {"num_hidden_layers": LAYERS})
    except Exception:  # a config that lists its layers
        config = AutoConfig.for_model(model_type)
    return config


def proposal(model_type: str) -> FamilyProposal:
    """Returns what the nearest family explains of a type."""
    config = small_config(model_type)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    raw = config.to_dict() | {"architectures": [type(model).__name__], "model_type": model_type}
    tensors = {name: ("BF16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    with TemporaryDirectory() as folder:
        return propose_family(open_source(write_checkpoint(Path(folder) / model_type, raw, tensors)))


def lines(found: FamilyProposal) -> Iterator[str]:
    """Yields the description of a proposal."""
    yield f"  nearest: {found.nearest.name}"
    for title, names in (
        ("new tensors", [each.pattern for each in found.left]),
        ("missing tensors", found.nearest.missing),
        ("new keys", [f"{key}={value!r:.40}" for key, value in found.unread.items()]),
    ):
        if names:
            more = "" if len(names) <= MOST else f" and {len(names) - MOST} more"
            yield f"  {title}: {', '.join(list(names)[:MOST])}{more}"


def main(wanted: Iterable[str]) -> None:
    wanted = list(wanted)
    print(f"transformers {transformers.__version__}")
    for model_type in wanted or refused_types():
        reason = MODELS_LEFT_OUT.get(model_type)
        print(f"{model_type}: {reason or 'new'}")
        if reason and not wanted:
            continue
        try:
            for line in lines(proposal(model_type)):
                print(line)
        except Exception as error:  # transformers or the comparison cannot make a small model of the type
            print(f"  not compared: {type(error).__name__}: {str(error).splitlines()[0]:.200}")


if __name__ == "__main__":
    main(sys.argv[1:])

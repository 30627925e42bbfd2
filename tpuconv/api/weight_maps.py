"""Maps between trees of weights in memory."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from tpuconv.errors import UsageError
from tpuconv.location import Location
from tpuconv.options import argument, option, takes

if TYPE_CHECKING:
    from tpuconv.weight_map.weight_map import WeightMap


@dataclass(eq=False, repr=False)
class WeightMapRequest:
    """The arguments of `weight_map`."""

    model: str | Location | Mapping[str, Any] = field(
        metadata=argument(
            "A checkpoint of tpuconv, a folder or a Hub id with safetensors, a config.json, or a parsed config.json."
        )
    )
    source: str = field(
        metadata=argument(
            "The tree that is given: tpuconv, nnx, maxtext, tunix, gemma, jax-llm-examples, huggingface or vllm."
        )
    )
    target: str = field(metadata=argument("The wanted tree, one of the same."))
    _: KW_ONLY
    scan_layers: bool = option(
        False, "Layers are stacked in the trees that have stacked layers: tpuconv, nnx and maxtext."
    )
    tensor_parallel: int = option(
        1, "Into how many shards of tensor parallelism vllm divides the matrices that it joins.", least=1
    )
    text_only: bool = option(False, "Map the text model of a multimodal model alone.")


@takes(WeightMapRequest)
def weight_map(asked: WeightMapRequest) -> "WeightMap":
    """Returns the map between two trees of the weights of a model: a function on arrays in memory, which may be jitted,
    with its rows as data, its inverse, and a stream that takes little more memory than the weights.

    Raises:
        TpuconvError: there is no such model or tree, a tree does not have the model, or the checkpoint is quantized.
    """
    from tpuconv.weight_map.model import open_model
    from tpuconv.weight_map.trees import VLLM, form_of
    from tpuconv.weight_map.weight_map import make_map

    if asked.tensor_parallel > 1 and VLLM not in (asked.source, asked.target):
        raise UsageError(
            f"{asked.source} and {asked.target} have no shards of tensor parallelism",
            hint="leave out `tensor_parallel=`, or map to vllm",
        )
    forms = [
        form_of(name, scan_layers=asked.scan_layers, tensor_parallel=asked.tensor_parallel)
        for name in (asked.source, asked.target)
    ]
    model = open_model(asked.model)
    return make_map(model.with_parts(()) if asked.text_only else model, *forms)

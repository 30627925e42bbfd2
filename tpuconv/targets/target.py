"""Describes a target: the place of its arrays, and for each family a table from our parameters to its parameters.

A tree is written in the letters and words of the mapping tables. It says only what differs: its names, the parameters
that it joins, the axis on which it stacks layers, and the few values that it changes. The way there from the tensors of
a release, and the way back, follow from it and from the family's table (`tpuconv.targets.compose`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.names import LEAF, OWN_TARGET, QVALUE, SCALE, ZERO_POINT
from tpuconv.notation.arithmetic import Arithmetic
from tpuconv.notation.letters import Word, declare
from tpuconv.targets.needs import Needs

PATHWAYS_DTYPES = ("bfloat16", "float32", "float64", *(f"{sign}int{8 << n}" for sign in ("", "u") for n in range(4)))
"""Dtypes of arrays that Pathways reads: `cloud_pathways_helper` of Orbax 0.12 names them."""

HALF_HEAD = "half_head"
declare(**{HALF_HEAD: Word("half of the head dimension: rotary position pairs an element of each half")})


@dataclass(frozen=True)
class Place:
    """The place of a parameter, or of several joined ones, in a target's tree.

    Attributes:
        name: the target's name of the parameter.
        layout: how our axes become the target's, as in a mapping table; by default they are the same.
        arithmetic: how its values differ from ours; by default they are the same.
        layer_axis: the axis on which scanned layers are stacked; by default the axis of the target.
        others: the names of the layout's further results.
    """

    name: str
    layout: str = ""
    arithmetic: Arithmetic | None = None
    layer_axis: int | None = None
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its arrays."""
        return (self.name, *self.others)


Places = Mapping[str | tuple[str, ...], str | Place]
"""By our name, or by the names of parameters that are joined, the target's place; a name alone if axes and values are
ours. Under one name several times is an array of `Ones`, of the shape of these parameters joined."""


@dataclass(frozen=True)
class LayerPlaces:
    """The layers of a tree.

    Attributes:
        places: by our names after `layers.{L}.`.
        apart: what stands before the names of one layer. `{L}` is the number of the layer, `{#J}` its place among the
            layers of the letter J.
        stacked: the prefix of the names of scanned layers; `{#}` is the place in a period. Or the prefix of each place
            of a period: places with the same one are stacked on an axis of their own, after the axis of the periods.
            None if these layers are never stacked, though others are.
        letter: the layers that have these names: L for all, I for those with a dense MLP, J for those with experts, Y
            for the first of each period, Y+1 for the second.
        rest: what stands before the names of a layer after the last complete period, if the others are scanned. If
            empty, there must be none.
    """

    places: Places
    apart: str
    stacked: str | tuple[str, ...] | None = ""
    letter: str = "L"
    rest: str = ""

    def stack(self, place: int) -> str:
        """Returns what stands before the names of scanned layers at a place of a period."""
        assert self.stacked is not None
        return self.stacked.replace("{#}", str(place)) if isinstance(self.stacked, str) else self.stacked[place]


@dataclass(frozen=True)
class PartPlaces:
    """A part of a multimodal model beside its text model: an encoder and its projector. Its layers are never stacked.

    Attributes:
        places: by our names after the name of the part, with their indices.
        when: whether the target has the part as a config of it (`tpuconv.models.common.beside.PartConfig`) says.
        is_scannable: whether the layers of the text may be stacked beside the part.
    """

    places: Places
    when: Callable[[Any], bool] = lambda config: True
    is_scannable: Callable[[Any], bool] = lambda config: True


@dataclass(frozen=True)
class Tree:
    """A family's parameters in a target.

    Attributes:
        places: of the parameters outside of the layers.
        layers: all layers, or each kind of layers.
        period: how many layers repeat; scanned layers are stacked for each place of a period.
        when: whether the tree belongs to a config. The first match counts.
        needs: what the program's code takes for granted of a model, as a text after "with", and whether it holds.
        stacked_needs: the same of a model with stacked layers.
        differs: the same where a model without the property is converted all the same: its weights are right, and the
            program computes other logits.
        note: what a user must know to load it.
        layer_sets: layers of the tree that a config does not have, by their letter.
        sizes: of letters of the tree that a config does not have.
        parts: the parts beside the text model that the target has, by name. Without the others the text model is
            converted.
        quantized: sets of parameters of layers, by our names after `layers.{L}.`, of which the program reads all
            quantized or none; others it reads as they are. None if it reads each as it finds it.
    """

    places: Places
    layers: tuple[LayerPlaces, ...]
    period: int = 1
    when: Callable[[Any], bool] = lambda config: True
    needs: Needs = field(default_factory=dict)
    stacked_needs: Needs = field(default_factory=dict)
    differs: Needs = field(default_factory=dict)
    note: str = ""
    layer_sets: Callable[[Any], Mapping[str, Sequence[int]]] = lambda config: {}
    sizes: Callable[[Any], Mapping[str, int]] = lambda config: {}
    parts: Mapping[str, PartPlaces] = field(default_factory=dict)
    quantized: tuple[frozenset[str], ...] | None = None


@dataclass(frozen=True)
class PairForm:
    """The form in which a program reads pairs of LoRA (`tpuconv.notation.pairs`).

    Attributes:
        is_flat: whether they have all axes of inputs, or of outputs, as one: Qwix makes them so at products by
            `dot_general`, and with all axes at products by einsum.
        is_state: whether their names are as in the state of a model of Flax NNX: without the root of the target, and
            with the leaf `value`. Else they are as the names of parameters.
        metadata: for Orbax, from the rank and the alpha of all pairs. None if each pair may have a rank of its own.
        loading: how an output with pairs alone is loaded.
    """

    is_flat: bool = False
    is_state: bool = False
    metadata: Callable[[int, float], dict[str, Any]] | None = None
    loading: str = "its arrays, into nnx.state(model, nnx.LoRAParam)"


@dataclass(frozen=True)
class Target:
    """A program, or a family of programs, that loads the output.

    Attributes:
        name: of the target.
        summary: one line about it.
        loading: how the output is loaded there, as Python.
        trees: by family, or by the model_type of config.json. None: every family, under our own names.
        folder: where the Orbax checkpoint of the arrays is in the output.
        root: what stands before each name.
        leaf: what stands after each name.
        collections: what may stand in place of `root` in a run: where the program saves values that are not trained.
        layer_axis: the axis on which scanned layers are stacked; None if the target has no scanned layers.
        custom_metadata: for Orbax, from whether the layers are scanned.
        pathways: the settings by which the program reads zarr's format 2 on Pathways. Empty if it does not run there.
        step_item: the name of the arrays in a step of a `CheckpointManager`, whose folder is the parent of `folder`.
        quantized: what is appended to a parameter's name for the arrays that hold it quantized, by our suffix. None if
            the target has no quantized parameters.
        fp8_block: the number of values along each axis that share a scale, if parameters can only be quantized as FP8
            with such scales, as the release has them. An axis that is shorter has a scale for each of its values. 0 if
            every form is possible.
        squeezes_scales: whether scales lack the axes that are contracted.
        empty: names that must be in the tree without an array, if the config has the property.
        pairs: the form of pairs of LoRA.
        has_lists: whether numbers in names are places in lists; else they are keys of dicts.
        is_safetensors: whether the output has the tensors of the release again, and no arrays.
    """

    name: str
    summary: str
    loading: str
    trees: Mapping[str, Tree | tuple[Tree, ...]] | None = None
    folder: str = "params"
    root: str = ""
    leaf: str = ""
    collections: tuple[str, ...] = ()
    layer_axis: int | None = None
    custom_metadata: Callable[[bool], dict[str, Any]] = lambda scanned: {}
    pathways: str = ""
    step_item: str = ""
    quantized: Mapping[str, str] | None = None
    fp8_block: int = 0
    squeezes_scales: bool = False
    empty: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    pairs: PairForm = PairForm()
    has_lists: bool = False
    is_safetensors: bool = False

    def fronts_beside(self, front: str) -> list[str]:
        """Returns what stands before the names of `collections` in a tree, where `front` stands before parameters: the
        root, without its first parts or with others before it."""
        if front.endswith(self.root):
            return [front.removesuffix(self.root) + collection for collection in self.collections]
        cut = self.root.removesuffix(front)
        return [each.removeprefix(cut) for each in self.collections if each.startswith(cut)]

    def pair_name(self, parameter: str, end: str) -> str:
        """Returns the name of one of the two arrays of LoRA that change a parameter.

        Args:
            parameter: its name in the tree.
            end: of the array's name, of `tpuconv.notation.pairs.PAIR_ENDS`.
        """
        root, leaf = ("", LEAF) if self.pairs.is_state else (self.root, self.leaf)
        return f"{root}{parameter.removeprefix(self.root).removesuffix(self.leaf)}{end}{leaf}"

    def check_pathways(self, dtypes: Mapping[str, str]) -> None:
        """Checks that the program reads arrays on Pathways.

        Args:
            dtypes: of the arrays, by their names.

        Raises:
            UsageError: it does not run there.
            UnsupportedConfig: Pathways does not read an array.
        """
        if not self.pathways:
            raise UsageError(
                f"the target {self.name} does not run on Pathways",
                hint='leave out `pathways=`, or use `target="maxtext"`',
            )
        if others := {name: dtype for name, dtype in dtypes.items() if dtype not in PATHWAYS_DTYPES}:
            first, dtype = next(iter(others.items()))
            raise UnsupportedConfig(
                f"Pathways does not read {dtype}, the dtype of {first}",
                hint='convert to another `dtype=`, such as bfloat16, and leave out `encoding="keep"`',
            )

    def loading_of(self, pathways: bool) -> str:
        """Returns how an output is loaded, written for Pathways or not."""
        return f"{self.loading} {self.pathways}" if pathways else self.loading

    def part(self, parameter: str, suffix: str) -> str:
        """Returns the name of an array that holds a part of a quantized parameter, such as its scales.

        Raises:
            UnsupportedConfig: the target has no such part.
        """
        assert self.quantized is not None
        if suffix not in self.quantized:
            raise UnsupportedConfig(
                f"the target {self.name} has no {suffix} of quantized parameters", hint="quantize in another way"
            )
        return f"{parameter.removesuffix(self.leaf)}{self.quantized[suffix]}{self.leaf}"


OWN_PARTS = {suffix.removeprefix("."): suffix for suffix in (QVALUE, SCALE, ZERO_POINT)}
"""The names of the parts of quantized parameters in our tree."""

OWN = Target(
    name=OWN_TARGET,
    summary="tpuconv.load, and every command of tpuconv",
    loading='tpuconv.load("OUT")',
    layer_axis=0,
    quantized=OWN_PARTS,
)
"""The default target."""

NNX = Target(
    name="nnx",
    summary="plain Flax NNX: StandardCheckpointer().restore into nnx.state(model)",
    loading='StandardCheckpointer().restore("OUT/params", nnx.state(model))',
    leaf=LEAF,
    layer_axis=0,
    quantized=OWN_PARTS,
)
"""Plain Flax NNX: our own tree as `nnx.state(model)` has it, in which every leaf is the value of a variable."""

HUGGINGFACE = Target(
    name="huggingface",
    summary="transformers, vLLM, SGLang: safetensors; with `quantize=` in the formats of compressed-tensors",
    loading='AutoModelForCausalLM.from_pretrained("OUT")',
    quantized=OWN_PARTS,
    is_safetensors=True,
)
"""Safetensors as transformers, vLLM and SGLang read them: the names of the release, with our own tree in between."""

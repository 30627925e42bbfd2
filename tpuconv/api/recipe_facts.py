"""The data of a recipe: the sizes of a model, and the commands that convert, quantize, serve, train and load it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.verify.topology.request import FitReport

SPARE = 0.15
"""The share of a device's memory that is left for the cache and for temporaries, where slices are chosen by size."""


@dataclass(frozen=True)
class CommandCall:
    """A command of tpuconv.

    Attributes:
        name: of the command, such as "convert".
        arguments: in their order.
        options: values by the Python name of the option, such as `scan_layers`; True for a flag.
    """

    name: str
    arguments: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"name": self.name, "arguments": list(self.arguments), "options": dict(self.options)}


@dataclass(frozen=True)
class RecipeStep:
    """A step of a recipe.

    Attributes:
        title: of the step.
        calls: commands of tpuconv.
        elsewhere: lines for another program: a shell, or Python.
        language: of these lines, "bash" or "python".
        note: what the user must know; empty if there is nothing.
    """

    title: str
    calls: tuple[CommandCall, ...] = ()
    elsewhere: tuple[str, ...] = ()
    language: str = "bash"
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        calls = [call.to_json() for call in self.calls]
        return {**vars(self), "calls": calls, "elsewhere": list(self.elsewhere)}


@dataclass(frozen=True)
class ModelForm:
    """The parameters of the model in one form.

    Attributes:
        name: a quantization config, a dtype, or `as released`.
        summary: one line about it.
        device_bytes: bytes of all parameters in device memory; None if the form is refused.
        slices: by kind of chip the smallest slice whose memory holds the parameters with `SPARE` to spare; None if no
            slice does.
        refusal: why the model cannot have this form; empty if it can.
    """

    name: str
    summary: str
    device_bytes: int | None
    slices: Mapping[str, str | None] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True)
class ModelTarget:
    """A target, and whether it has the model.

    Attributes:
        target: its name.
        supported: whether `convert` writes the model for it.
        refusal: why not; empty if it is supported.
        scanned: whether it has the layers stacked.
        parts: the encoders that it has, of a multimodal model.
    """

    target: str
    supported: bool
    refusal: str = ""
    scanned: bool = False
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class ModelRecipe(OneLine):
    """The facts and the commands of a model.

    Attributes:
        model: the Hub id, the folder or the file that was asked about.
        family: of the model.
        summary: the models of the family.
        architecture, model_type: of config.json.
        encoding: the name of the encoding of the weights; None if they are not encoded.
        returns: "logits", "scores", "scores of tokens" or "hidden states".
        from_headers: whether the headers of the tensors were read; otherwise config.json alone.
        tensors, source_bytes: of the source.
        parameters: the number of parameters that are converted; tied ones count once.
        arrays, output_bytes: of the checkpoint.
        parts: the encoders beside the text model.
        positions: the longest context, in tokens.
        forms: the parameters unquantized, as released, and by the packaged configs.
        targets: all targets.
        steps: the commands.
        fit: the answers of the TPU compiler; empty if it was not asked.
    """

    model: str
    family: str
    summary: str
    architecture: str
    model_type: str
    encoding: str | None
    returns: str
    from_headers: bool
    tensors: int
    source_bytes: int
    parameters: int
    arrays: int
    output_bytes: int
    parts: tuple[str, ...]
    positions: int
    forms: Sequence[ModelForm]
    targets: Sequence[ModelTarget]
    steps: Sequence[RecipeStep]
    fit: "Sequence[FitReport]" = ()

    @property
    def asked(self) -> Mapping[str, Any]:
        """The options of the command `fit` among the steps; none for a model that does not decode."""
        return next((call.options for step in self.steps for call in step.calls if call.name == "fit"), {})

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {
            **vars(self),
            "parts": list(self.parts),
            "forms": [vars(form) for form in self.forms],
            "targets": [vars(target) for target in self.targets],
            "steps": [step.to_json() for step in self.steps],
            "fit": [report.to_json() for report in self.fit],
        }

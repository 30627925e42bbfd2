"""Options, each described once: a field of a dataclass that says type, default, help and check. From it come the
keyword of the Python interface (`takes`), the flag of the command (`tpuconv.commands.options.of`), the key of the
manifest (`manifest_keys`) and the lines of docs/api.md and docs/cli.md.

    @dataclass(eq=False, repr=False, kw_only=True)
    class Options:
        compress: bool = option(False, "Compress all arrays with zstd.", manifest=Key())

Such classes have no other methods than `__init__`: each method takes 0.1 ms of every start of a command.

In a help text and in an error an option has the form `compress=` or `compress=True`, as in a call; the commands show it
as a flag.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tpuconv.arguments import as_declared
from tpuconv.errors import UsageError
from tpuconv.progress import Bar, ignore

DTYPE_CHOICES = ("auto", "bfloat16", "float32")
ENCODING_CHOICES = ("dequantize", "keep")
CACHE_DTYPES = ("int8", "float8_e4m3fn")
KV_CACHES: Mapping[str, str] = {"fp8": "tensor", "fp8_per_head": "attn_head"}
"""The choices of `kv_cache` in a calibration, and the strategy of each in compressed-tensors: one scale for a layer's
keys and one for its values, or one for each head."""
SCHEME_CHOICES = ("compressed-tensors", "fp8", "awq", "mxfp4")
DRAFT_FORMS = ("speculators", "sglang")
FORM_CHOICES = ("released", "transformers", *DRAFT_FORMS)
MOST_TOKENS, MOST_SEQUENCES = 1 << 24, 1 << 20  # more than any model has and any machine holds

_OPTION = "option"
"""The name of an option in the metadata of its field."""
_LINE = re.compile(r"\S.{0,103}(?!\S)")
"""A line of a docstring."""


@dataclass(eq=False, repr=False)
class Key:
    """The key of an option in a manifest, which has it always or only if it is not the default.

    Attributes:
        name: the key; the name of the field if it is empty.
        always: whether the manifest has the default too.
        to_json: converts the value.
    """

    name: str = ""
    always: bool = False
    to_json: Callable[[Any], Any] = lambda value: value


@dataclass(eq=False, repr=False)
class Description:
    """The description of a field.

    Attributes:
        help: the meaning, for the command and for Python.
        python: the meaning in Python, where the value has another form than on the command line.
        is_flag: whether the command has the option.
        choices: the allowed values; empty if any is.
        least, most: bounds of a number.
        manifest: the key in the manifest; None if the option is not in it.
    """

    help: str
    python: str = ""
    is_flag: bool = True
    choices: Sequence[str] = ()
    least: int | None = None
    most: int | None = None
    manifest: Key | None = None

    @property
    def meaning(self) -> str:
        """The meaning in Python, on one line, with the choices."""
        choices = f"Choices: {', '.join(self.choices)}." if self.choices else ""
        return " ".join(f"{self.python or self.help} {choices}".split())


def described_as(help: str, **kwargs: Any) -> Mapping[str, Any]:
    """Returns the metadata of a field that is an option; the arguments are those of `Description`. Shared ones are
    constants of this module."""
    return {_OPTION: Description(help, **kwargs)}


def option(default: Any, help: str, **kwargs: Any) -> Any:
    """Returns a field with a default that is an option."""
    return field(default=default, metadata=described_as(help, **kwargs))


def argument(meaning: str) -> Mapping[str, Any]:
    """Returns the metadata of a field that only the Python interface has, or that the command has as an argument."""
    return described_as(meaning, is_flag=False)


def options_of(request: Any) -> "Iterator[tuple[Field[Any], Description]]":
    """Yields the described fields of a dataclass, in their order."""
    for each in fields(request):
        if found := each.metadata.get(_OPTION):
            yield each, found


def manifest_keys(options: Any) -> dict[str, Any]:
    """Returns the manifest's description of the options of a dataclass."""
    keys = [(each, known.manifest) for each, known in options_of(options) if known.manifest]
    given = {each.name: getattr(options, each.name) for each, _ in keys}
    return {
        key.name or each.name: key.to_json(given[each.name])
        for each, key in sorted(keys, key=lambda pair: not pair[1].always)
        if key.always or (given[each.name] and given[each.name] != each.default)
    }


Arguments = ParamSpec("Arguments")
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def takes(request: Callable[Arguments, Asked]) -> Callable[[Callable[[Asked], Answer]], Callable[Arguments, Answer]]:
    """Makes a function of a request, a dataclass, one of its fields: `convert(src, out, dtype="float32")` instead of
    `convert(ConvertRequest(src, out, dtype="float32"))`. Type checkers, editors and `help` see the fields as its
    parameters. `request` of the result is the dataclass.

    A call raises TypeError for an argument that the function does not have, and UsageError for a value that is of
    another type, not among the choices or not within the bounds.
    """

    def decorate(function: Callable[[Asked], Answer]) -> Callable[Arguments, Answer]:
        signature = inspect.signature(request).replace(return_annotation=function.__annotations__["return"])
        by_position = [
            name for name, each in signature.parameters.items() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]

        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                wrong = next((name for name in kwargs if name not in signature.parameters), "")
                near = get_close_matches(wrong, signature.parameters, 1)
                meant = f". Did you mean '{near[0]}'?" if near else ""
                if len(args) > len(by_position):
                    meant = f": it takes {', '.join(by_position)} by position, the others by name"
                raise TypeError(f"{function.__name__}() {error}{meant}") from None
            if "progress" in kwargs and isinstance(wanted := kwargs["progress"], bool | None):
                kwargs["progress"] = Bar() if wanted else ignore
            asked = request(*args, **kwargs)
            give_values(asked)
            return function(asked)

        call.__signature__, call.request = signature, request  # type: ignore[attr-defined]
        call.__doc__ = _documented(function.__doc__ or "", request, signature.parameters)
        return call

    return decorate


def give_values(asked: Any) -> None:
    """Gives each option its value as its type (`as_declared`).

    Raises:
        UsageError: a value is of another type, not among the choices or outside of the bounds.
    """
    for each, known in options_of(asked):
        value = as_declared(each, getattr(asked, each.name), known.meaning, known.choices)
        setattr(asked, each.name, value)
        if value == each.default:
            continue
        if known.choices and value not in known.choices:
            raise UsageError(
                f"{each.name} cannot be {value!r}: it is not one of the choices",
                hint=f"give one of {', '.join(map(str, known.choices))}",
            )
        if value == () and each.default is not MISSING and each.default:
            raise UsageError(f"{each.name} cannot be empty", hint="give at least one value")
        for number in value if isinstance(value, tuple) else (value,):
            name, least, most = each.name, known.least, known.most
            if least is not None and isinstance(number, int) and number < least:
                raise UsageError(f"{name} cannot be {number}: it is too small", hint=f"give at least {least}")
            if most is not None and isinstance(number, int) and number > most:
                raise UsageError(f"{name} cannot be {number}: it is too large", hint=f"give at most {most}")


def _documented(doc: str, request: Any, names: Iterable[str]) -> str:
    """Returns a docstring with the fields of a request as arguments, in the order of their names."""
    summary, raises, faults = inspect.cleandoc(doc).partition("Raises:\n")
    meanings = {each.name: known.meaning for each, known in options_of(request)}
    lines = ["\n        ".join(_LINE.findall(f"{name}: {meanings[name]}")) for name in names]
    args = "\n    ".join(["Args:", *lines])
    return "\n\n".join([summary.rstrip(), args, *([raises + faults] if raises else [])])


DTYPE_OPTION = described_as(
    "Dtype of parameters and activations. auto: the dtype of the checkpoint.",
    choices=DTYPE_CHOICES,
    manifest=Key(always=True),
)
COMPUTE_DTYPE_OPTION = described_as(
    "Compute dtype of both models. auto: float32, so that any difference is a bug, not rounding.", choices=DTYPE_CHOICES
)
CACHE_DTYPE_OPTION = described_as(
    "Dtype of the KV cache; int8 and FP8 halve its memory (one scale per head and token; in FP8 the static scales of "
    "the checkpoint, if it has any).",
    python="Dtype of the KV cache, by default the dtype of the model; int8 and FP8 halve its memory (one scale per "
    "head and token; in FP8 the static scales of the checkpoint, if it has any).",
    choices=CACHE_DTYPES,
)
ENCODING_OPTION = described_as(
    "FP8, INT8, INT4 and FP4 weights: decode them to bfloat16, or keep quantized values and scales (passthrough).",
    choices=ENCODING_CHOICES,
    manifest=Key(always=True),
)
COMPRESS_OPTION = described_as(
    "Compress all arrays with zstd: smaller, slower. Quantized values of less than 8 bits are always compressed.",
    manifest=Key(),
)
PATHWAYS_OPTION = described_as(
    "Write a checkpoint that MaxText reads on Pathways: zarr's format 2, without OCDBT.", manifest=Key()
)
QUANTIZE_OPTION = described_as(
    "Quantize the model, by this config of `tpuconv quantize`; auto:4.5 chooses types by the roles of parameters.",
)
SCHEME_OPTION = described_as(
    "The format of quantized weights: quant_method of config.json.  [default: chosen by the types of the weights]",
    choices=SCHEME_CHOICES,
    manifest=Key(),
)
SCAN_LAYERS_OPTION = described_as("Stack the layers into one array each, for jax.lax.scan.", manifest=Key(always=True))
TEXT_ONLY_OPTION = described_as(
    "Convert only the text model of a multimodal model, without its encoders of images and sounds.",
    python="Take only the text model of a multimodal model, without its encoders of images and sounds.",
)
ADAPTER_OPTION = described_as(
    "Merge this LoRA adapter of PEFT into the weights; may be repeated.",
    python="Merge these LoRA adapters of PEFT into the weights: folders or Hub ids, each perhaps with a weight: "
    "`my-lora:0.5`.",
    manifest=Key("adapters", to_json=lambda adapters: [adapter.to_json() for adapter in adapters]),
)
REVISION_OPTION = described_as("Branch, tag or commit of a Hub repository.")
NONFINITE_OPTION = described_as("Accept NaN and infinite values, and scales of 0.", manifest=Key())
ALLOW_CONFIG_OPTION = described_as(
    "Ignore this key of config.json, which is not supported; may be repeated.",
    python="Ignore these keys of config.json, which are not supported.",
    manifest=Key(to_json=lambda keys: sorted(set(keys))),
)
MESH_OPTION = described_as(
    "Sizes of the mesh axes, such as tensor=8,expert=2.", python='Sizes of the mesh axes, such as {"tensor": 8}.'
)
TRAINED_NONFINITE_OPTION = described_as("Accept NaN and infinite values of a trainer's checkpoint.")
TRAINED_CONFIG_OPTION = described_as(
    "The model that was trained, if the checkpoint is a trainer's, saved with Orbax: a path or Hub id with config.json "
    "and tokenizer.",
    python="The model that was trained, if the checkpoint is a trainer's, saved with Orbax (the checkpoint itself, its "
    "step, or its run, of which the latest step is taken): a folder or a Hub id with config.json and tokenizer. If it "
    "has safetensors, an output has their names.",
)
TRAINED_TARGET_OPTION = described_as(
    "The program that trained CKPT: maxtext, tunix, nnx, ...  [default: each is tried]"
)
PROMPTS_OPTION = described_as(
    "A text file with one prompt per line.  [default: built-in prompts]", python="Texts.  [default: built-in prompts]"
)
GATES_OPTION = described_as(
    "A bound that must hold: top1=0.99, the top-1 agreement over tokens without ties, or mean_kl=0.01. May be "
    "repeated.",
    python='Bounds that must hold, such as {"top1": 0.99}, the top-1 agreement over tokens without ties, or '
    '{"mean_kl": 0.01}.',
)
SPECULATE_OPTION = described_as(
    "Draft tokens with this draft, a checkpoint or a release; without DRAFT with the model's MTP module, of a "
    "checkpoint converted with `include_mtp=True`.",
    python="Draft tokens with a draft, a checkpoint or a release; or True: with the model's MTP module, of a "
    "checkpoint converted with `include_mtp=True`.",
)
WORKSPACE_OPTION = described_as(
    "Folder for large temporary files, such as /dev/shm: shards of a streamed source, and the results of a "
    "calibration if OUT is in a bucket.  [default: beside OUT, or the folder for temporary files]"
)
OVERWRITE_OPTION = described_as("Replace OUT if tpuconv wrote it. The old output stays complete until the new one is.")
READ_ARGUMENT = argument("A checkpoint of tpuconv, or a release; with `config` a trainer's checkpoint.")
STORED_ARGUMENT = argument("A checkpoint of tpuconv; with `config` a trainer's.")
PART_ARGUMENT = argument(
    "The share of this process, if several convert one model, on this host or others. The last one publishes OUT."
)
ELSEWHERE_ARGUMENT = argument(
    "The manifest of a complete output on the Hub: if it is of the same source and options, nothing is made."
)
PROGRESS_ARGUMENT = argument("Called with a `Progress` while long work runs; `Bar()` draws a bar.")


@dataclass(eq=False, repr=False, kw_only=True)
class Replacing:
    """Options of an output that may be there already."""

    overwrite: bool = field(default=False, metadata=OVERWRITE_OPTION)
    check: bool = option(
        False,
        "If OUT exists already, read all of it and compare checksums. By default only file sizes are compared.",
    )


@dataclass(eq=False, repr=False, kw_only=True)
class Budget:
    """Options of the memory and the processors that work may take."""

    max_memory: int | None = option(
        None,
        "Memory budget, such as 8GB.  [default: 60% of the machine's]",
        python="Memory budget in bytes.  [default: 60% of the machine's]",
    )
    jobs: int | None = option(None, "Threads.  [default: one more than processors]", least=1)

"""`tpuconv generate`."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpuconv import api
from tpuconv.api.opened import runs_to_json
from tpuconv.commands import options
from tpuconv.commands.console import print_json, say
from tpuconv.commands.convert import run_lines
from tpuconv.commands.inputs import chosen_checkpoint, read_prompts
from tpuconv.commands.params import File, Prompt
from tpuconv.commands.process import all_processes
from tpuconv.errors import UsageError
from tpuconv.memory import check_address_space_for_jax
from tpuconv.options import MOST_TOKENS
from tpuconv.text import plain

if TYPE_CHECKING:
    from tpuconv.convert.export.trained import TrainedRun
    from tpuconv.models.text_generator import Completion, PromptEncoder


@options.command(
    "generate",
    'tpuconv generate --prompt "Once upon a time"',
    'tpuconv generate Qwen3-8B-orbax --chat --system "Be brief." --prompt "What is a TPU?"',
    'tpuconv generate Qwen/Qwen3-0.6B --prompt "Once upon a time"',
    'tpuconv generate Qwen3-8B-orbax --speculate Qwen3-8B-eagle3-orbax --prompt "Once upon a time"',
    'tpuconv generate runs/sft --config Qwen/Qwen3-8B --chat --prompt "What is a TPU?"',
    'tpuconv generate gemma-3-4b-it-orbax --chat --image cat.png --prompt "What is this?"',
    'tpuconv generate Qwen3-8B-orbax --prompt "def fibonacci(n):" --temperature 0.7 --top-p 0.9 --seed 1',
)
@options.src_or_ckpt
@click.option(
    "--prompt",
    "prompts",
    type=Prompt(),
    multiple=True,
    help="The text to continue; - reads it from standard input. May be repeated; all texts run in one batch.",
)
@click.option("--prompt-file", type=File(exists=True, dir_okay=False), help="A text file with one prompt per line.")
@click.option(
    "--image",
    "images",
    type=File(exists=True, dir_okay=False),
    multiple=True,
    help="An image that the prompt is about; may be repeated. The checkpoint must have the part that sees.",
)
@click.option(
    "--sound",
    "sounds",
    type=File(exists=True, dir_okay=False),
    multiple=True,
    help="A sound that the prompt is about; may be repeated. Other formats than WAV need the package soundfile.",
)
@click.option("--chat", is_flag=True, help="Format each prompt as a user message with the chat template of the model.")
@click.option("--system", type=Prompt(), help="The system message of the chat.")
@click.option(
    "--stop",
    type=Prompt(),
    multiple=True,
    help="End the text before this string or special token, such as <|im_end|>; may be repeated.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1, MOST_TOKENS),
    default=128,
    show_default=True,
    help="The largest number of tokens to generate.",
)
@options.of(api.generator, "temperature", "top_p", "top_k")
@click.option(
    "--seed",
    type=click.IntRange(-(1 << 63), (1 << 63) - 1),
    metavar="INTEGER",
    default=0,
    help="The same seed gives the same text.  [default: 0]",
)
@options.of(api.generator, "cache_dtype")
@options.on_all_processes
@options.of(api.generator)
@options.as_json
def generate(
    src: str | None,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    images: tuple[Path, ...],
    sounds: tuple[Path, ...],
    chat: bool,
    system: str | None,
    stop: tuple[str, ...],
    max_new_tokens: int,
    seed: int,
    distributed: bool,
    speculate: bool | str,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue prompts with the model of a release or of a checkpoint, the newest one in the current folder by default.

    A release, safetensors in a folder or on the Hub, is loaded without a conversion. Of
    generation_config.json only the end tokens are read, and the schedule of a model that writes canvases. The options
    decide all else. With --config the model is a checkpoint, a step or a run of a trainer; the latest step is taken.
    """
    if distributed and "-" in prompts:
        raise UsageError("--prompt - reads the input of each process", hint="give --prompt TEXT or --prompt-file")
    options.require_mode("--chat", chat, "system")
    samples = options.is_given("temperature")
    options.require_mode("--temperature", samples, "top_p", "top_k")
    texts = _all_prompts(prompts, prompt_file)
    if (images or sounds) and texts[1:]:
        raise UsageError("--image and --sound go with one prompt", hint="run the command once for each prompt")
    if (images or sounds) and speculate:
        raise UsageError("--speculate drafts for text alone", hint="leave it out with --image and --sound")
    with all_processes(distributed):
        folder = src or chosen_checkpoint(None, "Generating with", quiet=as_json, own=True)
        check_address_space_for_jax()

        ids: list[list[int]] = []
        features: Mapping[str, Any] | None = None

        def encode(encoder: "PromptEncoder") -> None:
            nonlocal ids, features
            options.require_mode("--temperature", samples or encoder.has_canvases, "seed")
            if images or sounds:
                prompt_ids, features = encoder.encode_with(texts[0], images, sounds, chat=chat, system=system)
                ids = [prompt_ids]
            else:
                ids = encoder.encode(texts, chat=chat, system=system)
            encoder.check_lengths(ids, max_new_tokens)
            if encoder.has_chat_template and not chat and not as_json:
                say("The model has a chat template: --chat formats the prompt with it.", err=True)

        runs: list[TrainedRun] = []
        generator = api.generator(folder, speculate=speculate, before_reading=encode, on_run=runs.append, **sampling)
        for line in (line for run in runs for line in run_lines(run) if not as_json):
            say(line, err=True)
        streams = not as_json and len(texts) == 1
        times = [time.monotonic()]
        outputs: Sequence[Completion] = ()
        steps = generator.stream_ids(texts, ids, max_new_tokens, stop=stop, seed=seed, features=features)
        for new, completions in steps:
            if streams and not chat and not outputs:
                say(plain(texts[0], "\n\t"), nl=False)
            outputs = completions
            times.append(time.monotonic())
            if streams:
                say(plain(new[0], "\n\t"), nl=False)
            if getattr(sys.stdout, "unread", False) and not distributed:  # `| head`
                return
        share = generator.accepted_share
        if as_json:
            print_json({"checkpoint": str(folder), **_facts(outputs, times, share), **runs_to_json(runs)})
        elif streams:
            say("")
        else:
            say("\n\n".join(plain(("" if chat else output.prompt) + output.text, "\n\t") for output in outputs))
        if share is not None and not as_json:
            say(f"{100 * share:.0f}% of the drafts were accepted", err=True)


def _facts(outputs: "Sequence[Completion]", times: Sequence[float], share: float | None) -> dict[str, Any]:
    """Returns the keys of `generate --json` about texts. `times` has one time a step, `share` is of the drafts."""
    several = {"outputs": [output.to_json() for output in outputs]}
    seconds = {"first_token_seconds": times[1] - times[0], "seconds": times[-1] - times[0]}
    drafts = {} if share is None else {"accepted_share": share}
    return {**(several if outputs[1:] else outputs[0].to_json()), **seconds, **drafts}


def _all_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """Returns the prompts of the options; reads "-" from standard input."""
    if list(prompts).count("-") > 1:
        raise UsageError("standard input is one prompt: --prompt - can be given once")
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts] + read_prompts(file)
    if not texts:
        raise UsageError(
            "there is no prompt", hint="give --prompt TEXT, --prompt - for standard input, or --prompt-file"
        )
    return texts

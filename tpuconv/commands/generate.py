"""`tpuconv generate`."""

import sys
import time
from pathlib import Path

import click

from tpuconv.commands import options
from tpuconv.commands.console import print_json, say
from tpuconv.commands.inputs import chosen_checkpoint
from tpuconv.commands.params import Number, Prompt
from tpuconv.memory import check_address_space_for_jax
from tpuconv.paths import plain_path
from tpuconv.text import plain


@options.command(
    "generate",
    "Generate text.",
    'tpuconv generate --prompt "Once upon a time"',
    'tpuconv generate Qwen3-8B-orbax --prompt "def fibonacci(n):" --temperature 0.7 --top-p 0.9 --seed 1',
)
@options.ckpt
@click.option("--prompt", type=Prompt(), required=True, help="The text to continue.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1, options.MOST_TOKENS),
    default=128,
    show_default=True,
    help="Stop after so many tokens.",
)
@click.option(
    "--temperature", type=Number(min=0, max=1000), default=0.0, show_default=True, help="0 takes the most likely token."
)
@click.option(
    "--top-p",
    type=Number(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="Sample from the fewest tokens that have this probability together.",
)
@click.option("--top-k", type=click.IntRange(min=1), help="Sample from the k most likely tokens.")
@click.option(
    "--seed",
    type=click.IntRange(-(1 << 63), (1 << 63) - 1),
    metavar="INTEGER",
    default=0,
    help="The same seed gives the same text.  [default: 0]",
)
@options.cache_dtype
@options.as_json
def generate(
    ckpt: Path | None,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int | None,
    seed: int,
    cache_dtype: str | None,
    as_json: bool,
) -> None:
    """Generate text with the model of CKPT, the newest checkpoint in the current folder by default."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.models.tokenizer import end_tokens, load_tokenizer

    manifest = read_manifest(chosen_checkpoint(ckpt, "Generating with", quiet=as_json))
    folder = manifest.folder
    check_address_space_for_jax()
    with plain_path(folder) as path:
        tokenizer, ends = load_tokenizer(path), end_tokens(path)
    from tpuconv.api.models import load_on_all_devices
    from tpuconv.models.generate import Generator, Sampling

    generator = Generator(load_on_all_devices(folder), Sampling(temperature, top_k, top_p), cache_dtype)
    manifest.check_current()  # of which the tokenizer was read
    ids = tokenizer(prompt)["input_ids"]
    before = tokenizer.decode(ids, skip_special_tokens=True)  # the text of the new ids alone may lack its first space
    new: list[int] = []
    shown, text, times = "", "", [time.monotonic()]
    if not as_json:
        say(plain(prompt, "\n\t"), nl=False)
    for ids_B in generator([ids], max_new_tokens, eos=ends, seed=seed):
        times.append(time.monotonic())
        new.append(int(ids_B[0]))
        text = tokenizer.decode(ids + new, skip_special_tokens=True)[len(before) :]
        if not as_json and not text.endswith("\ufffd"):  # a character whose bytes are not all there
            say(plain(text[len(shown) :], "\n\t"), nl=False)
            shown = text
        if getattr(sys.stdout, "unread", False):  # `| head`
            return
    if as_json:
        print_json(
            {
                "checkpoint": str(folder),
                "prompt": prompt,
                "text": text,
                "ids": new,
                "stopped": "eos" if new[-1] in ends else "length",
                "first_token_seconds": times[1] - times[0],
                "seconds": times[-1] - times[0],
            }
        )
    else:
        say(plain(text[len(shown) :], "\n\t"))

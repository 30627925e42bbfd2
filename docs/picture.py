"""Makes docs/picture.svg, the terminal at the top of README.md: the real output of real commands on the example.

    python docs/picture.py

Times, rates and memory, which differ from run to run, are shown as `…`. Needs the extra `hf`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
PICTURE = Path(__file__).with_name("picture.svg")
COMMANDS = (
    "tpuconv convert tiny-qwen3",
    "tpuconv verify --compare-hf",
    'tpuconv generate --prompt "In the beginning" --max-new-tokens 24',
)
WIDTH = 88  # columns
VARIABLE = re.compile(r"(?<= in )[\d.]+ s|[\d.]+ [kMG]?B/s|(?<=peak memory )[\d.]+ [kMG]?B|[\d.]+ tokens/s")
"""What differs from run to run."""

FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich has it, with fonts that are there instead of one from the network."""


def record() -> str:
    """The commands and what they print, with ANSI escapes, one after the other in a folder of their own."""
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    env |= {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu"}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
    parts = []
    with TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples" / "tiny-qwen3", Path(folder, "tiny-qwen3"))
        for command in COMMANDS:
            done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=True)
            parts.append(f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m\n{done.stdout.replace(folder, '~').rstrip()}\n")
    return "\n".join(parts)


def render(recorded: str) -> str:
    """The SVG of a recorded terminal. The same text gives the same picture."""
    lines = (line.rstrip() for line in VARIABLE.sub("…", recorded).splitlines())
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi("\n".join(lines)))
        svg = console.export_svg(title="tpuconv", code_format=FORMAT, unique_id="tpuconv")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(render(record()))

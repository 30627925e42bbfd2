"""The trained example, and its held-out text in pieces, for the other scripts."""

from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
MODEL = EXAMPLES / "tiny-qwen3"
PIECE = 512
"""Characters of a prompt."""
VOCABULARY = 257
"""The size of its vocabulary."""


def prompts(characters: int) -> list[str]:
    """Returns the first characters of the held-out text, in pieces."""
    text = (EXAMPLES / "sample.txt").read_text()[:characters]
    return [text[i : i + PIECE] for i in range(0, len(text), PIECE)]

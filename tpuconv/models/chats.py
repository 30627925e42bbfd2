"""Conversations as chat templates write them.

Some templates take the content of a message as a text, some as a list of parts. A template may leave out, or print as
Python does, content in the form that it does not take: several of LLaVA and Idefics print no text that is not a part.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tpuconv.errors import UsageError
from tpuconv.models.placeholders import IMAGE, SOUND

if TYPE_CHECKING:
    from tpuconv.models.pictures import Preparer

CHAT_TYPES = {IMAGE: "image", SOUND: "audio"}
"""How chat templates name them."""


def has_template(tokenizer: Any) -> bool:
    """Returns True if a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_text(tokenizer: Any, prompt: str, system: str | None) -> str:
    """Returns the text of a conversation whose user's message is a text.

    Args:
        tokenizer: has the chat template.
        prompt: the user's message.
        system: the system message.

    Raises:
        UsageError: the tokenizer has no chat template, or it fails, or it leaves the prompt out.
    """
    try:
        return _whole(tokenizer, _forms(prompt), system, {prompt: "the prompt"})
    except UsageError:
        for content, empty in zip(_forms(prompt), _forms(""), strict=True):  # some templates take words out as commands
            with suppress(UsageError):
                if (text := _written(tokenizer, content, system)) != _written(tokenizer, empty, system):
                    return text
        raise


def chat_about(preparer: "Preparer", prompt: str, media: Mapping[str, Sequence[Any]], system: str | None) -> str:
    """Returns the text of a conversation about images and sounds, with their markers. A template that takes a text
    alone is given a text with markers.

    Args:
        preparer: has the tokenizer, and the markers of the model.
        prompt, system: as of `chat_text`.
        media: the images and sounds by kind.

    Raises:
        UsageError: the template leaves them out, or see `chat_text`.
    """
    markers: dict[str, str] = {}
    parts, text = [], prompt
    for kind, items in media.items():
        if items:
            marker, framed = preparer.marker_of(kind)
            markers[marker] = f"{kind}s"
            if marker not in prompt:
                parts += [{"type": CHAT_TYPES[kind]}] * len(items)
                text = framed * len(items) + text
    parts.append({"type": "text", "text": prompt})
    return _whole(preparer.tokenizer, [parts, text], system, markers)


def _forms(text: str) -> list[Any]:
    """Returns the content of a message in the forms that templates take."""
    return [text, [{"type": "text", "text": text}]]


def _whole(tokenizer: Any, contents: Sequence[Any], system: str | None, needed: Mapping[str, str]) -> str:
    """Returns the text of a conversation in the first form that has some texts, and if it can be the system message.

    Args:
        tokenizer, system: as of `chat_text`.
        contents: the forms of the user's message.
        needed: what the text must have, and how an error calls it.

    Raises:
        UsageError: the template fails, or leaves out what is needed, in each form.
    """
    forms = [(content, form) for content in contents for form in ([None] if system is None else _forms(system))]
    found: list[str] = []
    errors: list[UsageError] = []
    for form in forms:
        try:
            text = _written(tokenizer, *form)
        except UsageError as e:
            errors.append(e)
            continue
        is_printed = any(str(content) in text for content in form if isinstance(content, list))
        if not is_printed and all(each.strip() in text for each in needed):
            found.append(text)
    if not found:
        raise (
            errors[0]
            if errors
            else UsageError(
                f"the chat template leaves out {' and '.join(needed.values())}",
                hint="leave `chat=` out, and write the prompt as the model expects a conversation",
            )
        )
    return next((text for text in found if (system or "").strip() in text), found[0])


def _written(tokenizer: Any, content: Any, system: Any) -> str:
    """Returns the text of a conversation whose messages have these contents. Raises UsageError if the tokenizer has no
    chat template, or it fails."""
    if not has_template(tokenizer):
        raise UsageError("the tokenizer has no chat template", hint="leave `chat=` out")
    begin = [] if system is None else [{"role": "system", "content": system}]
    messages = [*begin, {"role": "user", "content": content}]
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as e:  # the template is a program, and may raise any exception
        raise UsageError(
            f"the chat template cannot be used: {type(e).__name__}: {str(e)[:300]}",
            hint="leave `system=` out: some templates refuse it" if system is not None else "leave `chat=` out",
        ) from e

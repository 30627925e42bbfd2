"""Text generation: batches, chat templates, stop strings, and contexts that overflow."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tokenizers import Tokenizer

import tpuconv
from helpers.commands import EXAMPLE
from helpers.commands import tpuconv as command
from helpers.conversions import convert
from tpuconv.errors import ConfigError, UsageError
from tpuconv.models.common.config import context_of
from tpuconv.models.common.rope import Rope
from tpuconv.models.generate import ENDED, Sampling
from tpuconv.models.text_generator import Completion, TextGenerator, _Text
from tpuconv.models.tokenizer import PlainTokenizer, end_tokens, load_tokenizer
from tpuconv.verify.logits import tokenize

CHAT = (
    "{% for m in messages %}{% if m.role == 'system' and 'no system' in m.content %}{{ raise_exception('refused') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text") / "out"
    convert(EXAMPLE, out)
    return out


@pytest.fixture(scope="module")
def write(folder: Path) -> TextGenerator:
    return TextGenerator(tpuconv.load(folder), load_tokenizer(folder), end_tokens(folder))


@pytest.fixture
def chat(write: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> TextGenerator:
    monkeypatch.setattr(write.tokenizer, "chat_template", CHAT)
    return write


@pytest.mark.slow
def test_a_batch_is_each_prompt_alone(write: TextGenerator) -> None:
    prompts = ["The king said", "Once"]
    together = write(prompts, max_new_tokens=8)
    assert [out.prompt for out in together] == prompts
    assert [out.stopped for out in together] == ["length"] * 2
    assert together == [write([prompt], max_new_tokens=8)[0] for prompt in prompts]
    assert all(len(out.ids) == 8 and out.text == write.tokenizer.decode(out.ids) for out in together)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=5, top_p=0.9)], ids=["greedy", "drawn"])
def test_numbers_of_64_bits_change_no_text(write: TextGenerator, folder: Path, sampling: Sampling) -> None:
    def text() -> str:
        writer = TextGenerator(tpuconv.load(folder), write.tokenizer, write.ends, sampling)
        return writer(["The king said"], max_new_tokens=4)[0].text

    with jax.enable_x64(True):
        found = text()
    assert found == text() or sampling.temperature
    assert found


def test_the_pieces_are_the_text(write: TextGenerator) -> None:
    steps = list(write.stream(["The king said", "Once"], 8))
    assert len(steps) == 8
    final = steps[-1][1]
    assert ["".join(new[row] for new, _ in steps) for row in range(2)] == [out.text for out in final]


def test_a_text_ends_before_a_stop_string(write: TextGenerator) -> None:
    (free,) = write(["The king said"], max_new_tokens=12)
    stop = free.text[3:6]
    at = free.text.index(stop)
    steps = list(write.stream(["The king said"], 12, stop=["never", stop]))
    assert steps[-1][1] == [Completion("The king said", free.text[:at], free.ids[: at + 3], "stop")]
    assert "".join(new[0] for new, _ in steps) == free.text[:at]  # nothing was shown that had to be taken back
    assert len(steps) == at + 3


def test_a_chat_is_what_the_template_writes(chat: TextGenerator) -> None:
    def ids(text: str) -> list[int]:
        return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert chat.has_chat_template
    assert chat.encode(["Hi", "Ho"], chat=True) == [ids("<user>Hi<assistant>"), ids("<user>Ho<assistant>")]
    assert chat.encode(["Hi"], chat=True, system="Be brief.") == [ids("<system>Be brief.<user>Hi<assistant>")]
    assert chat(["Hi"], 3, chat=True)[0].text == chat(["<user>Hi<assistant>"], 3)[0].text


IN_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}{% endfor %}<assistant>"
)
"""As LLaVA's and Idefics's: of a text it prints nothing."""


@pytest.mark.parametrize(
    ("template", "system", "text"),
    [
        (IN_PARTS, None, "<user>Hi<assistant>"),
        (IN_PARTS, "Be brief.", "<system>Be brief.<user>Hi<assistant>"),
        (f"<system>{{{{ messages[0].content | trim }}}}{IN_PARTS}", "No", "<system>No<system><user>Hi<assistant>"),
        ("{{ messages[-1].content | replace('Hi', 'Ho') }}", "No", "Ho"),
    ],
    ids=["parts", "system", "text and parts", "replaced"],
)
def test_a_chat_has_the_prompt_in_the_form_that_the_template_takes(template, system, text, chat) -> None:
    chat.tokenizer.chat_template = template
    ids = list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert chat.encode(["Hi"], chat=True, system=system) == [ids]
    chat.tokenizer.chat_template = "<user>"
    with pytest.raises(UsageError, match="the chat template leaves out the prompt"):
        chat.encode(["Hi"], chat=True)


MISTAKES: dict[str, tuple[Callable[[TextGenerator], Any], str]] = {
    "a template that refuses": (lambda w: w(["x"], chat=True, system="no system"), "cannot be used: .*refused"),
    "a system prompt without a chat": (lambda w: w(["x"], system="y"), "a system prompt needs"),
    "too many tokens": (lambda w: w(["four"], 509), "a prompt of 4 tokens and 509 new ones are 513.* has 512 pos"),
    "a prompt of one token": (lambda w: w(["a"], 999), "a prompt of 1 token and 999 new ones are 1000.* has 512"),
    "too long a prompt": (lambda w: w(["x" * 600], 1), "of 600 tokens and 1 new ones are 601.* has 512"),
    "no prompt": (lambda w: w([]), "no prompt is given"),
    "an empty prompt": (lambda w: w([""]), "prompt 1 of 1 has no tokens"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_an_answer(chat: TextGenerator, mistake: str) -> None:
    act, message = MISTAKES[mistake]
    with pytest.raises(UsageError, match=f"(?s){message}"):
        act(chat)


def test_a_single_text_is_no_list_of_prompts(write: TextGenerator) -> None:
    """Else each of its characters would be a prompt."""
    with pytest.raises(UsageError, match="a single text"):
        write("the end", max_new_tokens=2)


def test_without_a_template_there_is_no_chat(write: TextGenerator) -> None:
    assert not write.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        write(["x"], chat=True)


class Bytes:
    """A tokenizer of which a token is a byte; 0 is a special one, `<|end|>`."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        pieces = bytes(ids).split(b"\0")
        return (b"" if skip_special_tokens else b"<|end|>").join(pieces).decode(errors="replace")


def test_half_a_character_and_half_a_stop_string_are_held_back() -> None:
    text = _Text(Bytes(), b"x", {0}, ["END", ""])
    assert [text.add(byte, False) for byte in "aü".encode()] == ["a", "", "ü"]
    assert [text.add(byte, False) for byte in b"EN."] == ["", "", "EN."]
    assert [text.add(byte, False) for byte in b"bEND"] == ["b", "", "", ""]
    assert (text.text, text.stopped, text.add(65, False)) == ("aüEN.b", "stop", "")
    ended = _Text(Bytes(), b"x", {0}, ["END"])
    assert [ended.add(token, False) for token in (69, 0, ENDED)] == ["", "E", ""]
    assert (ended.stopped, ended.ids) == ("eos", [69, 0])
    cut = _Text(Bytes(), b"x", {0}, ["END"])
    assert cut.add(69, True) == "E"


@pytest.mark.parametrize(
    ("stop", "text", "ids"),
    [
        ("<|end|>", "ab", b"ab\0"),
        ("b<|end|>", "a", b"ab\0"),
        ("<|end|>\n", "abc", b"ab\0c\0\n"),
        ("d|>", "ab", b"ab\0"),
    ],
)
def test_a_stop_string_may_have_special_tokens(stop: str, text: str, ids: bytes) -> None:
    """As those of chats and of tasks have. The prompt's count for nothing."""
    made = _Text(Bytes(), b"\0x\0", (), [stop])
    pieces = [made.add(token, False) for token in b"ab\0c\0\nd"]
    assert (made.text, made.ids, made.stopped) == (text, list(ids), "stop")
    assert "".join(pieces) == text or stop == "b<|end|>"


def test_the_end_tokens_are_those_of_the_tokenizer_too(folder: Path) -> None:
    own = end_tokens(folder)
    assert end_tokens(folder, SimpleNamespace(eos_token_id=7)) == own | {7}
    assert end_tokens(folder, SimpleNamespace(eos_token_id=None)) == own


def test_without_transformers_the_tokenizer_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = load_tokenizer(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    plain = load_tokenizer(folder)
    assert isinstance(plain, PlainTokenizer)
    ids = plain("The king said")["input_ids"]
    assert ids == full("The king said")["input_ids"]
    assert (plain.eos_token_id, plain.bos_token_id) == (full.eos_token_id, full.bos_token_id)
    assert plain.decode(ids, skip_special_tokens=True) == full.decode(ids, skip_special_tokens=True)
    with pytest.raises(ImportError, match="chat templates need transformers"):
        plain.apply_chat_template([])


def test_the_context_is_that_of_stretched_positions() -> None:
    def of(rope: Rope) -> int:
        return context_of(SimpleNamespace(max_position_embeddings=40960, rope=rope))  # type: ignore[arg-type]

    assert of(Rope()) == 40960
    assert of(Rope("yarn", factor=4.0, original_max_position_embeddings=32768)) == 131072
    assert of(Rope("llama3", factor=8.0, original_max_position_embeddings=8192)) == 40960


def add_token(path: Path) -> None:
    """As training does, which has to resize the embedding too."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"<new{i}>" for i in range(300 - tokenizer.get_vocab_size())] + ["<new>"])
    tokenizer.save(str(path))


def test_prompts_to_compare_have_no_token_without_an_embedding(folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    add_token(tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match="no embedding: 300"):
        tokenize(tmp_path, ["The king", "The <new> king"], 257)


def test_a_tokenizer_that_lacks_its_file_names_it(folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(folder / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    with pytest.raises(ConfigError, match=r"from one of: \(1\)") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint.endswith("it has no tokenizer.json")


def test_a_prompt_beyond_the_context_is_told_once(folder: Path, tmp_path: Path) -> None:
    refused = command("generate", folder, "--prompt", "x" * 600, code=2).stderr
    assert refused.startswith("UsageError")
    assert "600 tokens and 128 new ones are 728" in refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-new-tokens", "600"), "601, and the model has 512 positions"),
        (("--chat",), "no chat template"),
        (("--speculate",), "no layers for multi-token prediction"),
        (("--prompt", ""), "prompt 2 of 2 has no tokens"),
        (("--prompt", "The <new> king"), "no embedding: 300 ('<new>'); the model has 257"),
    ],
)
def test_the_command_refuses_before_weights_are_read(
    folder: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    """Those of a large model take minutes. Here they are damaged, and nobody sees it."""
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    for chunk in damaged.glob("params/*/c.*"):
        chunk.write_bytes(b"")
    add_token(damaged / "tokenizer.json")
    assert message in command("generate", damaged, "--prompt", "x", *args, code=2).stderr
    command("generate", damaged, "--prompt", "x", code=10)


def test_the_command_takes_several_prompts(folder: Path, tmp_path: Path) -> None:
    import json
    import subprocess
    import sys

    (tmp_path / "prompts.txt").write_text("Once\n\nThe king said\n")
    new = ("--max-new-tokens", "4", "--json")
    many = json.loads(command("generate", folder, "--prompt-file", tmp_path / "prompts.txt", *new).stdout)
    assert [out["prompt"] for out in many["outputs"]] == ["Once", "The king said"]
    args = [sys.executable, "-m", "tpuconv", "generate", str(folder), "--prompt", "-", *new]
    done = subprocess.run(args, input="Once", capture_output=True, text=True, check=True)
    assert {k: json.loads(done.stdout)[k] for k in ("prompt", "text", "ids", "stopped")} == many["outputs"][0]
    refused = command("generate", folder, "--prompt", "x", "--max-new-tokens", "600", code=2)
    assert "601, and the model has 512 positions" in refused.stderr
    assert "there is no prompt" in command("generate", folder, code=2).stderr

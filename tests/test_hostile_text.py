"""Names, configs and arguments with characters that terminals, pages, encodings or the system do not accept."""

import html.parser
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import hollow_checkpoint, qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.commands import forked
from helpers.limits import limited
from tpuconv import text
from tpuconv.api import convert
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.run.card import model_card
from tpuconv.errors import ResourceError, UsageError
from tpuconv.explanations import explanation_of
from tpuconv.quantize.report import report_page
from tpuconv.sources.hub import fetch_config, resolve

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-qwen3"
COMMAND = [sys.executable, "-m", "tpuconv"]
C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
HOSTILE = "\x1b[31m\x9b2J\u202egpj\udc80[/x]"
ESCAPED = r"\x1b[31m\x9b2J\u202egpj\udc80[/x]"


def tpuconv(*args: object, cwd: Path, code: int = 0, env: dict[str, str] | None = None) -> tuple[str, str]:
    """Runs the command, with other variables `env` in a new interpreter; what it writes is UTF-8 (or ASCII, which is
    that), shows nothing unsafe and no bug."""
    words = [os.fsdecode(arg) if isinstance(arg, bytes) else str(arg) for arg in args]
    if env is None:
        done = forked(words, cwd)
        out, err = done.stdout, done.stderr
    else:
        done = subprocess.run([*COMMAND, *words], capture_output=True, cwd=cwd, check=False, env=os.environ | env)
        out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, out + err
    assert "Traceback" not in err
    assert not UNSAFE.search(out + err), out + err
    return out, err


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A folder with a small checkpoint, `hf`, and what it was converted to, `orbax`."""
    folder = tmp_path_factory.mktemp("hostile")
    random_checkpoint(folder / "hf", qwen3_config())
    tpuconv("convert", "hf", "orbax", cwd=folder)
    return folder


# -- text --------------------------------------------------------------------------------------------------------------


def test_plain_text_stays_and_other_is_escaped():
    for same in ("layers.{0...3}.q", "é 机器 🙂 [b]x[/b] \\d", "a\u3000b\u200dc", ""):
        assert text.plain(same) == same
    assert text.plain(HOSTILE) == ESCAPED
    assert text.plain("a\n\tb\r") == r"a\n\tb\r"
    assert text.plain("a\n\tb\r", "\n\t") == "a\n\tb\\r"
    assert text.plain("\U000e0041\u2066\ufeff") == r"\U000e0041\u2066\ufeff"
    assert text.plain(text.plain(HOSTILE)) == ESCAPED


def test_every_text_can_be_encoded():
    every = "".join(map(chr, range(0x3000))) + "\ud800\udfff\ufffe\U000e0001\U0010ffff"
    for shown in (text.plain(every), text.markdown(every), text.code(every), text.html(every), text.json(every)):
        shown.encode()
        assert not UNSAFE.search(shown)


def test_markdown_has_neither_markup_nor_html():
    assert text.markdown("<b>*x*</b> [a](b) `c` __d__") == r"\<b\>\*x\*\</b\> \[a\]\(b\) \`c\` \_\_d\_\_"
    assert text.markdown("https://x") == r"https\://x"
    assert text.markdown("a\n# b") == r"a\\n\# b"


def test_a_code_span_holds_any_backticks():
    assert text.code("a.b") == "`a.b`"
    assert text.code("a`b``c") == "```a`b``c```"
    assert text.code("`") == "`` ` ``"
    assert text.code(" a ") == "`  a  `"
    assert "\n" not in text.code("a\n\n# b")


def test_html_is_escaped():
    assert text.html("<script>\x1b\"'&") == r"&lt;script&gt;\x1b&quot;&#x27;&amp;"


def test_json_is_valid_and_readable():
    value = {"é": [HOSTILE, float("nan"), float("inf"), 1.5, 1 << 70, None, "\n\x00\\"], "🙂": {}}
    shown = text.json(value)
    assert "é" in shown
    assert "🙂" in shown
    expected = {"é": [HOSTILE, None, None, 1.5, 1 << 70, None, "\n\x00\\"], "🙂": {}}
    assert json.loads(shown, parse_constant=pytest.fail) == expected
    assert json.loads(text.json(value, ascii_only=True).encode("ascii").decode()) == expected


# -- names of tensors and values of configs ----------------------------------------------------------------------------


def test_names_of_tensors_are_shown_as_they_are(tmp_path):
    tensors = read_tensors(random_checkpoint(tmp_path / "hf", qwen3_config()))
    foreign = {name: np.zeros(3, "f4") for name in ("[/x]", "[bold]b[/bold]", ":smile:", "]\\[[")}
    write_checkpoint(tmp_path / "hf", qwen3_config(), tensors | foreign)
    out, _ = tpuconv("inspect", "hf", cwd=tmp_path)
    assert all(name in out for name in foreign)
    _, err = tpuconv("convert", "hf", cwd=tmp_path, code=5)
    assert "[/x]" in err
    write_checkpoint(tmp_path / "hf", qwen3_config(), tensors | {"a\x1b[2J\nb\u202e": np.zeros(3, "f4")})
    out, err = tpuconv("convert", "hf", "--json", cwd=tmp_path, code=4)
    assert r"a\x1b[2J\nb\u202e" in err
    assert json.loads(out)["error"]["exit_code"] == 4


def test_a_skipped_tensor_with_markup_is_shown(tmp_path):
    config = qwen3_config(tie_word_embeddings=True)
    tensors = read_tensors(random_checkpoint(tmp_path / "hf", config))
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_checkpoint(tmp_path / "hf", config, tensors | copy)
    assert "not converted: 1 tensor, a copy of" in tpuconv("convert", "hf", "[/x] out", cwd=tmp_path)[0]
    skipped = [{"pattern": "vision_model.[/bold]`x`<b>", "count": 1, "reason": "vision\n# tower"}]
    raw = dict(read_manifest(tmp_path / "[/x] out").raw) | {"skipped": skipped}
    assert r"- ``vision_model.[/bold]`x`<b>`` (1): vision\\n\# tower" in model_card(raw)


def test_values_of_a_config_have_no_escape_codes(tmp_path):
    hollow_checkpoint(tmp_path / "hf", qwen3_config())
    for change in ({HOSTILE: 1}, {"model_type": HOSTILE, "architectures": [HOSTILE]}, {"rope_scaling": {HOSTILE: 1}}):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(qwen3_config(**change)))
        for flags in (("--json",), ("-v",)):
            done = subprocess.run([*COMMAND, "convert", "hf", *flags], cwd=tmp_path, capture_output=True, check=False)
            assert done.returncode in (5, 6)
            assert not UNSAFE.search((done.stdout + done.stderr).decode())
            if "--json" in flags:
                assert json.loads(done.stdout)["error"]["exit_code"] == done.returncode


# -- names of folders and arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["[old]", "a[/b]", r"\[x", HOSTILE, "a\nb机器 é"])
def test_a_folder_of_any_name_is_shown(name, converted, tmp_path):
    shown = text.plain(name)
    shutil.copytree(converted / "hf", tmp_path / name)
    out, _ = tpuconv("convert", name, f"{name}.out", cwd=tmp_path)
    folder = Path(name).parent
    assert out.startswith(f"{shown}.out: qwen3, ")
    assert f"{shown}.out exists already" in tpuconv("convert", name, f"{name}.out", cwd=tmp_path)[0]
    out, _ = tpuconv("verify", cwd=tmp_path / folder)
    assert f"Verifying {text.plain(Path(name).name)}.out, the newest checkpoint in this folder." in out
    assert "all checksums match" in out
    card = (tmp_path / f"{name}.out" / "README.md").read_bytes().decode()
    assert Path(name).name not in card  # what a folder of this machine is called is not published
    assert not UNSAFE.search(card)
    assert tpuconv("export", f"{name}.out", "again", cwd=tmp_path)[0].startswith("again: qwen3, ")
    facts = json.loads(tpuconv("inspect", f"{name}.out", "--json", cwd=tmp_path)[0])
    assert facts["format"] == "tpuconv"


def test_the_pages_hold_no_html_of_others(converted):
    raw = json.loads((converted / "orbax" / "tpuconv.json").read_text())
    raw["source"] |= {"name": "<img src=x onerror=alert(1)>\x9b", "repo": "a/<script>", "commit": "`\n# x"}
    raw["skipped"] = [{"pattern": "`<b>", "count": 1, "reason": "<i>"}]
    card = model_card(raw)
    assert r"# \<img src=x onerror=alert\(1\)\>\\x9b for JAX" in card
    assert not re.search(r"(?<![\\`])<\w", card)
    figures = {"signal": 1.0, "noise": 0.1, "clipped": 0.0, "count": 4.0}
    parameter = {"qtype": "<u>", "rule": 0, "bits": 8, "figures": figures}
    raw["quantization"] = {"name": "`<c>`", "summary": "<s>*", "rules": [], "parameters": {"<p>.kernel": parameter}}
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(report_page(raw))
    assert not {"img", "script", "u", "c", "s"} & set(tags)
    assert set(tags) >= {"svg", "table", "h1"}
    assert r"quantized by `` `<c>` `` (\<s\>\*)" in model_card(raw)


LONG = "a" * 5000
ARGUMENTS = {
    "a source": ("convert", LONG),
    "a target": ("convert", EXAMPLE, LONG),
    "a checkpoint to quantize": ("quantize", LONG, "--config", "int8_default"),
    "a config": ("quantize", "x", "--config", LONG),
    "a checkpoint to export": ("export", LONG, "x"),
    "a checkpoint to verify": ("verify", LONG),
    "a topology's source": ("fit", LONG, "--topology", "v5e:2x2"),
    "a comparison's source": ("verify", "x", "--compare-hf", "--source", LONG),
    "a model to generate": ("generate", LONG, "--prompt", "x"),
    "a folder to inspect": ("inspect", LONG),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_a_path_that_the_system_refuses_is_a_mistake(what, tmp_path):
    _, err = tpuconv(*ARGUMENTS[what], cwd=tmp_path, code=2)
    assert "File name too long" in err
    assert "(5,000 characters)" in err
    assert len(err) < 500


def test_a_folder_of_many_folders_is_no_bug(tmp_path):
    """The folder can be there, and no file of an output in it; or it cannot either."""
    for folder in ("a/" * 1980, "a" * 254):
        with pytest.raises(UsageError, match="File name too long") as error:
            convert(EXAMPLE, tmp_path / folder)
        assert error.value.hint == "choose an OUT with a shorter path"
        assert explanation_of(error.value).message == "{path} cannot be written: {strerror}"
    assert not list(tmp_path.iterdir())


def test_an_empty_path_is_a_mistake(tmp_path):
    """As of a variable of a script that is not set: without a path another checkpoint would be taken."""
    for args in (("verify", ""), ("convert", EXAMPLE, ""), ("generate", "", "--prompt", "x")):
        assert "cannot be a path: it is empty" in tpuconv(*args, cwd=tmp_path, code=2)[1]


def test_bytes_that_are_no_utf8_are_a_mistake_where_nothing_is(tmp_path):
    for args in (("convert", b"\xff\xfe"), ("export", b"\xff", "x"), ("verify", b"\xff"), ("inspect", b"./\xff")):
        assert r"\udcff" in tpuconv(*args, cwd=tmp_path, code=2)[1]
    out, _ = tpuconv("convert", b"./\xff", "--json", cwd=tmp_path, code=2)
    assert json.loads(out)["error"]["exit_code"] == 2
    assert "is not text in UTF-8" in tpuconv("generate", "x", "--prompt", b"\xff", cwd=tmp_path, code=2)[1]


@pytest.mark.parametrize("src", ["a\0b", LONG, "~no-such-user/x", "/" + LONG, "loop"])
def test_the_calls_refuse_such_paths_too(src, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    for call in (resolve, fetch_config):
        with pytest.raises(UsageError):
            call(src)


def test_a_folder_whose_name_is_no_utf8_goes_all_the_way(converted, tmp_path):
    name = os.fsdecode(b"n\xff\xfe")
    shutil.copytree(converted / "hf", tmp_path / name)
    tpuconv("convert", name, f"{name}-orbax", cwd=tmp_path)
    assert "all checksums match" in tpuconv("verify", f"{name}-orbax", cwd=tmp_path)[0]
    tpuconv("export", f"{name}-orbax", f"{name}-again", cwd=tmp_path)
    for tensor, values in read_tensors(tmp_path / name).items():
        np.testing.assert_array_equal(values.view("u1"), read_tensors(tmp_path / f"{name}-again")[tensor].view("u1"))
    facts = json.loads(tpuconv("verify", f"{name}-orbax", "--json", cwd=tmp_path)[0])
    assert facts["checkpoint"] == f"{name}-orbax"
    tpuconv("quantize", f"{name}-orbax", "q", "--config", "int8_default", cwd=tmp_path)
    assert "udcff" not in (tmp_path / "q" / "quantization.html").read_text()  # no name of this machine


NUMBERS = {
    "temperature": ("generate", "x", "--prompt", "x", "--temperature", "nan"),
    "temperature without end": ("generate", "x", "--prompt", "x", "--temperature", "inf"),
    "temperature below zero": ("generate", "x", "--prompt", "x", "--temperature", "-1"),
    "temperature beyond float32": ("generate", "x", "--prompt", "x", "--temperature", "1e300"),
    "top-p of nothing": ("generate", "x", "--prompt", "x", "--top-p", "0"),
    "top-p above one": ("generate", "x", "--prompt", "x", "--top-p", "1.01"),
    "top-p not a number": ("generate", "x", "--prompt", "x", "--top-p", "nan"),
    "top-k": ("generate", "x", "--prompt", "x", "--top-k", "0"),
    "tokens": ("generate", "x", "--prompt", "x", "--max-new-tokens", str(10**11)),
    "bits": ("quantize", "x", "--target-bits", "nan"),
    "bits without end": ("quantize", "x", "--target-bits", "inf"),
    "layers": ("convert", "x", "--layers", "0-" + "9" * 5000),
    "layers of other digits": ("convert", "x", "--layers", "²"),
    "memory": ("convert", "x", "--max-memory", "inf"),
    "memory not a number": ("convert", "x", "--max-memory", "nan"),
    "batch": ("benchmark", "x", "--batch", str(10**11)),
    "batch of many digits": ("benchmark", "x", "--batch", "9" * 5000),
    "prompt length": ("benchmark", "x", "--prompt-length", str(10**11)),
    "new tokens": ("benchmark", "x", "--new-tokens", str(10**11)),
    "context": ("fit", "x", "--topology", "v5e:2x2", "--context", str(10**30)),
    "mesh": ("inspect", EXAMPLE, "--mesh", "data=" + "9" * 5000),
    "mesh of other digits": ("inspect", EXAMPLE, "--mesh", "data=²"),
    "topology": ("fit", EXAMPLE, "--topology", ","),
    "topology of many digits": ("fit", EXAMPLE, "--topology", "v5e:" + "9" * 5000 + "x2"),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_a_number_that_cannot_be_is_a_mistake(what, tmp_path):
    option = NUMBERS[what][-2]
    assert str(option).lstrip("-") in tpuconv(*NUMBERS[what], cwd=tmp_path, code=2)[1]


# -- encodings, and streams that are closed, full or not read ----------------------------------------------------------


def test_in_the_c_locale_names_are_escaped(converted, tmp_path):
    name = "ñame机"
    shutil.copytree(converted / "hf", tmp_path / name)
    for args in (("convert", name, f"{name}-o"), ("verify", f"{name}-o"), ("inspect", f"{name}-o"), ("inspect", name)):
        for flags in ((), ("--json",)):
            out, err = tpuconv(*args, *flags, cwd=tmp_path, env=C_LOCALE)
            assert (out + err).isascii()
            if flags:
                json.loads(out)
    assert r"\udcc3" in tpuconv("convert", f"./{name}x", cwd=tmp_path, env=C_LOCALE, code=2)[1]
    assert "Usage" in tpuconv("--help", cwd=tmp_path, env=C_LOCALE)[0]


def test_json_is_valid_in_every_encoding(converted, tmp_path):
    name = "ñ\u202e\x9b机"
    shutil.copytree(converted / "orbax", tmp_path / name)
    for encoding in ("utf-8", "latin-1", "ascii", "utf-16"):
        env = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([*COMMAND, "verify", name, "--json"], cwd=tmp_path, env=env, capture_output=True)
        assert json.loads(done.stdout.decode(encoding))["checkpoint"] == name
        assert ("ñ" in done.stdout.decode(encoding)) == encoding.startswith("utf")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_with_closed_streams_the_work_is_done(closed, converted, tmp_path):
    shell = f'exec "$0" -m tpuconv convert {converted}/hf out {closed}'
    done = subprocess.run(["sh", "-c", shell, sys.executable], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert "all checksums match" in tpuconv("verify", "out", cwd=tmp_path)[0]
    failing = f'exec "$0" -m tpuconv convert ./nowhere {closed}'
    assert subprocess.run(["sh", "-c", failing, sys.executable], cwd=tmp_path, capture_output=True).returncode == 2


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("families",), ("families", "--json")])
@pytest.mark.parametrize("env", [{}, C_LOCALE, {"PYTHONUNBUFFERED": "1"}], ids=["utf8", "ascii", "unbuffered"])
def test_a_full_disk_under_stdout_is_said(args, env):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *args], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=os.environ | env
        )
    assert done.returncode == 8
    assert re.fullmatch(r"ResourceError\[TC\d{4}\]: stdout cannot be written: No space left on device\n", done.stderr)


def test_a_full_disk_under_stderr_changes_no_exit_code(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "convert", "./nowhere"], cwd=tmp_path, stderr=full, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("env", [{}, C_LOCALE], ids=["utf8", "ascii"])
@pytest.mark.parametrize("args", [("--help",), ("families", "llama", "--table"), ("families", "--json")])
def test_whoever_reads_no_further_is_no_error(args, env):
    """A pipe whose reader is gone before anything is written, as behind `| head` of a long table."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *args], stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=os.environ | env
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_unread_output_does_not_stop_the_work(converted, tmp_path):
    """And the exit code is that of the work."""
    shutil.copytree(converted / "orbax", tmp_path / "orbax")
    shard = next((tmp_path / "orbax/params/layers.1.mlp.up.kernel").glob("c.*"))
    shard.write_bytes(shard.read_bytes()[:-100])
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, "verify"], stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, text=True)
    os.close(write)
    assert done.returncode == 10
    assert "the output orbax has 1 fault" in done.stderr


# -- signals and limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_a_module_makes_an_import_error_of_is_no_bug(number, code, tmp_path):
    (tmp_path / "xxhash.py").write_text(
        "import os, signal\n"
        "try:\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    signal.pause()\n"
        "except BaseException as e:\n"
        "    raise ImportError('cannot be imported') from e\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(EXAMPLE.parent.parent)])}
    for flags in ((), ("-v",)):
        _, err = tpuconv("convert", EXAMPLE, "out", *flags, cwd=tmp_path, code=code, env=env)
        assert err.strip() == "Interrupted."


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("place", ["in C", "exec"])
def test_a_signal_in_the_middle_of_an_import_has_its_exit_code(number, code, place, tmp_path):
    """Numpy calls `numpy.exceptions` while its module in C is loaded, and would make an ImportError of an exception;
    the interpreter would end with SIGINT by one that was raised within `exec`."""
    program = (
        "import os, sys, builtins\n"
        "from importlib.machinery import ExtensionFileLoader\n"
        "from tpuconv import cli\n"
        "from tpuconv.commands import convert\n"
        f"signal = lambda: os.kill(os.getpid(), {int(number)})\n"
        "class Find:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        frame = sys._getframe()\n"
        "        while frame and not isinstance(frame.f_locals.get('self'), ExtensionFileLoader):\n"
        "            frame = frame.f_back\n"
        "        if frame and name.startswith('numpy.'):\n"
        "            sys.meta_path.remove(self)\n"
        "            signal()\n"
        "def run(as_json):\n"
        "    exec('signal()', {'signal': signal})\n"
        "if sys.argv.pop() == 'exec':\n"
        "    convert.resumable = run\n"
        "else:\n"
        "    sys.meta_path.insert(0, Find())\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", program, "convert", str(EXAMPLE), "out", place]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (code, "Interrupted.")
    assert os.listdir(tmp_path) == []


def test_an_ignored_signal_stays_ignored(converted):
    """As for what a shell runs in the background."""
    program = (
        "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, *COMMAND, "convert", str(converted / "hf"), "--dry-run"]
    sent = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if b"tpuconv" in cmdline(process.pid):
                process.send_signal(signal.SIGINT)
                sent += 1
            time.sleep(0.01)
    assert process.returncode == 0
    assert sent


def cmdline(pid: int) -> bytes:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"" if b"-c" in words else b" ".join(words)


@pytest.mark.parametrize(
    "args",
    [
        ("quantize", "orbax", "q", "--config", "int8_default"),
        ("generate", EXAMPLE, "--prompt", "x"),
        ("verify", "orbax", "--compare-hf"),
        ("convert", "hf", "--quantize", "int8_default"),
    ],
    ids=lambda args: args[0],
)
def test_a_limit_of_addresses_that_jax_cannot_live_with_is_said(args, converted):
    if args[0] == "generate":
        args = (args[0], "orbax", *args[2:])
    command = [*limited(resource.RLIMIT_AS, 1_500_000_000), *COMMAND, *map(str, args)]
    done = subprocess.run(command, cwd=converted, capture_output=True, text=True, check=False)
    assert done.returncode == 8, done.stderr
    assert "limited to 1.5 GB" in done.stderr
    assert "ulimit -v" in done.stderr


def test_a_cache_larger_than_the_memory_is_refused(converted, monkeypatch):
    from tpuconv import load
    from tpuconv.models.generate import Generator

    generator = Generator(load(converted / "orbax"))
    assert next(generator([[1]], 2)).shape == (1,)
    monkeypatch.setattr("tpuconv.models.generate.available_memory", lambda: (8, 8))
    with pytest.raises(ResourceError, match="the cache of keys and values needs"):
        next(generator([[1]], 3))


def test_a_temperature_too_small_for_float32_is_greedy():
    from tpuconv.models.generate import Sampling

    logits = np.array([[0.0, 3.0, 2.9999], [5.0, -1.0, 4.0]], np.float32)
    for temperature in (0.0, 1e-300, 1e-6):
        assert list(Sampling(temperature)(logits, None)) == [1, 0]
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(UsageError, match="temperature"):
            Sampling(wrong)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), MemoryError("Unable to allocate 9 TiB"), RuntimeError("can't start new thread")],
    ids=["no words", "numpy", "threads"],
)
def test_too_little_memory_is_no_bug(error, monkeypatch, capsys):
    from tpuconv import cli

    def fail() -> None:
        raise error

    monkeypatch.setattr("tpuconv.models.registry.family_names", fail)
    monkeypatch.setattr(sys, "argv", ["tpuconv", "families"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="8"):
        cli.main()
    assert "there is too little memory" in capsys.readouterr().err


def test_an_unknown_error_is_a_bug_in_one_line(monkeypatch, capsys):
    from tpuconv import cli

    def fail() -> None:
        raise EOFError(f"{HOSTILE}\nsecond")  # which click takes for an interruption

    monkeypatch.setattr("tpuconv.models.registry.family_names", fail)
    monkeypatch.setattr(sys, "argv", ["tpuconv", "families"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    err = capsys.readouterr().err
    assert f"EOFError: {ESCAPED}\n  second\n" in err
    assert "this is a bug of tpuconv" in err

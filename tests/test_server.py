"""`verify --server`: a running server's log-probabilities of prompts beside a checkpoint's. The servers here answer as
vLLM 0.32 and SGLang do, with the logits of transformers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.commands import tpuconv as command
from helpers.families import FIRST, hf_model
from tpuconv import api
from tpuconv.errors import GateError, ServerError

CASE = FIRST["qwen3"]


class Answers(BaseHTTPRequestHandler):
    """Answers as `server.program` does; `server.spoil` changes the logits."""

    def log_message(self, *_: Any) -> None: ...

    def answer(self, contents: Any, code: int = 200) -> None:
        data = json.dumps(contents).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer({"data": [{"id": name} for name in self.server.models]})
        elif self.path == "/get_model_info" and self.server.program == "SGLang":
            self.answer({"model_path": "qwen"})
        else:
            self.answer({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = asked.get("prompt") or asked["input_ids"]
        with torch.no_grad():
            logits = self.server.spoil(self.server.model(torch.tensor([ids])).logits[0].double())
        if self.server.other:
            self.answer(self.server.other)
            return
        rows = torch.log_softmax(logits, -1).numpy()
        count = asked.get("prompt_logprobs") or asked.get("top_logprobs_num")
        tops = [np.argsort(-row)[:count] for row in rows]
        if self.path == "/v1/completions" and self.server.program == "vLLM":
            named = [
                {str(i): {"logprob": float(row[i]), "rank": 1, "decoded_token": "x"} for i in {*map(int, top), token}}
                for row, top, token in zip(rows, tops, ids[1:], strict=False)
            ]
            self.answer({"choices": [{"prompt_logprobs": [None, *named]}]})
        elif self.path == "/generate" and self.server.program == "SGLang":
            own = [[None, ids[0], None], *([float(row[i]), i, None] for row, i in zip(rows, ids[1:], strict=False))]
            top = [None, *([[float(row[i]), int(i), None] for i in top] for row, top in zip(rows, tops, strict=True))]
            self.answer({"meta_info": {"input_token_logprobs": own, "input_top_logprobs": top[: len(ids)]}})
        else:
            self.answer({"error": "no such route"}, 404)


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_model(CASE)


@pytest.fixture
def server(request: Any, model: Any) -> Iterator[Any]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    found.model, found.models, found.spoil = model, ["qwen"], lambda logits: logits
    found.other = None
    found.program = getattr(request, "param", "vLLM")
    found.url = f"http://127.0.0.1:{found.server_port}"
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture(scope="module")
def ckpt(hf: Any, tmp_path_factory: Any) -> Path:
    out = tmp_path_factory.mktemp("served") / "out"
    api.convert(hf(CASE), out)
    return out


@pytest.mark.parametrize("server", ["vLLM", "SGLang"], indirect=True)
def test_a_server_of_the_same_model(server: Any, ckpt: Path) -> None:
    found = api.compare_server(ckpt, f"{server.url}/v1")
    found.check()
    assert (found.program, found.model) == (server.program, "qwen")
    assert found.statistics.mean_kl < 1e-9
    assert found.statistics.max_difference < 1e-4
    assert found.statistics.first is None
    assert found.statistics.top1_decided == 1


@pytest.mark.parametrize("server", ["vLLM", "SGLang"], indirect=True)
def test_a_server_of_another_model(server: Any, ckpt: Path) -> None:
    """The first token whose most likely successor differs is named."""

    def spoiled(logits: torch.Tensor) -> torch.Tensor:
        logits[5:] = logits[5:].flip(-1)
        return logits

    server.spoil = spoiled
    found = api.compare_server(ckpt, server.url)
    with pytest.raises(GateError, match="computes other outputs"):
        found.check()
    first = found.statistics.first
    assert first is not None
    assert (first.prompt, first.position) == (1, 6)
    done = command("verify", ckpt, "--server", server.url, code=GateError.exit_code)
    assert "first that differs: prompt 1, position 6" in done.stdout


@pytest.mark.slow
def test_a_server_that_rounds_activations_otherwise(server: Any, ckpt: Path, tmp_path: Path) -> None:
    """This server does not round them at all; in float32 another rounding is the only reason to differ."""
    api.quantize(ckpt, tmp_path / "int8", config="int8_default")
    found = api.compare_server(tmp_path / "int8", server.url, dtype="float32").statistics
    assert 1e-5 < found.mean_kl < found.gate == 2 * found.rounding_kl
    server.spoil = lambda logits: logits.roll(1, -1)
    assert api.compare_server(tmp_path / "int8", server.url, dtype="float32").statistics.failures
    api.export(tmp_path / "int8", tmp_path / "export")
    with pytest.raises(GateError) as error:
        api.compare_server(tmp_path / "export", server.url).check()
    assert "with decoded weights does not" in error.value.hint


def test_divergence_of_some_tokens_is_a_lower_bound(server: Any, ckpt: Path) -> None:
    """Of a server that is a little warmer."""
    server.spoil = lambda logits: logits / 1.3
    found = api.compare_server(ckpt, server.url).statistics
    assert 1e-4 < found.mean_kl < 1
    assert found.failures


@pytest.mark.parametrize(
    ("server", "answer"),
    [
        ("vLLM", {"choices": []}),
        ("vLLM", {"choices": [{"prompt_logprobs": ["row"] * 40}]}),
        ("vLLM", {"choices": [{"prompt_logprobs": [{"x": {"logprob": -1}}] * 40}]}),
        ("vLLM", {"choices": [{"prompt_logprobs": [{"1": {"logprob": None}}] * 40}]}),
        ("vLLM", {"choices": [{"prompt_logprobs": [{"1": {"rank": 1}}] * 40}]}),
        ("SGLang", {"meta_info": {"input_token_logprobs": [[-1]] * 40, "input_top_logprobs": [[]] * 40}}),
        ("SGLang", {"meta_info": {"input_token_logprobs": [3] * 40, "input_top_logprobs": [[]] * 40}}),
    ],
    indirect=["server"],
)
def test_an_answer_of_another_form(server: Any, answer: Any, ckpt: Path) -> None:
    server.other = answer
    with pytest.raises(ServerError, match="gave log-probabilities of 0 of the last"):
        api.compare_server(ckpt, server.url)


def test_a_server_with_a_padded_vocabulary_that_leaves_out_a_token(server: Any, ckpt: Path) -> None:
    def padded(logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits, torch.full((len(logits), 32), -9.0, dtype=logits.dtype)], -1)

    server.spoil = padded
    assert api.compare_server(ckpt, server.url).statistics.max_difference < 0.1
    rows = [None, *({"1": {"logprob": -1.0}} for _ in range(200))]
    server.other = {"choices": [{"prompt_logprobs": rows}]}
    with pytest.raises(ServerError, match="gave log-probabilities of"):
        api.compare_server(ckpt, server.url)


def test_the_command(server: Any, ckpt: Path) -> None:
    facts = json.loads(command("verify", ckpt, "--server", server.url, "--json").stdout)
    assert facts["passed"]
    assert facts["server"] == {"url": server.url, "program": "vLLM", "model": "qwen"}
    done = command("verify", ckpt, "--server", server.url)
    assert "passed" in done.stdout
    assert "mean KL divergence" in done.stdout
    command("verify", ckpt, "--server", server.url, "--compare-hf", code=2)
    command("verify", ckpt, "--served", "qwen", code=2)


def test_faults_of_servers(server: Any, ckpt: Path) -> None:
    with pytest.raises(ServerError, match="cannot be reached"):
        api.compare_server(ckpt, "http://127.0.0.1:9")
    server.models = ["one", "two"]
    with pytest.raises(ServerError, match="serves several models"):
        api.compare_server(ckpt, server.url)
    with pytest.raises(ServerError, match="does not serve three"):
        api.compare_server(ckpt, server.url, served="three")
    api.compare_server(ckpt, server.url, served="two").check()
    server.program = "neither"
    with pytest.raises(ServerError, match="refuses the request: 404"):
        api.compare_server(ckpt, server.url, served="one")

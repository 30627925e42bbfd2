"""`verify --server` against a running server of vLLM's build for CPUs, in an environment of its own; see `make
consumers`."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.commands import EXAMPLE
from helpers.commands import tpuconv as command
from helpers.consumers import FORMS, MODELS
from helpers.families import save
from helpers.vllm_server import vllm_server
from tpuconv import api
from tpuconv.errors import GateError, ServerError

pytestmark = [pytest.mark.slow, pytest.mark.consumers]

NAME = "tiny"
SPOILED = "model.layers.1.self_attn.o_proj.weight"


def spoil(source: Path, folder: Path) -> Path:
    """Writes a release with the rows of a matrix in another order, and returns the folder."""
    config, tensors = json.loads((source / "config.json").read_text()), read_tensors(source)
    return write_checkpoint(folder, config, tensors | {SPOILED: np.roll(tensors[SPOILED], 1, axis=0)})


@pytest.mark.parametrize(
    ("form", "has_tokenizer", "most_kl"), [("plain", True, 1e-9), ("int8", True, 2e-3), ("plain", False, 1e-9)]
)
def test_verify_a_running_server(form: str, has_tokenizer: bool, most_kl: float, tmp_path: Path) -> None:
    """The right model passes, a model with one other matrix fails at a named position."""
    config, dtype = FORMS[form].config or None, FORMS[form].dtype
    source = EXAMPLE if has_tokenizer else tmp_path / "hf"
    if not has_tokenizer:
        save(MODELS["qwen3"], source, "bfloat16")
    for name, folder in (("right", source), ("spoiled", spoil(source, tmp_path / "spoiled-hf"))):
        api.convert(folder, tmp_path / name, quantize=config)
    right, spoiled = tmp_path / "right", tmp_path / "spoiled"
    api.convert(source, tmp_path / "served", target="huggingface", quantize=config)
    options = ["--dtype", dtype, "--served-model-name", NAME, *([] if has_tokenizer else ["--skip-tokenizer-init"])]
    with vllm_server(tmp_path / "served", tmp_path / "log", *options) as url:
        for checkpoint in (right, *([tmp_path / "served"] if form == "plain" else [])):
            asked = ("verify", checkpoint, "--server", f"{url}/v1", "--served", NAME, "--dtype", dtype)
            facts = json.loads(command(*asked, "--json").stdout)
            assert facts["passed"]
            assert facts["server"] == {"url": url, "program": "vLLM", "model": NAME}
            assert facts["mean_kl"] < most_kl
            assert facts["tokens"] > 500
        assert f"vLLM serves the model of {right}" in command("verify", right, "--server", url).stdout
        command("verify", right, "--server", url, "--served", "other", code=ServerError.exit_code)
        failed = command("verify", spoiled, "--server", url, code=GateError.exit_code)
        assert "first that differs: prompt 1, position " in failed.stdout
        facts = json.loads(command("verify", spoiled, "--server", url, "--json", code=GateError.exit_code).stdout)
        assert facts["first"]["token"] != facts["first"]["server_token"]
        assert facts["mean_kl"] > 5 * facts["gate"]

"""A checkpoint on the devices of several processes: each reads its own part, and the results are those of one."""

import json

import numpy as np
import pytest

from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.commands import EXAMPLE, tpuconv
from helpers.joined import joined
from tpuconv import api
from tpuconv.convert.plan import sizes
from tpuconv.verify.logits import DTYPE_GATES

pytestmark = pytest.mark.slow

CHILD = """
import json, sys
from pathlib import Path
import jax
import numpy as np
from flax import nnx
from tpuconv.api.models import join_processes, leave_processes
part = join_processes()
import tpuconv
from tpuconv.models.logits import forward
folder = sys.argv[1]
alone = tpuconv.load(folder)  # without a mesh: a copy of its own
ids = [[1, 2, 3, 4, 5, 6, 7, 8]]
own = forward(alone, ids, "float32")()[0]
def read():
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
before = read()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
with jax.sharding.set_mesh(mesh):
    model = tpuconv.load(folder, mesh=mesh)
    taken = read() - before
    logits = forward(model, ids, "float32")()[0]
arrays = jax.tree.leaves(nnx.state(model))
held = sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards)
total = sum(x.nbytes for x in arrays)
print(json.dumps({"taken": taken, "held": held, "total": total, "logits": logits.tolist(), "own": own.tolist()}))
leave_processes()
"""


@pytest.mark.parametrize(("count", "devices"), [(2, 1), (4, 2)])
def test_each_process_reads_its_part(count, devices, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "CHUNK_BYTES", 64 << 10)  # small beside the arrays, as in a large model
    config = qwen3_config(
        vocab_size=4096, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, head_dim=64,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    source = random_checkpoint(tmp_path / "src", config, dtype="float32")
    api.convert(source, tmp_path / "ckpt", jobs=1)
    found = [json.loads(out) for out in joined(["-c", CHILD, tmp_path / "ckpt"], count, devices)]
    for each in found:
        logits, own = np.array(each["logits"]), np.array(each["own"])
        assert np.abs(logits - own).max() <= DTYPE_GATES["float32"]["relative_difference"] * np.abs(own).max()
        np.testing.assert_array_equal(each["logits"], found[0]["logits"])
        assert each["held"] <= 1.05 * each["total"] / count
        assert each["taken"] <= 1.3 * each["total"] / count, each["taken"] / each["total"]


def test_commands_on_two_processes(tmp_path):
    """Process 0 prints what one process prints; the other prints nothing."""
    api.convert(EXAMPLE, tmp_path / "ckpt", jobs=1)
    ckpt = tmp_path / "ckpt"
    words = ["generate", ckpt, "--prompt", "Once upon a time", "--max-new-tokens", 8, "--json"]
    first, second = joined(["-m", "tpuconv", *words, "--distributed"], 2, 1)
    assert json.loads(first)["text"] == json.loads(tpuconv(*words).stdout)["text"]
    assert not second
    first, second = joined(["-m", "tpuconv", "verify", ckpt, "--compare-hf", "--dtype", "float32", "--json",
                            "--distributed"], 2, 1)  # fmt: skip
    assert json.loads(first)["passed"]
    assert not second
    sizes = ["--prompt-length", 8, "--new-tokens", 4, "--repeats", 1, "--json"]
    first, second = joined(["-m", "tpuconv", "benchmark", ckpt, *sizes, "--distributed"], 2, 1)
    assert json.loads(first)["devices"] == 2
    assert not second

"""Logits that tpu-inference computes on a CPU: its own loaders and layers, with another attention in place of the TPU's
kernel. Runs in the environment of tpu-inference, as a script; see `oracles.ask`.

The request is that of `vllm_logprobs`. The variable MODEL_IMPL_TYPE says which models: "flax_nnx" for those in JAX,
"vllm" for vLLM's in torch. An error after a model was loaded, such as that of a kernel for TPUs, is told apart from one
of loading.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tpu_inference.layers.common.attention_interface as interface
import tpu_inference.models.vllm.vllm_model_wrapper as wrapper
import vllm.ir
from flax import nnx
from jax.sharding import Mesh
from tpu_inference.distributed.jax_parallel_state import init_pp_distributed_environment
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES
from tpu_inference.models.common.model_loader import get_model
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs

LENGTH, SEQUENCES, PAGES = 256, 4, 64


def attention(mesh, q, k, v, cache, *_, sm_scale, attention_chunk_size=None, attn_logits_soft_cap=None, **others):
    """Attention of one sequence without a past, whose length is below all windows but `attention_chunk_size`."""
    length, heads, size = q.shape
    groups, at = k.shape[1], jnp.arange(length)
    queries = q.astype(jnp.float32).reshape(length, groups, heads // groups, size) * sm_scale
    scores = jnp.einsum("tkgh,skh->kgts", queries, k.astype(jnp.float32))
    if attn_logits_soft_cap:
        scores = attn_logits_soft_cap * jnp.tanh(scores / attn_logits_soft_cap)
    seen = at[:, None] >= at
    if attention_chunk_size:
        seen &= at[:, None] - at < attention_chunk_size
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    out = jnp.einsum("kgts,skh->tkgh", weights, v.astype(jnp.float32))
    return out.astype(q.dtype).reshape(length, heads, size), cache


def metadata(length: int) -> AttentionMetadata:
    return AttentionMetadata(
        input_positions=jnp.arange(length, dtype=jnp.int32),
        block_tables=jnp.zeros(PAGES, jnp.int32),
        seq_lens=jnp.array([length, *[0] * (SEQUENCES - 1)], jnp.int32),
        query_start_loc=jnp.array([0, *[length] * SEQUENCES], jnp.int32),
        request_distribution=jnp.array([0, 0, 1], jnp.int32),
    )


def load(folder: str, dtype: str, mesh: Mesh) -> tuple:
    config = EngineArgs(
        model=folder,
        dtype=dtype,
        max_model_len=LENGTH,
        max_num_batched_tokens=LENGTH,
        max_num_seqs=SEQUENCES,
        enforce_eager=True,
        skip_tokenizer_init=True,
    ).create_engine_config()
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        return config, get_model(config, jax.random.key(0), mesh)  # constructs by nnx.eval_shape, then loads


def logits(config, model, ids: list[int], mesh: Mesh) -> np.ndarray:
    tokens, described = jnp.array(ids, jnp.int32), metadata(len(ids))
    with set_current_vllm_config(config), jax.set_mesh(mesh):
        if os.environ["MODEL_IMPL_TYPE"] == "vllm":
            names = [name for name in config.compilation_config.static_forward_context if name.endswith("attn")]
            caches = [jnp.zeros((1, 1, 1, 1, 128), jnp.bfloat16) for _ in names]
            places = tuple((name, i) for i, name in enumerate(names))
            given = (dict.fromkeys(names, described), None, described.input_positions, places, None)
            out = model.model_fn(model.state, caches, tokens, *given)
            return model.compute_logits_fn(model.state, out[1], None)
        graph, state = nnx.split(model.model)
        caches = [jnp.zeros(1)] * config.model_config.hf_config.num_hidden_layers

        def run(state):
            merged = nnx.merge(graph, state)
            return merged.compute_logits(merged(caches, tokens, described)[1])

        return jax.jit(run)(state)


def main() -> None:
    request = json.load(sys.stdin)
    interface.sharded_ragged_paged_attention = attention
    wrapper.get_step_fn_compiler_options = lambda *args, **kwargs: {}  # options of the TPU's compiler
    vllm.ir.set_default_torch_wrap(False)  # as its worker does
    place = "file://" + tempfile.mktemp()
    init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=place, backend="gloo")
    init_pp_distributed_environment("127.0.0.1", 0, 1, jax.devices()[0], need_pp=False)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(MESH_AXIS_NAMES)), MESH_AXIS_NAMES)
    results = []
    for model in request["models"]:
        result = {}
        try:
            loaded = load(model["folder"], model["dtype"], mesh)
            result["loaded"] = True
            found = np.asarray(logits(*loaded, request["ids"], mesh).astype(jnp.float32), np.float64)
            np.save(model["out"], found - np.logaddexp.reduce(found, -1, keepdims=True))
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        results.append(result)
        Path(request["results"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)

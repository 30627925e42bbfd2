"""Compares estimated times with published ones: compiles other projects' programs unchanged, and estimates their times.

    git clone https://github.com/jax-ml/jax-llm-examples && git clone https://github.com/martin-marek/jax-llm
    pip install flatbuffers etils
    python benchmarks/published.py jax-llm-examples jax-llm > table.md

Each program is compiled with two depths, each in its own process, and the step of the complete model is extrapolated.
The programs' code is unchanged; `pltpu.repeat`, which jax has removed, is defined again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpuconv.verify.topology.chips import Slice
from tpuconv.verify.topology.hlo import Schedule
from tpuconv.verify.topology.request import ENVIRONMENT


@dataclass(frozen=True)
class Step:
    """A decode step, and the milliseconds that its authors published."""

    program: str
    topology: str
    layers: int
    batch: int
    context: int
    milliseconds: float


LLAMA, R1, QWEN3 = "Llama 3.1 70B, int8", "DeepSeek R1, int8", "Qwen3-32B, bfloat16"
DEPTHS = {LLAMA: (4, 8), R1: (5, 7), QWEN3: (4, 8)}
"""The two depths that are compiled. The first three layers of R1 have no experts."""

STEPS = (
    *(
        Step(LLAMA, "v5e:4x4", 80, batch, context, 1e3 / rate)
        for batch, context, rate in (
            *((8, 2048, 159), (8, 8192, 146), (16, 2048, 135)),
            *((32, 2048, 108), (64, 2048, 68.7), (128, 2048, 39.3)),
        )
    ),
    *(
        Step(R1, "v5e:8x8", 61, batch, context, 1e3 / rate)
        for batch, context, rate in ((1, 512, 75.9), (8, 512, 48.0), (8, 4096, 42.1), (128, 512, 17.4))
    ),
    *(
        Step(QWEN3, "v6e:2x4", 64, batch, context, 1e3 / rate)
        for batch, context, rate in ((1, 512, 108), (512, 512, 41), (128, 4096, 42))
    ),
)
"""The rates are tokens/s of each sequence, from the README.md of llama3 and of deepseek_r1_jax in jax-llm-examples, and
of jax-llm."""


def mesh_of(step: Step, sizes: tuple[int, ...], names: tuple[str, ...], explicit: bool) -> Any:
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import AxisType, Mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=step.topology).devices
    arranged = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(arranged, names, axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes))


def placed(mesh: Any, shape: tuple[int, ...], dtype: str, *axes: str | None) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def of_jax_llm_examples(step: Step, model: Any, config: Any, *cache_size: int) -> tuple[Any, ...]:
    """Returns the function, its arguments, and the index of the argument to donate."""
    import jax

    def shapes(kind: Any, *sizes: int) -> Any:
        infos, places = kind.abstract(config, *sizes), kind.shardings(config, *sizes)
        return jax.tree.map(
            lambda info, place: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place),
            infos,
            places,
            is_leaf=model.is_param,
        )

    ids = placed(config.mesh, (step.batch, 1), "int32", None, None)
    arguments = ids, shapes(model.Weights), shapes(model.KVCache, step.batch, *cache_size), config
    return model.decode_step.__wrapped__, arguments, 2


def llama(step: Step, layers: int) -> tuple[Any, ...]:
    from llama3_jax import model

    config = model.Config(
        embed=8192, ffw_size=28672, q_heads=64, kv_heads=8, num_layers=layers, head_dim=128, vocab_size=128256,
        max_seq_len=step.context, causal=True, use_prefill_attn_kernel=False, use_decode_attn_kernel=True,
        mesh=mesh_of(step, (1, 8, 2), ("x", "y", "z"), True), rules=model.ShardingRules(batch=None),
    )  # fmt: skip
    return of_jax_llm_examples(step, model, config)


def r1(step: Step, layers: int) -> tuple[Any, ...]:
    from deepseek_r1_jax import model

    mesh = mesh_of(step, (1, 8, 8), ("x", "y", "z"), False)
    config = model.Config(mesh=mesh, num_layers=layers, max_seq_len=step.context)
    return of_jax_llm_examples(step, model, config, step.context)


def qwen3(step: Step, layers: int) -> tuple[Any, ...]:
    import jax
    from jax.sharding import PartitionSpec, reshard
    from models import qwen3 as model

    D, N, K, H, F, V = 5120, 64, 8, 128, 25600, 151936
    mesh = mesh_of(step, (1, 8), ("data", "model"), True)
    own: dict[str, tuple[Any, ...]] = {
        **{name: ((D,),) for name in ("input_layernorm", "post_attention_layernorm")},
        **{name: ((H,),) for name in ("q_norm", "k_norm")},
        "q_proj": ((N, H, D), "model", None, "data"),
        **{name: ((K, H, D), "model", None, "data") for name in ("k_proj", "v_proj")},
        "o_proj": ((D, N, H), "data", "model"),
        **{name: ((F, D), "model", "data") for name in ("gate_proj", "up_proj")},
        "down_proj": ((D, F), "data", "model"),
    }
    whole = {"norm": ((D,),), **{name: ((V, D), "model", "data") for name in ("embed_tokens", "lm_head")}}
    whole |= {f"layers.{i}.{name}": facts for i in range(layers) for name, facts in own.items()}
    weights = {name: placed(mesh, facts[0], "bfloat16", *facts[1:]) for name, facts in whole.items()}
    shape = (2, step.batch, step.context, K, H)
    cache = [placed(mesh, shape, "bfloat16", None, "data", None, "model", None) for _ in range(layers)]
    config = {"num_hidden_layers": layers, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}

    def sample(weights: Any, ids: Any, cache: Any, at: Any, seed: Any) -> Any:
        logits, cache = model.forward(config, ids, weights, cache, at)
        ids = jax.random.categorical(jax.random.key(seed), logits[:, 0]).astype("int32")[:, None]
        return reshard(ids, PartitionSpec("data", None)), cache

    ids, number = placed(mesh, (step.batch, 1), "int32", "data", None), placed(mesh, (), "int32")
    return sample, (weights, ids, cache, number, number), 2


PROGRAMS: dict[str, tuple[str, Callable[[Step, int], tuple[Any, ...]]]] = {
    LLAMA: ("{0}/llama3", llama),
    R1: ("{0}/deepseek_r1_jax", r1),
    QWEN3: ("{1}", qwen3),
}


def compiled(step: Step, layers: int) -> dict[str, float]:
    """Compiles a step with this number of layers. Run in its own process."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu

    if not hasattr(pltpu, "repeat"):
        pltpu.repeat = lambda x, repeats, axis: jnp.concatenate([x] * repeats, axis)
    function, arguments, cache = PROGRAMS[step.program][1](step, layers)
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    with jax.sharding.set_mesh(mesh):
        done = jax.jit(function, donate_argnums=cache).lower(*arguments).compile()
    schedule, chip = Schedule(str(done.as_text())), Slice(step.topology).chip
    return {
        "peak": done.memory_analysis().peak_memory_in_bytes,
        "floor": sum(schedule.hbm) / chip.bandwidth,
        "estimate": schedule.estimate(chip.bandwidth, chip.ici, chip.clock).seconds,
    }


def main(folders: list[str]) -> None:
    print(
        "| program | slice | batch, context | peak GB | floor ms | estimate ms | published ms | estimate / published |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for step in STEPS:
        path = PROGRAMS[step.program][0].format(*(Path(folder).absolute() for folder in folders))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
        facts = []
        for layers in DEPTHS[step.program]:
            command = [sys.executable, __file__, "--one", json.dumps(asdict(step)), str(layers)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            facts.append(json.loads(done.stdout.splitlines()[-1]))
        less, more = DEPTHS[step.program]
        whole = {
            key: y + (y - x) / (more - less) * (step.layers - more)
            for (key, x), y in zip(facts[0].items(), facts[1].values(), strict=True)
        }
        cells = [step.program, step.topology, f"{step.batch}, {step.context}", f"{whole['peak'] / 1e9:.1f}"]
        cells += [f"{1e3 * whole[key]:.1f}" for key in ("floor", "estimate")]
        cells += [f"{step.milliseconds:.1f}", f"{1e3 * whole['estimate'] / step.milliseconds:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(compiled(Step(**json.loads(sys.argv[2])), int(sys.argv[3]))))
    elif len(sys.argv) == 3:
        main(sys.argv[1:])
    else:
        sys.exit(__doc__)

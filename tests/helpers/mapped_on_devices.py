"""A program for eight devices: weight maps of sharded arrays. It prints one JSON object for each argument, which is a
JSON object too: which of `FACTS`, and the arguments of that function."""

import json
import re
import sys
import time
import warnings

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from tpuconv import api

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
LLAMA3 = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "head_dim": 24},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    },
}
EXPERTS = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **SIZES},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "norm_topk_prob": True},
}
CONFIGS = {"dense": DENSE, "llama3": LLAMA3, "experts": EXPERTS}
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute")


def collectives(compiled) -> dict[str, int]:
    """How many of each collective a program has. Those of several arrays have blanks in their types."""
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", compiled.as_text())) for name in COLLECTIVES}
    return {name: count for name, count in found.items() if count}


def added(*counts: dict[str, int]) -> dict[str, int]:
    return {name: total for name in COLLECTIVES if (total := sum(each.get(name, 0) for each in counts))}


def random_arrays(shapes, dtype, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def different(have, want) -> list[str]:
    bits = {name: (np.asarray(have[name]), np.asarray(want[name])) for name in want}
    return [name for name, (a, b) in bits.items() if a.dtype != b.dtype or a.tobytes() != b.tobytes()]


def mesh_of(text: str, *, explicit: bool, devices=None) -> Mesh:
    names, sizes = zip(
        *((part.partition("=")[0], int(part.partition("=")[2])) for part in text.split(",")), strict=True
    )
    devices = np.array(jax.devices() if devices is None else devices)[: np.prod(sizes)].reshape(sizes)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def on_one_mesh(config, source, target, mesh, *, scan, shards=1, explicit=False, dtype="bfloat16") -> dict:
    """Compares one program and a stream on a mesh with the same map on one device."""
    there = api.weight_map(CONFIGS[config], source, target, scan_layers=scan, tensor_parallel=shards)
    given = random_arrays(there.source.shapes, jax.numpy.dtype(dtype))
    wanted = jax.jit(there)(given)
    back = jax.jit(there.inverse)(wanted)
    mesh = mesh_of(mesh, explicit=explicit)
    ins, outs = there.shardings("source", mesh), there.shardings("target", mesh)

    def put() -> dict[str, jax.Array]:
        return {name: jax.device_put(x, ins[name]) for name, x in given.items()}

    program = jax.jit(there, out_shardings=outs).lower(put()).compile()
    made = program(put())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        donated = jax.jit(there, out_shardings=outs, donate_argnums=0)(put())
    arrays = put()
    described = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in arrays.items()}
    programs = {id(call.program): call.program for call in there.calls(described, outs)}
    streamed = there.stream(arrays, outs)
    placed = {name: x.sharding for name, x in streamed.items()}
    wrong = [different(made, wanted), different(donated, wanted), different(streamed, wanted)]
    kept = put()
    there.stream(kept, outs, free=False)
    returned = there.inverse.stream(streamed, ins)
    return {
        "different": wrong,
        "back": different(returned, back),
        "shardings": [name for name in outs if not (made[name].sharding == placed[name] == outs[name])],
        "left": [name for name, x in arrays.items() if not x.is_deleted()],
        "gone": [name for name, x in kept.items() if x.is_deleted()],
        "divided": sum(not x.sharding.is_fully_replicated for x in made.values()),
        "one program": collectives(program),
        "stream": added(*map(collectives, programs.values())),
        "programs": len(programs),
    }


def between_meshes() -> dict:
    """From a trainer's four devices to a sampler's other four, which are divided in another way."""
    there = api.weight_map(EXPERTS, "maxtext", "vllm", scan_layers=True, tensor_parallel=4)
    given = random_arrays(there.source.shapes, np.float32)
    wanted = there(given)
    trainer = mesh_of("data=2,tensor=2", explicit=False, devices=jax.devices()[:4])
    sampler = mesh_of("tensor=4", explicit=False, devices=jax.devices()[4:])
    ins, theirs = there.shardings("source", trainer), there.shardings("target", sampler)
    arrays = {name: jax.device_put(x, ins[name]) for name, x in given.items()}
    made = there.stream(arrays, deliver=lambda name, x: jax.device_put(x, theirs[name], donate=True))
    return {
        "different": different(made, wanted),
        "elsewhere": [name for name, x in made.items() if x.sharding != theirs[name]],
        "left": [name for name, x in arrays.items() if not x.is_deleted()],
    }


QWEN3_30B_A3B = {
    **EXPERTS,
    **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}


def peak(source, target, mesh, *, scan, shards=1) -> dict:
    """Adds up what a stream of Qwen3-30B-A3B takes on a device by the compiler's count, in parts of the bytes of its
    arrays there: `sent` if each result is sent off at once, `kept` if all stay."""
    there = api.weight_map(QWEN3_30B_A3B, source, target, scan_layers=scan, tensor_parallel=shards)
    mesh = mesh_of(mesh, explicit=False)
    ins, outs = there.shardings("source", mesh), there.shardings("target", mesh)
    sizes = {
        side: {name: 2 * int(np.prod(shardings[name].shard_shape(shape))) for name, shape in tree.shapes.items()}
        for side, tree, shardings in (("source", there.source, ins), ("target", there.target, outs))
    }
    described = {
        name: jax.ShapeDtypeStruct(shape, "bfloat16", sharding=ins[name]) for name, shape in there.source.shapes.items()
    }
    began = time.monotonic()
    live = total = sum(sizes["source"].values())
    sent = kept = stacked = delivered = temporary = 0
    counted: dict[int, tuple] = {}
    for call in there.calls(described, outs):
        if id(call.program) not in counted:
            counted[id(call.program)] = (call.program, call.program.memory_analysis(), collectives(call.program))
        needs = counted[id(call.program)][1]
        temporary = max(temporary, needs.temp_size_in_bytes)
        stacked += sum(sizes["target"][name] for name in call.begins)
        now = live + stacked + needs.temp_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
        sent, kept = max(sent, now), max(kept, now + delivered)
        live -= sum(sizes["source"][name] for name in call.frees)
        done = sum(sizes["target"][name] for name in call.done)
        stacked -= done if call.updates else 0
        delivered += done
    assert (live, stacked, delivered) == (0, 0, sum(sizes["target"].values()))
    return {
        "sent": sent / total,
        "kept": kept / total,
        "bytes": total,
        "temporary": temporary,
        "programs": len(counted),
        "collectives": added(*(each[2] for each in counted.values())),
        "seconds": time.monotonic() - began,
    }


FACTS = {"one mesh": on_one_mesh, "two meshes": between_meshes, "peak": peak}

if __name__ == "__main__":
    for text in sys.argv[1:]:
        case = json.loads(text)
        print(json.dumps(FACTS[case.pop("facts")](**case)))

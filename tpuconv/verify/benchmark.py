"""Times prefill and decoding on all devices, and compares the times with the hardware limits.

A decode step reads every weight that it uses, and the cache, at least once: its limit is the memory bandwidth. A
prefill multiplies every weight with every token: its limit is the peak FLOP/s. The limits are the limits of the chip
(`tpuconv.verify.topology.chips.CHIPS`) if it is listed there, and are measured in the same run otherwise.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tpuconv.errors import ResourceError, UsageError
from tpuconv.names import CACHE_SCALES, INPUT_SCALE, SCALE, ZERO_POINT
from tpuconv.verify.topology.chips import CHIPS

PROMPT = "Once upon a time, there was a little"


@dataclass(frozen=True)
class HardwareLimits:
    """The limits of all devices together.

    Attributes:
        bandwidth: memory bandwidth in bytes/s.
        peak: peak of the matrix units in FLOP/s.
        measured: whether both were measured in this run; if false, they are the chip's specification.
    """

    bandwidth: float
    peak: float
    measured: bool


@dataclass(frozen=True)
class Machine:
    """The hardware and software of a benchmark: kind and number of devices, their limits, versions of packages."""

    device: str
    devices: int
    limits: HardwareLimits
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return asdict(self)


@dataclass(frozen=True)
class Workload:
    """The workload that is timed: the number of prompts in a batch, their length in tokens, and the new tokens of
    each."""

    batch: int
    prompt_length: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """The length of a sequence at its end."""
        return self.prompt_length + self.new_tokens

    def __str__(self) -> str:
        return f"a batch of {self.batch} with {self.prompt_length} tokens each and {self.new_tokens} new ones"


@dataclass(frozen=True)
class Timing:
    """The timing of one workload. Times are medians over the repeats.

    Attributes:
        workload: what was timed.
        compile_seconds: time to compile prefill and decoding.
        first_token_seconds: time of a prefill.
        step_seconds: time of a decode step.
        step_bytes: bytes that a decode step must read.
        prefill_flops: FLOPs that a prefill must compute.
        memory_bytes: memory of a decode step on one device, weights included.
        peak_memory_bytes: peak memory of the first device of this process so far; None if that does not report it.
        new_ids: token ids that the warm-up generated.
        limits: limits of the hardware.
        tokens_per_step: tokens that a sequence takes in a decode step: with drafts 1 and those that are accepted, of a
            canvas its tokens by the number of its steps.
        accepted_share: the share of drafts that is accepted; None without drafts.
    """

    workload: Workload
    compile_seconds: float
    first_token_seconds: float
    step_seconds: float
    step_bytes: int
    prefill_flops: int
    memory_bytes: int
    peak_memory_bytes: int | None
    new_ids: tuple[int, ...]
    limits: HardwareLimits
    tokens_per_step: float = 1.0
    accepted_share: float | None = None

    @property
    def tokens_per_second_per_sequence(self) -> float:
        """Decoding speed of one sequence."""
        return self.tokens_per_step / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed of all sequences together."""
        return self.workload.batch * self.tokens_per_second_per_sequence

    @property
    def bandwidth_share(self) -> float:
        """The share of the memory bandwidth that decoding reaches."""
        return self.step_bytes / self.step_seconds / self.limits.bandwidth

    @property
    def peak_share(self) -> float:
        """The share of the peak FLOP/s that prefill reaches."""
        return self.prefill_flops / self.first_token_seconds / self.limits.peak

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts = asdict(self)
        del facts["limits"], facts["new_ids"]
        return {
            **facts.pop("workload"),
            **facts,
            "tokens_per_second_per_sequence": self.tokens_per_second_per_sequence,
            "tokens_per_second": self.tokens_per_second,
            "bandwidth_share": self.bandwidth_share,
            "peak_share": self.peak_share,
        }


def workloads(batches: Sequence[int], prompt_lengths: Sequence[int], new_tokens: Sequence[int]) -> list[Workload]:
    """Returns a workload for each combination; `new_tokens` changes fastest.

    Raises:
        UsageError: a number of new tokens is less than 2. Prefill gives the first, so nothing would be decoded.
    """
    if min(new_tokens) < 2:
        raise UsageError("`new_tokens=` must be at least 2: the first token comes from the prefill")
    return [Workload(*sizes) for sizes in product(batches, prompt_lengths, new_tokens)]


def machine() -> Machine:
    """Returns the devices, of all processes, with their limits. Takes some seconds if the limits must be measured."""
    import jax

    devices = jax.devices()
    kind = devices[0].device_kind
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    if chip:
        # The compiler sees the two cores of a v4 chip as two devices, a host sees one. Chips are counted by
        # coordinates.
        count = chip.devices * len({tuple(device.coords) for device in devices})
        limits = HardwareLimits(chip.bandwidth * count, chip.peak * count, measured=False)
    else:
        limits = _measure_limits(len(devices) if devices[0].platform != "cpu" else 1)  # CPU devices share one memory
    libraries = ("tpuconv", "jax", "jaxlib", "flax")
    return Machine(kind, len(devices), limits, {name: version(name) for name in libraries})


def _measure_limits(devices: int) -> HardwareLimits:
    """Measures one device: matrix times vector for the bandwidth, matrix times matrix for the peak; the best of several
    runs. Returns the limits of `devices` such devices."""
    import jax
    import jax.numpy as jnp

    platform = jax.local_devices()[0].platform
    multiply = jax.jit(jnp.matmul)
    rows = jnp.ones((1 << {"gpu": 17, "cpu": 14}.get(platform, 15), 1 << 13), jnp.float32)
    bandwidth = rows.nbytes / _best(multiply, rows, jnp.ones(rows.shape[1]))
    n = 1 << {"gpu": 13, "cpu": 10}.get(platform, 11)
    squares = [jnp.ones((n, n), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    peak = max(2 * n**3 / _best(multiply, square, square) for square in squares)
    return HardwareLimits(bandwidth * devices, peak * devices, measured=True)


def _best(function: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Returns the shortest time of several calls in seconds, after one that compiles."""
    function(*args).block_until_ready()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function(*args).block_until_ready()
        times.append(time.perf_counter() - began)
    return min(times)


def _repeated(layers: Sequence[int]) -> list[int]:
    """Returns the entries that an earlier one equals."""
    return [layer for place, layer in enumerate(layers) if layer in layers[:place]]


class Roofline:
    """The least work of a step, computed from the model's weights: bytes to read, FLOPs to compute. A step reads the
    weights of a draft each time that it runs, and the weights of a layer each time that it runs. It reads one row of an
    embedding for each token, and no weights of encoders of images and sounds."""

    def __init__(self, model: Any, draft: Any = None):
        import jax
        from flax import nnx

        from tpuconv.models.common.layers import Embed
        from tpuconv.models.common.moe import Expert

        def total(part: Any, *parameters: str) -> np.ndarray:
            """Returns the bits of a module's arrays, or of some parameters alone, and the elements of its weights, as
            an array of two. Scales and zero points are read, and multiply no token by themselves."""
            found = np.zeros(2, int)
            for path, value in nnx.to_flat_state(nnx.state(part)):
                if parameters and path[0] not in parameters:
                    continue
                x, name = value.get_value(), "." + ".".join(map(str, path))
                is_weight = not name.endswith((SCALE, ZERO_POINT, INPUT_SCALE, *CACHE_SCALES))
                found += (x.size * jax.dtypes.itemsize_bits(x.dtype), x.size * is_weight)
            return found

        self.vocab_size = model.config.vocab_size
        self.head = model.config.vocab_size * model.config.hidden_size
        self.dense = total(model) - sum((total(getattr(model, part)) for part in model.config.parts), np.zeros(2, int))
        self.rows = 0  # bits of one row of each embedding, but of a tied one, of which the head reads all rows
        for _, part in nnx.iter_modules(model):
            if isinstance(part, Embed) and (part is not model.embed or model.lm_head is not None):
                tables = total(part, *part.tables)  # a projection beside them multiplies each token
                self.dense -= tables
                self.rows += tables[0] // jax.tree.leaves(nnx.state(part)[part.tables[0]])[0].shape[0]
        repeated = [model.layers[layer] for layer in _repeated(model.config.executed_layers)]
        self.dense += sum(map(total, repeated), np.zeros(2, int))
        routed = [
            part for whole in (model, *repeated) for _, part in nnx.iter_modules(whole) if isinstance(part, Expert)
        ]
        self.experts = routed[0].kernel.shape[-3] if routed else 1
        self.chosen = model.config.num_experts_per_tok if routed else 1
        routed_total = sum(map(total, routed), np.zeros(2, int))
        self.dense -= routed_total
        self.expert = routed_total // self.experts
        if draft is not None:
            of_draft = total(draft) - (0 if draft.looked_up is None else total(draft.looked_up))
            self.dense[0] += draft.reads * of_draft[0]

    def step_bytes(self, batch: int, cache_bytes: float) -> int:
        """Returns the bytes that a decode step must read: weights, chosen experts, rows of embeddings, and the
        cache. It is assumed that no two tokens choose the same expert while there are enough experts."""
        experts = min(self.experts, batch * self.chosen)
        bits = self.dense[0] + experts * self.expert[0] + batch * self.rows
        return int(bits / 8 + cache_bytes)

    def prefill_flops(self, batch: int, length: int) -> int:
        """Returns the FLOPs of a prefill's products with weights: 2 per weight and token. The head counts for the last
        token only; attention scores are not counted."""
        token = self.dense[1] - self.head + self.chosen * self.expert[1]
        return int(2 * batch * (length * token + self.head))


def measure(
    model: Any,
    wanted: Sequence[Workload],
    repeats: int,
    limits: HardwareLimits,
    warmup_ids: Sequence[int] = (),
    cache_dtype: str | None = None,
    *,
    sampling: Any = None,
    speculate: bool = False,
    draft: Any = None,
) -> Iterator[Timing]:
    """Times each workload with random prompts, and yields its timing. With drafts the prompt of the warm-up is timed:
    how many are accepted depends on the text.

    Args:
        model: a model from `tpuconv.load`.
        wanted: the workloads.
        repeats: number of timed runs.
        limits: limits of the hardware.
        warmup_ids: prompt of the warm-up run; random ids if empty.
        cache_dtype: dtype of the cache; None for the model's.
        sampling: how tokens are chosen; by default the most likely ones.
        speculate: draft with the model's module for multi-token prediction.
        draft: a draft of the model, which drafts instead.

    Raises:
        ResourceError: a workload needs more memory than the device has.
        UsageError: `speculate` is asked for, and the model was loaded without that module.
    """
    import jax

    from tpuconv.models.drafts import generator_of
    from tpuconv.models.generate import Sampling

    generator = generator_of(model, sampling or Sampling(), cache_dtype, speculate=speculate, draft=draft)
    roofline = Roofline(model, draft)
    for workload in wanted:
        try:
            yield _measure_workload(generator, roofline, workload, repeats, limits, warmup_ids)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise ResourceError(
                f"{workload} does not fit the device: {str(e).partition(chr(10))[0][:200]}",
                hint="try a smaller batch, shorter prompts or fewer new tokens",
            ) from e


def _measure_workload(
    generator: Any,
    roofline: Roofline,
    workload: Workload,
    repeats: int,
    limits: HardwareLimits,
    warmup_ids: Sequence[int],
) -> Timing:
    import jax

    from tpuconv.models.generate import Generator, prefill_chunk

    B, T, new = workload.batch, workload.prompt_length, workload.new_tokens
    length = generator.slots(B, T, new)
    ids_BT = np.random.default_rng(0).integers(0, roofline.vocab_size, (B, T), np.int32)

    began = time.perf_counter()
    decode, _ = generator.decode(B, length), generator.prefill(B, prefill_chunk(B, T), length)
    compile_seconds = time.perf_counter() - began

    prompt = list(warmup_ids)[-T:] or list(map(int, ids_BT[0]))
    measure = _decoding if type(generator) is Generator else _writing
    times = measure(generator, decode, ids_BT, prompt, new, repeats)
    used_share = (T + new / 2) / length  # of the cache's slots, on average over the steps
    cache = generator.cache_shapes(B, length)
    cache_bytes = used_share * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((cache.layers, cache.mtp)))
    memory = decode.memory_analysis()
    parts = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return Timing(
        workload=workload,
        compile_seconds=compile_seconds,
        first_token_seconds=statistics.median(times.firsts),
        step_seconds=statistics.median(times.steps),
        step_bytes=roofline.step_bytes(B * generator.ids_of_step, cache_bytes),
        prefill_flops=roofline.prefill_flops(B, T),
        memory_bytes=sum(parts) - memory.alias_size_in_bytes,
        peak_memory_bytes=(jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        new_ids=tuple(times.new_ids),
        limits=limits,
        tokens_per_step=times.tokens_per_step,
        accepted_share=times.accepted_share,
    )


class _Times(NamedTuple):
    """Measured times.

    Attributes:
        firsts, steps: seconds to the first token, and of each step behind it, once for each repetition.
        new_ids: of the prompt that warmed up.
        tokens_per_step: new tokens of each sequence.
        accepted_share: of the drafted tokens; None without a draft.
    """

    firsts: Sequence[float]
    steps: Sequence[float]
    new_ids: Sequence[int]
    tokens_per_step: float = 1.0
    accepted_share: float | None = None


def _writing(generator: Any, decode: Any, ids_BT: np.ndarray, prompt: Sequence[int], new: int, repeats: int) -> _Times:
    """Measures how `new` tokens are written on a prompt in each row, with drafts or in canvases."""
    from tpuconv.models.speculate import Speculator

    prompts_BT, mask_BT = _batched(prompt, ids_BT.shape)
    new_ids = [int(ids_B[0]) for ids_B in generator([prompt], new)]
    firsts, steps = [], []
    for _ in range(repeats):
        began, times, taken = time.perf_counter(), [], []
        for _, taken_B in generator.steps(prompts_BT, mask_BT, new):
            times.append(time.perf_counter())
            taken.append(np.mean(taken_B))
        firsts.append(times[0] - began)
        steps.append((times[-1] - times[0]) / (len(times) - 1))
    tokens_per_step = statistics.mean(taken[1:])
    share = (tokens_per_step - 1) / generator.ahead if isinstance(generator, Speculator) else None
    return _Times(firsts, steps, new_ids, tokens_per_step, share)


def _decoding(generator: Any, decode: Any, ids_BT: np.ndarray, prompt: Sequence[int], new: int, repeats: int) -> _Times:
    """Measures how `new` tokens are written on random ids, after a prompt that warms up."""
    import jax

    weights, key = generator.weights, jax.random.key(0)
    ids_B1, cache = generator.read(*_batched(prompt, ids_BT.shape), new, key)
    new_ids = [int(ids_B1[0, 0])]
    for _ in range(new - 1):
        ids_B1, cache = decode(weights, ids_B1, cache, key)
        new_ids.append(int(ids_B1[0, 0]))
    firsts, steps = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        ids_B1, cache = generator.read(ids_BT, np.ones(ids_BT.shape, bool), new, key)
        np.asarray(ids_B1)
        first = time.perf_counter()
        for _ in range(new - 1):
            ids_B1, cache = decode(weights, ids_B1, cache, key)
        np.asarray(ids_B1)
        firsts.append(first - began)
        steps.append((time.perf_counter() - first) / (new - 1))
    return _Times(firsts, steps, new_ids)


def _batched(prompt: Sequence[int], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids [B, T] and mask [B, T] of a batch that has the prompt in each row, padded on the left."""
    ids_BT, mask_BT = np.zeros(shape, np.int32), np.zeros(shape, bool)
    ids_BT[:, -len(prompt) :], mask_BT[:, -len(prompt) :] = prompt, True
    return ids_BT, mask_BT

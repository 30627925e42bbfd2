"""How fast does a model read prompts (prefill) and write (decode) on the devices here, and how near to their limits?

A decode step must read every weight that it uses and the cache once: its time against the memory bandwidth is the
share that was reached. A prefill must multiply every weight with every token: against the peak of the matrix units. The
limits are those of the chip (`tpuconv.verify.topology.chips.CHIPS`), or measured here in the same run.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np

from tpuconv.errors import ResourceError, UsageError
from tpuconv.verify.topology.chips import CHIPS

PROMPT = "Once upon a time, there was a little"


@dataclass(frozen=True)
class HardwareLimits:
    """Of all devices together: bytes/s and FLOP/s, and whether they were measured here or are the chip's."""

    bandwidth: float
    peak: float
    measured: bool


@dataclass(frozen=True)
class Machine:
    """What ran: the devices, their limits, and the versions."""

    device: str
    devices: int
    limits: HardwareLimits
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Workload:
    """One measurement: prompts of a length in a batch, and how many tokens each gets."""

    batch: int
    prompt_length: int
    new_tokens: int


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats, in seconds. `memory_bytes` is what a decode step holds on one device, weights
    included; `peak_memory_bytes` the most that the device counted so far, None where it does not count. `new_ids`
    follow the spoken prompt."""

    shape: Workload
    compile_seconds: float
    first_token_seconds: float
    step_seconds: float
    step_bytes: int
    prefill_flops: int
    memory_bytes: int
    peak_memory_bytes: int | None
    new_ids: tuple[int, ...]
    limits: HardwareLimits

    @property
    def per_sequence(self) -> float:
        """Tokens per second."""
        return 1 / self.step_seconds

    @property
    def in_all(self) -> float:
        """Tokens per second."""
        return self.shape.batch / self.step_seconds

    @property
    def bandwidth_share(self) -> float:
        """Of the memory bandwidth, in decoding."""
        return self.step_bytes / self.step_seconds / self.limits.bandwidth

    @property
    def peak_share(self) -> float:
        """Of the peak FLOP/s, in prefill."""
        return self.prefill_flops / self.first_token_seconds / self.limits.peak

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["limits"], facts["new_ids"]
        return {
            **facts.pop("shape"),
            **facts,
            "tokens_per_second_per_sequence": self.per_sequence,
            "tokens_per_second": self.in_all,
            "bandwidth_share": self.bandwidth_share,
            "peak_share": self.peak_share,
        }


def shapes(batches: Sequence[int], prompt_lengths: Sequence[int], new_tokens: Sequence[int]) -> list[Workload]:
    """Every combination, the last changing fastest.

    Raises:
        UsageError: fewer than two new tokens, of which the first is the prefill's.
    """
    if min(new_tokens) < 2:
        raise UsageError("--new-tokens is 2 or more: the first comes from the prefill")
    return [Workload(*each) for each in product(batches, prompt_lengths, new_tokens)]


def machine() -> Machine:
    """The devices of this process. Takes some seconds where their limits must be measured."""
    import jax

    devices = jax.devices()
    kind = devices[0].device_kind
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    if chip:
        # The two cores of a v4 are two devices to the compiler and one to a host: chips are counted, by their places.
        parts = chip.devices * len({tuple(device.coords) for device in devices})
        limits = HardwareLimits(chip.bandwidth * parts, chip.peak * parts, measured=False)
    else:
        limits = _measured(len(devices) if devices[0].platform != "cpu" else 1)  # devices of a CPU share its memory
    libraries = ("tpuconv", "jax", "jaxlib", "flax")
    return Machine(kind, len(devices), limits, {name: version(name) for name in libraries})


def _measured(devices: int) -> HardwareLimits:
    """The best of several products: a large matrix and a vector for the bandwidth, two matrices for the peak."""
    import jax
    import jax.numpy as jnp

    on_gpu = jax.devices()[0].platform == "gpu"
    multiply = jax.jit(jnp.matmul)
    rows = jnp.ones((1 << (17 if on_gpu else 15), 1 << 13), jnp.float32)
    bandwidth = rows.nbytes / _best(multiply, rows, jnp.ones(rows.shape[1]))
    n = 1 << (13 if on_gpu else 11)
    squares = [jnp.ones((n, n), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    peak = max(2 * n**3 / _best(multiply, square, square) for square in squares)
    return HardwareLimits(bandwidth * devices, peak * devices, measured=True)


def _best(function: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Seconds, the least of several calls after one that compiles."""
    function(*args).block_until_ready()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function(*args).block_until_ready()
        times.append(time.perf_counter() - began)
    return min(times)


class Roofline:
    """What a step of a model must do at least, by its weights."""

    def __init__(self, model: Any):
        import jax
        from flax import nnx

        from tpuconv.models.common.moe import Expert

        def total(part: Any) -> np.ndarray:
            """Bytes and elements."""
            leaves = jax.tree.leaves(nnx.state(part))
            return np.array([sum(x.nbytes for x in leaves), sum(x.size for x in leaves)])

        self.vocab_size = model.config.vocab_size
        self.head = model.config.vocab_size * model.config.hidden_size
        self.row = 0  # bytes; of an embedding that is not the head too, a row for each token is all that is read
        self.dense = total(model)
        if model.lm_head is not None:
            self.dense -= total(model.embed)
            self.row = total(model.embed)[0] // model.config.vocab_size
        routed = [part for _, part in nnx.iter_modules(model) if isinstance(part, Expert)]
        self.experts = routed[0].kernel.shape[-3] if routed else 1
        self.chosen = getattr(model.config, "num_experts_per_tok", 1)
        routed_total = sum(map(total, routed), np.zeros(2, int))
        self.dense -= routed_total
        self.expert = routed_total // self.experts

    def step_bytes(self, batch: int, cache_bytes: float) -> int:
        """Bytes that a decode step reads at least: weights, of experts those that are chosen (other ones by each token,
        as long as there are others), rows of the embedding, and the cache."""
        experts = min(self.experts, batch * self.chosen)
        return int(self.dense[0] + experts * self.expert[0] + batch * self.row + cache_bytes)

    def prefill_flops(self, batch: int, length: int) -> int:
        """Multiplications and additions with the weights, the head's for the last token alone; attention's are left
        out."""
        token = self.dense[1] - self.head + self.chosen * self.expert[1]
        return int(2 * batch * (length * token + self.head))


def measure(
    model: Any,
    wanted: Sequence[Workload],
    repeats: int,
    limits: HardwareLimits,
    spoken: Sequence[int] = (),
    cache_dtype: str | None = None,
) -> Iterator[Timing]:
    """Times every shape with random prompts, after a run with the prompt `spoken` to warm up. The cache is in the
    model's dtype where it is not in `cache_dtype`.

    Raises:
        ResourceError: the device has too little memory for a shape.
    """
    import jax

    from tpuconv.models.generate import Generator

    generator = Generator(model, cache_dtype=cache_dtype)
    roofline = Roofline(model)
    for shape in wanted:
        try:
            yield _measure_workload(generator, roofline, shape, repeats, limits, spoken)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise ResourceError(
                f"{shape} does not fit the device: {str(e).partition(chr(10))[0][:200]}",
                hint="try a smaller batch, shorter prompts or fewer new tokens",
            ) from e


def _measure_workload(
    generator: Any, roofline: Roofline, shape: Workload, repeats: int, limits: HardwareLimits, spoken: Sequence[int]
) -> Timing:
    import jax

    from tpuconv.models.generate import prefill_chunk

    B, T, new = shape.batch, shape.prompt_length, shape.new_tokens
    length = generator.slots(B, T, new)
    ids_BT = np.random.default_rng(0).integers(0, roofline.vocab_size, (B, T), np.int32)
    mask_BT = np.ones(ids_BT.shape, bool)
    weights, key = generator.weights, jax.random.key(0)

    began = time.perf_counter()
    decode, _ = generator.decode(B, length), generator.prefill(B, prefill_chunk(B, T), length)
    compile_seconds = time.perf_counter() - began

    own = list(spoken)[-T:] or list(map(int, ids_BT[0]))
    ids_B, cache = generator.read(*_in_shape(own, ids_BT.shape), new, key)
    new_ids = [int(ids_B[0])]
    for _ in range(new - 1):
        ids_B, cache = decode(weights, ids_B, cache, key)
        new_ids.append(int(ids_B[0]))

    firsts, steps = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        ids_B, cache = generator.read(ids_BT, mask_BT, new, key)
        np.asarray(ids_B)
        first = time.perf_counter()
        for _ in range(new - 1):
            ids_B, cache = decode(weights, ids_B, cache, key)
        np.asarray(ids_B)
        firsts.append(first - began)
        steps.append((time.perf_counter() - first) / (new - 1))

    slots_taken = (T + new / 2) / length  # on average over the steps
    cache_bytes = slots_taken * sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    memory = decode.memory_analysis()
    parts = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return Timing(
        shape=shape,
        compile_seconds=compile_seconds,
        first_token_seconds=statistics.median(firsts),
        step_seconds=statistics.median(steps),
        step_bytes=roofline.step_bytes(B, cache_bytes),
        prefill_flops=roofline.prefill_flops(B, T),
        memory_bytes=sum(parts) - memory.alias_size_in_bytes,
        peak_memory_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        new_ids=tuple(new_ids),
        limits=limits,
    )


def _in_shape(prompt: Sequence[int], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The prompt in every row, padded on the left: ids and mask."""
    ids_BT, mask_BT = np.zeros(shape, np.int32), np.zeros(shape, bool)
    ids_BT[:, -len(prompt) :], mask_BT[:, -len(prompt) :] = prompt, True
    return ids_BT, mask_BT

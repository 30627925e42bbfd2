"""Compiles one model for one slice. Runs in a child process of `tpuconv.verify.topology.request`, with the environment
variables that libtpu needs.
"""

import json
import re
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.checkpoint.device_layouts import DeviceLayout
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.models.common.beside import VISION
from tpuconv.notation.layout import UNIT
from tpuconv.notation.sharding import MESH_AXES, decoding_mesh, format_mesh
from tpuconv.text import format_count, format_size
from tpuconv.verify.topology.chips import Slice
from tpuconv.verify.topology.hlo import Schedule
from tpuconv.verify.topology.request import CompileRequest, Memory, Program

if TYPE_CHECKING:
    from tpuconv.models.common.seen import Prepared


def compile_in_child(asked: Path, answered: Path) -> None:
    """Reads a `CompileRequest` and the name of a slice from the file `asked`, and writes a `FitReport` or an error to
    the file `answered`, both as JSON."""
    request = json.loads(asked.read_text())
    topology = Slice(request.pop("topology"))
    try:
        facts: Mapping[str, Any] = compile_for(CompileRequest(**request), topology)
    except TpuconvError as e:
        facts = {
            "error": {"type": type(e).__name__, "message": e.message, "details": list(e.details), "hint": e.hint},
        }
    answered.write_text(json.dumps(facts))


def compile_for(request: CompileRequest, topology: Slice) -> dict[str, Any]:
    """Returns the facts of a `FitReport`, as `FitReport.from_json` reads them.

    Raises:
        UsageError: the mesh does not match the slice, or there is no such slice.
        TpuconvError: the compiler failed for a reason other than memory.
    """
    from tpuconv.models.registry import find_family

    family = find_family(request.config)
    config = family.read_config(request.config, parts=asked_parts(request))
    mesh = dict(request.mesh or decoding_mesh(config.sizes, topology.devices))
    if prod(mesh.values()) != topology.devices:
        raise UsageError(
            f"the mesh {format_mesh(mesh)} has {prod(mesh.values())} devices, {topology.name} has {topology.devices}",
            hint="leave `mesh=` out to have one chosen",
        )
    return _Compilation(request, topology, family, config, mesh).report()


class _Compilation:
    """One model on one mesh, as shapes with shardings. Imports jax."""

    def __init__(self, request: CompileRequest, topology: Slice, family: Any, config: Any, mesh: Mapping[str, int]):
        import jax
        from flax import nnx

        from tpuconv.models.common.cache import cache_shardings
        from tpuconv.models.denoise import Denoiser, writes_canvases
        from tpuconv.models.generate import Generator

        self.request, self.topology, self.sizes = request, topology, mesh
        self.model = model_of(request, family, config)
        graph, state = nnx.split(self.model)
        self.mesh = _mesh(topology, mesh)
        table = family.table_without_release(parts=config.parts)
        table = table.stack_layers(config) if self.model.scan_layers else table
        self.axes = {name: axes for binding in table.bind(config) for name, axes in binding.dst_axes().items()}
        self.params = nnx.from_flat_state(
            [(path, value.replace(self._param(path, value))) for path, value in nnx.to_flat_state(state)]
        )
        # The programs that `generate` runs, with the layouts that `load` uses after `--write-layouts`.
        kind: type[Generator] = Denoiser if writes_canvases(config) else Generator
        self.generator = kind(nnx.merge(graph, self.params), cache_dtype=request.cache_dtype, free_layouts=True)
        self.images = self._images() if request.images else ()
        cache = self.generator.cache_shapes(request.batch, request.context)
        self.cache = jax.tree.map(_with_sharding, cache, cache_shardings(cache, self.mesh))
        self.seen = 0  # bytes of the features, which are there while the prompt is read

    def _param(self, path: tuple[Any, ...], value: Any) -> Any:
        """Returns a parameter's shape with its sharding. Qwix's quantized values and scales have the parameter's axes;
        static scales, which no row of the table has, are on each device."""
        from tpuconv.models.common.placement import sharding

        names = list(map(str, path))
        prefixes = (".".join(names[:n]) for n in range(len(names), 0, -1))
        axes = next((self.axes[name] for name in prefixes if name in self.axes), " ".join([UNIT] * len(value.shape)))
        return _with_sharding(value, sharding(axes, value.shape, self.mesh, MESH_AXES))

    def _images(self) -> tuple[Any, ...]:
        """Returns the arguments of the encoder for the images of the request. Sets `self.features`, the number of their
        features, and the slots of the cache for those that layers attend to.

        Raises:
            UsageError: the sizes of images depend on more than the config, or the batch has no room for their features.
        """
        encoder: Any = getattr(self.model, VISION)
        request = self.request
        if (features := encoder.usual_images(request.images)) is None:
            raise UsageError(
                f"images of {encoder.config.modality.tower.summary} have no usual size", hint="leave `images=` out"
            )
        prepared: Prepared = encoder.prepare(features)
        self.generator.image_slots = encoder.slots(features)
        self.features = self.generator.image_slots or len(prepared.rows)
        if len(prepared.rows) > request.batch * request.context:
            raise UsageError(
                f"{format_count(request.images, 'image')} with {self.features:,} features exceed "
                f"{format_count(request.batch, 'sequence')} of {request.context:,} tokens",
                hint="make `context=` or `batch=` larger, or `images=` smaller",
            )
        return prepared.arrays

    def report(self) -> dict[str, Any]:
        """Compiles the programs of the request. Returns the facts of a `FitReport`."""
        from tpuconv.models.generate import prefill_chunk

        request, available = self.request, self.topology.chip.hbm
        weights, cache = _bytes_per_device(self.params), _bytes_per_device(self.cache)
        facts: dict[str, Any] = {
            "topology": self.topology.name,
            "devices": self.topology.devices,
            "mesh": self.sizes,
            "batch": request.batch,
        }
        programs: list[Program] = []
        why = ""
        if weights + cache > available:
            why = f"weights and cache alone need {format_size(weights + cache)} of {format_size(available)}"
        tokens = {"decode": self.generator.ids_of_step, "prefill": prefill_chunk(request.batch, request.context)}
        tokens |= {"see": self.features} if request.images else {}
        for name in (*request.programs, *(["see"] if request.images else [])):
            if not why:
                try:
                    programs.append(self._compile(name, tokens[name]))
                except Exception as e:  # jax has no exception type for a program that does not fit
                    if "RESOURCE_EXHAUSTED" not in str(e):
                        raise TpuconvError(
                            f"{name} does not compile for {self.topology.name}: {str(e)[:300]}",
                            hint="this is a limit of the compiler or a bug in tpuconv: please report it",
                        ) from e
                    why = f"{name} does not fit: {_compiler_reason(str(e))}"
        temporaries = max((program.temporaries for program in programs), default=0) + self.seen
        code = sum(program.code for program in programs)
        memory = Memory(available, weights, cache, temporaries, code)
        if not why and memory.headroom < 0:
            why = f"prefill and decode together need {format_size(memory.peak)} of {format_size(available)}"
        facts |= {"memory": vars(memory), "programs": [vars(program) for program in programs], "why": why}
        return facts | {"layouts": {} if why else self._layouts()}

    def _layouts(self) -> dict[str, DeviceLayout]:
        """Returns the device layout that the compiler chose for each parameter of the decode step."""
        import jax
        from flax import nnx

        decode = self.generator.decode(self.request.batch, self.request.context)
        chosen = jax.tree.unflatten(self.generator.form, decode.input_formats[0][0])
        out = {}
        shapes, formats = (dict(nnx.to_flat_state(state)) for state in (self.params, chosen))
        for path, value in shapes.items():
            layout = formats[path].get_value().layout
            if layout is None:  # no parameter of the step, but of an encoder
                continue
            out[".".join(map(str, path))] = DeviceLayout(value.dtype.name, layout.major_to_minor, layout.tiling)
        return out

    def _compile(self, name: str, tokens: int) -> Program:
        batch, context = self.request.batch, self.request.context
        began = time.monotonic()
        if name == "decode":
            compiled: Any = self.generator.decode(batch, context)
        elif name == "see":
            compiled = self._see()
            self.seen = compiled.memory_analysis().output_size_in_bytes
        else:
            compiled = self.generator.prefill(batch, tokens, context)
        seconds = time.monotonic() - began
        memory: Any = compiled.memory_analysis()
        schedule = Schedule(str(compiled.as_text()))
        read, written = schedule.hbm
        chip = self.topology.chip
        estimate = schedule.estimate(chip.bandwidth, chip.ici, chip.clock)
        return Program(
            name=name,
            tokens=tokens,
            compile_seconds=round(seconds, 1),
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
            peak=memory.peak_memory_in_bytes,
            hbm_read=read,
            hbm_written=written,
            floor=(read + written) / chip.bandwidth,
            expected_floor=schedule.hbm_expected / chip.bandwidth,
            estimate=estimate.seconds,
            collectives=schedule.collectives(),
            products=schedule.products(),
            copies=schedule.copies(),
            custom_calls=schedule.custom_calls(),
            communication=estimate.communication,
            steps=self.generator.most_steps if name == "decode" else 1,
        )

    def _see(self) -> Any:
        """Compiles the encoder, as `Decoder.see` calls it."""
        import jax
        from flax import nnx

        generator = self.generator
        graph, state = nnx.split(getattr(generator.model, VISION))
        weights, form = jax.tree.flatten(state)

        def see(weights: list[Any], *arrays: Any) -> Any:
            return nnx.merge(graph, jax.tree.unflatten(form, weights))(*arrays)

        jitted = jax.jit(
            see,
            in_shardings=([x.sharding for x in weights], *[generator.replicated] * len(self.images)),
            out_shardings=generator.replicated,
        )
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*weights, *self.images)]  # type: ignore[no-untyped-call]
        with generator.on_mesh():
            return jitted.lower(shapes[: len(weights)], *shapes[len(weights) :]).compile(generator.options)


def asked_parts(request: CompileRequest) -> tuple[str, ...]:
    """Returns the parts beside the text model: of a checkpoint the ones that it has, else the encoder of images if
    there are some."""
    if not request.checkpoint:
        return (VISION,) if request.images else ()
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.location import to_location

    return tuple(read_manifest(to_location(request.checkpoint)).parts)


def model_of(request: CompileRequest, family: Any, config: Any) -> Any:
    """Returns the model of a request with shapes instead of arrays."""
    import jax.numpy as jnp
    from flax import nnx

    dtype = jnp.dtype(request.dtype)
    if request.checkpoint:
        from tpuconv.checkpoint.manifest import read_manifest
        from tpuconv.location import to_location
        from tpuconv.restore import abstract_model

        return abstract_model(read_manifest(to_location(request.checkpoint)), dtype)

    def build() -> Any:
        return family.model_class(config, dtype=dtype)

    if request.quantize is None:
        return nnx.eval_shape(build)
    from tpuconv.quantize.rules import abstract_quantized_model

    return abstract_quantized_model(build, request.quantize)


def _with_sharding(x: Any, sharding: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _mesh(topology: Slice, sizes: Mapping[str, int]) -> Any:
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import Mesh

    bounds = {"chips_per_host_bounds": topology.bounds} if topology.bounds else {}
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **bounds)
    except Exception as e:  # a RuntimeError of jax's own kind
        raise UsageError(
            f"there is no slice {topology.name}: {str(e)[:200]}",
            hint=f"the slices of {topology.kind} are {', '.join(topology.chip.slices)}",
        ) from e
    shape = tuple(sizes.values()) or (1,)
    devices = mesh_utils.create_device_mesh(shape, described.devices, allow_split_physical_axes=True)
    return Mesh(devices, tuple(sizes) or ("tensor",))


def _bytes_per_device(tree: Any) -> int:
    """Returns the bytes of all arrays on one device."""
    import jax

    return sum(
        -(-prod(x.sharding.shard_shape(x.shape)) * jax.dtypes.itemsize_bits(x.dtype) // 8)
        for x in jax.tree.leaves(tree)
    )


def _compiler_reason(text: str) -> str:
    """Returns the sentence of a compiler error that says what does not fit."""
    found = re.search(r"RESOURCE_EXHAUSTED:\s*(.*)", text)
    return (found[1] if found else text)[:300]

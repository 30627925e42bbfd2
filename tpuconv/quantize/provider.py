"""Qwix's provider with our products, and the models that it quantizes."""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from tpuconv.checkpoint.manifest import AS_RELEASED
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum
from tpuconv.models.common.seen import Seen
from tpuconv.models.kernels import grouped, lookup
from tpuconv.private import apply_interceptors, flax_util, ptq, qarray
from tpuconv.private import qwix_einsum as einsum
from tpuconv.private import qwix_ragged_dot as ragged_dot
from tpuconv.quantize import tiled
from tpuconv.quantize.config import EMBEDDING, MTP_MODULE, QuantConfig

TOKENS = 1024
"""The number of tokens in the call that shows Qwix every product: enough that no product takes a path for few
tokens."""


class Provider(qwix.PtqProvider):  # type: ignore[misc]
    """Qwix's provider for quantized weights. It handles the experts' grouped products too, and records which modules
    asked for a rule, which was the last one, and the number of the config's rule that quantizes the weights of each."""

    def __init__(self, config: QuantConfig, part: str = ""):
        rules = [qwix.QuantizationRule(**rule.to_qwix()) for rule in config.rules]
        super().__init__([qwix.QuantizationRule(module_path=rf"{EMBEDDING}(/.*)?"), *rules], _einsum_fn=_einsum)
        self.config, self.part = config, part
        self.seen_modules: dict[str, None] = {}
        self.rule_numbers: dict[str, int] = {}
        self.module = ""
        self.of_parts: list[Provider] = []

    def for_part(self, part: str) -> "Provider":
        """Returns a provider with the rules that name a part. What it records is in this one too."""
        provider = Provider(self.config.for_part(part), part)
        provider.seen_modules, provider.rule_numbers = self.seen_modules, self.rule_numbers
        self.of_parts.append(provider)
        return provider

    @cached_property
    def _for_mtp(self) -> "Provider":
        return self.for_part(MTP_MODULE)

    def unused(self) -> set[int]:
        """Returns the numbers of the config's rules that matched nothing."""
        unmatched = {i for i, count in enumerate(self._rule_matches[1:]) if count == 0}
        return unmatched.intersection(*(provider.unused() for provider in self.of_parts))

    def _get_current_rule_and_op_id(self, op_name: str, **kwargs: Any) -> Any:
        self.module = "/".join(map(str, flax_util.get_current_module_path()))
        if not self.part and self.module.startswith(f"{MTP_MODULE}/"):
            return self._for_mtp._get_current_rule_and_op_id(op_name, **kwargs)
        self.seen_modules[self.module] = None
        rule, op_id = super()._get_current_rule_and_op_id(op_name, **kwargs)
        if rule is not None and rule.weight_qtype is not None:  # the first rule is not the config's
            self.rule_numbers[self.module] = next(i for i, own in enumerate(self._rules) if own is rule) - 1
        return rule, op_id

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """Qwix's functions to intercept, with the grouped product."""
        intercepted: dict[str, Callable[..., Any]] = super().get_intercept_map()
        intercepted |= {"tpuconv.models.kernels.grouped.grouped_matmul": self.grouped_matmul}
        as_released = {"tpuconv.models.kernels.lookup.take_rows": self.take_rows}
        return intercepted | (as_released if self.config.name == AS_RELEASED else {})

    def grouped_matmul(self, lhs: Any, rhs: Any, group_sizes: jax.Array, *, groups: int) -> Any:
        """`lhs` [T, D], group by group, times `rhs` [E, D, M]: [T, M]. Scales are as for the einsum TD,EDM->TEM."""
        rule, op_id = self._get_current_rule_and_op_id("ragged_dot")
        if rule is None or rule.weight_qtype is None:
            return grouped.grouped_matmul(lhs, rhs, group_sizes, groups=groups)
        if isinstance(rhs, ptq.WithAux):
            rhs = rhs.array
        elif name := flax_util.find_param(rhs):
            how = qarray.HowToQuantize(
                qtype=rule.weight_qtype,
                channelwise_axes=[0, 2],
                tiled_axes={1: rule.tile_size} if rule.tile_size else {},
                calibration_method=rule.weight_calibration_method,
            )
            rhs = ptq.create_quantized_param(name, rhs, how).array
        if _is_plain_qarray(rhs) and rule.act_qtype is None:
            return grouped.grouped_matmul(lhs, rhs.qvalue, group_sizes, groups=groups, scale=rhs.scale)
        if rule.act_qtype is not None:
            how = qarray.HowToQuantize(
                qtype=rule.act_qtype,
                channelwise_axes=[0],
                tiled_axes={1: rule.tile_size} if rule.tile_size else {},
                calibration_method=rule.act_calibration_method,
            )
            lhs = ptq.quantize_act(lhs, how, rule, f"{op_id}_lhs")
        return ragged_dot(lhs, rhs, group_sizes)

    def take_rows(self, table: Any, ids: jax.Array) -> jax.Array:
        """Rows [..., D] of a table [V, D] that is encoded as it was released. Rules do not quantize such tables."""
        rule, _ = self._get_current_rule_and_op_id("take_rows")
        if isinstance(table, ptq.WithAux):
            table = table.array
        elif rule is not None and rule.weight_qtype is not None and (name := flax_util.find_param(table)):
            how = qarray.HowToQuantize(qtype=rule.weight_qtype, channelwise_axes=[0], calibration_method="absmax")
            table = ptq.create_quantized_param(name, table, how).array
        if not isinstance(table, qarray.QArray):
            return lookup.take_rows(table, ids)
        qvalues, scales = (lookup.take_rows(x, ids) for x in (table.qvalue, table.scale))
        values = qvalues.astype(jnp.float32).reshape(*scales.shape, -1) * scales.astype(jnp.float32)[..., None]
        return values.reshape(qvalues.shape)


def _is_plain_qarray(x: Any) -> bool:
    """True if the quantized values are numbers themselves, and there are scales but no zero points."""
    return isinstance(x, qarray.QArray) and x.zero_point is None and x.qvalue.dtype.name in grouped.KINDS


def _einsum(equation: str, lhs: Any, rhs: Any) -> jax.Array:
    """Qwix's einsum; on a TPU the einsum of `tiled` if it is faster."""
    if (
        isinstance(lhs, qarray.QArray)
        or not _is_plain_qarray(rhs)
        or not tiled.is_for(equation, lhs, rhs.qvalue, rhs.scale)
    ):
        y: jax.Array = einsum(equation, lhs, rhs)
        return y

    def by_qwix(x: jax.Array, qvalues: jax.Array, scale: jax.Array) -> jax.Array:
        y: jax.Array = einsum(equation, x, rhs.replace(qvalue=qvalues, scale=scale))
        return y.astype(x.dtype)

    operands, on_tpu = (lhs, rhs.qvalue, rhs.scale), partial(tiled.einsum, equation)
    return jax.lax.platform_dependent(*operands, tpu=on_tpu, default=by_qwix)  # type: ignore[no-any-return]


ENTRIES = ("run_layers", "head", "draft", "denoise", "mean_embeddings")
"""The methods of a decoder that are called from outside too, by drafts and for canvases. Qwix quantizes `__call__`
alone."""


def quantized(model: nnx.Module, provider: Provider) -> Any:
    """Returns the model as Qwix quantizes it. Within `nnx.eval_shape` it needs no weights."""
    ids_BT = jnp.zeros((1, TOKENS), jnp.int32)
    model = qwix.quantize_model(model, provider, ids_BT, **_images_of(model, ids_BT))
    for name in (each for each in ENTRIES if isinstance(model, Decoder) and hasattr(model, each)):
        method = apply_interceptors(getattr(type(model), name), provider, lambda output: output)
        setattr(type(model), name, method)
    if hasattr(model, MTP_MODULE) and provider.config.names_part(MTP_MODULE):
        _quantize_mtp(model)
    if isinstance(model, Decoder) and model.config.canvas_length:
        _quantize_canvas(model)
    for part in model.config.parts if isinstance(model, Decoder) else ():
        if provider.config.names_part(part):
            _quantize_part(getattr(model, part), provider.for_part(part))
    return model


def _images_of(model: nnx.Module, ids_BT: jax.Array) -> dict[str, Seen]:
    """Returns what a call needs to run experts for images too; nothing where a model has no such experts."""
    if not isinstance(model, Decoder) or not model.config.routes_images:
        return {}
    none_BT = jnp.full(ids_BT.shape, -1, jnp.int32)
    return {"seen": Seen(jnp.zeros((1, model.config.hidden_size)), slot_BT=none_BT, block_BT=none_BT)}


def _quantize_mtp(model: Any) -> None:
    """Quantizes the module for multi-token prediction, of a model whose `draft` is intercepted."""
    ids_BT = jnp.zeros((1, TOKENS), jnp.int32)
    x_BTD, cache = model.run_layers(ids_BT, ids_BT >= 0, model.init_cache(1, TOKENS))
    model.draft(x_BTD, ids_BT, cache, 0)


def _quantize_canvas(model: Any) -> None:
    """Quantizes what only the steps of a canvas compute with, of a model whose `denoise` is intercepted."""
    mean_BCD = jnp.zeros((1, TOKENS, model.config.hidden_size), model.embed.embedding.dtype)
    model.denoise(jnp.zeros((1, TOKENS), jnp.int32), model.init_cache(1, TOKENS), mean_BCD)


def _quantize_part(encoder: Any, provider: Provider) -> None:
    """Quantizes the kernels of an encoder. Each product is intercepted by itself: a call of the encoder would show Qwix
    convolutions, and products of activations, which it would compute in another way."""

    @cache
    def intercepted(kind: type[Einsum]) -> type[Einsum]:
        product = apply_interceptors(kind.product, provider, lambda output: output)
        return type(kind.__name__, (kind,), {"product": product})

    for _, module in list(nnx.iter_modules(encoder)):
        if isinstance(module, Einsum):
            module.__class__ = intercepted(type(module))
            inputs, kernel = module.equation.split("->")[0].split(",")
            sizes = dict(zip(kernel, module.kernel.shape, strict=True))
            x = jnp.zeros([sizes.get(letter, 1) for letter in inputs], module.kernel.dtype)
            module.product(module.equation, x)

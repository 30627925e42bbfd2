"""The parts that families are made of: a model with a broken part computes something else in a case of each family that
has it, so that the tests of this family fail."""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.families import CASES, FIRST, Case
from helpers.logits import forward
from tpuconv.models.common import blocks
from tpuconv.models.declare import decoder
from tpuconv.models.modules.gpt import NoNorm
from tpuconv.models.parts import NAMES_OF_NORMS, PLACES_OF_NORMS, Attn, Factors, Mlp, Norms
from tpuconv.models.registry import get_family

OF_PARTS = [name for name in FIRST if ":" not in get_family(name).model]
"""Families of parts, and text models of multimodal ones that run their modules."""
LIMIT = 2e-5
"""How far logits may be from those of transformers, of the largest."""
IDS = np.random.default_rng(0).integers(3, 30, (2, 12))
PLACES = {place for places in PLACES_OF_NORMS.values() for place in places}


def config_of(case: Case) -> Any:
    family = get_family(case.family)
    raw = json.loads(case.hf_config().to_json_string())
    if raw["model_type"] not in family.architectures.values():  # it is read as another by transformers
        raw["model_type"] = next(iter(family.architectures.values()))
    return family.read_config(raw)


def built(case: Case) -> Any:
    """The model with random values everywhere: ones and zeros would hide that they are not used."""
    config, family = config_of(case), get_family(case.family)
    graph, state = nnx.split(nnx.eval_shape(lambda: family.model_class(config, dtype=jnp.float32)))
    flat = []
    for at, (path, param) in enumerate(nnx.to_flat_state(state)):
        values = 0.3 * np.random.default_rng(at).normal(size=param.shape) + (path[-1] == "scale")
        flat.append((path, param.replace(jnp.asarray(values, jnp.float32))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def same(x: jax.Array) -> jax.Array:
    return x


def layers_of(model: Any) -> list[Any]:
    return list(model.layers)


def parts_of(model: Any, *names: str) -> list[Any]:
    """The parts of the layers that have one of these names."""
    return [getattr(layer, name) for layer in layers_of(model) for name in names if hasattr(layer, name)]


def without(names: tuple[str, ...], attribute: str, value: Any, model: Any) -> bool:
    """Sets an attribute of parts that have another value."""
    found = [part for part in parts_of(model, *names) if getattr(part, attribute, None) is not None]
    for part in found:
        setattr(part, attribute, value)
    return bool(found)


def drop_bias(part: str, products: tuple[str, ...], model: Any) -> bool:
    found = [getattr(each, name) for each in parts_of(model, part) for name in products if hasattr(each, name)]
    biased = [product for product in found if getattr(product, "bias", None) is not None]
    for product in biased:
        product.bias = None
    return bool(biased)


def swap_gate_and_up(part: str, model: Any) -> bool:
    found = [each for each in parts_of(model, part) if hasattr(each, "gate") and hasattr(each, "up")]
    for each in found:
        each.gate, each.up = each.up, each.gate
    return bool(found)


def turn_other_pairs(model: Any) -> bool:
    plain = (blocks.Attention.positioned, blocks.NormedAttention.positioned)
    found = [each for each in parts_of(model, "attn") if getattr(type(each), "positioned", None) in plain]
    for each in found:
        each.pairs = not each.pairs
    return bool(found) and any(rope is not None for rope in model.config.ropes)


def leave_norms_out(model: Any) -> bool:
    for layer in layers_of(model):
        for place in PLACES & set(vars(layer)):
            if getattr(layer, place) is not None:
                setattr(layer, place, same)
    return True


def leave_last_norm_out(model: Any) -> bool:
    has_norm = not isinstance(model.norm, NoNorm)
    model.norm = same
    return has_norm


def leave_head_norms_out(model: Any) -> bool:
    return without(("attn",), "q_norm", same, model) and without(("attn",), "k_norm", same, model)


def change_act(model: Any) -> bool:
    found = parts_of(model, "mlp")
    for each in found:
        each.act = jnp.tanh
    return bool(found) and all(hasattr(type(each), "act") for each in found)


def leave_factor_out(name: str, model: Any) -> bool:
    factors = model.parts.part(Factors) or Factors()
    setattr(model, name, same)
    if name == "scaled":
        return bool(factors.embedding)
    has_cap = bool(factors.cap) and getattr(model.config, factors.cap) is not None
    return bool(factors.logits or factors.divisor) or has_cap


def leave_residual_factor_out(model: Any) -> bool:
    found = [layer for layer in layers_of(model) if hasattr(layer, "factor")]
    for layer in found:
        layer.factor = 1.0
    return bool(found)


BREAKS: dict[str, Callable[[Any], bool]] = {
    "bias of queries, keys and values": partial(drop_bias, "attn", ("q", "k", "v")),
    "bias of the output": partial(drop_bias, "attn", ("o",)),
    "bias of the MLP": partial(drop_bias, "mlp", ("gate", "up", "down")),
    "gate and up": partial(swap_gate_and_up, "mlp"),
    "gate and up of experts": partial(swap_gate_and_up, "moe"),
    "pairs": turn_other_pairs,
    "norms": leave_norms_out,
    "last norm": leave_last_norm_out,
    "norms of heads": leave_head_norms_out,
    "activation": change_act,
    "scale of scores": partial(without, ("attn",), "scale", None),
    "cap of scores": partial(without, ("attn",), "cap", None),
    "factor of residuals": leave_residual_factor_out,
    "factor of embeddings": partial(leave_factor_out, "scaled"),
    "factor of logits": partial(leave_factor_out, "adjusted"),
}
"""What each does to a model; False if the model does not have it."""


def swap_scores(model: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A softmax in place of the router's sigmoid, and the other way round."""
    moes = parts_of(model, "moe")
    for kind in {type(getattr(moe, "router", moe)) for moe in moes} | {type(moe) for moe in moes}:
        for base in kind.__mro__:
            module = __import__(base.__module__, fromlist=["nnx"])
            if base.__module__.startswith("tpuconv.models") and hasattr(module, "nnx"):
                swapped = SimpleNamespace(**{**vars(nnx), "softmax": nnx.sigmoid, "sigmoid": nnx.softmax})
                monkeypatch.setattr(module, "nnx", swapped)
    return bool(moes)


def differs(broken: Any, sound: np.ndarray) -> bool:
    try:
        found = np.asarray(nnx.jit(lambda model, ids: model(ids))(broken, jnp.asarray(IDS)))
    except (AttributeError, TypeError, ValueError):
        return True
    return not np.abs(found - sound).max() <= LIMIT * np.abs(sound).max()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen3" else [pytest.mark.slow]) for name in OF_PARTS]
)
def test_a_broken_part_shows_in_a_case_of_each_family_that_has_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has, shows = set(), set()
    for case in (case for case in CASES if case.family == family):
        model = built(case)
        model.parts = get_family(get_family(family).model)
        sound = np.asarray(forward(model, jnp.asarray(IDS)))
        assert np.isfinite(sound).all()
        for what, break_it in BREAKS.items():
            if what not in shows and break_it(broken := nnx.clone(model)):
                has.add(what)
                shows |= {what} if differs(broken, sound) else set()
        with monkeypatch.context() as patch:
            if swap_scores(broken := nnx.clone(model), patch):
                has.add("scores")
                shows |= {"scores"} if differs(broken, sound) else set()
    assert {"norms"} | ({"last norm"} if family != "openai-gpt" else set()) <= has
    assert has == shows


def test_a_family_like_another_names_no_key_without_use() -> None:
    llama = decoder("x", "X", "XForCausalLM", Norms(), Attn("attention_bias"), Mlp(bias="mlp_bias"))
    other = llama.but("y", "Y", "YForCausalLM", Norms("sandwich"))
    assert [row.jax_names[0] for row in other.table][1:5] == [
        f"layers.{{L}}.{place}.scale" for place in PLACES_OF_NORMS["sandwich"]
    ]
    assert other.config.model_type == "y"
    with pytest.raises(ValueError, match="does not use mlp_bias of x"):
        llama.but("z", "Z", "ZForCausalLM", Mlp())


def test_each_place_of_norms_has_a_name() -> None:
    assert {at: len(names) for at, names in NAMES_OF_NORMS.items()} == {
        at: len(places) for at, places in PLACES_OF_NORMS.items()
    }


def test_what_no_part_and_no_config_has_is_refused() -> None:
    with pytest.raises(ValueError, match="onyl is no class variable of DecoderConfig"):
        decoder("x", "X", "XForCausalLM", Norms(), Attn(), Mlp(), onyl={})
    with pytest.raises(ValueError, match="x: say the types of query_bias in keys"):
        decoder("x", "X", "XForCausalLM", Norms(), Attn("query_bias"), Mlp())

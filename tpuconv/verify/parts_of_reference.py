"""The names that transformers' models have for their parts, and ours."""

import ast
import inspect
from collections.abc import Sequence
from textwrap import dedent
from typing import Any

LAYER_NAMES = ("layers", "h", "blocks")
"""The names that transformers' models have for the list of their layers."""

NORM_NAMES = (
    *("norm", "embedding_norm", "final_layernorm", "final_layer_norm", "final_norm", "layer_norm", "norm_f", "ln_f"),
    *("layernorm", "hyper_connection_mixer"),
)
"""The names that transformers' models have for the norm after the last layer."""

DECODER_NAMES = ("language_model", "text_model", "decoder")
"""The names that they have for what is a decoder of text, where this is a part of them."""

INPUT_NAMES = {
    **dict.fromkeys(("wpe", "embed_positions", "positions_embed"), "positions."),
    **dict.fromkeys(("word_embeddings_layernorm", "embeddings"), "embed_norm."),
    "project_in": "project_in.",
}
"""The names that they have for what makes the first layer's input besides the embedding, and ours."""

LOGIT_BIAS = "logit_bias."
"""Our name of the bias of a head that may be the embedding."""

ROTARY_OPTIONS = {"rotary_emb_unscaled": {"scaled": False}}
"""Further arguments of rotary positions, by the name that the decoder has for them."""

RETURNED = {"openai-gpt": 1}
"""Model types whose layers return a list, and its length."""


def returned_values(layer: Any, model_type: str) -> int:
    """Returns the number of values in the tuple that a layer of transformers returns; 0 if it returns hidden states
    alone. It differs between versions, and the code says it."""
    code = ast.parse(dedent(inspect.getsource(type(layer).forward)))
    *_, last = (node.value for node in ast.walk(code) if isinstance(node, ast.Return))
    return len(last.elts) if isinstance(last, ast.Tuple) else RETURNED.get(model_type, 0)


def first_of(module: Any, names: Sequence[str], *default: Any) -> Any:
    """Returns the submodule with the first of these names that the module has, or the default."""
    found = (getattr(module, name, None) for name in names)
    return next(iter((*(each for each in found if each is not None), *default)))


def head_of(model: Any) -> Any:
    """Returns the head of transformers' model; None if it has none. A model around a causal one may have that one's."""
    head = model.get_output_embeddings()
    inner: Any = getattr(model, "language_model", None)
    return inner.get_output_embeddings() if head is None and inner is not None else head

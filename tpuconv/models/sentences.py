"""Vectors of texts: hidden states of a model, which the modules after it pool, multiply and normalize. The files
modules.json and config_sentence_transformers.json of a release describe them, as sentence-transformers writes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.jsonfile import Each, Optional, check, short
from tpuconv.models.common.pooling import masked_mean, state_at, weighted_sums
from tpuconv.models.tokenizer import check_ids, text_ids
from tpuconv.sources.companions import MODULES, listed_modules
from tpuconv.sources.config import read_json

PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_KEYS = {"sentence_bert_config.json": "max_seq_length", "tokenizer_config.json": "model_max_length"}
"""The keys that say how many tokens a text may have, by their files."""
TEXTS_OF_BATCH, LENGTH_STEP = 32, 64
"""Texts of a batch, and the multiple that its length is padded to: each length is compiled once."""

Pool = Callable[[jax.Array, jax.Array], jax.Array]
"""Pools hidden states [B, T, D] by the mask [B, T] of their tokens to [B, D]."""


def _weighted_mean(x_BTD: jax.Array, mask_BT: jax.Array) -> jax.Array:
    weights_BT = mask_BT * jnp.arange(1, mask_BT.shape[1] + 1)
    return weighted_sums(x_BTD, weights_BT) / jnp.maximum(weights_BT.sum(1, keepdims=True), 1e-9)


POOLINGS: Mapping[str, Pool] = {
    "cls": lambda x, mask: state_at(x, jnp.argmax(mask, axis=1)),
    "max": lambda x, mask: jnp.where(mask[..., None] > 0, x, -jnp.inf).max(axis=1),
    "mean": masked_mean,
    "mean_sqrt_len_tokens": partial(masked_mean, power=0.5),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x, mask: state_at(x, mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)),
}
"""By the name of a mode."""
POOLING_SWITCHES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""The keys of older files, by the modes that they turn on. The vectors of several modes follow one another."""
DENSE_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": jnp.tanh,
    "torch.nn.modules.activation.ReLU": nnx.relu,
    "torch.nn.modules.activation.GELU": partial(nnx.gelu, approximate=False),
    "torch.nn.modules.activation.SiLU": nnx.silu,
    "torch.nn.modules.activation.Sigmoid": nnx.sigmoid,
}
"""By their names in config.json of a dense module, which has Tanh if it names none."""


@dataclass(frozen=True)
class TextModules:
    """The modules that follow a model.

    Attributes:
        pools: the modes of `POOLINGS`, whose vectors follow one another.
        include_prompt: whether the tokens of the prompt are pooled too.
        maps: change vectors [B, E], in this order.
        prompts: texts that stand before a text, by their names.
        default_prompt: the name of the prompt that is used if none is named.
        most_tokens: of a text; None if the files do not say it.
    """

    pools: Sequence[str]
    include_prompt: bool
    maps: Sequence[Callable[[jax.Array], jax.Array]]
    prompts: Mapping[str, str]
    default_prompt: str | None
    most_tokens: int | None

    @classmethod
    def read(cls, folder: Path) -> "TextModules":
        """Returns what the files of a folder describe.

        Raises:
            UsageError: the folder has no modules.json.
            ConfigError: a file cannot be read, or does not describe what it should.
            SourceError: modules.json names what is not a folder inside.
            UnsupportedConfig: a module is not implemented.
        """
        path = folder / MODULES
        if not path.exists():
            raise UsageError(
                f"the model has no {MODULES}, which says how the vector of a text is made",
                hint="`tpuconv.load` returns the model, which returns the hidden states of tokens",
            )
        listed = listed_modules(folder, {"type": str, "path": str}, ConfigError)
        kinds = [each["type"].rpartition(".")[2] for each in listed]
        if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= MODULES_BEHIND.keys():
            raise UnsupportedConfig(
                f"{path} lists the modules {', '.join(map(short, kinds))}",
                hint=f"implemented are Transformer, Pooling, and then {' and '.join(MODULES_BEHIND)}",
            )
        pools, include_prompt = _read_pooling(folder / listed[1]["path"])
        maps = [MODULES_BEHIND[kind](folder / each["path"]) for kind, each in zip(kinds[2:], listed[2:], strict=True)]
        settings = _read(folder / PROMPTS_FILE, {"prompts": Optional(Each((str, None))), "default_prompt_name": NAMED})
        lengths = (_read(folder / name, {key: LENGTH}).get(key) for name, key in LENGTH_KEYS.items())
        most_tokens = min((int(length) for length in lengths if length), default=None)
        prompts = {name: text or "" for name, text in settings.get("prompts", {}).items()}
        return cls(pools, include_prompt, maps, prompts, settings.get("default_prompt_name"), most_tokens)


NAMED, LENGTH = Optional((str, None)), Optional((int, float, None))
POOLING_KEYS = {
    "pooling_mode": Optional((str, [str])),
    "include_prompt": Optional(bool),
    **{key: Optional(bool) for key in POOLING_SWITCHES.values()},
}
DENSE_KEYS = {
    "activation_function": Optional(str),
    **dict.fromkeys(("module_input_name", "module_output_name"), NAMED),
    "use_residual": Optional(bool),
}


def _read(path: Path, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a file of keys; an empty one if there is none."""
    return dict(check(read_json(path, ConfigError), schema, str(path), ConfigError)) if path.exists() else {}


def _read_pooling(folder: Path) -> tuple[list[str], bool]:
    path = folder / "config.json"
    raw = _read(path, POOLING_KEYS)
    given = raw.get("pooling_mode", [mode for mode, key in POOLING_SWITCHES.items() if raw.get(key)] or "mean")
    wanted = [given] if isinstance(given, str) else given
    if unknown := [mode for mode in wanted if mode not in POOLINGS]:
        raise UnsupportedConfig(f"{path}: pooling_mode={short(unknown[0])} is not one of {', '.join(POOLINGS)}")
    return wanted, raw.get("include_prompt", True)


def _read_dense(folder: Path) -> Callable[[jax.Array], jax.Array]:
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    path, weights = folder / "config.json", folder / "model.safetensors"
    raw = _read(path, DENSE_KEYS)
    name = raw.get("activation_function", "torch.nn.modules.activation.Tanh")
    places = {raw.get(key) or VECTOR_OF_TEXT for key in ("module_input_name", "module_output_name")}
    if name not in DENSE_ACTIVATIONS or raw.get("use_residual") or places != {VECTOR_OF_TEXT}:
        raise UnsupportedConfig(
            f"{path} describes a dense module that is not implemented",
            details=[f"{key}: {short(value)}" for key, value in raw.items()],
            hint=f"implemented are modules without a residual, with one of {', '.join(DENSE_ACTIVATIONS)}",
        )
    try:
        tensors = load_file(weights)
        kernel_FE = tensors.pop("linear.weight")
    except (OSError, SafetensorError, KeyError) as e:
        raise ConfigError(
            f"{weights} has no readable linear.weight: {type(e).__name__}",
            hint=SAVE_AGAIN,
        ) from None
    bias_F = tensors.get("linear.bias")
    if kernel_FE.ndim != 2 or (bias_F is not None and bias_F.shape != kernel_FE.shape[:1]):
        raise ConfigError(
            f"{weights} has a linear.weight of the shape {list(kernel_FE.shape)}, which does not fit a dense module "
            "with its linear.bias",
            hint=SAVE_AGAIN,
        )
    return partial(_dense, weights, DENSE_ACTIVATIONS[name], kernel_FE, bias_F)


def _dense(
    source: Path,
    activation: Callable[[jax.Array], jax.Array],
    kernel_FE: jax.Array,
    bias_F: jax.Array | None,
    x_BE: jax.Array,
) -> jax.Array:
    if kernel_FE.shape[1] != x_BE.shape[1]:
        raise ConfigError(
            f"{source} multiplies vectors of {kernel_FE.shape[1]} numbers, and those before it have {x_BE.shape[1]}",
            hint=SAVE_AGAIN,
        )
    y_BF = jnp.einsum("BE,FE->BF", x_BE, kernel_FE.astype(jnp.float32), precision="highest")
    return activation(y_BF if bias_F is None else y_BF + bias_F.astype(jnp.float32))


def _normalized(x_BE: jax.Array) -> jax.Array:
    return x_BE / jnp.maximum(jnp.linalg.norm(x_BE, axis=-1, keepdims=True), 1e-12)


SAVE_AGAIN = "save the model again as safetensors, by a current sentence-transformers"
VECTOR_OF_TEXT = "sentence_embedding"
"""The name that sentence-transformers gives the vector of a text."""
MODULES_BEHIND: Mapping[str, Callable[[Path], Callable[[jax.Array], jax.Array]]] = {
    "Dense": _read_dense,
    "Normalize": lambda folder: _normalized,
}
"""Functions that read a module of a kind after pooling."""


class TextEmbedder:
    """A model with its tokenizer and the modules after it.

    Args:
        model: returns hidden states [B, T, D].
        tokenizer: a tokenizer from `tpuconv.models.tokenizer.load_tokenizer`.
        modules: what follows the model.
    """

    def __init__(self, model: Any, tokenizer: Any, modules: TextModules):
        self.model, self.tokenizer, self.modules = model, tokenizer, modules
        config = model.config
        self.most_tokens = min(modules.most_tokens or config.max_position_embeddings, config.max_position_embeddings)
        self._vectors = nnx.jit(self._compute)

    def __call__(self, texts: Sequence[str], *, prompt: str | None = None) -> np.ndarray:
        """Returns the vectors [texts, E] of texts, in float32. Longer texts than the model takes are cut.

        Args:
            texts: a list of texts.
            prompt: the name of the release's prompt that stands before each text, such as "query" or "document"; by
                default the one that the release names, or none.

        Raises:
            UsageError: the release has no such prompt; or `texts` is a single text; or one has no tokens;
                or see `check_ids`.
        """
        if isinstance(texts, str):
            raise UsageError("the texts are a single text", hint="give a list: [text]")
        prompts, name = self.modules.prompts, self.modules.default_prompt if prompt is None else prompt
        if name is not None and name not in prompts:
            raise UsageError(
                f"the release has no prompt {short(name)}", hint=f"it has {', '.join(prompts) or 'no prompts at all'}"
            )
        front = "" if name is None else prompts[name]
        skipped = 0
        if front and not self.modules.include_prompt:
            before, own = text_ids(self.tokenizer, front)
            skipped = len(before) + len(own)
        rows = [self._encoded(front + text) for text in texts]
        check_ids(self.tokenizer, rows, self.model.config.vocab_size)
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        found: dict[int, np.ndarray] = {}
        for numbers, ids_BT, mask_BT in _batches(rows, order):
            pooled_BT = mask_BT.copy()
            pooled_BT[:, :skipped] = False
            arrays = map(jnp.asarray, (ids_BT, mask_BT, pooled_BT))
            found |= zip(numbers, np.asarray(self._vectors(self.model, *arrays)), strict=False)
        return np.stack([found[number] for number in range(len(rows))]) if rows else np.zeros((0, 0), np.float32)

    def _encoded(self, text: str) -> list[int]:
        """Returns the ids of a text, cut before the tokens that end each text."""
        whole = list(self.tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        if not whole:
            raise UsageError(f"the text {short(text)} has no tokens, and so no vector", hint="leave it out")
        if len(whole) <= self.most_tokens:
            return whole
        before, own = text_ids(self.tokenizer, text)
        after = whole[len(before) + len(own) :] if whole[: len(before) + len(own)] == before + own else []
        return whole[: self.most_tokens - len(after)] + after

    def _compute(self, model: Any, ids_BT: jax.Array, mask_BT: jax.Array, pooled_BT: jax.Array) -> jax.Array:
        x_BTD = model(ids_BT, mask_BT).astype(jnp.float32)
        weights_BT = pooled_BT.astype(jnp.float32)
        x_BE = jnp.concatenate([POOLINGS[mode](x_BTD, weights_BT) for mode in self.modules.pools], axis=-1)
        for change in self.modules.maps:
            x_BE = change(x_BE)
        return x_BE


def _batches(rows: Sequence[Sequence[int]], order: Sequence[int]) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yields the numbers of texts of similar length, their token ids [B, T] and the mask of these [B, T]. The last
    batch is filled with its first text."""
    for first in range(0, len(order), TEXTS_OF_BATCH):
        numbers = list(order[first : first + TEXTS_OF_BATCH])
        length = -(-max(len(rows[n]) for n in numbers) // LENGTH_STEP) * LENGTH_STEP
        filled = numbers + numbers[:1] * (TEXTS_OF_BATCH - len(numbers) if len(order) > TEXTS_OF_BATCH else 0)
        ids_BT, mask_BT = np.zeros((len(filled), length), np.int32), np.zeros((len(filled), length), bool)
        for place, number in enumerate(filled):
            ids_BT[place, : len(rows[number])] = rows[number]
            mask_BT[place, : len(rows[number])] = True
        yield numbers, ids_BT, mask_BT

"""The outputs of a model: logits, or scores of a text (`...ForSequenceClassification`) or of each token
(`...ForTokenClassification`), or hidden states (`...Model`).

Every family has all four. `architectures` of config.json says which it is; where the tensors show another, they count.
A model without logits has the family's table without the head: `headed` makes it.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable

LOGITS, SCORES, TOKEN_SCORES, HIDDEN = "", "scores", "scores of tokens", "hidden states"
AS_DRAFT = "drafts"
"""The outputs of models. A model that returns drafts runs with its target alone."""
DRAFTS_AHEAD = 3
"""The number of drafts in a step, of drafts that do not set it."""
ANOTHER_DRAFT = "give a draft of this target, or generate without one, for the same text"
"""The hint of errors about a draft that does not fit its target."""

CAUSAL_ENDS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
HEADLESS_ENDS = {"ForSequenceClassification": SCORES, "ForTokenClassification": TOKEN_SCORES, "Model": HIDDEN}
"""The ends of architectures' names, in place of `CAUSAL_ENDS`."""

REWARD_MODELS = {"Qwen2ForRewardModel": (SCORES, 1), "Qwen2ForProcessRewardModel": (TOKEN_SCORES, 2)}
"""Architectures of Qwen2.5-Math's reward models, whose scores are of an MLP: what they return, and how many scores."""

POOLED_TYPES = ("llama_bidirec",)
"""Model types whose texts are scored by the keys `pooling` and `temperature` of config.json."""
SCORED_STATES = ("avg", "cls", "last")
"""Which hidden state of a text is scored: the mean of all, or the one of the first or of the last token."""

declare(hidden_score=Word("width of the hidden layer of scores, which is D"))

FSDP = "FSDP"
"""The prefix that FSDP2 gives the name of a model's class. transformers before 4.56 saved it in `architectures`."""

MOST_LABELS = 1 << 16
TWO_LABELS = 2
"""The number of labels where config.json does not say it, as transformers has it."""

SCORE_MODULES = ("score.", "classifier.")
"""How the names of a matrix of scores begin."""
HEAD_MODULES = ("lm_head.", "llm.unembed.", "output_layer.")
"""Parts of the names of heads, in releases with the names of transformers, of Inkling and of ChatGLM."""
OWN_HEADS = ("head.weight", "output.weight")
OWN_EMBEDDINGS = ("embed.weight", "tok_embeddings.weight")
"""The names of the head and of the embedding in releases with the names of DeepSeek's and of Mistral's own code, which
have no prefix."""

NO_HEAD = "of a head for logits, which this model does not have"


@dataclass(frozen=True)
class Head:
    """The head of a model.

    Attributes:
        kind: `LOGITS`, `SCORES`, `TOKEN_SCORES`, `HIDDEN` or `AS_DRAFT`.
        labels: number of scores; 0 of other kinds.
        pad: id of the token that fills batches, which is not scored; None if there is none.
        has_bias: True if scores have a bias.
        is_mlp: True if scores are of an MLP with ReLU.
        pooling: the hidden state of a text that is scored, one of `SCORED_STATES`.
        temperature: scores are divided by it.
        is_classifier: True if the matrix of scores has the name `classifier` in the release, not `score`.
    """

    kind: str = LOGITS
    labels: int = 0
    pad: int | None = None
    has_bias: bool = False
    is_mlp: bool = False
    is_classifier: bool = False
    pooling: str = "last"
    temperature: float = 1.0

    @classmethod
    def from_hf(cls, kind: str, raw: Mapping[str, Any], tensors: Collection[str] = ()) -> "Head":
        """Returns the head that a parsed config.json describes, and the names of tensors, if they are known.

        Raises:
            ConfigError: the labels, the id of padding, the pooling or the temperature are malformed.
        """
        if kind not in (SCORES, TOKEN_SCORES):
            return cls(kind)
        named, text = raw.get("id2label"), raw.get("text_config")
        labels = len(named) if isinstance(named, Mapping) else raw.get("num_labels", TWO_LABELS)
        if type(labels) is not int or not 1 <= labels <= MOST_LABELS:
            raise ConfigError(f"config.json has {short(labels)} labels, which are not 1 to {MOST_LABELS}")
        pad = (text if isinstance(text, Mapping) else raw).get("pad_token_id")
        if pad is not None and type(pad) is not int:
            raise ConfigError(f"config.json: pad_token_id={short(pad)} is not an integer")
        for name in map(class_of, raw.get("architectures") or ()):
            if name in REWARD_MODELS:
                return cls(kind, REWARD_MODELS[name][1], pad, has_bias=True, is_mlp=True)
        ends = {".".join(name.split(".")[-2:]) for name in tensors}
        has_bias = bool(ends & {"score.bias", "classifier.bias"}) if ends else kind == TOKEN_SCORES
        head = cls(kind, labels, pad, has_bias, is_classifier="classifier.weight" in ends)
        return head._pooled(raw) if raw.get("model_type") in POOLED_TYPES else head

    def _pooled(self, raw: Mapping[str, Any]) -> "Head":
        """Returns the head with `pooling` and `temperature` of a config.json."""
        pooling, temperature = raw.get("pooling", "avg"), raw.get("temperature", 1.0)
        if pooling not in SCORED_STATES:
            raise ConfigError(f"config.json: pooling={short(pooling)} is none of {', '.join(SCORED_STATES)}")
        if type(temperature) not in (int, float) or not temperature > 0:
            raise ConfigError(f"config.json: temperature={short(temperature)} is no positive number")
        return replace(self, pad=None, pooling=pooling, temperature=float(temperature))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the letters that only this head has."""
        return {"O": self.labels} if self.labels else {}


LANGUAGE_MODEL = Head()


def class_of(architecture: str) -> str:
    """Returns the class that an architecture of config.json names."""
    return architecture.removeprefix(FSDP)


def with_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json whose architectures are the classes that they name: servers know no others."""
    if not isinstance(named := config.get("architectures"), list):
        return dict(config)
    return {**config, "architectures": [class_of(name) if isinstance(name, str) else name for name in named]}


def named_head(architecture: str, causal: Collection[str]) -> str | None:
    """Returns what a model of an architecture returns; None unless it is of the same family as one of the
    architectures `causal`, which return logits."""
    architecture = class_of(architecture)
    if architecture in causal:
        return LOGITS
    kind, _ = REWARD_MODELS.get(architecture, (None, 0))
    if kind and any(architecture.startswith(own.removesuffix("CausalLM")) for own in causal):
        return kind
    for own in causal:
        stem = next((own.removesuffix(end) for end in CAUSAL_ENDS if own.endswith(end)), own)
        for end, kind in HEADLESS_ENDS.items():
            if architecture in (stem + end, f"{stem}Text{end}"):
                return kind
    return None


def headless_name(architecture: str) -> str:
    """Returns the architecture of the same model without a head."""
    architecture = class_of(architecture)
    stem = next((architecture.removesuffix(end) for end in CAUSAL_ENDS if architecture.endswith(end)), architecture)
    return f"{stem}Model"


def is_of_head(name: str) -> bool:
    """Returns whether a tensor of this name is one of a head for logits."""
    return any(module in name for module in HEAD_MODULES) or name in OWN_HEADS


def shown_head(named: str, tensors: Collection[str], embedding: str) -> str:
    """Returns what a model returns whose architecture says `named`, and that has tensors with these names. Releases of
    embedding models keep the name of the language model that they were made of, and lack its head.

    Args:
        named: one of the kinds of heads.
        tensors: the names of the tensors; none if they are not known.
        embedding: the name of the embedding in a language model of the family.
    """
    if not tensors:
        return named
    has_scores = any(name.startswith(SCORE_MODULES) for name in tensors)
    if any(map(is_of_head, tensors)):
        return named if named in (SCORES, TOKEN_SCORES) and has_scores else LOGITS
    if has_scores:
        return TOKEN_SCORES if named == TOKEN_SCORES else SCORES
    # A `...Model` of transformers does not write the prefix that language models and classifiers have. Releases with
    # names of their authors have none, nor has Cosmos.
    without_prefix = any(name.startswith(("layers.", "language_model.layers.")) for name in tensors)
    without_prefix = without_prefix and not any(name in tensors for name in (*OWN_EMBEDDINGS, embedding))
    return HIDDEN if named == HIDDEN or without_prefix else named


def headed(table: MappingTable, kind: str) -> MappingTable:
    """Returns the table of models that return `kind`, from the table of models that return logits."""
    if kind == LOGITS:
        return table
    if kind == AS_DRAFT:
        return replace(table, returns=AS_DRAFT)
    return _headless(table, kind, *(_score_rows(table) if kind in (SCORES, TOKEN_SCORES) else ()))


def _score_rows(table: MappingTable) -> Iterator[Map]:
    """Yields the rows of scores. Their matrix is as wide as the embedding."""
    embeddings = (row.layout for row in table if row.jax_names == ("embed.embedding",))
    width = next(embeddings, "V D").split()[1]
    matrix = f"{width} -> {width} O"
    names = {"score": "not head.is_classifier and not head.is_mlp", "classifier": "head.is_classifier"}
    for name, condition in names.items():
        yield Map(f"{name}.weight", "score.kernel", f"O {matrix}", when=condition)
        yield Map(f"{name}.bias", "score.bias", "O", when=f"{condition} and head.has_bias")
    for hf, jax, layout in (
        ("score.0.weight", "score.hidden.kernel", f"hidden_score {width} -> {width} hidden_score"),
        ("score.0.bias", "score.hidden.bias", "hidden_score"),
        ("score.2.weight", "score.kernel", "O hidden_score -> hidden_score O"),
        ("score.2.bias", "score.bias", "O"),
    ):
        yield Map(hf, jax, layout, when="head.is_mlp")


def _headless(table: MappingTable, kind: str, *rows: Map) -> MappingTable:
    heads = [row for row in table if row.jax_names[0].startswith("lm_head.")]
    names = {name: NO_HEAD for row in heads for name in row.hf_names}
    return replace(
        table,
        rows=(*(row for row in table if row not in heads), *rows),
        ignore={**table.ignore, **names},
        copies={name: original for name, original in table.copies.items() if name not in names},
        returns=kind,
    )

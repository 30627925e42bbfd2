"""vLLM's tree: the names of a release, with queries, keys and values in one matrix, gate and up in one, and the
experts of a layer in two arrays.

These are the parameters of `QKVParallelLinear`, `MergedColumnParallelLinear` and `FusedMoE` in vLLM
(vllm/model_executor/layers/linear.py, fused_moe/layer.py): rows of one part below the rows of the next.

    ((N H) + (K H) + (K H)) D                   qkv_proj
    (F + F) D                                   gate_up_proj
    E (M + M) D, E D M                          experts.w13_weight, experts.w2_weight

With t shards of tensor parallelism the rows of a shard lie together, so that the outermost axis is sharded as t is:

    (t ((n_of_shard H) + (k_of_shard H) + (k_of_shard H))) D
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuconv.errors import UnsupportedConfig
from tpuconv.notation.layout import UNIT, Axes, Axis, Layout
from tpuconv.notation.letters import Word, declare, meaning
from tpuconv.notation.table import EXPERTS, Binding, Map, Stack

SHARDS = "shards"
declare(**{SHARDS: Word("shards of tensor parallelism", as_="N")})

QKV_PARTS, GATE_UP_PARTS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
QKV_MODULE, GATE_UP_MODULE = "qkv_proj", "gate_up_proj"
JOINED_MODULES: Mapping[tuple[str, ...], str] = {QKV_PARTS: QKV_MODULE, GATE_UP_PARTS: GATE_UP_MODULE}
"""The modules that vLLM joins, and the name of the module that has their rows."""

EXPERT_MODULES: Mapping[tuple[str, ...], str] = {
    GATE_UP_PARTS: "w13_weight",
    ("down_proj",): "w2_weight",
    ("w1", "w3"): "w13_weight",
    ("w2",): "w2_weight",
}
"""The modules of an expert that are numbered, and the array of all experts that has their rows."""

EXPERT_ARRAYS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""The tensors of all experts of a layer, and vLLM's arrays."""

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)\.weight")
_STACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(?:\.weight)?")
_MODULE = re.compile(r"(.*\.)?(\w+)\.(weight|bias)")


def joined(released: Sequence[Binding], tensor_parallel: int = 1) -> list[Binding]:
    """Returns the rows of vLLM's tree.

    Args:
        released: the rows of the tree of the release, of the text model alone.
        tensor_parallel: into how many shards the joined matrices are divided.

    Raises:
        UnsupportedConfig: the model has other modules than those that are known to be joined so, or heads or widths
            that the shards do not divide.
    """
    return _Joiner(released, tensor_parallel).rows()


@dataclass
class _Joiner:
    """Joins the rows of a release."""

    released: Sequence[Binding]
    shards: int

    def __post_init__(self) -> None:
        self.by_name = {row.src[0].names[0]: row for row in self.released}

    def rows(self) -> list[Binding]:
        done: set[str] = set()
        out: list[Binding] = []
        for name in self.by_name:
            if name in done:
                continue
            names, row = self._row(name)
            done.update(names)
            out.append(row)
        if not any(QKV_MODULE in stack.names[0] for row in out for stack in row.dst):
            raise UnsupportedConfig(
                "the tree of vLLM is known for models with q_proj, k_proj and v_proj, or qkv_proj",
                hint='use the tree "huggingface": vLLM takes the names of a release too',
            )
        return out

    def _row(self, name: str) -> tuple[list[str], Binding]:
        """Returns the row of the array that has a tensor, and all tensors of that row."""
        if found := _EXPERT.fullmatch(name):
            front, _, module = found.groups()
            for modules, array in EXPERT_MODULES.items():
                if module in modules and all(f"{front}0.{part}.weight" in self.by_name for part in modules):
                    count = self.by_name[name].sizes[EXPERTS]
                    each = [[f"{front}{i}.{part}.weight" for i in range(count)] for part in modules]
                    return [n for names in each for n in names], self._joined(each, f"{front}{array}", EXPERTS)
            raise _unknown(name)
        if found := _STACKED.fullmatch(name):
            return [name], self._stacked(name, f"{found[1]}{EXPERT_ARRAYS[found[2]]}")
        if ".experts." in name:
            raise _unknown(name)
        if (found := _MODULE.fullmatch(name)) is None:
            return [name], self.by_name[name]
        front, module, kind = found[1] or "", found[2], found[3]
        for modules, array in JOINED_MODULES.items():
            if module == array:
                if len(list(_terms(self.by_name[name].layout.src[0][0]))) != len(modules):
                    raise _unknown(name)
                return [name], self._joined([[name]], name)
        for modules, array in JOINED_MODULES.items():
            names = [f"{front}{part}.{kind}" for part in modules]
            there = [each for each in names if each in self.by_name]
            if module in modules and len(there) > 1:
                if there != names:
                    raise _unknown(name)
                return names, self._joined([[each] for each in names], f"{front}{array}.{kind}")
        return [name], self.by_name[name]

    def _joined(self, parts: Sequence[Sequence[str]], array: str, stack: str = "") -> Binding:
        """Returns the row of an array that has the rows of several tensors, `parts`; of each of the names of a part,
        which are stacked on an axis."""
        rows = [self.by_name[names[0]] for names in parts]
        sizes = {letter: size for row in rows for letter, size in row.sizes.items()}
        firsts, inputs = zip(*((axes[0], axes[1:]) for axes in (row.layout.src[0] for row in rows)), strict=True)
        outputs, below = self._below(firsts, sizes, parts[0][0])
        front = tuple(map(Axis, stack))
        src = tuple((*front, axis, *others) for axis, others in zip(outputs, inputs, strict=True))
        layout = Layout(src, ((*front, below, *inputs[0]),))
        stacks = tuple(Stack(tuple(names), len(stack)) for names in parts)
        return Binding(_map(rows[0], parts[0][0], array, layout), layout, sizes, stacks, (Stack((array,), 0),))

    def _below(self, axes: Sequence[Axis], sizes: dict[str, int], name: str) -> tuple[list[Axis], Axis]:
        """Returns the axes of several tensors and the axis that has them one below the other; with shards, the rows of
        each shard. Adds the sizes of the letters of shards."""
        terms = [list(_terms(axis)) for axis in axes]
        if self.shards == 1 or sum(map(len, terms)) == 1:  # what is not joined has its rows in order
            return list(axes), _sum([term for each in terms for term in each])
        whole = [
            _sum([Axis(op="*", parts=(Axis(SHARDS), *self._of_shard(x, sizes, name))) for x in each]) for each in terms
        ]
        parts = [self._of_shard(term, sizes, name) for each in terms for term in each]
        inner = _sum([Axis(op="*", parts=each) if len(each) > 1 else each[0] for each in parts])
        return whole, Axis(op="*", parts=(Axis(SHARDS), inner))

    def _of_shard(self, term: Axis, sizes: dict[str, int], name: str) -> Axes:
        """Returns the parts of a term in one shard: a word in place of its outermost letter. Adds the sizes of the word
        and of the shards."""
        letter, *inner = term.parts if term.op else (term,)
        size = sizes.get(letter.letter, 1)
        if letter.op or letter.letter == UNIT or size % self.shards:
            raise UnsupportedConfig(
                f"{self.shards} shards do not divide the {meaning(letter.letter) or 'rows'} of {name}: {size}",
                hint="give a divisor as `tensor_parallel=`: repeating heads and padding rows is the work of vLLM",
            )
        word = f"{letter.letter.lower()}_of_shard"
        declare(**{word: Word(f"{meaning(letter.letter)}: the part of one shard")})
        sizes |= {SHARDS: self.shards, word: size // self.shards}
        return (Axis(word), *inner)

    def _stacked(self, name: str, array: str) -> Binding:
        """Returns the row of the experts of a layer that a release has in one tensor, perhaps as [in, out]."""
        row = self.by_name[name]
        axes = row.layout.src[0]
        is_joined = array.endswith(EXPERT_ARRAYS[GATE_UP_MODULE])
        outputs = [i for i, axis in enumerate(axes) if i and (axis.op == "+" if is_joined else axis != Axis("M"))]
        if len(axes) != 3 or axes[0] != Axis(EXPERTS) or len(outputs) != 1 or f"{name}_bias" in self.by_name:
            raise _unknown(name)
        (at,) = outputs
        src, sizes = list(axes), dict(row.sizes)
        (src[at],), rows = self._below([axes[at]], sizes, name)
        dst = (axes[0], rows, axes[3 - at])
        layout = Layout((tuple(src),), (dst,))
        return replace(row, row=_map(row, name, array, layout), layout=layout, sizes=sizes, dst=(Stack((array,), 0),))


def _map(like: Binding, hf: str, array: str, layout: Layout) -> Map:
    return replace(like.row, hf=hf, jax=array, layout=str(layout))


def _terms(axis: Axis) -> Iterator[Axis]:
    """Yields the terms of a sum, or the axis. `((N + K) H)` is `((N H) + (K H))`."""
    if axis.op == "+":
        yield from axis.parts
    elif axis.op == "*" and axis.parts[0].op == "+":
        for term in axis.parts[0].parts:
            yield Axis(op="*", parts=(term, *axis.parts[1:]))
    else:
        yield axis


def _sum(terms: Sequence[Axis]) -> Axis:
    return Axis(op="+", parts=tuple(terms)) if len(terms) > 1 else terms[0]


def _unknown(name: str) -> UnsupportedConfig:
    return UnsupportedConfig(
        f"it is not known how vLLM joins {name}",
        hint='use the tree "huggingface": vLLM takes the names of a release too',
    )

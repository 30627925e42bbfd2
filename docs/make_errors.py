"""Writes tpuconv/explanations.json and docs/errors/ from the errors of the package: `python docs/make_errors.py`.
A test keeps the files up to date.

An error keeps its id while its message stays, or, reworded, while it is the message of the same class in the same
functions that resembles it most. The number of a message that is gone is not used again.
"""

import ast
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from math import inf
from pathlib import Path
from typing import Any

from tpuconv import errors
from tpuconv.errors import TpuconvError
from tpuconv.explanations import ANY, EXPLANATIONS_FILE, GAP, Explanation, explanations, page_of
from tpuconv.text import code, markdown

ROOT = Path(__file__).parent.parent
PAGES = Path(__file__).parent / "errors"
CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TpuconvError)
}
SENTENCE_END = r"(?<=\.) "
ALIKE = 0.6
"""The least likeness of a message and the one that it was before, of 1."""


@dataclass
class Found:
    """A message with gaps, and all calls that have it."""

    error: str
    message: str
    hints: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """The class and the message, whatever the gaps are called."""
        return self.error, GAP.sub("{}", self.message)

    def add(self, hints: list[str], place: str) -> None:
        """Adds another call that has this message."""
        self.hints += [hint for hint in hints if hint not in self.hints]
        self.places += [place] * (place not in self.places)


class Calls(ast.NodeVisitor):
    """Collects the errors that one file makes.

    Args:
        module, tree: the file.
        kinds: for each class of errors of the package the one of `tpuconv.errors` that it is or derives from.
        found: gets the errors.
    """

    def __init__(self, module: str, tree: ast.Module, kinds: Mapping[str, str], found: dict[tuple[str, str], Found]):
        self._module, self._kinds, self._found = module, kinds, found
        self._around: list[ast.Module | ast.ClassDef | ast.FunctionDef] = [tree]
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node)

    def _within(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._around.append(node)
        self.generic_visit(node)
        self._around.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        error = self._class(node.func.id) if isinstance(node.func, ast.Name) and node.args else None
        if error is None:
            return
        hints = [text for word in node.keywords if word.arg == "hint" for text in self._texts(word.value)]
        messages = [text for text in self._texts(node.args[0]) if re.search(r"\w{3}", GAP.sub("", text))]
        if not messages and ".message" not in ast.unparse(node.args[0]):  # the message of another error has an id
            raise SystemExit(f"{self._place.partition(':')[0]}, line {node.lineno}: a message without words of its own")
        for message in messages:
            found = Found(error, message)
            self._found.setdefault(found.key, found).add([each for each in hints if GAP.sub("", each)], self._place)

    def _class(self, name: str) -> str | None:
        """The class that a name stands for, `ANY` for an argument that is a class of errors; None for no error."""
        if (own := self._kinds.get(name)) is not None:
            return own
        arguments = [each for node in self._around if isinstance(node, ast.FunctionDef) for each in node.args.args]
        kinds = [ast.unparse(each.annotation) for each in arguments if each.arg == name and each.annotation]
        if any(kind.startswith("type[") and "Error" in kind for kind in kinds):
            return ANY
        return None

    @property
    def _place(self) -> str:
        """The function around a call, and the first sentence of its docstring, or of what is around it."""
        path = [self._module, *(node.name for node in self._around if not isinstance(node, ast.Module))]
        docs = [" ".join(doc.split()) for node in reversed(self._around) if (doc := ast.get_docstring(node))]
        return f"{'.'.join(path)}: {re.split(SENTENCE_END, docs[0])[0]}" if docs else ".".join(path)

    def _texts(self, node: ast.expr) -> list[str]:
        """The texts that an expression may be, with gaps."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return ["".join(each.value if isinstance(each, ast.Constant) else _gap(each) for each in node.values)]
        if isinstance(node, ast.IfExp):
            return [*self._texts(node.body), *self._texts(node.orelse)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [self._texts(side) or ["{}"] for side in (node.left, node.right)]
            return [first + second for first in sides[0] for second in sides[1]]
        if isinstance(node, ast.Name):
            value = getattr(importlib.import_module(self._module), node.id, None)
            return [value] if isinstance(value, str) else []
        return []


def _gap(node: ast.expr) -> str:
    """A gap with the name of what fills it."""
    value = node.value if isinstance(node, ast.FormattedValue) else node
    while isinstance(value, ast.Call) and (value.args or isinstance(value.func, ast.Attribute)):
        value = value.args[0] if value.args else value.func
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else "..."
    return "{" + name.strip("_").lower() + "}"


def raised() -> list[Found]:
    """Returns the errors of the package, in the order of exit codes and of files."""
    found: dict[tuple[str, str], Found] = {}
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "tpuconv").rglob("*.py"))}
    kinds = _kinds(trees.values())
    for path, tree in trees.items():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        Calls(module, tree, kinds, found)
    return sorted(found.values(), key=lambda each: _order(each.error))


def _kinds(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Returns for each class of errors of the package the one of `tpuconv.errors` that it is or derives from."""
    bases = {
        node.name: base.id
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    kinds = {name: name for name in CLASSES}
    while derived := {name: kinds[base] for name, base in bases.items() if base in kinds and name not in kinds}:
        kinds |= derived
    return kinds


def _order(error: str) -> tuple[float, str]:
    """Exit codes, then names; any class comes last."""
    return (inf if error == ANY else CLASSES[error].exit_code, error)


def numbered(found: list[Found], known: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of explanations.json; `known` is what it has now."""
    before = {(entry["error"], GAP.sub("{}", entry["message"])): id for id, entry in known["errors"].items()}
    ids = {each.key: before[each.key] for each in found if each.key in before}
    free = {id: entry for id, entry in known["errors"].items() if id not in ids.values()}
    following = known["next"]
    for each in found:
        if each.key in ids:
            continue
        functions = {_function(place) for place in each.places}
        alike = {
            id: SequenceMatcher(None, entry["message"], each.message).ratio()
            for id, entry in free.items()
            if entry["error"] == each.error and functions & {_function(place) for place in entry["places"]}
        }
        if alike and alike[best := max(alike, key=alike.__getitem__)] >= ALIKE:
            ids[each.key] = best
            del free[best]
        else:
            ids[each.key] = f"TC{following:04}"
            following += 1
    entries = {
        ids[each.key]: {"error": each.error, "message": each.message, "hints": each.hints, "places": each.places}
        for each in found
    }
    return {"next": following, "errors": dict(sorted(entries.items()))}


def _function(place: str) -> str:
    return place.partition(":")[0]


def pages() -> Iterator[tuple[str, str]]:
    """Yields the names and the texts of the pages: one for each class, and their index."""
    by_class: dict[str, list[Explanation]] = {}
    for each in explanations().values():
        by_class.setdefault(each.error, []).append(each)
    rows = [
        f"| [{name}]({page_of(name)}) | {each[0].exit_code or ''} | {each[0].meaning} | {len(each)} |"
        for name, each in sorted(by_class.items(), key=lambda item: _order(item[0]))
    ]
    index = [
        "# Errors",
        "",
        "Errors have an id, which stays when its message is reworded: `SourceError[TC0123]: ...`. `tpuconv explain`",
        "shows what these pages have, for an id or a message. `--json` has the id as `error.id`. These pages are",
        "generated from the source code by `python docs/make_errors.py`. `{path}` stands for what differs.",
        "",
        "| error | [exit code](../exit-codes.md) | meaning | messages |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
    yield "index.md", "\n".join(index)
    for name, its in by_class.items():
        exits = f"Exit code {its[0].exit_code}. " if its[0].exit_code else ""
        lines = [f"# {name[0].upper()}{name[1:]}", "", f"{exits}{its[0].meaning}", ""]
        for each in its:
            lines += [f"## {each.id}", "", code(each.message), ""]
            lines += [line for hint in each.hints for line in (f"What to do: {markdown(hint)}.", "")]
            for place in each.places:
                function, _, doc = place.partition(": ")
                lines += [f"- Raised by `{function}`" + (f": {markdown(doc)}" if doc else "")]
            lines += [""]
        yield page_of(name), "\n".join(lines)


def main() -> None:
    known = json.loads(EXPLANATIONS_FILE.read_text(encoding="utf-8"))
    EXPLANATIONS_FILE.write_text(json.dumps(numbered(raised(), known), indent=1) + "\n", encoding="utf-8")
    explanations.cache_clear()
    PAGES.mkdir(exist_ok=True)
    for name, text in pages():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

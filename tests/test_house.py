"""The structure of the package: import order, names, who prints, and pages that are generated."""

import ast
import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from helpers.samples import SAMPLES
from tpuconv.models.families import FAMILIES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tpuconv"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# From the ground up: a room imports those that stand before it.
ORDER = (
    *("errors", "explanations", "extras", "text", "pages", "memory", "names", "plugins", "progress"),
    *("location", "arguments", "options"),
    *("credentials", "bucket_errors", "object_requests", "buckets", "jsonfile", "hosts"),
    *("patterns", "private", "forks", "libtpu", "notation", "storage", "sources", "encodings", "checkpoint", "models"),
    *(
        "targets",
        "convert",
        "quantize",
        "weight_map",
        "restore",
        "needed",
        "exchange",
        "direct",
        "persist",
        "verify",
        "doctor",
    ),
    *("api", "commands"),
    *("cli", "__main__"),
)
HEAVY = {"jax", "flax", "orbax", "torch", "transformers"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, everywhere: bool) -> frozenset[str]:
    """The modules that a file imports; at its top level alone, or in its functions too."""
    tree = parsed(path)
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    out = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            out |= names & set(MODULES) or {module}
    return frozenset(out)


def room(module: str) -> int:
    return ORDER.index(module.split(".")[1])


INSIDE = [module for module in MODULES if module != "tpuconv"]


def test_imports_point_one_way():
    upward = {
        (module, name)
        for module in INSIDE
        for name in imports(MODULES[module], everywhere=True)
        if name.startswith("tpuconv.") and room(name) > room(module)
    }
    assert not upward


def test_no_files_import_each_other_in_a_circle():
    """Not even in functions. TopologicalSorter raises CycleError, which names the files."""
    TopologicalSorter({m: imports(MODULES[m], everywhere=True) & set(INSIDE) - {m} for m in INSIDE}).prepare()


def test_folders_import_each_other_one_way():
    """Folders that stand side by side: of `tpuconv.convert` these are `plan`, `run` and `export`."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for module in INSIDE:
        for name in imports(MODULES[module], everywhere=True) & set(INSIDE):
            one, other = module.split("."), name.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            if shared is not None and len(one) > shared + 1 and len(other) > shared + 1:
                place = ".".join(one[:shared])
                graphs.setdefault(place, {}).setdefault(one[shared], set()).add(other[shared])
    assert {"tpuconv", "tpuconv.convert", "tpuconv.models"} <= set(graphs)
    for graph in graphs.values():
        TopologicalSorter(graph).prepare()


MOST_LINES = 450


def test_files_are_short():
    """A file of the package that is longer says in its docstring why it is one file ("One file because ...")."""
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES.values()}
    long = {path for path, lines in lengths.items() if lines > MOST_LINES}
    said = {path for path in long if "One file because" in (ast.get_docstring(parsed(path)) or "")}
    assert not {str(path.relative_to(PACKAGE)) for path in long - said}


MOST_LINES_OF_A_FUNCTION = 66


def test_functions_are_short():
    """Without the docstring."""
    long = {}
    for path in MODULES.values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[0] if ast.get_docstring(node) is None else node.body[min(1, len(node.body) - 1)]
                long[f"{path.relative_to(PACKAGE)}: {node.name}"] = node.end_lineno - first.lineno + 1
    assert not {name for name, lines in long.items() if lines > MOST_LINES_OF_A_FUNCTION}


SAME_NAME_IN_EACH_FAMILY = (
    *("Config", "TABLE", "FAMILY", "LEGEND"),
    *("LAYER_ROWS", "Attention", "MLP", "MoE", "Router", "Block", "new_block", "Model", "MTPLayer", "MTPModule"),
)
"""A family is read by itself, and its files have the same structure. `common` has what most families use, under the
same names."""

SAME_NAME_IN_EACH_TARGET = (
    "MODEL_PLACES",
    "ATTENTION_PLACES",
    "NORM_PLACES",
    "MLP_PLACES",
    "LLAMA_TREE",
    "GPT_OSS_TREE",
)
"""A target is read by itself too."""


def definitions(path: Path) -> set[str]:
    """The classes, functions and constants at the top level of a file, with or without a leading underscore."""
    names = set()
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return names


def test_one_name_has_one_meaning():
    """No class or constant (a capitalised name) is defined in two files of the package, and no public function in two
    files below `api`. A function of `api` may have the name of the one that does its work, and a command that of its
    function of `api`."""
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        below_api = module != "tpuconv" and room(module) < ORDER.index("api")
        for name in definitions(path):
            if name.lstrip("_")[:1].isupper() or (below_api and not name.startswith("_")):
                places.setdefault(name, []).append(module)
    several = {name: modules for name, modules in places.items() if len(modules) > 1}
    for name in SAME_NAME_IN_EACH_FAMILY:
        assert all(module.startswith("tpuconv.models.") for module in several.pop(name)), name
    for name in SAME_NAME_IN_EACH_TARGET:
        assert all(module.startswith("tpuconv.targets.") for module in several.pop(name, ())), name
    for name in FAMILIES:  # a target may have a table for it
        several.pop(name.upper(), None)
    assert not several


PLAIN = ("tpuconv.quantize.config", "tpuconv.quantize.matches")
WITH_JAX = (
    *("tpuconv.models.", "tpuconv.quantize.", "tpuconv.restore", "tpuconv.exchange", "tpuconv.direct"),
    *("tpuconv.persist", "tpuconv.weight_map.on_devices"),
)


def test_what_converts_needs_no_jax():
    without = [m for m in MODULES if not m.startswith(WITH_JAX) or m in PLAIN]
    top = {m: {name.partition(".")[0] for name in imports(MODULES[m], everywhere=False)} & HEAVY for m in without}
    assert not {module: names for module, names in top.items() if names}


def test_only_commands_print_and_exit():
    faults = {}
    for module, path in MODULES.items():
        if not module.startswith(("tpuconv.cli", "tpuconv.commands")):
            calls = (node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
            names = {call.id for call in calls if isinstance(call, ast.Name)} & {"print", "exit", "input"}
            faults[module] = names | imports(path, everywhere=True) & {"click", "rich"}
    assert not {module: names for module, names in faults.items() if names}


def test_the_pages_of_commands_and_functions_are_up_to_date():
    made, text = runpy.run_path(str(ROOT / "docs" / "make_cli.py")), (ROOT / "docs" / "api.md").read_text()
    assert (ROOT / "docs" / "cli.md").read_text() == made["page"](), "run `python docs/make_cli.py`"
    assert text == made["api_page"](text), "run `python docs/make_cli.py`"


def test_the_page_of_servers_is_made_of_their_results():
    page, results = runpy.run_path(str(ROOT / "docs" / "make_consumers.py"))["page"], ROOT / "docs" / "consumers.json"
    made = page(json.loads(results.read_text()))
    assert (ROOT / "docs" / "consumers.md").read_text() == made, "run `make consumers`"


def test_what_tests_share_is_in_helpers():
    """No test module imports another one, at its top or in a function, nor what is no module of `helpers`."""
    tests = Path(__file__).parent
    faults = {}
    for path in tests.rglob("*.py"):
        neighbours = {other.stem for folder in (path.parent, tests) for other in folder.glob("*.py")} - {"__init__"}
        if found := {name.partition(".")[0] for name in imports(path, everywhere=True)} & neighbours:
            faults[path.stem] = found
    assert not faults


def test_every_sampled_test_is_one_test():
    """The samples go by names of functions, which two files may share."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    names = Counter(name for text in texts for name in set(re.findall(r"^def (test_\w+)", text, re.M)))
    assert {name: names[name] for name in SAMPLES if names[name] != 1} == {}


def test_the_page_of_models_knows_every_family():
    from tpuconv.models.wrappers import WRAPPERS

    page = (ROOT / "docs" / "models.md").read_text()
    assert all(f"| `{name}` |" in page for name in (*FAMILIES, *WRAPPERS))


def test_every_exit_code_is_documented():
    from tpuconv import errors

    documented = set(re.findall(r"^\| (\d+)", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")]
    assert {str(kind.exit_code) for kind in kinds} <= documented


def test_kernels_bring_no_scipy():
    """Numba would look for its BLAS, which takes longer than all kernels do to load."""
    program = """
import sys
import numpy as np
from tpuconv.convert.run.transpose import transpose
words, at = np.arange(64, dtype=np.uint64), np.zeros(1, np.int64)
transpose(words, at, 8, np.zeros(512, np.uint8), at, 8, 8, 8, 1)
assert "scipy.linalg" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


MOST_VAGUE_DOCSTRINGS = 15
"""The most docstrings that may begin with one of these words: the number only falls."""

MOST_OWN_NAMES = 15
"""The most places in the package that use a name with `own_`."""

MOST_THAT_OF = 80
"""The most places in the package and its pages that say "that of" or "those of" instead of the noun."""


def docstrings(path: Path) -> list[str]:
    """Returns the docstrings of a file, and the strings that describe the constant or field above them."""
    bodies = (node.body for node in ast.walk(parsed(path)) if isinstance(getattr(node, "body", None), list))
    values = (line.value for body in bodies for line in body if isinstance(line, ast.Expr))
    return [v.value.strip() for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]


def test_docstrings_begin_with_a_verb_or_a_noun():
    """ "Returns ...", "Reads ..." of a function, a noun of a class or constant; not "What", "Whether" or a pronoun."""
    vague = re.compile(r"(What|Whether|Of|That|Those)\b")
    found = [doc for path in MODULES.values() for doc in docstrings(path) if vague.match(doc)]
    assert len(found) <= MOST_VAGUE_DOCSTRINGS


def test_names_say_whose_they_are():
    found = [name for path in MODULES.values() for name in re.findall(r"(?<![A-Za-z])own_\w+", path.read_text())]
    assert len(found) <= MOST_OWN_NAMES


def test_nouns_stand_instead_of_pronouns():
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "log.md"]
    files = (*MODULES.values(), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages)
    texts = (re.sub(r"\n\s*#", " ", path.read_text()) for path in files)
    assert sum(len(re.findall(r"\b(?:that|those)\s+of\b", text, re.IGNORECASE)) for text in texts) <= MOST_THAT_OF


def texts(path: Path) -> list[str]:
    """The strings of a file, docstrings too; `{}` stands for what an f-string inserts."""
    tree, inside, found = parsed(path), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in ast.walk(node) if part is not node}
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values))
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in inside)
    return found + [node.value for node in constants if isinstance(node.value, str)]


WITH_FLAGS = {
    "{} {}: quantize {} --method {}": "the command that made a recipe",
    "--target-bits {}": "a part of it",
    "--gate {}={}": "a part of it",
    "vllm serve TARGET --speculative-config {}": "a command of vLLM",
    "use a smaller mesh; XLA_FLAGS=--xla_force_host_platform_device_count=8 gives a CPU eight devices": "a variable",
}
"""Texts below `commands` that have flags, with the reason."""


def test_the_library_names_options_and_the_commands_name_flags():
    """Errors, notes and docstrings below `commands` have flags only in commands that are printed for a shell, in
    backquotes. Elsewhere an option is `mesh=`, and each of these is an option of a command."""
    from tpuconv.cli import tpuconv
    from tpuconv.commands.flags import WORDS, flag_of
    from tpuconv.commands.group import SUMMARIES

    below = [path for module, path in MODULES.items() if module != "tpuconv" and room(module) < ORDER.index("commands")]
    said = {text for path in below for text in texts(path)}
    commands = re.compile(r"`[\w.]+\s[^`]*`")
    assert {text for text in said if re.search(r"--[a-z]", commands.sub("", text))} <= set(WITH_FLAGS)
    flags = {flag for name in SUMMARIES for param in tpuconv.command_of(name).params for flag in param.opts}
    named = {name for text in said for name in re.findall(r"`(\w+)=[^`]*`", text) if f"{name}=" not in WORDS}
    assert {name for name in named if flag_of(name) not in flags} == set()
    assert {"mesh", "encoding", "include_mtp"} <= named

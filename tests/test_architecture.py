"""The order of the source: layers, import circles, private names, files side by side; see docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from torch import nn

SOURCE = Path(__file__).parents[1] / "src" / "rollwright"
MOST_FILES = 15  # side by side in a folder, __init__.py not counted

# From the ground up: a layer imports from layers above it in this list, and from itself. A name stands for the module
# and all below it, unless a longer one is listed; "=" before it: for the module alone.
LAYERS = """
    =rollwright rollwright.errors rollwright._files rollwright._keys rollwright._interrupts rollwright._foreign\
        rollwright._missing rollwright._options rollwright._progress rollwright._seeding rollwright._tensors\
        rollwright._video rollwright._warnings
    rollwright._memory
    rollwright._processes
    rollwright.data
    rollwright.weight_update
    rollwright.modules
    rollwright.policies
    rollwright.envs
    rollwright.collectors.core rollwright.collectors.options rollwright.collectors.reports\
        rollwright.collectors.loggers
    rollwright.collectors.rollout
    rollwright.collectors.delivery
    rollwright.collectors.weights
    rollwright.collectors.workers
    rollwright.collectors.base rollwright.collectors.collector rollwright.collectors.collectors\
        rollwright.collectors.keywords rollwright.collectors.multi rollwright.collectors.utils
    rollwright.collectors.evaluation rollwright.collectors.llm
    =rollwright.collectors rollwright.collectors.distributed
    rollwright.testing
    rollwright.cli rollwright.__main__
"""

# Lines of code (docstrings, comments and empty lines are none) and statements of a folder, less those of folders inside
# that are listed too. Whoever needs more raises the numbers in the same change, and says why.
BUDGETS = {
    "_memory": (290, 290),
    "_processes": (1480, 1535),
    "_processes/network": (945, 880),
    "cli": (2702, 2254),
    "collectors": (2395, 2090),
    "collectors/distributed": (265, 185),
    "collectors/delivery": (2046, 2011),
    "collectors/evaluation": (1441, 1245),  # conversations, too
    "collectors/llm": (580, 504),  # Ray has a class of its own
    "collectors/reports": (470, 470),
    "collectors/rollout": (5940, 5746),
    "collectors/workers": (3323, 3104),
    "collectors/workers/remote": (1354, 1323),
    "data": (4220, 3895),
    "data/datasets": (933, 804),
    "data/llm": (2388, 2056),  # pass@k, numbers of chats, where records come from
    "data/replay_buffers": (7080, 6685),
    "data/replay_buffers/service": (1505, 1415),
    "envs": (3978, 3696),
    "envs/batched": (2765, 2595),
    "envs/libs": (3603, 3189),
    "envs/llm": (3812, 3422),
    "envs/llm/agents": (870, 745),  # a server of its own, programs and their limits
    "envs/transforms": (4230, 3955),
    "modules": (2410, 2020),
    "modules/llm": (3354, 3025),  # prompts that vLLM divides on a CPU
    "policies": (3095, 3015),
    "testing": (2800, 2580),
    "weight_update": (1390, 1318),
}

# Imports by name, ``import_module("rollwright...")``, that need not keep the order, and why.
BY_NAME = {
    ("rollwright.modules.primers", "rollwright.envs"),  # environments register there; modules know nothing of them
}


class Import(NamedTuple):
    """One import: who, of which module, which name of it (None: the module itself), and whether by name."""

    importer: str
    module: str
    name: str | None = None
    by_name: bool = False


def module_of(path: Path) -> str:
    parts = ("rollwright", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files() -> dict[str, Path]:
    return {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def imports() -> list[Import]:
    """All imports within the package, those in functions too, but not those for type checkers alone."""
    found: list[Import] = []
    for name, path in files().items():
        text = path.read_text()
        tree = ast.parse(text)
        found += statements(name, tree)
        if "import_module(" in text:
            found += by_name(name, tree)
    return found


def statements(importer: str, tree: ast.AST) -> Iterator[Import]:
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{importer}: import {node.module} by its whole name"
            yield from (resolved(importer, node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (Import(importer, alias.name) for alias in node.names)
        else:  # what a statement may hold: other statements, handlers, cases
            for_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            inner = ("orelse",) if for_types else ("body", "orelse", "finalbody", "handlers", "cases")
            nodes += [child for field in inner for child in getattr(node, field, ())]


def by_name(importer: str, tree: ast.AST) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            match node.args:
                case [ast.Constant(value=str(module)), *_]:
                    yield Import(importer, module, by_name=True)


def resolved(importer: str, module: str, name: str) -> Import:
    inner = f"{module}.{name}"
    return Import(importer, inner) if inner in files() else Import(importer, module, name)


def ours() -> list[Import]:
    return [found for found in imports() if found.module in files() and found.importer != found.module]


def ordered() -> list[Import]:
    return [found for found in ours() if not found.by_name or (found.importer, found.module) not in BY_NAME]


def layer_of(module: str) -> int:
    known = {name: number for number, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    found = next((known[name] for name in (f"={module}", *prefixes) if name in known), None)
    assert found is not None, f"{module} is in no layer: add it to LAYERS"
    return found


def test_no_file_takes_part_in_an_import_circle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in files()}
    for found in ordered():
        graph[found.importer].add(found.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("an import circle: " + " <- ".join(error.args[1])) from None


def test_layers_import_from_layers_below_them() -> None:
    upward = {
        f"{found.importer} imports {found.module}"
        for found in ordered()
        if layer_of(found.importer) < layer_of(found.module)
    }
    assert sorted(upward) == []


def test_every_name_in_the_layers_is_a_module() -> None:
    assert {name.removeprefix("=") for name in LAYERS.split()} - files().keys() == set()
    assert {layer_of(name) for name in files()} == set(range(len(LAYERS.strip().splitlines())))
    assert {(found.importer, found.module) for found in ours() if found.by_name} >= BY_NAME


def test_no_private_name_of_another_package() -> None:
    """What is called ``_x`` belongs to its folder; the packages and modules ``rollwright._x`` belong to all."""
    foreign = []
    for found in ours():
        path = [*found.module.split("."), *([] if found.name is None else [found.name])]
        for depth, name in enumerate(path):
            if depth < 2 or not name.startswith("_") or name.startswith("__"):
                continue
            owner = files()[".".join(path[:depth])].parent
            if owner not in files()[found.importer].parents:
                foreign.append(f"{found.importer} imports {'.'.join(path)}")
    assert foreign == []


def test_few_files_side_by_side() -> None:
    count = Counter(path.parent for path in files().values() if path.name != "__init__.py")
    assert {str(folder.relative_to(SOURCE)): n for folder, n in count.items() if n > MOST_FILES} == {}


@cache
def names_in(path: Path) -> tuple[set[str], dict[str, set[str]]]:
    """All names that the code of a file has, and what it defines, classes with the names inside and of their bases."""
    tree = ast.parse(path.read_text())
    defined: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                defined[name] = names_of(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.setdefault(name, set())
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                defined.setdefault(name, set())
    return names_of(tree), defined


def names_of(tree: ast.AST) -> set[str]:
    """Of definitions, arguments, variables, attributes, what is imported, and strings, which may be keys."""
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.Constant: "value"}
    fields |= dict.fromkeys((ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.alias), "name")
    return {str(getattr(node, fields[type(node)])) for node in ast.walk(tree) if type(node) in fields}


def wrong_names(page: str) -> list[str]:
    """What a page names between backticks that is in no file, or not in the file or class that it says.

    A file or folder may lack its first folders; tests have to be named in full for what is in them.
    "`file`: `name`" and "`name` (`file`)" say where a name is defined.
    """
    root = SOURCE.parents[1]
    paths = [path for folder in (SOURCE, root / "tests") for path in folder.rglob("*.py")]
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)

    def found(name: str) -> list[Path]:
        end = f"/{name}" if name.endswith(".py") else f"/{name.rstrip('/')}/"
        return [path for path in paths if end in f"{path}"[len(str(root)) :]]

    read = [path for path in paths if SOURCE in path.parents or f"{path.relative_to(root)}" in text]
    everywhere = set[str]().union(*(names_in(path)[0] for path in read))
    classes: dict[str, set[str]] = {}
    for path in read:
        for name, inside in names_in(path)[1].items():
            classes.setdefault(name, set()).update(inside)
    wrong = []
    for word in re.findall(r"`([^`\n]+)`", text):
        start = re.match(r"[A-Za-z_][\w./]*", word)
        if start is None:
            continue  # an entry, a shape
        owner, _, name = start[0].rstrip(".").rpartition(".")
        if "/" in start[0] or name == "py":
            known = bool(found(start[0])) or (root / start[0]).exists()
        elif owner[:1].isupper() and owner in classes:
            inherited = (names for base in classes[owner] & classes.keys() for names in (classes[base],))
            known = name in classes[owner].union(*inherited)
        else:
            known = name in everywhere or hasattr(nn, name)
        wrong += [] if known else [word]
    file, name = r"`([\w/]+(?:\.py|/))`", r"`([A-Za-z_]\w*)[^`]*`"
    places = re.findall(rf"{file}: {name}", text)
    places += [(where, what) for what, where in re.findall(rf"{name} \({file}\)", text)]
    wrong += [f"{what} in {where}" for where, what in places if not any(what in names_in(p)[1] for p in found(where))]
    return wrong


def test_the_pages_name_what_there_is() -> None:
    root = SOURCE.parents[1]
    for page in ("architecture", "concepts"):
        assert wrong_names((root / f"docs/{page}.md").read_text()) == [], page


def test_a_page_that_names_what_is_not_there_is_found() -> None:
    right = "`errors.py`: `PolicyError`, `Transform` (`envs/transforms/base.py`), `Rollout.run()`, `data/layout/`"
    wrong = "`error.py`, `PolicyMistake`, `data/layouts/`, `Rollout.jump`, `errors.py`: `Transform`"
    assert wrong_names(right) == []
    assert wrong_names(wrong) == [
        "error.py",
        "PolicyMistake",
        "data/layouts/",
        "Rollout.jump",
        "Transform in errors.py",
    ]


def size_of(tree: ast.AST, text: str) -> tuple[int, int]:
    """Lines of code, and statements."""
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as doc, *_]:
                    docs.update(range(doc.lineno, (doc.end_lineno or 0) + 1))
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in docs]
    code = sum(bool(line) and not line.startswith("#") for line in lines)
    return code, sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def test_no_folder_exceeds_its_budget() -> None:
    sizes = dict.fromkeys(BUDGETS, (0, 0))
    for path in files().values():
        place = path.parent.relative_to(SOURCE)
        folder = next((str(each) for each in (place, *place.parents) if str(each) in BUDGETS), None)
        if folder is not None:
            text = path.read_text()
            code, statements = size_of(ast.parse(text), text)
            sizes[folder] = sizes[folder][0] + code, sizes[folder][1] + statements
    over = {
        folder: size for folder, size in sizes.items() if size[0] > BUDGETS[folder][0] or size[1] > BUDGETS[folder][1]
    }
    assert over == {}

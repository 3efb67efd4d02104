"""The structure of the package: rooms that depend downwards only, and keep to themselves.

Tests keep to public names too, of the package and of its modules.
"""

import ast
import contextlib
import re
import textwrap
from collections import Counter
from pathlib import Path

import pytest

import hvp

PACKAGE = Path(hvp.__file__).parent
# From the bottom up. A room depends on rooms of lines below its own.
FLOORS = [
    ["_errors"],
    ["_runtime", "_keras"],
    ["_vectors"],
    ["_graphs"],
    ["_devices"],
    ["_derivatives"],
    ["_recompute", "_engines", "_taylor"],
    ["_data"],
    ["_snapshots"],
    ["_operators"],
    ["_solve", "_kronecker"],
    ["_minimize", "_spectra"],
    ["_influence", "_laplace", "_implicit", "_training"],
    ["_check"],
    ["_command", "keras"],
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)
# Where private names of TensorFlow and Keras stand.
PRIVATE = {"_graphs/private.py", "_keras/private.py"}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def imported(tree):
    """Yield the modules of this package that a file imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvp"):
            yield node.module
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("hvp"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_room_depends_on_rooms_below_it(path):
    room = path.relative_to(PACKAGE).parts[0]
    for module in imported(ast.parse(path.read_text())):
        other = module.split(".")[1]
        assert other == room or LEVEL[other] < LEVEL[room], module


def private_attributes(tree):
    """Yield attributes with an underscore of anything but the object or class itself."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        owner = node.value
        # `other` and `twin` name further objects of the class itself.
        own = isinstance(owner, ast.Name) and owner.id in ("self", "cls", "other", "twin")
        inherited = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
        dunder = node.attr.startswith("__") and node.attr.endswith("__")
        dunder |= node.attr in ("_fields", "_replace", "_asdict")  # of named tuples, public
        if not (own or inherited or dunder):
            yield f"{ast.unparse(node)} in line {node.lineno}"


# The one function that opens an operator, beside the class of operators.
ALLOWED = {"_operators/symmetric.py": {"operator._matrix"}}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_class_touches_the_underscored_attributes_of_another(path):
    if name_of(path) in PRIVATE:
        return
    allowed = ALLOWED.get(name_of(path), set())
    touched = private_attributes(ast.parse(path.read_text()))
    assert not [place for place in touched if place.split(" ")[0] not in allowed]


# Names that TensorFlow and Keras do not document, as they stand in strings.
OF_OTHERS = re.compile(r"_[a-zA-Z]\w*|.*(gradient_tape/|_grad/).*|GLOBAL_\w+", re.DOTALL)


def private_strings(tree):
    """Yield strings that are private names, but for documentation and parts of longer texts."""
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            documented.update(map(id, node.values))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in documented and OF_OTHERS.fullmatch(node.value):
            yield f"{node.value!r} in line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_in_strings_are_behind_one_door(path):
    if name_of(path) not in PRIVATE:
        assert not list(private_strings(ast.parse(path.read_text())))


def test_every_file_is_in_a_room():
    assert {path.relative_to(PACKAGE).parts[0] for path in FILES} <= set(LEVEL)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        "__init__",
        "__main__",
        "_errors",
    }


def test_no_two_classes_have_one_name():
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_what_is_wrong_is_noticed():
    tree = ast.parse("def f(a):\n    from hvp._check import check\n    return a._b + self._c")
    assert list(imported(tree)) == ["hvp._check"]
    assert list(private_attributes(tree)) == ["a._b in line 3"]
    tree = ast.parse('def f(a):\n    """_documented"""\n    return getattr(a, "_hidden"), "public"')
    assert list(private_strings(tree)) == ["'_hidden' in line 3"]


TESTS = Path(__file__).parent
# All but the one that may use hidden names, and this file, which has examples of uses.
TEST_FILES = sorted(set(TESTS.rglob("*.py")) - {TESTS / "inside.py", Path(__file__)})
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
MODULES = {
    ".".join(["hvp", *path.relative_to(PACKAGE).with_suffix("").parts])
    for path in PACKAGE.rglob("*")
    if path.is_dir() or path.suffix == ".py"
}


def defined_names(tree):
    """Yield the names that a file gives to attributes, variables, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


HIDDEN = {
    name
    for path in PACKAGE.rglob("*.py")
    if name_of(path) not in PRIVATE
    for name in defined_names(ast.parse(path.read_text()))
    if name.startswith("_") and name.strip("_") and not name.endswith("__")
}


def is_hidden(path):
    """Whether a dotted path leads to, or through, an underscored name of the package."""
    parts = path.split(".")
    modules = [i for i in range(len(parts) + 1) if ".".join(parts[:i]) in MODULES]
    return not HIDDEN.isdisjoint(parts[max(modules, default=0) :])


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def hidden_names(tree):
    """Yield uses of underscored names of the package, in programs for other processes too."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    in_classes = {node for owner in classes for node in ast.walk(owner)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and node.attr in HIDDEN:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not (own and node in in_classes):
                names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvp"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            names = [argument.value for argument in node.args if is_text(argument)]
        elif is_text(node) and "import " in node.value:
            with contextlib.suppress(SyntaxError):
                yield from hidden_names(ast.parse(textwrap.dedent(node.value)))
        yield from (f"{name} in line {node.lineno}" for name in names if is_hidden(name))


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_tests_use_public_names(path):
    """What they need beyond these goes through `inside.py`."""
    assert not list(hidden_names(ast.parse(path.read_text())))


@pytest.mark.parametrize(
    "use",
    [
        "graph_map._BLOCK_BYTES",
        "def f(self):\n    self._BLOCK_BYTES",
        "from hvp._engines.graph_map import _BLOCK_BYTES",
        "monkeypatch.setattr(graph_map, '_BLOCK_BYTES', 4)",
        "monkeypatch.setattr('hvp._engines.graph_map._BLOCK_BYTES', 4)",
        "RUN = '''\n    import hvp\n    hvp._engines.graph_map._BLOCK_BYTES = 4\n'''",
    ],
)
def test_hidden_names_in_tests_are_noticed(use):
    assert list(hidden_names(ast.parse(use)))


def test_what_is_not_hidden_may_be_used_in_tests():
    uses = """
        from hvp._engines import graph_map
        monkeypatch.setattr("hvp._engines.graph_map.GraphMap", None)
        model._flatten_layers()
        class Case:
            def __init__(self):
                self._BLOCK_BYTES = 4
    """
    assert not list(hidden_names(ast.parse(textwrap.dedent(uses))))

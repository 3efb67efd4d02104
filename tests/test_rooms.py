"""The structure of the package: rooms that depend downwards only, and keep to themselves."""

import ast
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
    ["_derivatives"],
    ["_recompute", "_engines"],
    ["_data"],
    ["_snapshots"],
    ["_operators"],
    ["_solve", "_check"],
    ["_minimize", "_influence"],
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
ALLOWED = {"_operators/operator.py": {"operator._core"}}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_class_touches_the_underscored_attributes_of_another(path):
    if name_of(path) in PRIVATE:
        return
    allowed = ALLOWED.get(name_of(path), set())
    touched = private_attributes(ast.parse(path.read_text()))
    assert not [place for place in touched if place.split(" ")[0] not in allowed]


def test_every_file_is_in_a_room():
    assert {path.relative_to(PACKAGE).parts[0] for path in FILES} <= set(LEVEL)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "_errors"}


def test_what_is_wrong_is_noticed():
    tree = ast.parse("def f(a):\n    from hvp._check import check\n    return a._b + self._c")
    assert list(imported(tree)) == ["hvp._check"]
    assert list(private_attributes(tree)) == ["a._b in line 3"]

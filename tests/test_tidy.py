"""House style, as a test: what a reader may rely on in every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import floodmark

PACKAGE = Path(floodmark.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
FUNCTION_LINES_MAX = 60
# Longer for a reason; an entry that is not needed any more fails.
LONG_FUNCTIONS: set[str] = set()
NAMES_FORBIDDEN = {"utils", "helpers", "common", "manager", "base", "misc"}
# Empty packages that Python or Alembic needs.
WITHOUT_DOCSTRING = {"catalog/migrations/versions/__init__.py"}


def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(module)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 50
    assert "lake.py" in MODULES


def test_functions_are_short() -> None:
    long = {
        f"{module}:{function.name}"
        for module in MODULES
        for function in functions(module)
        if (function.end_lineno or 0) - function.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert long == LONG_FUNCTIONS


def test_modules_are_named_by_what_they_are() -> None:
    parts = {part for module in MODULES for part in Path(module).with_suffix("").parts}
    assert parts & NAMES_FORBIDDEN == set()


@pytest.mark.parametrize("module", sorted(set(MODULES) - WITHOUT_DOCSTRING))
def test_every_module_says_what_it_is_for(module: str) -> None:
    docstring = ast.get_docstring(tree(module))
    assert docstring, "no docstring"
    assert len(docstring.splitlines()) <= 15, "too long to be read"


def imports(node: ast.AST) -> Iterator[str]:
    """The modules that are imported below this node, leaving out what only a type checker imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for branch in child.orelse:
                yield from imports(branch)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            yield child.module or ""
        else:
            yield from imports(child)


def test_only_the_rooms_that_move_rows_know_spark() -> None:
    knowing = {module for module in MODULES if any(name.split(".")[0] == "pyspark" for name in imports(tree(module)))}
    assert knowing, "nobody imports Spark: the check is blind"
    # testing/ stands above all rooms, and starts servers for them.
    assert {module for module in knowing if not module.startswith(("rows/", "ingest/", "testing/"))} == set()


def test_nothing_that_only_asks_for_state_imports_spark_arrow_or_iceberg_at_once() -> None:
    """Late imports are inside functions; at the top of these modules they would cost every command a second."""
    at_once = ("lake.py", "settings/settings.py", "commit/catalog.py", "catalog/history.py", "commit/journal.py")
    reports = [name for name in MODULES if name.startswith("report")]
    heavy = {"pyspark", "pyarrow", "pyiceberg", "pandas"}
    for module in (*at_once, *reports, *(name for name in MODULES if name.startswith("cli/"))):
        top = [node for node in tree(module).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.split(".")[0] for node in top for name in imports(ast.Module(body=[node], type_ignores=[]))}
        assert names & heavy == set(), module


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME"])
def test_nothing_is_left_for_later(word: str) -> None:
    project = PACKAGE.parent
    found = [
        str(path.relative_to(project))
        for folder in (PACKAGE, project / "tests")
        for path in folder.rglob("*.py")
        if re.search(rf"\b{word}\b", path.read_text())
    ]
    assert found == []

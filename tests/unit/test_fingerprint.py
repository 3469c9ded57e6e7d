"""By what a function is known again."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest

from floodmark.backfill.chunks.spec import fingerprint, is_same_function


def made(text: str) -> Any:
    names: dict[str, Any] = {}
    exec(text, names)
    return fingerprint(names["f"])


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("def f(x): return x.where('id > 3')", True),
        ("\n\n# a comment\ndef f(x):\n    'What it does.'\n    return x.where('id > 3')  # why", True),
        ("def f(rows): return rows.where('id > 3')", True),
        ("def f(x): return x.where('id > 4')", False),
        ("def f(x): return x.filter('id > 3')", False),
        ("def f(x): return x.where('id > 3').limit(1)", False),
    ],
    ids=["again", "with-comments", "another-argument", "another-constant", "another-name", "more"],
)
def test_a_function_is_known_by_its_code(text: str, same: bool) -> None:
    assert is_same_function(made("def f(x): return x.where('id > 3')"), made(text)) is same


def test_what_is_within_a_function_counts() -> None:
    text = "def f(x):\n    def g(row):\n        'Doc.'\n        return row in {'a', 'b', %r}\n    return x.map(g)"
    assert is_same_function(made(text % "c"), made(text % "c"))
    assert not is_same_function(made(text % "c"), made(text % "d"))


def test_two_versions_of_python_and_what_has_no_code_are_known_by_name() -> None:
    here = made("def f(x): return x")
    assert is_same_function({**here, "code": "other", "python": "2.7"}, here)
    assert is_same_function({"function": "f"}, here), "kept without a fingerprint"
    assert not is_same_function({**here, "function": "g"}, here)
    assert is_same_function(fingerprint(functools.partial(print)), fingerprint(functools.partial(repr)))


def test_another_process_finds_the_same() -> None:
    """The order of a set in memory is another in every process."""
    text = "def f(x): return x in {'a', 'b', 'c', 'd', 'e'}"
    code = f"from floodmark.backfill.chunks.spec import fingerprint\n{text}\nprint(fingerprint(f)['code'])"
    codes = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert codes == {made(text)["code"]}

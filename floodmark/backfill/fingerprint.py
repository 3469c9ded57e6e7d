"""By what a function is known again: its name, and a fingerprint of its code and of the constants in it.

Pure. Told by what Python runs: a comment, its docstring or a place in a file is no difference. What the function calls,
and values that come from outside of it, are not looked at. Another version of Python makes other code of the same text,
so fingerprints of two versions say nothing about each other.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

_CHARACTERS = 16


def fingerprint(function: Callable[..., Any]) -> dict[str, str]:
    """As JSON can keep it. What is called but has no code of its own is known by its name alone."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return {"function": name}
    if function.__doc__ is not None and code.co_consts[:1] == (function.__doc__,):
        code = code.replace(co_consts=(None, *code.co_consts[1:]))  # as it is without one
    digest = hashlib.sha256(_code_text(code).encode()).hexdigest()
    return {"function": name, "code": digest[:_CHARACTERS], "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}


def is_same_function(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two fingerprints may be of one function."""
    if one.get("function") != other.get("function"):
        return False
    comparable = {"code", "python"} <= one.keys() & other.keys() and one["python"] == other["python"]
    return not comparable or one["code"] == other["code"]


def _code_text(code: CodeType) -> str:
    return f"({code.co_code.hex()} {code.co_names} {' '.join(map(_constant_text, code.co_consts))})"


def _constant_text(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, tuple):
        return f"({' '.join(map(_constant_text, constant))})"
    if isinstance(constant, frozenset):
        # In another process they may come in another order.
        return f"{{{' '.join(sorted(map(_constant_text, constant)))}}}"
    return repr(constant)

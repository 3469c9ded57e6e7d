"""The size of each room, for docs/architecture.md: modules, lines, `Any` and `Callable`; `make walks` writes it.

`BEFORE` are the figures of the commit before the rooms were made (1301853), counted in the same way. A module of that
commit counts for the room that it went to.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "floodmark"
TOP = "modules above and below"


@dataclass(frozen=True)
class Size:
    modules: int = 0
    lines: int = 0
    any: int = 0
    callables: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.modules + other.modules,
            self.lines + other.lines,
            self.any + other.any,
            self.callables + other.callables,
        )


BEFORE = {
    TOP: Size(12, 2113, 47, 9),
    "backfill": Size(25, 5542, 190, 27),
    "branches": Size(9, 1611, 16, 4),
    "catalog": Size(37, 6874, 142, 2),
    "cli": Size(44, 4768, 129, 13),
    "commit": Size(26, 5118, 48, 5),
    "ingest": Size(17, 3593, 59, 11),
    "jobs": Size(3, 299, 10, 5),
    "maintenance": Size(8, 1965, 10, 19),
    "repair": Size(5, 1299, 2, 4),
    "report": Size(7, 911, 43, 0),
    "rows": Size(56, 10657, 253, 32),
    "schema": Size(14, 2448, 22, 7),
    "serve": Size(32, 5419, 112, 26),
    "settings": Size(3, 583, 20, 0),
    "sinks": Size(23, 5513, 64, 15),
    "spool": Size(16, 2519, 5, 15),
    "storage": Size(11, 1629, 18, 6),
    "testing": Size(21, 3361, 87, 16),
    "write": Size(20, 2753, 32, 16),
}


def sizes(package: Path = PACKAGE) -> dict[str, Size]:
    """By the first folder of each module; modules of the package itself are together."""
    found: dict[str, Size] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        room = parts[0] if len(parts) > 1 else TOP
        found[room] = found.get(room, Size()) + size_of(path.read_text())
    return found


def size_of(source: str) -> Size:
    """Of one module. `Any` counts where it stands in code, imports too; `Callable` where it describes a parameter."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    names = [token.string for token in tokens if token.type == tokenize.NAME]
    callables = sum(one.string == "Callable" and two.string == "[" for one, two in pairwise(tokens))
    return Size(1, len(source.splitlines()), names.count("Any"), callables)


def lines() -> Iterator[str]:
    """The table: each figure now, and before if it differs."""
    now = sizes()
    yield "| room | modules | lines | `Any` | `Callable[` |"
    yield "|---|---|---|---|---|"
    for room in sorted({*now, *BEFORE}):
        yield _row(f"`{room}`" if room != TOP else room, BEFORE.get(room, Size()), now.get(room, Size()))
    yield _row("**all**", sum(BEFORE.values(), Size()), sum(now.values(), Size()))


def _row(name: str, before: Size, now: Size) -> str:
    pairs = [(before.modules, now.modules), (before.lines, now.lines), (before.any, now.any)]
    pairs.append((before.callables, now.callables))
    return f"| {name} | " + " | ".join(f"{old:,} → {new:,}" for old, new in pairs) + " |"

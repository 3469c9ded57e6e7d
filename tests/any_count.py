"""How often the package says `Any`: at most CEILING times, and the ceiling only goes down. `make lint` runs it.

The word is counted where it stands in code, imports too; texts and comments do not count.
"""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "floodmark"
CEILING = 76
GOAL = 250


def count(folder: Path = PACKAGE) -> int:
    return sum(_in(path.read_text()) for path in sorted(folder.rglob("*.py")))


def _in(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.NAME and token.string == "Any" for token in tokens)


def main() -> int:
    found = count()
    if found > CEILING:
        sys.stdout.write(f"{found} times Any, and {CEILING} are allowed: give what is new a type.\n")
        return 1
    lower = f"; lower CEILING in tests/any_count.py to {found}" if found < CEILING else ""
    sys.stdout.write(f"{found} times Any, of at most {CEILING}; the goal is {GOAL}{lower}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

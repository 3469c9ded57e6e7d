"""What `make test` left to `make soak`: listed by file at the end of a run, by test in build/left_out.txt."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap

LIST = Path(__file__).parent.parent / "build" / "left_out.txt"
WIDTH = 118


@dataclass
class LeftOut:
    """Cases by test, as pairs of (run, left out); workers of one run collect the same."""

    cases: dict[str, tuple[int, int]] = field(default_factory=dict)

    def count(self, run: list[str], left: list[str]) -> None:
        """Node ids: a test is what they have before their case."""
        ran, rest = (Counter(one.partition("[")[0] for one in ids) for ids in (run, left))
        self.cases = {test: (ran[test], rest[test]) for test in {**ran, **rest}}

    def lines(self) -> list[str]:
        """For a person: all in one line, then each file with how many cases of how many were left out."""
        sampled = [test for test, (_, rest) in self.cases.items() if rest]
        if not sampled:
            return []
        left, every = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
        for test, (ran, rest) in self.cases.items():
            folder, _, name = test.partition("::")[0].removeprefix("tests/").rpartition("/")
            short = name.removeprefix("test_").removesuffix(".py")
            left[folder][short] += rest
            every[folder][short] += ran + rest
        total = sum(counts.total() for counts in left.values())
        where = LIST.relative_to(LIST.parent.parent)
        lines = [f"{total} cases of {len(sampled)} tests are left to `make soak` (each test in {where}). By file:"]
        for folder, counts in sorted(left.items()):
            parts = [f"{name} {rest} of {every[folder][name]}" for name, rest in sorted(counts.items()) if rest]
            if parts:
                lines += wrap(f"{folder}: {', '.join(parts)}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        return lines

    def write(self) -> None:
        LIST.parent.mkdir(exist_ok=True)
        sampled = sorted((test, run, left) for test, (run, left) in self.cases.items() if left)
        LIST.write_text("".join(f"{test}: {left} of {run + left}\n" for test, run, left in sampled))

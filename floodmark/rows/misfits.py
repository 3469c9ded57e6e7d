"""Problems of rows, as records: executors return them, the driver adds them up and raises one `Invalid`.

A problem is identified by its column and its text; counts of the same problem add up over batches and tasks. A problem
of the input's shape (a column missing, a wrong type) has no count: it is the same in every batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from floodmark.errors import Invalid

_SHOWN_MAX = 10


@dataclass(frozen=True)
class Problem:
    column: str
    problem: str
    count: int | None = None
    advice: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Problem:
        return cls(**json.loads(text))


class Misfits:
    """Problems found so far, equal ones counted together."""

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        self._found: dict[tuple[str, str], Problem] = {}
        for problem in problems:
            self.add(problem)

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, problem: Problem) -> None:
        name = (problem.column, problem.problem)
        before = self._found.get(name)
        if before is None:
            self._found[name] = problem
        elif before.count is not None and problem.count is not None:
            total = before.count + problem.count
            self._found[name] = Problem(problem.column, problem.problem, total, before.advice)

    def all(self) -> tuple[Problem, ...]:
        return tuple(self._found.values())

    def raise_invalid(self, *, in_all: bool = True, what: str = "the rows do not fit the table") -> None:
        """Raise one `Invalid` that names every column, if there is any problem; its message begins with `what`.

        Without `in_all` no count of several problems: one row that lacks three columns is not three rows.
        """
        if not self._found:
            return
        problems = sorted(self.all(), key=lambda found: (found.column, found.problem))
        if len(problems) == 1:
            only = problems[0]
            raise Invalid(
                f"{what}: {only.problem}",
                column=only.column,
                count=only.count,
                advice=only.advice,
            )
        shown = problems[:_SHOWN_MAX]
        lines = [f"{p.column}: {p.problem}" + (f" (count={p.count})" if p.count is not None else "") for p in shown]
        if len(problems) > len(shown):
            lines.append(f"and {len(problems) - len(shown)} more")
        counts = [p.count for p in problems if p.count is not None]
        raise Invalid(
            f"{what}: " + "; ".join(lines),
            column=", ".join(dict.fromkeys(p.column for p in shown)),
            count=sum(counts) if counts and in_all else None,
            advice=" ".join(dict.fromkeys(p.advice for p in shown if p.advice)),
        )

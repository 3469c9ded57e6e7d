"""The written parts of docs/architecture.md: their modules and rooms exist. A trace may differ from run to run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import rooms, walks
from docs.walks import Entry, Walk

PAGE = walks.PAGE.read_text()


def section(name: str) -> str:
    begin, end = walks.marks(name)
    return PAGE.partition(begin)[2].partition(end)[0]


def test_every_module_of_the_walks_exists() -> None:
    named = re.findall(r"\d+ `([\w/]+)`", section("walks"))
    assert len(named) > 50
    package = Path(walks.PACKAGE)
    gone = [name for name in named if not (package / f"{name}.py").is_file() and not (package / name).is_dir()]
    assert gone == [], "run `make walks`"


def test_the_walks_have_their_counts_and_their_stages() -> None:
    totals = [int(one) for one in re.findall(r"^\| \*\*all\*\* \| \*\*(\d+)\*\*", section("walks"), flags=re.MULTILINE)]
    numbers = [int(one) for one in re.findall(r"(\d+) `[\w/]+` \(", section("walks"))]
    assert numbers == [*range(1, totals[0] + 1), *range(1, totals[1] + 1)]
    for stage in ("request", "spool", "feed", "stage", "plan", "build", "publish", "clean", "sink: send", "executors"):
        assert f"| {stage} |" in section("walks")


def test_the_table_of_sizes_has_every_room() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", section("sizes"), flags=re.MULTILINE))
    assert listed >= set(rooms.sizes()) - {rooms.TOP}, "run `make walks`"


def test_a_module_counts_once_and_is_come_back_to_when_a_later_stage_enters_it() -> None:
    entries = [
        Entry(1.0, "request", "serve/http/rows", "post", ""),
        Entry(2.0, "request", "ingest/judge", "read", "serve/http/rows"),
        Entry(3.0, "feed", "ingest/judge", "shape", "ingest/feed"),
        Entry(4.0, "feed", "storage/store", "put", "ingest/judge"),
        Entry(5.0, "publish", "storage/store", "put", "commit/build"),
    ]
    walk = Walk(entries)
    assert list(walk.first) == ["serve/http/rows", "ingest/judge", "storage/store"]
    assert walk.counts == (3, 1, 1)
    assert walk.come_back_to == {"ingest/judge": ["request", "feed"]}


def test_sizes_count_names_in_code_only() -> None:
    found = rooms.size_of('from typing import Any\n\n# Any\nx: Any = "Any"\ny: Callable[[], None]\n')
    assert found == rooms.Size(modules=1, lines=5, any=2, callables=1)


def test_a_section_that_the_page_does_not_have_is_an_error() -> None:
    assert walks.written("a\n" + "\n".join(walks.marks("x")) + "\nb", "x", "new").count("new") == 1
    with pytest.raises(ValueError, match="no section x"):
        walks.written("a page", "x", "new")

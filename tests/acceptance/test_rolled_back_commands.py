"""A catalog that was rolled back, as a person meets it: what the commands say, and the way out that they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from tests.acceptance.test_sink_commands import answer, change, command, made, sink
from tests.conftest import Place
from tests.rolled_back import CatalogCopy

__all__ = ["made"]  # the fixture


def note(number: int) -> Any:
    return lambda lake: lake.append("notes", [{"id": number, "name": "note"}])


def test_the_commands_name_a_rolled_back_catalog_and_the_way_out_works(made: Path) -> None:
    out = ("--kind", "files", "--table", "notes", "--path", "out", "--format", "jsonl")
    sink(made, "add", "out", *out)
    sink(made, "run", "out")
    copy = CatalogCopy(Place(str(made / "lake"), None), made / "copy")
    change(made, note(2))
    sink(made, "run", "out")
    copy.put_back()
    change(made, note(102))
    assert "rolled back" in command(made, "doctor", code=1).stdout
    done = answer(made, "sink", "run", "out", code=5)
    assert done["outcome"] == "refused"
    assert "refused" in command(made, "status").stdout
    # The advice, typed as it is.
    advice = done["tables"][0]["error"]["advice"]
    found = re.search(r"`floodmark (sink replay [^`]* --from mark)`", advice)
    assert found is not None, advice
    command(made, *shlex.split(found[1]), "--apply")
    assert "shipped 1 row" in sink(made, "run", "out").stdout
    # Added again over its own folder: it has to be said where to begin.
    sink(made, "remove", "out", "--apply")
    sink(made, "add", "out", *out, code=2).says("Invalid", "sent rows of this table there before", "--start beginning")
    sink(made, "add", "out", *out, "--start", "head")

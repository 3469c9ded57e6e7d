"""`sink` and its parts, and what `status` says of sinks, as a person meets them.

Every command is a process of its own that has no Java to find: what is little is shipped without Spark.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.cli.main import main
from floodmark.sinks.files.units import read_rows, read_units
from floodmark.testing.children import Child, preload, run_child, run_killed
from floodmark.testing.invariants import check_lake
from floodmark.testing.receiver import Fault, Receiver, answers

TOKEN = "a-token-that-nobody-may-see"
UNIT_SIZE = {"unit_rows": 20_000_000, "unit_bytes": 8 * 1024**3}
NEW = ("add", "new", "--kind", "files", "--table", "users", "--path", "x")

preload(
    "floodmark.cli.main", "floodmark.sinks.sinks", "floodmark.sinks.http.destination", "floodmark.rows.reading.parts"
)


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        """The one JSON object on stdout; nothing else may be there."""
        assert self.stdout.count("\n") == 1, self.stdout
        return json.loads(self.stdout)

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    def says(self, kind: str, *words: str) -> None:
        """It ended as wrong input, said so on stderr, and named these."""
        assert (self.code, self.stdout) == (2, ""), self.stdout + self.stderr
        assert self.stderr.startswith(f"floodmark: {kind}: "), self.stderr
        assert [word for word in words if word not in self.stderr] == [], self.stderr
        assert "Traceback" not in self.stderr


def run_main(folder: str, arguments: tuple[str, ...]) -> Done:
    """The command's entry on the lake of this folder, where no Java is to be found."""
    os.chdir(folder)
    armed = os.environ.get("FLOODMARK_FAILPOINT")
    os.environ.clear()
    os.environ.update({"PATH": f"{folder}/empty", "HOME": folder, "FLOODMARK_LAKE": "lake", "WEB_TOKEN": TOKEN})
    if armed:
        os.environ["FLOODMARK_FAILPOINT"] = armed
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as ended:
            code = ended.code or 0
    return Done(code, out.getvalue(), err.getvalue())


def command(folder: Path, *arguments: str, code: int = 0) -> Done:
    done: Done = run_child(run_main, str(folder), arguments)
    assert done.code == code, f"{arguments}: {done.stdout}\n{done.stderr}"
    return done


def sink(folder: Path, *arguments: str, code: int = 0) -> Done:
    return command(folder, "sink", *arguments, code=code)


def answer(folder: Path, *arguments: str, code: int = 0) -> Any:
    return command(folder, *arguments, "--json", code=code).data


def make_lake(folder: Path) -> Path:
    with fm.open(folder / "lake", create=True, actor="test") as lake:
        lake.create_table("users", "id long not null, name string, country string", key=["id"])
        lake.create_table("notes", "id long not null, name string")
        lake.append("users", [{"id": n, "name": f"user {n}", "country": "NL" if n % 2 else "US"} for n in range(6)])
        lake.append("notes", [{"id": 1, "name": "same"}, {"id": 1, "name": "same"}])
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_lake(tmp_path)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with a sink that no test changes."""
    folder = make_lake(tmp_path_factory.mktemp("still"))
    with fm.open(folder / "lake") as lake:
        lake.sinks.add("out", "files", tables=["users", "notes"], path=str(folder / "out"))
        lake.sinks.run("out")
        lake.append("notes", [{"id": 2, "name": "more"}])
    return folder


@pytest.fixture
def web() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def add_web(folder: Path, web: Receiver, *more: str) -> Done:
    quick = ("--set", "tries=2", "--set", "backoff_s_max=0.01", "--part-rows", "2")
    there = ("--kind", "http", "--table", "users", "--url", f"{web.url}/{{table}}")
    return sink(folder, "add", "web", *there, *quick, *more)


def change(folder: Path, work: Callable[[fm.Lake], Any]) -> None:
    with fm.open(folder / "lake", actor="test") as lake:
        work(lake)


def folded(folder: Path, path: str = "out") -> dict[int, dict[str, Any]]:
    """Users as somebody has them who took every unit once."""
    found: dict[int, dict[str, Any]] = {}
    for unit in read_units(str(folder / path), table="users"):
        for row in (row for batch in read_rows(unit) for row in batch.to_pylist()):
            kept = {name: value for name, value in row.items() if not name.startswith("_")}
            if row["_change"] == "delete":
                found.pop(row["id"], None)
            else:
                found[row["id"]] = kept
    return found


def table(folder: Path, name: str = "users") -> list[dict[str, Any]]:
    with fm.open(folder / "lake", read_only=True) as lake:
        check_lake(lake.catalog)
        return sorted(lake.read_arrow(name).read_all().to_pylist(), key=str)


def everything(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Every row of the catalog, and every file beside it with the time of its last change."""
    with closing(sqlite3.connect(folder / "lake" / "catalog.db")) as database:
        dump = list(database.iterdump())
    parts = ("lake/tables", "lake/operations", "out")
    files = (path for part in parts for path in (folder / part).rglob("*"))
    return dump, {str(path): path.stat().st_mtime_ns for path in files}


# ── from adding to running ──


def test_a_sink_is_added_run_and_looked_at(made: Path) -> None:
    assert sink(made, "list").stdout == "no sinks; add one with `floodmark sink add`\n"
    added = sink(made, "add", "out", "--kind", "files", "--table", "users", "--table", "notes", "--path", "out")
    assert added == Done(
        0,
        "added out: files, notes from beginning, users from beginning; "
        "up to 8 changes to send with `floodmark sink run out`\n",
        "",
    )
    assert not (made / "out").exists()
    planned = sink(made, "run", "out", "--dry-run")
    assert planned.lines == [
        "notes: would ship up to 2 rows of 1 file, sequences 0 to 1",
        "users: would ship up to 6 rows of 1 file, sequences 0 to 1",
    ]
    done = sink(made, "run", "out")
    assert re.fullmatch(r"notes: shipped 2 rows \([\d.]+ (bytes|kB)\) in 1 unit, up to sequence 1", done.lines[0])
    assert re.fullmatch(r"users: shipped 6 rows \([\d.]+ (bytes|kB)\) in 1 unit, up to sequence 1", done.lines[1])
    assert done.stderr == ""
    assert sink(made, "run", "out").lines == [
        "notes: nothing to do: no changes after sequence 1",
        "users: nothing to do: no changes after sequence 1",
    ]

    change(made, lambda lake: lake.delete("users", "id = 3"))
    assert ", 1 deletion among them " in sink(made, "run", "out").lines[1]
    assert sorted(folded(made).values(), key=str) == table(made)
    header, row = sink(made, "list").lines
    assert header.split() == ["sink", "kind", "state", "branch", "tables", "behind", "oldest", "quarantined", "problem"]
    assert row.split() == ["out", "files", "active", "main", "notes,", "users", "0", "-", "0", "-"]


def test_where_a_sink_is_as_text_and_as_json(still: Path) -> None:
    shown = sink(still, "status", "out").lines
    fields = dict(line.split(None, 1) for line in shown[:3])
    assert fields == {"sink": "out", "kind": "files", "state": "active"}
    assert f"path={still}/out" in shown[4]
    header, notes, users = shown[-3:]
    assert header.split()[:5] == ["table", "mark", "head", "behind", "oldest"]
    assert notes.split()[:4] == ["notes", "1", "2", "1"]
    assert users.split()[:5] == ["users", "1", "1", "0", "-"]
    assert "0 to 1, 6 rows, " in users

    about = answer(still, "sink", "status", "out")
    assert (about["sink"], about["kind"], about["state"], about["error"]) == ("out", "files", "active", None)
    one = about["tables"][0]
    assert (one["table"], one["mark"], one["head"], one["lag_rows"], one["units"]) == ("notes", 1, 2, 1, 1)
    assert one["lag_ms"] > 0
    assert (one["last_unit"]["rows"], one["open_unit"], one["quarantined"]) == (2, None, 0)
    for every in (answer(still, "sink", "status")["sinks"], answer(still, "sink", "list")["sinks"]):
        assert [found["sink"] for found in every] == ["out"]
        assert every[0]["settings"] == about["settings"]


def test_a_run_as_one_json_object(made: Path) -> None:
    added = answer(made, "sink", "add", "out", "--kind", "files", "--table", "users", "--path", "out")
    assert (added["outcome"], added["sink"], added["tables"][0]["mark"]) == ("added", "out", -1)
    assert added["settings"]["path"] == f"{made}/out"
    planned = answer(made, "sink", "run", "out", "--dry-run")
    assert (planned["outcome"], planned["tables"][0]["rows_max"]) == ("planned", 6)
    done = answer(made, "sink", "run", "out")
    assert list(done) == ["sink", "outcome", "rows", "tables"]
    assert (done["sink"], done["outcome"], done["rows"]) == ("out", "shipped", 6)
    one = done["tables"][0]
    assert (one["table"], one["units"], one["since"], one["until"], one["error"]) == ("users", 1, -1, 1, None)
    assert answer(made, "sink", "run", "out")["outcome"] == "nothing_to_do"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "out", "--dry-run"),
        ("run", "--all", "--dry-run"),
        ("status",),
        ("status", "out"),
        ("list",),
        ("remove", "out"),
        ("replay", "out", "--from", "beginning"),
        ("quarantine", "list", "out"),
        ("quarantine", "drop", "out", "--all"),
    ],
)
def test_what_only_asks_changes_nothing(still: Path, arguments: tuple[str, ...]) -> None:
    before = everything(still)
    assert sink(still, *arguments).stdout
    assert answer(still, "sink", *arguments)
    assert everything(still) == before


def test_a_sink_may_begin_with_what_comes_from_now_on(made: Path) -> None:
    added = sink(made, "add", "out", "--kind", "files", "--table", "users", "--path", "out", "--start", "head")
    assert "users from 1; 0 changes to send" in added.stdout
    assert sink(made, "run", "out").lines == ["users: nothing to do: no changes after sequence 1"]
    change(made, lambda lake: lake.append("users", [{"id": 9, "name": "new", "country": "DE"}]))
    sink(made, "run", "out")
    assert list(folded(made)) == [9]
    sink(made, "add", "later", "--kind", "files", "--table", "users", "--path", "x", "--start", "7", code=2).says(
        "Invalid", "start=7", "newest=2"
    )


def test_columns_and_a_filter_decide_what_is_shipped(made: Path) -> None:
    few = ("--column", "country", "--where", "country = 'NL'", "--format", "jsonl")
    sink(made, "add", "out", "--kind", "files", "--table", "users", "--path", "out", *few)
    sink(made, "run", "out")
    assert folded(made) == {n: {"id": n, "country": "NL"} for n in (1, 3, 5)}
    change(made, lambda lake: lake.merge("users", [{"id": 3, "name": "moved", "country": "US"}]))
    assert "shipped 1 row, 1 deletion among them" in sink(made, "run", "out").stdout
    assert sorted(folded(made)) == [1, 5]
    (unit, *_) = read_units(str(made / "out"))
    assert (unit.format, unit.columns) == ("jsonl", ("id", "country", "_change", "_seq"))


# ── settings ──


def test_a_sink_of_the_settings_file_is_added_by_its_name(made: Path) -> None:
    (made / "floodmark.toml").write_text(
        '[sinks.mart]\ntype = "files"\ntables = ["users", "notes"]\npath = "mart"\npart_bytes = "2 MiB"\n'
        'columns = ["name"]\n[sinks.mart.storage]\nregion = "eu-1"\n'
    )
    added = answer(
        made, "sink", "add", "mart", "--start", "head", "--format", "jsonl", "--set", "storage.endpoint=http://here"
    )
    assert [(one["table"], one["mark"]) for one in added["tables"]] == [("notes", 1), ("users", 1)]
    assert added["kind"] == "files"
    assert added["settings"] == {
        **UNIT_SIZE,
        "columns": ["name"],
        "protected": True,
        "path": f"{made}/mart",
        "format": "jsonl",
        "part_bytes": 2 * 1024 * 1024,
        "storage": {"region": "eu-1", "endpoint": "http://here"},
    }


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("", ("--kind", "[sinks.mart]")),
        ('[sinks.mart]\ntables = ["users"]', ("kind=", "http")),
        ('[sinks.mart]\ntype = "files"\npath = "x"', ("--table",)),
        ('[sinks.mart]\ntype = "files"\ntables = ["users"]\npaht = "x"', ("setting=paht", "path")),
        ('[sinks.mart]\ntype = "files"\ntables = ["users"]\npath = "x"\npart_bytes = "much"', ("4MiB", "much")),
        ('sinks = "mart"', ("setting=sinks",)),
        ("[sinks]\nmart = 1", ("setting=sinks.mart",)),
    ],
)
def test_a_wrong_section_of_the_settings_file_is_named(made: Path, section: str, words: tuple[str, ...]) -> None:
    (made / "floodmark.toml").write_text(section + "\n")
    sink(made, "add", "mart", code=2).says("Invalid", *words)
    assert answer(made, "sink", "list") == {"sinks": []} if "[sinks.mart]" in section else True


def test_settings_change_and_the_place_stays(made: Path) -> None:
    sink(made, "add", "out", "--kind", "files", "--table", "users", "--path", "out", "--part-bytes", "1MiB")
    assert sink(made, "set", "out", "--format", "jsonl", "--unprotected").stdout == (
        "set out: format=jsonl, protected=False; format from the next unit on; "
        "protected from the next run on, also for an open unit\n"
    )
    assert sink(made, "set", "out", "--where", "id > 1").stdout.endswith("; from the next unit on\n")
    assert sink(made, "set", "out", "--protected").stdout.endswith("; from the next run on, also for an open unit\n")
    sink(made, "set", "out", "--unprotected", "--set", "where=")
    with fm.open(made / "lake", read_only=True) as lake:
        (consumer,) = lake.show("users")["consumers"]
    assert (consumer["name"], consumer["protected"]) == ("sink:out", False)
    about = answer(made, "sink", "set", "out", "--set", "part_bytes=", "--where", "id > 2", "--path", "out")
    assert (about["outcome"], about["settings"]["part_bytes"]) == ("set", 64 * 1024 * 1024)
    assert (about["settings"]["format"], about["settings"]["where"]) == ("jsonl", "id > 2")
    assert "where" not in answer(made, "sink", "set", "out", "--set", "where=")["settings"]
    sink(made, "set", "out", "--path", "elsewhere", code=2).says(
        "Invalid", "setting=path", "the location of a sink cannot change"
    )
    sink(made, "set", "out", code=2).says("Invalid", "nothing to set")


def test_properties_of_another_catalog_are_not_taken_for_the_lakes_own(made: Path) -> None:
    there = ("--catalog", "type=sql", f"--catalog=uri=sqlite:///{made}/other.db", "--catalog", "token=env:WEB_TOKEN")
    more = ("--namespace", "mart", "--into", "all_{table}", "--partition", "", "--compact-file-count", "5")
    added = answer(made, "sink", "add", "ice", "--kind", "iceberg", "--table", "users", *there, *more)
    assert added["settings"] == {
        **UNIT_SIZE,
        "keep_snapshots": "7d",
        "protected": True,
        "catalog": {"type": "sql", "uri": f"sqlite:///{made}/other.db", "token": "env:WEB_TOKEN"},
        "namespace": "mart",
        "table": "all_{table}",
        "partition": [],
        "compact_file_count": 5,
    }
    # An address of a database is the lake's, wherever it stands.
    assert sink(made, "status", "ice", "--catalog", f"sqlite:///{made}/lake/catalog.db").lines[0].split()[1] == "ice"
    sink(made, "status", "ice", f"--catalog=sqlite:///{made}/nowhere/catalog.db", code=4)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("add", "out", "--kind", "files", "--table", "users", "--path", "out"), "Invalid", ("floodmark sink set",)),
        (("add", "new", "--kind", "htp", "--table", "users"), "Invalid", ("http,files,iceberg",)),
        (("add", "new", "--kind", "http", "--table", "users"), "Invalid", ("setting=url",)),
        (
            (*NEW, "--url", "http://x"),
            "Invalid",
            ("url",),
        ),
        (("add", "new", "--kind", "files", "--table", "nowhere", "--path", "x"), "NotFound", ("users",)),
        (("add", "new", "--kind", "files", "--path", "x"), "Invalid", ("--table",)),
        ((*NEW, "--column", "y"), "Invalid", ("y",)),
        ((*NEW, "--set", "y"), "Invalid", ("KEY=VALUE",)),
        (
            (*NEW, "--part-bytes", "4x"),
            "Invalid",
            ("4x",),
        ),
        ((*NEW, "--start", "soon"), "Invalid", ("soon",)),
        (("add", " new", "--kind", "files", "--table", "users", "--path", "x"), "Invalid", ("invalid name",)),
        (("run",), "Invalid", ("--all",)),
        (("run", "out", "--all"), "Invalid", ("--all",)),
        (("run", "nowhere"), "NotFound", ("sinks=out",)),
        (("status", "nowhere"), "NotFound", ("sinks=out",)),
        (("set", "nowhere", "--format", "jsonl"), "NotFound", ("sinks=out",)),
        (("pause", "nowhere"), "NotFound", ("sinks=out",)),
        (("remove", "nowhere", "--apply"), "NotFound", ("sinks=out",)),
        (("replay", "out", "--from", "soon"), "Invalid", ("soon",)),
        (("replay", "out", "--from", "head", "--table", "nowhere"), "NotFound", ("nowhere",)),
        (("quarantine", "list", "out", "--table", "nowhere"), "NotFound", ("nowhere",)),
        (("quarantine", "drop", "out"), "Invalid", ("--all",)),
        (("quarantine", "drop", "out", "--all", "--id", "x"), "Invalid", ("--all",)),
        (("quarantine", "drop", "out", "--id", "x"), "Invalid", ("id=x",)),
        (("quarantine", "retry", "out", "--id", "x"), "Invalid", ("id=x",)),
    ],
)
def test_wrong_input_is_named_before_anything_is_done(
    still: Path, arguments: tuple[str, ...], kind: str, words: tuple[str, ...]
) -> None:
    def state() -> list[str]:
        # A writer's heartbeat is no change.
        return [line for line in everything(still)[0] if '"fm_processes"' not in line]

    before = state()
    sink(still, *arguments, code=2).says(kind, *words)
    assert state() == before


@pytest.mark.parametrize("arguments", [("add",), ("polish",), ("replay", "out"), ("run", "out", "--soon")])
def test_wrong_usage_is_exit_code_2(still: Path, arguments: tuple[str, ...]) -> None:
    done = sink(still, *arguments, code=2)
    assert done.stdout == ""
    assert "Usage" in done.stderr


# ── over HTTP ──


def test_rows_arrive_at_an_endpoint_with_a_token_that_nobody_sees(made: Path, web: Receiver) -> None:
    web.token = TOKEN
    add_web(made, web, "--token-env", "WEB_TOKEN", "--compression", "zstd", "--parallel", "2")
    assert "users: shipped 6 rows " in sink(made, "run", "web").stdout
    assert sorted(row["id"] for row in web.rows) == list(range(6))
    assert {request.path for request in web.requests} == {"/users"}
    assert {request.headers["content-encoding"] for request in web.requests} == {"zstd"}
    shown = [sink(made, *words).stdout for words in (("status",), ("list",), ("status", "--json"))]
    web.token = "another"
    change(made, lambda lake: lake.append("users", [{"id": 9}]))
    failed = sink(made, "run", "web", code=4)
    assert failed.stdout.startswith("users: failed: Unavailable: the endpoint does not accept the token ")
    shown += [failed.stdout, failed.stderr, sink(made, "status").stdout, command(made, "status").stdout]
    assert [text for text in shown if TOKEN in text] == []


def test_a_failed_run_says_so_until_another_one_went_well(made: Path, web: Receiver) -> None:
    add_web(made, web)
    assert answer(made, "status")["health"] == "fine"
    web.script(answers(503, text="later"))
    failed = answer(made, "sink", "run", "web", code=4)
    assert (failed["outcome"], failed["tables"][0]["error"]["kind"]) == ("failed", "Unavailable")
    assert failed["tables"][0]["error"]["facts"]["status"] == "503"

    status = answer(made, "status")
    assert status["health"] == "attention: sink web failed (Unavailable); see `floodmark sink status`"
    (one,) = status["sinks"]
    assert (one["sink"], one["state"], one["lag_rows"], one["quarantined"]) == ("web", "active", 6, 0)
    assert one["error"]["facts"]["status"] == "503"
    line = next(line for line in command(made, "status").lines if line.startswith("sinks"))
    assert re.search(r"web active, 6 changes behind, the oldest for [\d.]+ s \(FAILED: Unavailable: ", line)
    shown = sink(made, "status", "web")
    assert "Unavailable: the endpoint did not take a part" in shown.stdout
    assert sink(made, "list").lines[1].endswith("Unavailable: the endpoint did not take a part")
    # What an earlier run left open is shown before it is removed or sent again, and is finished by the next one.
    assert "its open unit, which may be partly sent" in sink(made, "remove", "web").stdout
    assert "the open unit is abandoned" in sink(made, "replay", "web", "--from", "mark").stdout
    assert "; the open unit comes first" in sink(made, "run", "web", "--dry-run").stdout

    web.script()
    assert "in 1 unit, 1 of them left open by an earlier run, up to sequence 1" in sink(made, "run", "web").stdout
    status = answer(made, "status")
    assert (status["health"], status["sinks"][0]["error"], status["sinks"][0]["lag_rows"]) == ("fine", None, 0)
    assert Counter(row["id"] for row in web.rows) == Counter(range(6))


def test_failed_maintenance_and_a_failed_sink_are_both_named(made: Path, web: Receiver) -> None:
    from floodmark.catalog.maintenance_state import Maintenance

    add_web(made, web)
    web.script(answers(503))
    sink(made, "run", "web", code=4)
    change(made, lambda lake: lake.catalog.maintenance.record(Maintenance("sweep", "", "failed", {"error": "Corrupt"})))
    assert answer(made, "status")["health"] == (
        "attention: sweep failed (Corrupt), sink web failed (Unavailable);"
        " see `floodmark maintain history` and `floodmark sink status`"
    )


def test_all_sinks_run_one_after_the_other_whatever_becomes_of_one(made: Path, web: Receiver) -> None:
    assert sink(made, "run", "--all").stdout == "nothing to do: no sinks yet\n"
    add_web(made, web)
    sink(made, "add", "zip", "--kind", "files", "--table", "users", "--path", "out")
    web.script(answers(404, text="nobody here"))
    done = sink(made, "run", "--all", code=2)
    assert done.lines[0].startswith("web: users: failed: Invalid: the endpoint does not take rows like this ")
    assert done.lines[1].startswith("zip: users: shipped 6 rows ")
    again = answer(made, "sink", "run", "--all", code=2)
    assert (again["outcome"], [one["outcome"] for one in again["sinks"]]) == ("failed", ["failed", "nothing_to_do"])
    assert len(folded(made)) == 6


def test_refused_rows_are_set_aside_sent_again_or_dropped(made: Path, web: Receiver) -> None:
    add_web(made, web)
    web.refuses = lambda row: row["id"] in (1, 4, 5)
    done = sink(made, "run", "web")
    assert "users: shipped 3 rows " in done.stdout
    assert "; 3 rows refused: see `floodmark sink quarantine list web`" in done.stdout
    assert sorted(row["id"] for row in web.rows) == [0, 2, 3]
    assert "3 in quarantine" in next(line for line in command(made, "status").lines if line.startswith("sinks"))
    assert "  3 refused rows in quarantine" in sink(made, "remove", "web").lines

    listed = answer(made, "sink", "quarantine", "list", "web")
    assert (listed["sink"], listed["quarantined"]) == ("web", 3)
    assert sorted(json.loads(row["line"])["id"] for row in listed["rows"]) == [1, 4, 5]
    reasons = {(row["table"], row["reason"], row["tries"]) for row in listed["rows"]}
    assert reasons == {("users", "422: a row is refused", 1)}
    ids = {json.loads(row["line"])["id"]: row["id"] for row in listed["rows"]}
    shown = sink(made, "quarantine", "list", "web", "--table", "users", "--limit", "1")
    assert listed["rows"][0]["id"] in shown.stdout
    assert sink(made, "quarantine", "list", "web", "--limit", "1").stderr == "2 more; --limit shows them.\n"

    # One of them is replaced by something newer, which is shipped by itself; one is good now; one is still bad.
    change(made, lambda lake: lake.merge("users", [{"id": 5, "name": "newer", "country": "DE"}]))
    web.refuses = lambda row: row["id"] == 4
    assert sink(made, "quarantine", "retry", "web").lines == [
        "users: 1 refused row arrived, 1 refused again, 1 removed because newer changes replaced them"
    ]
    (left,) = answer(made, "sink", "quarantine", "list", "web")["rows"]
    assert (left["id"], left["tries"]) == (ids[4], 2)
    sink(made, "run", "web")
    assert sorted(row["id"] for row in web.rows) == [0, 1, 2, 3, 5]

    planned = sink(made, "quarantine", "drop", "web", "--id", ids[4])
    assert (planned.stdout, planned.stderr) == ("would drop 1 refused row of web\n", "Add --apply to do it.\n")
    assert answer(made, "sink", "quarantine", "drop", "web", "--all")["outcome"] == "planned"
    assert sink(made, "quarantine", "drop", "web", "--all", "--apply").stdout == "dropped 1 refused row of web\n"
    assert sink(made, "quarantine", "list", "web").stdout == "no row is in quarantine\n"
    assert sink(made, "quarantine", "drop", "web", "--all").stdout == "nothing to do: no row is in quarantine\n"
    assert sink(made, "quarantine", "retry", "web").stdout == "nothing to do: no row is in quarantine\n"


def on_a_terminal(folder: Path, *arguments: str) -> tuple[str, str]:
    """What the command wrote to stdout, and to a terminal as its stderr."""
    screen, end = os.openpty()
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLOODMARK_")}
    with subprocess.Popen(
        [sys.executable, "-m", "floodmark.cli.main", *arguments],
        cwd=folder,
        env=env | {"FLOODMARK_LAKE": "lake", "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=end,
        text=True,
    ) as process:
        os.close(end)
        shown = b""
        while True:
            try:
                more = os.read(screen, 65536)
            except OSError:
                break  # the command has ended, and its end of the terminal is closed
            if not more:
                break
            shown += more
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(screen)
    assert process.returncode == 0, shown
    return out, shown.decode()


def test_progress_is_shown_on_a_terminal_alone(made: Path, web: Receiver) -> None:
    add_web(made, web, "--parallel", "1")
    web.script(Fault(delay_s=0.3))
    out, screen = on_a_terminal(made, "sink", "run", "web")
    assert out.startswith("users: shipped 6 rows ")
    assert re.search(r"shipping users: [24] of at most 6 rows, ", screen)
    sink(made, "replay", "web", "--from", "beginning", "--apply")
    out, screen = on_a_terminal(made, "sink", "run", "web", "--json")
    assert (json.loads(out)["outcome"], screen) == ("shipped", "")


# ── one at a time, stopped, killed, paused ──


def test_a_second_run_is_busy(made: Path) -> None:
    sink(made, "add", "out", "--kind", "files", "--table", "users", "--path", "out")
    with fm.open(made / "lake") as lake:
        lake.catalog.sinks.take("out", "a-run-of-this-process")
        done = sink(made, "run", "out", code=4)
        assert done.stdout.startswith("users: busy: Busy: another run of this sink is at work ")
        assert sink(made, "list").lines[1].split()[2:4] == ["active,", "running"]
        busy = answer(made, "sink", "remove", "out", "--apply", code=4)
        assert busy["error"]["kind"] == "Busy"
    assert sink(made, "run", "out").stdout.startswith("users: shipped 6 rows ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_by_name_and_the_next_one_goes_on(made: Path, web: Receiver, number: int) -> None:
    add_web(made, web, "--parallel", "1")
    web.script(Fault(nth=(2,), stores=True, delay_s=20))
    child = Child(run_main, str(made), ("sink", "run", "web", "--json"))
    limit = time.monotonic() + 30
    while len(web.requests) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    os.kill(child.pid, number)
    done: Done = child.wait(15)
    assert (done.code, done.data["outcome"]) == (130, "stopped"), done
    assert sink(made, "status", "web").lines[2].split() == ["state", "active"]
    web.script()
    assert "1 of them left open by an earlier run" in sink(made, "run", "web").stdout
    assert Counter(row["id"] for row in web.rows) == Counter(range(6))


def test_a_run_that_was_killed_is_finished_by_the_next_one(made: Path) -> None:
    sink(made, "add", "out", "--kind", "files", "--table", "users", "--path", "out")
    assert run_killed(run_main, str(made), ("sink", "run", "out"), failpoint="unit.sent")
    assert read_units(str(made / "out")) == []
    assert answer(made, "sink", "status", "out")["tables"][0]["open_unit"] is not None
    sink(made, "set", "out", "--format", "jsonl")
    assert "1 of them left open by an earlier run" in sink(made, "run", "out").stdout
    (unit,) = read_units(str(made / "out"))
    assert (unit.format, len(folded(made))) == ("parquet", 6)
    assert [row["outcome"] for row in answer(made, "audit")["audit"]] == ["resumed"]


def test_a_paused_sink_sends_nothing(made: Path) -> None:
    sink(made, "add", "out", "--kind", "files", "--table", "users", "--path", "out")
    assert sink(made, "pause", "out").stdout == "paused out\n"
    assert sink(made, "pause", "out").stdout == "nothing to do: out is paused\n"
    assert sink(made, "run", "out").stdout == "users: paused: nothing is sent until `floodmark sink resume out`\n"
    assert answer(made, "sink", "run", "out")["outcome"] == "paused"
    assert answer(made, "status")["sinks"][0]["state"] == "paused"
    assert not (made / "out").exists()
    assert answer(made, "sink", "resume", "out") == {"sink": "out", "state": "active", "outcome": "resumed"}
    assert answer(made, "sink", "resume", "out")["outcome"] == "nothing_to_do"
    assert sink(made, "run", "out").stdout.startswith("users: shipped 6 rows ")


# ── what cannot be undone ──


def test_removing_shows_what_is_lost_first(made: Path) -> None:
    sink(made, "add", "out", "--kind", "files", "--table", "users", "--table", "notes", "--path", "out")
    sink(made, "run", "out")
    change(made, lambda lake: lake.append("notes", [{"id": 2, "name": "new"}]))
    planned = sink(made, "remove", "out")
    assert planned.lines[:3] == [
        "would remove out, and with it",
        "  notes: the mark 1 of 2, 1 change not sent",
        "  users: the mark 1 of 1",
    ]
    assert planned.stderr == "Add --apply to do it.\n"
    assert answer(made, "sink", "remove", "out")["outcome"] == "planned"
    removed = sink(made, "remove", "out", "--apply")
    assert (removed.lines[0], removed.stderr) == ("removed out, and with it", "")
    assert answer(made, "sink", "list") == {"sinks": []}
    assert len(folded(made)) == 6
    with fm.open(made / "lake", read_only=True) as lake:
        assert lake.show("users")["consumers"] == []


def test_a_replay_says_how_many_rows_come_again_or_never(made: Path, web: Receiver) -> None:
    add_web(made, web)
    sink(made, "run", "web")
    change(made, lambda lake: lake.append("users", [{"id": 9}, {"id": 10}]))
    planned = sink(made, "replay", "web", "--from", "beginning")
    assert planned.lines == [
        "users: a new epoch would begin from the beginning (mark: 1): up to 8 changes to send, 6 of them again"
    ]
    assert planned.stderr.splitlines()[-1] == "Add --apply to do it."
    assert "twice" in planned.stderr
    skipping = answer(made, "sink", "replay", "web", "--from", "head")
    assert (skipping["outcome"], skipping["tables"][0]["skipped"]) == ("planned", 2)
    assert "2 changes not sent yet will never be sent" in sink(made, "replay", "web", "--from", "2").stdout

    assert answer(made, "sink", "status", "web")["tables"][0]["epoch"] == 0
    done = sink(made, "replay", "web", "--from", "beginning", "--table", "users", "--apply")
    assert done.lines[0].startswith("users: a new epoch begins from the beginning ")
    assert "shipped 8 rows " in sink(made, "run", "web").stdout
    assert Counter(row["id"] for row in web.rows) == Counter([*range(6)] * 2 + [9, 10])
    one = answer(made, "sink", "status", "web")["tables"][0]
    assert (one["epoch"], one["replays"], one["rows"]) == (1, 1, 14)


def test_a_sink_that_needs_a_choice_is_refused_until_somebody_chose(made: Path) -> None:
    sink(made, "add", "out", "--kind", "files", "--table", "users", "--path", "out")
    sink(made, "run", "out")
    assert command(made, "backup", "saved").code == 0
    (made / "lake" / "catalog.db").rename(made / "replaced.db")
    command(made, "restore", "saved")
    assert "Corrupt: the catalog was restored from a backup" in sink(made, "list").lines[1]
    refused = sink(made, "run", "out", code=5)
    assert refused.stdout.startswith("users: refused: Corrupt: the catalog was restored from a backup")
    assert "floodmark sink replay 'out' --table 'users' --from mark" in refused.stdout
    assert answer(made, "sink", "run", "out", code=5)["outcome"] == "refused"
    status = answer(made, "status")
    assert status["health"] == "attention: sink out refused (Corrupt); see `floodmark sink status`"
    assert any(line.startswith("users: Corrupt: the catalog was restored") for line in sink(made, "status").lines)

    sink(made, "replay", "out", "--from", "mark", "--apply")
    change(made, lambda lake: lake.append("users", [{"id": 9}]))
    assert "users: shipped 1 row " in sink(made, "run", "out").stdout
    assert answer(made, "status")["health"] == "fine"
    assert len(folded(made)) == 7


# ── compaction of what an Iceberg sink ships to ──


def test_the_destination_of_an_iceberg_sink_is_compacted_on_its_own(made: Path) -> None:
    there = ("--catalog", "type=sql", "--catalog", f"uri=sqlite:///{made}/other.db")
    place = (*there, "--catalog", f"warehouse=file://{made}/warehouse")
    sink(made, "add", "ice", "--kind", "iceberg", "--table", "notes", "--start", "head", "--namespace", "mart", *place)
    compact = ("maintain", "--sink", "ice", "--compact")
    assert command(made, *compact).stdout == "mart.notes: nothing to do: the table does not exist yet\n"
    for number in range(3):
        change(made, lambda lake, number=number: lake.append("notes", [{"id": number, "name": "more"}]))
        sink(made, "run", "ice")
    assert command(made, *compact).stdout == ("mart.notes: below threshold: 3 small files, compaction starts at 32\n")
    assert "mart.notes: would compact 3 files " in command(made, *compact, "--files", "2", "--dry-run").stdout
    done = answer(made, *compact, "--files", "2")
    assert (done["outcome"], done["records"][0]["files_in"], done["records"][0]["files_out"]) == ("compacted", 3, 1)
    again = command(made, *compact, "--table", "notes", "--files", "2")
    assert again.stdout == "mart.notes: nothing to do: 1 small file of 1\n"
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog(
        "default", type="sql", uri=f"sqlite:///{made}/other.db", warehouse=f"file://{made}/warehouse"
    )
    rows = catalog.load_table("mart.notes").scan().to_arrow().to_pylist()
    assert sorted(row["id"] for row in rows) == [0, 1, 2]
    # The next unit goes on where the last one ended.
    change(made, lambda lake: lake.append("notes", [{"id": 7, "name": "last"}]))
    assert "notes: shipped 1 row " in sink(made, "run", "ice").stdout


def test_the_destination_of_an_iceberg_sink_is_maintained_by_one_command(made: Path) -> None:
    there = ("--catalog", "type=sql", "--catalog", f"uri=sqlite:///{made}/other.db")
    place = (*there, "--catalog", f"warehouse=file://{made}/warehouse")
    options = ("--start", "head", "--set", "keep_snapshots=0s")
    sink(made, "add", "ice", "--kind", "iceberg", "--table", "notes", *options, *place)
    nothing = "default.notes: nothing to do: the table does not exist yet"
    assert command(made, "maintain", "--sink", "ice").lines == [nothing] * 3
    for number in range(3):
        change(made, lambda lake, number=number: lake.append("notes", [{"id": number, "name": "more"}]))
        sink(made, "run", "ice")
    planned = command(made, "maintain", "--sink", "ice", "--dry-run").lines
    assert planned[1].startswith("default.notes: would expire ")
    done = command(made, "maintain", "--sink", "ice", "--files", "2").lines
    assert done[0].startswith("default.notes: compacted 3 files into 1 ")
    assert done[1].startswith("default.notes: expired 3 snapshots, kept 1")
    assert done[2].startswith("default.notes: deleted ")
    assert command(made, "maintain", "--sink", "ice", "--keep", "1d").lines[1] == (
        "default.notes: nothing to do: no snapshot of this sink is older than its window"
    )
    said = command(made, "maintain", "history").stdout
    assert "sink_compact" in said
    assert "sink_sweep" in said


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (("--sink", "out", "--compact"), "Invalid", "kind=files"),
        (("--sink", "out"), "Invalid", "kind=files"),
        (("--sink", "out", "--grace", "1d"), "Invalid", "--sink"),
        (("--compact",), "Invalid", "--sink"),
        (("--sink", "out", "--compact", "--keep", "1d"), "Invalid", "--sink"),
        (("--sink", "out", "--compact", "sweep"), "Invalid", "floodmark maintain sweep"),
        (("--sink", "nowhere", "--compact"), "NotFound", "sinks=out"),
    ],
)
def test_only_the_destination_of_an_iceberg_sink_can_be_compacted(
    still: Path, arguments: tuple[str, ...], kind: str, word: str
) -> None:
    command(still, "maintain", *arguments, code=2).says(kind, word)

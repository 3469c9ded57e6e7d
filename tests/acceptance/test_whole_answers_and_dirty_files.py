"""Answers that are not cut without a word, errors that point into the user's own text, and files with bad rows.

All commands but two in one process with one session, because starting Spark takes seconds.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.cli.main import main
from floodmark.rows.session import Sessions
from floodmark.testing.children import Child
from floodmark.testing.invariants import check_lake

ROWS = 2500
DIRTY = "id,name,age\n1,Ann,1\n2,Ben,two\n3,Cid,3\n,Dan,4\n5,Eve,old\n"
LINES = '{"id": 1, "age": 10}\n{"id": 2, "name": "Bob"}\n\n{"id": 7, "name": "Gus", "age": 7}\n'
FAILS = f"select if(id < {ROWS - 1}, id, raise_error('no more')) as id from big order by id"


# One process runs all the commands; the first test waits for it.
pytestmark = pytest.mark.timeout(600)
HEAD = "id,amount,at\n"
FILES = {
    "rounded.csv": HEAD + "1,1.25,\n2,1.239,\n",
    "rounded.jsonl": '{"id": 1, "amount": 1.25}\n{"id": 2, "amount": 1.239}\n',
    "list.jsonl": '{"id": 1, "list": [1.5, 1.25]}\n',
    "map.jsonl": '{"id": 1, "map": {"x": {"a": 1.25}}}\n',
    "inside.jsonl": '{"id": 1, "list": [1.50, null], "map": {"x": {"a": 1.50}, "y": null}}\n',
    "nano.csv": HEAD + "1,1,2026-11-15T10:00:00.123456789Z\n",
    "nano.jsonl": '{"id": 1, "at": "2026-11-15T10:00:00.123456789Z"}\n',
    "exact.csv": HEAD + "1,1.2500,2026-11-15T10:00:00.123456000Z\n2,-7,\n",
    "exact.jsonl": '{"id": 3, "amount": 1.250}\n{"id": 4, "amount": "9999999999.99"}\n',
    "seen.jsonl": '{"id": -1}\n',
    "_hidden.jsonl": '{"id": -2}\n',
    "unclosed.csv": 'id\n1\n"2\n3\n',
    "malformed.jsonl": '{"id": 1}\n\n{"id": bad}\n',
    "wrong.jsonl": '{"id": 1}\n{"id": "x"}\n',
    "_bad-rows/corrected.csv": "id\n1000\n",
}


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        assert self.stdout.count("\n") == 1, self.stdout
        return json.loads(self.stdout)


COMMANDS: dict[str, list[str]] = {
    "all": ["query", "select id from big order by id", "--json"],
    "limited": ["query", "select id from big order by id", "--limit", "3", "--json"],
    "not reached": ["query", "select id from big where id < 3", "--limit", "3", "--json"],
    "as text": ["query", "select id, 'x' as x from big order by id"],
    "none": ["query", "select id from big where id < 0", "--json"],
    "fails late": ["query", FAILS, "--json"],
    "wrong column": ["query", "/* a comment */\nselect id,\n  nmae -- here\nfrom people", "--json"],
    "wrong word": ["query", "select id\nform people where", "--json"],
    "wrong inside with": ["query", "with a as (\n  select nmae from people)\nselect * from a -- end", "--json"],
    "misspelt table": ["query", "select * from peeple", "--json"],
    "dirty": ["load", "people", "dirty.csv", "--json"],
    "dirty as text": ["load", "people", "dirty.csv"],
    "dirty set aside": ["load", "people", "dirty.csv", "--bad-rows", "set-aside", "--batch", "one", "--json"],
    "merge lines": ["load", "people", "lines.jsonl", "--mode", "merge", "--json"],
    "merge csv": ["load", "people", "some.csv", "--mode", "merge", "--json"],
    "partial lines": ["load", "people", "lines.jsonl", "--mode", "merge", "--partial", "--json"],
    "partial csv": ["load", "people", "some.csv", "--mode", "merge", "--partial", "--json"],
    "partial append": ["load", "people", "some.csv", "--partial", "--json"],
    "set aside of json": ["load", "people", "lines.jsonl", "--bad-rows", "set-aside", "--json"],
    "people": ["query", "select * from people order by id", "--json"],
    "rounded csv": ["load", "money", "rounded.csv", "--json"],
    "rounded lines": ["load", "money", "rounded.jsonl", "--json"],
    "rounded in a list": ["load", "shares", "list.jsonl", "--json"],
    "rounded in a map": ["load", "shares", "map.jsonl", "--json"],
    "exact inside": ["load", "shares", "inside.jsonl", "--json"],
    "shares": ["query", "select list, map from shares", "--json"],
    "rounded partly": ["load", "money", "rounded.jsonl", "--mode", "merge", "--partial", "--json"],
    "nanoseconds csv": ["load", "money", "nano.csv", "--json"],
    "nanoseconds lines": ["load", "money", "nano.jsonl", "--json"],
    "exact csv": ["load", "money", "exact.csv", "--json"],
    "exact lines": ["load", "money", "exact.jsonl", "--json"],
    "money": ["query", "select id, amount, at from money order by id", "--json"],
    "hidden": ["load", "big", "_hidden.jsonl", "--json"],
    "hidden beside others": ["load", "big", "seen.jsonl", "_hidden.jsonl", "--json"],
    "unclosed": ["load", "big", "unclosed.csv", "--json"],
    "malformed line": ["load", "big", "malformed.jsonl", "--json"],
    "wrong type in a line": ["load", "big", "wrong.jsonl", "--json"],
    "after correction": ["load", "big", "_bad-rows/corrected.csv", "--json"],
}


def make(folder: Path) -> None:
    (folder / "floodmark.toml").write_text('[lake]\npath = "lake"\n[spark]\nmaster = "local[2]"\n')
    (folder / "dirty.csv").write_text(DIRTY)
    (folder / "lines.jsonl").write_text(LINES)
    (folder / "some.csv").write_text("age,id\n33,3\n")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with fm.open(folder / "lake", create=True) as lake:
        lake.create_table("people", "id long not null, name string, age int", key=["id"])
        lake.create_table("big", "id long")
        lake.create_table("money", "id long not null, amount decimal(12,2), at timestamp", key=["id"])
        lake.create_table("shares", "id long, list array<decimal(4,1)>, map map<string,struct<a:decimal(4,1)>>")
        lake.append("big", [{"id": number} for number in range(ROWS)])
        lake.append("people", [{"id": 2, "name": "Ben", "age": 2}])


def run_commands(folder: str) -> dict[str, Done]:
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("FLOODMARK_", "SPARK_", "PYSPARK_"))]:
        del os.environ[name]
    return {name: run_main(arguments) for name, arguments in COMMANDS.items()}


def run_main(arguments: list[str]) -> Done:
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code or 0
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    answers: dict[str, Done] = Child(run_commands, str(folder)).wait(580)
    return answers


# ── answers ──


def test_json_has_all_rows_in_one_object(done: dict[str, Done]) -> None:
    assert done["all"].data == {"rows": [{"id": number} for number in range(ROWS)]}
    assert done["none"].data == {"rows": []}


def test_a_limit_is_told_in_the_data(done: dict[str, Done]) -> None:
    assert done["limited"].data == {"rows": [{"id": 0}, {"id": 1}, {"id": 2}], "truncated": True}
    assert done["not reached"].data["truncated"] is False


def test_text_that_goes_to_a_file_is_not_cut(done: dict[str, Done]) -> None:
    lines = done["as text"].stdout.splitlines()
    assert [line.split() for line in lines] == [["id", "x"], *([str(number), "x"] for number in range(ROWS))]
    assert done["as text"].stderr == ""


def test_an_error_behind_the_first_rows_is_in_the_object_and_in_the_exit_code(done: dict[str, Done]) -> None:
    """Sorted by one task or not: whatever was written is one object that says that it is not all."""
    answer = done["fails late"]
    assert answer.code != 0
    assert "no more" in answer.data["error"]["facts"]["cause"]
    assert answer.stderr.count("floodmark: ") == 1


# ── errors of queries ──


@pytest.mark.parametrize(
    ("name", "place"),
    [("wrong column", "line 3 pos 2"), ("wrong word", "line 2, pos"), ("wrong inside with", "line 2 pos 9")],
)
def test_positions_are_those_of_the_text_that_the_user_wrote(done: dict[str, Done], name: str, place: str) -> None:
    assert done[name].code == 2
    assert place in done[name].data["error"]["facts"]["cause"]


def test_a_misspelt_table_gets_a_suggestion_where_spark_runs_too(done: dict[str, Done]) -> None:
    assert done["misspelt table"].code == 2
    assert "people" in done["misspelt table"].data["error"]["advice"]


def command(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    ours = ("FLOODMARK_", "SPARK_", "PYSPARK_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = {**kept, **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "floodmark.cli.main", *arguments], cwd=cwd, env=environment, text=True, **options
    )


def test_a_misspelt_table_gets_a_suggestion_before_spark_starts(folder: Path, tmp_path: Path) -> None:
    without_java = {"JAVA_HOME": "", "PATH": str(tmp_path)}
    started = command("query", "select *\nfrom peeple", cwd=folder, env=without_java, stderr=subprocess.PIPE)
    _, said = started.communicate(timeout=120)
    assert started.returncode == 2
    assert "table=peeple line=2 pos=5" in said
    assert "Did you mean people?" in said


def test_a_table_that_is_not_there_is_told_with_those_that_are_before_spark_starts(tmp_path: Path) -> None:
    with fm.open(tmp_path / "lake", create=True) as lake:
        for name in ("orders", "returns"):
            lake.create_table(name, "id long")
        lake.drop_table("returns")
    (tmp_path / "none").mkdir()
    without_java = {"JAVA_HOME": "", "PATH": str(tmp_path / "none")}

    def said(query: str) -> str:
        started = command("--lake", "lake", "query", query, cwd=tmp_path, env=without_java, stderr=subprocess.PIPE)
        text: str = started.communicate(timeout=120)[1]
        assert started.returncode == 2
        assert "NotFound: there is no such table" in text
        return text

    assert "The tables are: orders." in said("select count(*) from customers_all")
    assert "`floodmark undrop returns`" in said("select * from returns")


@pytest.mark.parametrize(
    ("settings", "variable", "empty"),
    [
        ({}, "", True),
        ({"master": "local[2]", "spark.sql.shuffle.partitions": "3"}, "", True),
        ({"spark.sql.catalogImplementation": "hive"}, "", False),
        ({"spark.sql.catalog.other": "x"}, "", False),
        ({"master": "sc://host"}, "", False),
        ({}, "SPARK_CONF_DIR", False),
    ],
)
def test_what_another_session_may_know_is_left_to_it(
    settings: dict[str, str], variable: str, empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.rows.session.is_spark_running", lambda: False)
    for name in [name for name in os.environ if "SPARK" in name or name.endswith("_CONF_DIR")]:
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "/somewhere")
    assert Sessions(settings).starts_empty() is empty


def read_all(terminal: int, into: list[bytes]) -> None:
    try:
        while piece := os.read(terminal, 65536):
            into.append(piece)
    except OSError:
        pass  # Linux says so when the other end is closed


def test_a_terminal_shows_a_hundred_rows_says_so_and_nothing_of_spark_or_java(folder: Path) -> None:
    ends, said = [os.openpty(), os.openpty()], [[], []]  # type: ignore[var-annotated]
    readers = [threading.Thread(target=read_all, args=(end[0], text)) for end, text in zip(ends, said, strict=True)]
    for reader in readers:
        reader.start()
    query = "select a.id from big a join big b using (id) order by id"
    plain = {"TERM": "dumb", "NO_COLOR": "1"}
    started = command("query", query, cwd=folder, env=plain, stdout=ends[0][1], stderr=ends[1][1])
    for _, slave in ends:
        os.close(slave)
    assert started.wait(200) == 0
    for reader in readers:
        reader.join(60)
    out, err = (b"".join(text).decode() for text in said)
    assert re.sub(r"\x1b\[\d*m", "", out).split() == ["id", *map(str, range(100))]
    assert err.splitlines() == ["(more than 100 rows; --limit shows more, --json all of them)"]


# ── files with bad rows, and rows that leave columns out ──


def test_a_dirty_csv_is_refused_with_line_column_and_value_of_the_first_mistakes(done: dict[str, Done]) -> None:
    answer = done["dirty"]
    assert answer.code == 2
    told = [(one["line"], one["column"], one["value"]) for one in answer.data["error"]["mistakes"]]
    assert told == [(3, "age", "'two'"), (5, "id", "''"), (6, "age", "'old'")]
    for place in ("line 3, column age", "line 5, column id", "'old'"):
        assert place in done["dirty as text"].stderr


def test_bad_rows_are_set_aside_in_a_file_and_the_others_are_loaded(done: dict[str, Done], folder: Path) -> None:
    data = done["dirty set aside"].data
    assert (data["rows"], data["bad_rows"], data["set_aside"]) == (2, 3, ["_bad-rows/dirty.csv"])
    assert (folder / "_bad-rows/dirty.csv").read_text() == "id,name,age\n2,Ben,two\n,Dan,4\n5,Eve,old\n"
    assert done["set aside of json"].code == 2


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("rounded csv", "amount", "1.239"),
        ("rounded lines", "amount", "1.239"),
        ("rounded partly", "amount", "1.239"),
        ("rounded in a list", "list", "1.25"),
        ("rounded in a map", "map", "1.25"),
    ],
)
def test_a_value_that_would_be_rounded_refuses_the_file(
    done: dict[str, Done], name: str, column: str, value: str
) -> None:
    assert done[name].code == 2
    facts = done[name].data["error"]["facts"]
    assert (facts["column"], value in facts["value"]) == (column, True)
    assert facts.get("line") == ("3" if name == "rounded csv" else None)


@pytest.mark.parametrize("name", ["nanoseconds csv", "nanoseconds lines"])
def test_a_time_that_would_be_cut_refuses_the_file(done: dict[str, Done], name: str) -> None:
    assert done[name].code == 2
    error = done[name].data["error"]
    assert ("123456789" in error["message"], error["facts"]["column"]) == (True, "at")


def test_digits_that_are_zero_are_no_loss(done: dict[str, Done]) -> None:
    assert [done[name].code for name in ("exact csv", "exact lines")] == [0, 0]
    found = [(row["id"], row["amount"]) for row in done["money"].data["rows"]]
    assert found == [(1, "1.25"), (2, "-7.00"), (3, "1.25"), (4, "9999999999.99")]
    assert done["shares"].data["rows"] == [{"list": ["1.5", None], "map": {"x": {"a": "1.5"}, "y": None}}]
    assert ".123456" in done["money"].data["rows"][0]["at"]


def test_a_file_that_spark_would_pass_over_is_refused_by_name(done: dict[str, Done]) -> None:
    for name in ("hidden", "hidden beside others"):
        assert done[name].code == 2
        assert done[name].data["error"]["facts"]["path"] == "_hidden.jsonl"


def test_rows_that_were_set_aside_can_be_loaded_when_they_are_corrected(done: dict[str, Done]) -> None:
    assert (done["after correction"].code, done["after correction"].data["rows"]) == (0, 1)


@pytest.mark.parametrize(
    ("name", "line"), [("unclosed", "3"), ("malformed line", "3"), ("wrong type in a line", "2")], ids=str
)
def test_a_row_that_cannot_be_read_is_named_by_file_and_line(done: dict[str, Done], name: str, line: str) -> None:
    assert done[name].code == 2
    facts = done[name].data["error"]["facts"]
    assert (facts["line"], facts["file"].rpartition("/")[2].partition(".")[0]) == (line, name.split()[0])


@pytest.mark.parametrize("name", ["merge lines", "merge csv"])
def test_a_merge_of_files_that_leave_a_column_out_is_refused(done: dict[str, Done], name: str) -> None:
    assert done[name].code == 2
    error = done[name].data["error"]
    assert "name" in " ".join([error["message"], *error["facts"].values()])


def test_a_partial_load_updates_only_what_its_rows_have(done: dict[str, Done], folder: Path) -> None:
    assert [done[name].code for name in ("partial lines", "partial csv", "partial append")] == [0, 0, 2]
    assert done["people"].data["rows"] == [
        {"id": 1, "name": "Ann", "age": 10},
        {"id": 2, "name": "Bob", "age": 2},
        {"id": 3, "name": "Cid", "age": 33},
        {"id": 7, "name": "Gus", "age": 7},
    ]
    with fm.open(folder / "lake") as lake:
        check_lake(lake.catalog)

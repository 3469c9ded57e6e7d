"""`delete`, `changes`, `export`, `adopt` and the modes of `load`, as a person meets them.

The first part has no Java to find, so whatever works there starts no Spark. The loads run one after the other in one
process with one session, because starting Spark takes seconds.
"""

from __future__ import annotations

import csv
import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

import floodmark as fm
from floodmark.cli.main import main
from floodmark.testing.children import Child, run_child
from floodmark.testing.invariants import check_lake

USERS = "id long not null, name string, country string, age int"
NOW, LONG_AGO = datetime(2026, 11, 15, 10, 0, 0, 123456, UTC), datetime(1582, 10, 5, tzinfo=UTC)
INF, NAN = float("inf"), float("nan")
FLAT = (
    "id long not null, small int, yes boolean, single float, double double, text string, money decimal(20,4), "
    "day date, moment timestamp, clock timestamp_ntz"
)
EVERYTHING = f"{FLAT}, bytes binary, list array<string>, pair struct<x:int,y:string>, counts map<string,int>"
COLUMNS = ["id", "small", "yes", "single", "double", "text", "money", "day", "moment", "clock"]
VALUES: list[tuple[Any, ...]] = [
    (1, -1, True, 0.1, 0.1, 'a, "b"\r\nc\\', "1.2500", date(2026, 11, 15), NOW, datetime(1960, 1, 1, 0, 0, 0, 1)),
    (2, *[None] * 9),
    (3, 2**31 - 1, False, INF, NAN, " é ", "0.0000", date(1, 1, 1), LONG_AGO, datetime(9999, 12, 31)),
]
FLAT_ROWS = [dict(zip(COLUMNS, values, strict=True)) for values in VALUES]
NESTED: list[dict[str, Any]] = [
    {"bytes": b"\x00\xff", "list": ["x", None], "pair": {"x": 1, "y": None}, "counts": {"one": 1, "two": None}},
    {},
    {"bytes": b"", "list": [], "pair": {"x": None, "y": None}, "counts": {}, "text": ""},
]
EVERYTHING_ROWS = [{**flat, **nested} for flat, nested in zip(FLAT_ROWS, NESTED, strict=True)]


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str
    version: int

    @property
    def data(self) -> Any:
        """The one JSON object on stdout; nothing else may be there."""
        assert self.stdout.count("\n") == 1, self.stdout
        return json.loads(self.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    @property
    def error(self) -> Any:
        assert "Traceback" not in self.stderr, self.stderr
        return self.data["error"]

    def says(self, kind: str, *words: str) -> None:
        """It ended as wrong input, said so in an object and on stderr, and named these."""
        assert self.code == 2, self.stderr
        error = self.error
        said = " ".join([error["message"], *error["facts"].values(), error["advice"]])
        assert error["kind"] == kind, said
        assert [word for word in words if word not in said] == [], said
        assert self.stderr.startswith(f"floodmark: {kind}: ")


def run_main(*arguments: str) -> Done:
    """The command's entry, in this process, on the lake of the working folder."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([*arguments, "--lake", "lake"])
        except SystemExit as ended:
            code = ended.code or 0
    with fm.open("lake", read_only=True) as lake:
        return Done(code, out.getvalue(), err.getvalue(), lake.status()["version"])


def run_without_java(folder: str, arguments: tuple[str, ...]) -> Done:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({"PATH": f"{folder}/empty", "HOME": folder})
    return run_main(*arguments)


def command(folder: Path, *arguments: str) -> Done:
    done: Done = run_child(run_without_java, str(folder), arguments)
    return done


def jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def users(*numbers: int, **values: Any) -> list[dict[str, Any]]:
    return [
        {"id": n, "name": f"user {n}", "country": "XX" if n % 3 == 0 else "DE", "age": n, **values} for n in numbers
    ]


def make_lake(folder: Path) -> Path:
    """Ten users in two files, then one merged, one new, one deleted; a table without a key; one with every type."""
    with fm.open(folder / "lake", create=True, actor="test") as lake:
        lake.create_table("users", USERS, key=["id"])
        lake.append("users", users(*range(5)))
        lake.append("users", users(*range(5, 10)))
        lake.merge("users", [*users(3, country="FR"), *users(20)])
        lake.delete("users", "id = 5")
        lake.create_table("notes", "id long not null, name string")
        lake.append("notes", [{"id": 1, "name": "twice"}, {"id": 1, "name": "twice"}])
        lake.create_table("everything", EVERYTHING)
        lake.append("everything", EVERYTHING_ROWS)
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_lake(tmp_path)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake that no test changes."""
    return make_lake(tmp_path_factory.mktemp("still"))


# ── delete ──


def test_a_delete_shows_its_plan_and_deletes_only_with_apply(made: Path) -> None:
    delete = ("delete", "users", "--where", "country = 'XX'")
    planned = command(made, *delete)
    assert planned == Done(
        0, "would delete 3 of 10 rows of users, which are in 2 of 3 files\n", "Add --apply to do it.\n", 9
    )
    data = command(made, *delete, "--json").data
    assert (data["outcome"], data["rows"], data["rows_total"], data["version"]) == ("planned", 3, 10, 9)
    assert {"table", "where", "files", "files_dropped", "files_total", "bytes"} <= set(data)

    done = command(made, *delete, "--apply", "--batch", "monday", "--json")
    assert (done.code, done.stderr, done.data["outcome"], done.data["rows"]) == (0, "", "committed", 3)
    assert done.data["tables"][0]["rows_deleted"] == 3
    assert done.data["message"] == "delete where country = 'XX'"
    again = command(made, *delete, "--apply", "--batch", "monday")
    assert (again.code, again.stdout) == (
        0,
        "nothing to do: batch monday was already committed to users in version 10\n",
    )
    for more in ((), ("--apply",)):
        assert command(made, *delete, *more) == Done(0, "nothing to do: no row matches\n", "", 10)
    text = command(made, "delete", "users", "--where", "id in (1, 2)", "--apply")
    assert text.stdout == "2 rows deleted from users, version 11\n"
    with fm.open(made / "lake") as lake:
        assert sorted(row["id"] for row in lake.read_arrow("users").read_all().to_pylist()) == [3, 4, 7, 8, 20]
        check_lake(lake.catalog)


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (("users", "--where", "cuntry = 'XX'"), "Invalid", "country"),
        (("users", "--where", "cuntry = 'XX'", "--apply"), "Invalid", "country"),
        (("users", "--where", " ", "--apply"), "Invalid", "condition"),
        (("nowhere", "--where", "id = 1", "--apply"), "NotFound", "users"),
    ],
)
def test_a_wrong_delete_is_named_and_changes_nothing(
    still: Path, arguments: tuple[str, ...], kind: str, word: str
) -> None:
    done = command(still, "delete", *arguments, "--json")
    done.says(kind, word)
    assert done.version == 9


def test_a_delete_that_needs_spark_says_so_before_anything_happens(still: Path) -> None:
    done = command(still, "delete", "users", "--where", "upper(country) = 'XX'", "--apply", "--json")
    assert (done.code, done.error["kind"], done.version) == (4, "Unavailable", 9)


@pytest.mark.parametrize(
    "arguments",
    [("delete", "users"), ("changes",), ("changes", "users", "--limit", "0"), ("export", "users"), ("adopt", "users")],
)
def test_wrong_usage_is_exit_code_2_with_nothing_on_stdout(still: Path, arguments: tuple[str, ...]) -> None:
    done = command(still, *arguments)
    assert (done.code, done.stdout, done.version) == (2, "", 9)
    assert "Usage" in done.stderr


# ── changes ──


def test_changes_are_shown_with_what_to_ask_next(still: Path) -> None:
    done = command(still, "changes", "users", "--since", "2")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["_seq", "_change", "id", "name", "country", "age"],
        ["3", "upsert", "3", "user", "3", "FR", "3"],
        ["3", "upsert", "20", "user", "20", "DE", "20"],
        ["4", "delete", "5", "-", "-", "-"],
    ]
    assert (done.code, done.stderr) == (0, "up to sequence 4; continue with --since 4\n")
    nothing = command(still, "changes", "users", "--since", "4")
    assert (nothing.code, nothing.stdout) == (0, "no changes\n")
    limited = command(still, "changes", "users", "--limit", "3")
    assert len(limited.stdout.splitlines()) == 4
    # What comes next is not said while there is more of this.
    assert limited.stderr == "(more than 3 changes; --limit shows more, `floodmark export --changes` writes all)\n"


def test_changes_as_one_json_object(still: Path) -> None:
    done = command(still, "changes", "users", "--since", "3", "--json")
    deleted = {"id": 5, "name": None, "country": None, "age": None, "_change": "delete", "_seq": 4}
    facts = {"table": "users", "since": 3, "until": 4, "version": 9, "more": False}
    assert (done.data, done.stderr) == ({**facts, "changes": [deleted]}, "")
    data = command(still, "changes", "users", "--until", "1", "--limit", "2", "--json").data
    assert (data["since"], data["until"], data["more"], len(data["changes"])) == (None, 1, True, 2)
    odd = command(still, "changes", "everything", "--json").data["changes"]
    assert (odd[2]["single"], odd[2]["double"], odd[0]["bytes"], odd[0]["counts"]["one"]) == (
        *("Infinity", "NaN", "AP8="),
        1,
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (("users", "--since", "5"), "Invalid", "4"),
        (("users", "--until", "99"), "Invalid", "4"),
        (("users", "--since", "3", "--until", "2"), "Invalid", "3"),
        (("users", "--version", "99"), "NotFound", "99"),
        (("nowhere",), "NotFound", "nowhere"),
    ],
)
def test_a_wrong_range_is_wrong_input(still: Path, arguments: tuple[str, ...], kind: str, word: str) -> None:
    command(still, "changes", *arguments, "--json").says(kind, word)


# ── export ──


def test_rows_are_exported_in_every_format(still: Path) -> None:
    done = command(still, "export", "notes", "notes.jsonl")
    assert done == Done(0, "2 rows of version 9 into notes.jsonl\n", "", 9)
    assert jsonl(still / "notes.jsonl") == [{"id": 1, "name": "twice"}] * 2
    data = command(still, "export", "users", "deep/folder/users", "--format", "csv", "--with-seq", "--json").data
    assert (data["table"], data["file"], data["format"], data["rows"], data["version"]) == (
        *("users", "deep/folder/users", "csv"),
        *(10, 9),
    )
    with (still / "deep/folder/users").open(newline="") as file:
        records = list(csv.DictReader(file))
    assert records[0].keys() == {"id", "name", "country", "age", "_seq"}
    sequences = {1: (0, 1, 2, 4), 2: (6, 7, 8, 9), 3: (3, 20)}
    assert {int(record["id"]): int(record["_seq"]) for record in records} == {
        number: sequence for sequence, numbers in sequences.items() for number in numbers
    }
    assert command(still, "export", "everything", "everything.parquet").code == 0
    with fm.open(still / "lake", read_only=True) as lake:
        rows = lake.read_arrow("everything").read_all()
    assert repr(pq.read_table(still / "everything.parquet").to_pylist()) == repr(rows.to_pylist())
    assert command(still, "export", "users", "old.jsonl", "--version", "2").code == 0
    assert [row["id"] for row in jsonl(still / "old.jsonl")] == list(range(5))


def test_exports_of_changes_follow_each_other_up_to_the_table(still: Path) -> None:
    copy: dict[int, Any] = {}
    since: int | None = None
    for until in (1, 3, None):
        bounds = [f"--{name}={at}" for name, at in (("since", since), ("until", until)) if at is not None]
        done = command(still, "export", "users", f"to-{until}.jsonl", "--changes", *bounds, "--json")
        changes = jsonl(still / f"to-{until}.jsonl")
        assert (done.data["since"], done.data["rows"]) == (since, len(changes))
        assert len({change["id"] for change in changes}) == len(changes), "a key came twice"
        for change in changes:
            copy[change["id"]] = change
        since = done.data["until"]
    assert since == 4
    live = {key: row for key, row in copy.items() if row["_change"] == "upsert"}
    command(still, "export", "users", "all.jsonl", "--with-seq")
    assert {row["id"]: row for row in jsonl(still / "all.jsonl")} == {
        key: {name: value for name, value in row.items() if name != "_change"} for key, row in live.items()
    }
    nothing = command(still, "export", "users", "nothing.csv", "--changes", "--since", "4")
    assert nothing.stdout == "0 changes up to sequence 4 into nothing.csv\n"
    assert (still / "nothing.csv").read_text() == "id,name,country,age,_change,_seq\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (("users", "taken.jsonl"), "Invalid", "--overwrite"),
        (("users", "new.txt"), "Invalid", "--format"),
        (("users", "new.jsonl", "--format", "xml"), "Invalid", "parquet"),
        (("users", ".", "--format", "csv", "--overwrite"), "Invalid", "folder"),
        (("users", "lake/catalog.db", "--format", "csv", "--overwrite"), "Invalid", "inside the lake"),
        (("users", "new.jsonl", "--since", "1"), "Invalid", "--changes"),
        (("users", "new.jsonl", "--changes", "--since", "99"), "Invalid", "4"),
        (("users", "new.jsonl", "--version", "0"), "NotFound", "0"),
        (("nowhere", "new.jsonl"), "NotFound", "there is no such table"),
        (("everything", "new.csv"), "Invalid", "bytes"),
    ],
)
def test_a_wrong_export_is_named_and_leaves_no_file(
    still: Path, arguments: tuple[str, ...], kind: str, word: str
) -> None:
    (still / "taken.jsonl").write_text("taken")
    command(still, "export", *arguments, "--json").says(kind, word)
    assert list(still.glob("new.*")) == []
    assert (still / "taken.jsonl").read_text() == "taken"


def test_an_export_that_fails_midway_leaves_what_was_there(made: Path) -> None:
    (made / "old.jsonl").write_text("old")
    with fm.open(made / "lake", read_only=True) as lake:
        last = lake.catalog.files.data_files(lake.catalog.history.head("users"))[-1]
    os.unlink(last.removeprefix("file://"))
    for file in ("new.parquet", "old.jsonl"):
        done = command(made, "export", "users", file, "--overwrite", "--json")
        assert done.code != 0
        assert last.rpartition("/")[2] in done.error["facts"]["file"]
    assert (made / "old.jsonl").read_text() == "old"
    assert sorted(path.name for path in made.iterdir()) == ["lake", "old.jsonl"]


# ── adopt ──


def foreign(folder: Path, name: str, *ids: int) -> str:
    """A table of another engine, a file for each id."""
    catalog = InMemoryCatalog("other", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace_if_not_exists("sales")
    fields = (NestedField(1, "id", LongType(), required=True), NestedField(2, "name", StringType()))
    table = catalog.create_table(f"sales.{name}", Schema(*fields))
    for number in ids:
        rows = [{"id": number, "name": f"row {number}"}]
        table.append(pa.Table.from_pylist(rows, schema=table.schema().as_arrow()))
    return str(table.location())


def test_a_foreign_table_is_adopted_once_and_followed_from_its_beginning(made: Path) -> None:
    place = foreign(made, "orders", 1, 2, 3)
    before = {path: path.read_bytes() for path in made.glob("warehouse/**/*") if path.is_file()}
    done = command(made, "adopt", "orders", place, "--key", "id", "--json")
    assert (done.code, done.stderr, done.data["kind"], done.version) == (0, "", "adopt", 10)
    assert done.data["tables"][0]["rows_total"] == 3
    again = command(made, "adopt", "orders", place, "--key", "id", "--json")
    again.says("Invalid", "orders")
    assert again.version == 10
    late = command(made, "adopt", "Orders", place, "--if-version", "9", "--json")
    assert (late.code, late.error["kind"], late.error["facts"]["actual"]) == (3, "Conflict", "10")
    done = command(made, "adopt", "copies", place, "--if-version", "10")
    assert done.stdout == "copies adopted: 3 rows in 3 files, version 11\n"

    changes = command(made, "changes", "orders", "--json").data
    assert sorted((row["_seq"], row["id"], row["_change"]) for row in changes["changes"]) == [
        (n, n, "upsert") for n in (1, 2, 3)
    ]
    assert command(made, "delete", "orders", "--where", "id = 2", "--apply").code == 0
    news = command(made, "changes", "orders", "--since", str(changes["until"]), "--json").data["changes"]
    assert [(row["id"], row["_change"]) for row in news] == [(2, "delete")]
    assert {path: path.read_bytes() for path in before} == before, "a foreign file was changed"
    with fm.open(made / "lake") as lake:
        check_lake(lake.catalog)


def test_what_cannot_be_adopted_is_named_and_changes_nothing(made: Path) -> None:
    twice = foreign(made, "twice", 7, 7)
    command(made, "adopt", "other", "warehouse", "--json").says("NotFound", "metadata")
    command(made, "adopt", "other", "nowhere.metadata.json", "--json").says("NotFound", "nowhere")
    command(made, "adopt", "other", twice, "--key", "id", "--json").says("Invalid", "id=7")
    command(made, "adopt", "other", twice, "--key", "name", "--json").says("Invalid", "nulls")
    command(made, "adopt", "other", twice, "--key", "nmae", "--json").says("Invalid", "name")
    done = command(made, "adopt", "an other", twice, "--json")
    done.says("Invalid", "an other")
    assert done.version == 9


# ── load ──


def write_files(folder: Path) -> None:
    write_jsonl(folder / "first.jsonl", *users(1, 2, 3))
    write_jsonl(folder / "some.jsonl", *users(2, age=20), *users(3, 4))
    write_jsonl(folder / "twice.jsonl", *users(5), *users(6, age=1), *users(6, age=2))
    write_jsonl(folder / "no key.jsonl", *users(7), {"name": "nobody"})
    write_jsonl(folder / "french.jsonl", *users(8, country="FR"))
    write_jsonl(folder / "more.jsonl", *users(8, country="FR", age=8, email="e@mail"))
    write_jsonl(folder / "wide.jsonl", *users(8, country="FR", age=2**31))
    write_jsonl(folder / "text.jsonl", *users(8, age="old", email="x"))
    write_jsonl(folder / "note.jsonl", {"id": 1, "name": "note"})


def load(file: str, *more: str) -> list[str]:
    return ["load", "people", file, *more]


LOADS: dict[str, list[str]] = {
    "create": load("first.jsonl", "--create", "--schema", USERS, "--key", "id", "--json"),
    "insert": load("first.jsonl", "--json"),
    "merge": load("some.jsonl", "--mode", "merge"),
    "merge again": load("some.jsonl", "--mode", "merge", "--json"),
    "merge again as text": load("some.jsonl", "--mode", "merge"),
    "twice": load("twice.jsonl", "--mode", "merge", "--json"),
    "last": load("twice.jsonl", "--mode", "merge", "--last-by", "age", "--batch", "one", "--json"),
    "last again": load("twice.jsonl", "--mode", "merge", "--last-by", "age", "--batch", "one"),
    "last by what": load("twice.jsonl", "--mode", "merge", "--last-by", "aeg", "--json"),
    "no key": load("no key.jsonl", "--mode", "merge", "--json"),
    "table without key": ["load", "notes", "note.jsonl", "--mode", "merge", "--json"],
    "overwrite": load("french.jsonl", "--mode", "overwrite", "--where", "country = 'FR' or id = 1"),
    "other rows": load("first.jsonl", "--mode", "overwrite", "--where", "country = 'FR'", "--json"),
    "wrong column": load("french.jsonl", "--mode", "overwrite", "--where", "cuntry = 'FR'", "--json"),
    "not evolved": load("more.jsonl", "--mode", "merge", "--json"),
    "evolved": load("more.jsonl", "--mode", "merge", "--evolve", "--json"),
    "widened": load("wide.jsonl", "--mode", "merge", "--evolve", "--partial", "--json"),
    "text for a number": load("text.jsonl", "--mode", "merge", "--evolve", "--json"),
    "delete": ["delete", "people", "--where", "length(name) > 5 and id = 2", "--apply", "--json"],
    "export jsonl": ["export", "everything", "everything.jsonl"],
    "export parquet": ["export", "everything", "everything.parquet"],
    "export csv": ["export", "flat", "flat.csv"],
    "load jsonl": ["load", "by_jsonl", "everything.jsonl"],
    "load parquet": ["load", "by_parquet", "everything.parquet"],
    "load csv": ["load", "by_csv", "flat.csv"],
}
WRONG_OPTIONS: dict[str, tuple[list[str], str]] = {
    "mode": (load("first.jsonl", "--mode", "upsert"), "overwrite"),
    "where": (load("first.jsonl", "--mode", "merge", "--where", "id = 1"), "--mode overwrite"),
    "last-by": (load("first.jsonl", "--last-by", "age"), "--mode merge"),
    "key": (load("first.jsonl", "--key", "id"), "--create"),
}


def run_loads(folder: str) -> tuple[dict[str, Done], dict[str, list[str]]]:
    """Every load after the other, in this process; and what is in the tables then."""
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("FLOODMARK_", "SPARK_", "PYSPARK_"))]:
        del os.environ[name]
    Path("floodmark.toml").write_text('[spark]\nmaster = "local[2]"\n')
    with fm.open("lake") as lake:
        lake.create_table("flat", FLAT)
        lake.append("flat", FLAT_ROWS)
        for name in ("by_jsonl", "by_parquet"):
            lake.create_table(name, EVERYTHING)
        lake.create_table("by_csv", FLAT)
    done = {name: run_main(*arguments) for name, arguments in LOADS.items()}
    with fm.open("lake") as lake:
        check_lake(lake.catalog)
        names = ("people", "everything", "flat", "by_jsonl", "by_parquet", "by_csv")
        # As text, because NaN is not equal to itself.
        return done, {name: sorted(map(repr, lake.read_arrow(name).read_all().to_pylist())) for name in names}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Done], dict[str, list[str]]]:
    folder = make_lake(tmp_path_factory.mktemp("loads"))
    write_files(folder)
    answers: tuple[dict[str, Done], dict[str, list[str]]] = Child(run_loads, str(folder)).wait(280)
    return answers


@pytest.fixture
def done(loaded: tuple[dict[str, Done], dict[str, list[str]]]) -> dict[str, Done]:
    return loaded[0]


FIRST = 15  # the version in which people was made


def test_a_keyed_table_is_made_and_its_keys_come_in_once(done: dict[str, Done]) -> None:
    assert (done["create"].code, done["create"].data["rows"], done["create"].version) == (0, 3, FIRST)
    done["insert"].says("Invalid", "id=1")
    assert done["insert"].version == FIRST


def test_a_merge_says_what_it_did_and_a_merge_of_the_same_is_nothing_to_do(done: dict[str, Done]) -> None:
    assert done["merge"].stdout == f"1 rows added, 1 updated, 0 deleted in people, version {FIRST + 1}\n"
    again = done["merge again"]
    assert (again.code, again.data["outcome"], again.data["rows"], again.version) == (0, "nothing_to_do", 0, FIRST + 1)
    assert done["merge again as text"].stdout == "nothing to do: the table has all of these rows already\n"


def test_a_key_that_comes_twice_is_refused_or_decided_by_a_column(done: dict[str, Done]) -> None:
    done["twice"].says("Invalid", "id=6")
    assert done["twice"].version == FIRST + 1
    assert (done["last"].code, done["last"].data["rows"], done["last"].version) == (0, 2, FIRST + 2)
    assert (
        done["last again"].stdout
        == f"nothing to do: batch one was already committed to people in version {FIRST + 2}\n"
    )
    done["last by what"].says("Invalid", "aeg", "age")


def test_what_cannot_be_merged_is_named_and_changes_nothing(done: dict[str, Done]) -> None:
    done["no key"].says("Invalid", "id", "1")
    done["table without key"].says("Invalid", "notes", "key")
    assert done["table without key"].version == FIRST + 2


def test_an_overwrite_replaces_what_its_condition_matches(done: dict[str, Done]) -> None:
    assert done["overwrite"].stdout == f"1 rows added, 0 updated, 1 deleted in people, version {FIRST + 3}\n"
    done["other rows"].says("Invalid", "country = 'FR'")
    done["wrong column"].says("Invalid", "country")
    assert done["wrong column"].version == FIRST + 3


def test_columns_are_added_and_numbers_widened_only_when_asked_and_needed(done: dict[str, Done]) -> None:
    done["not evolved"].says("Invalid", "email")
    assert done["not evolved"].version == FIRST + 3
    assert (done["evolved"].code, done["widened"].code, done["widened"].version) == (0, 0, FIRST + 5)
    done["text for a number"].says("Invalid", "age")
    assert done["text for a number"].version == FIRST + 5


def test_the_rows_are_what_all_of_it_left(loaded: tuple[dict[str, Done], dict[str, list[str]]]) -> None:
    done, rows = loaded
    assert (done["delete"].code, done["delete"].data["rows"]) == (0, 1)
    # The last file left `email` out and was partial: what the row had stays.
    (widened,) = users(8, country="FR", age=2**31)
    assert rows["people"] == sorted(
        repr(row | {"email": row.get("email")})
        for row in [*users(3, 4, 5), *users(6, age=2), widened | {"email": "e@mail"}]
    )


@pytest.mark.parametrize(
    ("table", "copy"), [("everything", "by_jsonl"), ("everything", "by_parquet"), ("flat", "by_csv")]
)
def test_what_is_exported_can_be_loaded_again(
    loaded: tuple[dict[str, Done], dict[str, list[str]]], table: str, copy: str
) -> None:
    done, rows = loaded
    told = done[copy.replace("by_", "load ")]
    assert told.stdout.startswith(f"3 rows into {copy}, "), told.stderr
    assert rows[copy] == rows[table]


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_options_that_do_not_go_together_are_refused_before_spark_is_asked_for(still: Path, name: str) -> None:
    arguments, word = WRONG_OPTIONS[name]
    command(still, *arguments, "--json").says("Invalid", word)

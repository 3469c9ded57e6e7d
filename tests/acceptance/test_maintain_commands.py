"""`maintain` and its parts, and the health in `status` and `show`, as a person meets them.

Every command is a process of its own that has no Java to find: what is small is kept healthy without Spark.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sqlite3
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.maintenance_state import Consumer, Maintenance
from floodmark.cli.main import main
from floodmark.cli.maintain import sentence
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place

COMMITS = 6
NOW = "2026-11-15T00:00:00Z"


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
    os.environ.clear()
    os.environ.update({"PATH": f"{folder}/empty", "HOME": folder, "FLOODMARK_LAKE": "lake"})
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


def maintain(folder: Path, *arguments: str, code: int = 0) -> Done:
    return command(folder, "maintain", *arguments, code=code)


def answer(folder: Path, *arguments: str, code: int = 0) -> Any:
    return command(folder, *arguments, "--json", code=code).data


def make_lake(folder: Path) -> Path:
    """Events came a few at a time, one month each, and one was deleted; notes have one file."""
    with fm.open(folder / "lake", create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, ts timestamp", key=["id"])
        lake.create_table("notes", "id long not null, name string")
        for month in range(1, COMMITS + 1):
            ids = range(month * 10, month * 10 + 3)
            lake.append("events", [{"id": number, "ts": datetime(2026, month, 1, tzinfo=UTC)} for number in ids])
        lake.delete("events", "id = 10")
        lake.append("notes", [{"id": 1, "name": "one"}])
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_lake(tmp_path)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake that no test changes."""
    return make_lake(tmp_path_factory.mktemp("still"))


def rows(folder: Path, table: str = "events") -> list[tuple[int, int]]:
    """Each row's id and sequence; the lake is sound."""
    with fm.open(folder / "lake", read_only=True) as lake:
        check_lake(lake.catalog)
        found = lake.read_arrow(table, with_seq=True).read_all().to_pylist()
    return sorted((row["id"], row["_seq"]) for row in found)


def everything(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Every row of the catalog, and every file of the lake with the time of its last change."""
    with closing(sqlite3.connect(folder / "lake" / "catalog.db")) as database:
        dump = list(database.iterdump())
    files = (path for part in ("tables", "operations") for path in (folder / "lake" / part).rglob("*"))
    return dump, {str(path): path.stat().st_mtime_ns for path in files}


def data_file(folder: Path, table: str) -> Path:
    with fm.open(folder / "lake", read_only=True) as lake:
        path = lake.catalog.files.data_files(lake.catalog.history.head(table))[0]
    return Path(path.removeprefix("file://"))


# ── compact ──


def test_a_compaction_is_told_in_a_sentence_and_keeps_rows_and_sequences(made: Path) -> None:
    before = rows(made)
    assert maintain(made, "compact") == Done(
        0,
        "events: below threshold: 6 small files, compaction starts at 32\nnotes: nothing to do: 1 small file of 1\n",
        "",
    )
    planned = maintain(made, "compact", "events", "--files", "4", "--dry-run")
    assert re.fullmatch(r"events: would compact 6 files in 1 group \([\d.]+ kB, 17 rows\)\n", planned.stdout)
    done = maintain(made, "compact", "--files", "4")
    assert re.fullmatch(
        r"events: compacted 6 files into 1 \([\d.]+ kB -> [\d.]+ (bytes|kB)\), 17 rows, version 11", done.lines[0]
    )
    assert (done.lines[1:], done.stderr) == (["notes: nothing to do: 1 small file of 1"], "")
    assert rows(made) == before
    assert maintain(made, "compact", "events", "--files", "4").stdout == "events: nothing to do: 1 small file of 1\n"


def test_a_compaction_as_one_json_object(made: Path) -> None:
    below = answer(made, "maintain", "compact", "events")
    assert (below["outcome"], below["records"][0]["below_threshold"]) == ("below_threshold", 6)
    planned = answer(made, "maintain", "compact", "events", "--files", "4", "--dry-run")
    assert (planned["outcome"], planned["records"][0]["files_in"]) == ("planned", 6)
    done = answer(made, "maintain", "compact", "--files", "4")
    assert list(done) == ["outcome", "records"]
    assert done["outcome"] == "compacted"
    events, notes = done["records"]
    assert (events["verb"], events["table"], events["outcome"]) == ("compact", "events", "compacted")
    assert (events["files_in"], events["files_out"], events["rows"], events["versions"]) == (6, 1, 17, [11])
    assert (notes["table"], notes["outcome"]) == ("notes", "nothing_to_do")


def test_an_empty_lake_has_nothing_to_keep(tmp_path: Path) -> None:
    with fm.open(tmp_path / "lake", create=True):
        pass
    assert maintain(tmp_path, "compact").stdout == "nothing to do: no tables yet\n"
    assert maintain(tmp_path).lines[-1] == "nothing to do"


# ── what goes wrong ──


def test_a_damaged_table_fails_by_name_and_the_others_are_done(made: Path) -> None:
    with fm.open(made / "lake") as lake:
        for number in range(2, 6):
            lake.append("notes", [{"id": number, "name": "more"}])
    path = data_file(made, "events")
    aside = shutil.move(path, made / "aside")
    done = maintain(made, "compact", "--files", "4", code=5)
    assert done.lines[0].startswith("events: failed: Corrupt: ")
    assert done.lines[1].startswith("notes: compacted 5 files into 1 ")
    again = answer(made, "maintain", "compact", "--files", "4", code=5)
    assert (again["outcome"], [one["outcome"] for one in again["records"]]) == ("failed", ["failed", "nothing_to_do"])
    assert again["records"][0]["error"] == "Corrupt"

    status = answer(made, "status")
    assert status["health"] == "attention: compact events failed (Corrupt); see `floodmark maintain history`"
    assert status["last_maintenance"]["compact"]["failed"] == ["compact events failed (Corrupt)"]
    assert "FAILED" in next(line for line in command(made, "status").lines if line.startswith("last_maintenance"))
    shutil.move(aside, path)
    assert maintain(made, "compact", "--files", "4").lines[0].startswith("events: compacted 6 files into 1 ")
    status = answer(made, "status")
    assert (status["health"], status["last_maintenance"]["compact"]["failed"]) == ("fine", [])
    assert len(rows(made)) == 17


def test_one_failed_and_one_compacted_are_partial(made: Path) -> None:
    with fm.open(made / "lake") as lake:
        for number in range(2, 6):
            lake.append("notes", [{"id": number, "name": "more"}])
    data_file(made, "events").unlink()
    done = answer(made, "maintain", "compact", "--files", "4", code=5)
    assert (done["outcome"], [one["outcome"] for one in done["records"]]) == ("partial", ["failed", "compacted"])


def append_batch(place: Place) -> None:
    with place.open() as lake:
        lake.append("notes", [{"id": 2, "name": "two"}], batch="monday")


def test_nothing_is_kept_healthy_while_an_operation_cannot_be_understood(made: Path) -> None:
    assert run_killed(append_batch, Place(str(made / "lake"), None), failpoint="append.sealed")
    with fm.open(made / "lake", recover=False) as lake, lake.catalog.database.write() as tx:
        tx.execute(update(tables.operations).where(tables.operations.c.state == "staged").values(state="floating"))
    files = everything(made)[1]
    done = answer(made, "maintain", "--files", "4", "--keep", "0s", "--grace", "0s", code=5)
    assert done["outcome"] == "refused"
    assert {(one["outcome"], one["error"], one["table"]) for one in done["records"]} == {("refused", "Corrupt", None)}
    assert {one["verb"] for one in done["records"]} == {"retain", "compact", "index", "expire", "sweep"}
    assert maintain(made, "sweep", code=5).lines[0].startswith("refused: Corrupt: ")
    assert everything(made)[1] == files

    status = answer(made, "status")
    assert status["health"].startswith("refused: 1 operation(s)")
    command(made, "recover", "--discard", status["unknown"][0], "--apply")
    # It was refused for all tables and verbs: any run that is let through shows that this is over.
    assert answer(made, "status")["health"].startswith("attention: retain refused (Corrupt), ")
    maintain(made, "compact", "notes")
    assert answer(made, "status")["health"] == "fine"


# ── retain ──


def set_marks(folder: Path) -> None:
    with fm.open(folder / "lake") as lake:
        table_id = lake.catalog.history.head("events").table_id
        for name, mark, protected in (("ahead", 7, True), ("behind", 2, True), ("careless", 0, False)):
            lake.catalog.maintenance.put_consumer(Consumer(name, table_id, mark, protected))


def test_a_policy_is_set_shown_and_taken_away(made: Path) -> None:
    assert maintain(made, "policy", "events").stdout == "events keeps everything\n"
    assert maintain(made, "policy", "events", "--retention", "90d").stdout == "events keeps 90d by ts\n"
    assert answer(made, "maintain", "policy", "events") == {"table": "events", "retention": "90d", "column": "ts"}
    shown = answer(made, "show", "events")
    assert (shown["retention"], shown["retention_column"]) == ("90d", "ts")
    assert maintain(made, "policy", "notes", "--retention", "1000 rows").stdout == "notes keeps 1000 rows\n"
    done = answer(made, "maintain", "policy", "events", "--none")
    assert done == {"table": "events", "retention": None, "column": None}
    assert answer(made, "show", "events")["retention"] is None


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (("events", "--retention", "soon"), "Invalid", "90d"),
        (("events", "--retention", "0d"), "Invalid", "0d"),
        (("events", "--retention", "90d", "--column", "tz"), "Invalid", "ts"),
        (("events", "--retention", "90d", "--column", "id"), "Invalid", "timestamp"),
        (("events", "--retention", "10 GB", "--column", "ts"), "Invalid", "column"),
        (("notes", "--retention", "90d"), "Invalid", "time column"),
        (("events", "--column", "ts"), "Invalid", "--retention"),
        (("events", "--none", "--retention", "90d"), "Invalid", "--none"),
        (("nowhere", "--retention", "90d"), "NotFound", "nowhere"),
        (("nowhere",), "NotFound", "nowhere"),
    ],
)
def test_a_wrong_policy_is_named_and_changes_nothing(
    still: Path, arguments: tuple[str, ...], kind: str, word: str
) -> None:
    maintain(still, "policy", *arguments, code=2).says(kind, word)
    assert answer(still, "maintain", "policy", "events")["retention"] is None


def test_retention_says_what_went_and_what_is_kept_for_whom(made: Path) -> None:
    maintain(made, "policy", "events", "--retention", "200d")
    planned = maintain(made, "retain", "--now", NOW, "--dry-run")
    assert planned == Done(0, "events: would delete 11 rows (policy 200d by ts): 4 files dropped, 0 rewritten\n", "")
    set_marks(made)
    due = ("retain", "events", "--now", NOW)
    done = maintain(made, *due)
    assert done.stdout == (
        "events: deleted 5 rows (policy 200d by ts): 2 files dropped, 0 rewritten, version 11; "
        "6 due rows stay: a protected consumer has not read them\n"
        "events: careless has lost 5 rows that it has not read\n"
    )
    assert [number for number, _ in rows(made)][:3] == [30, 31, 32]
    again = answer(made, "maintain", *due)
    assert (again["outcome"], again["records"][0]["rows_protected"]) == ("protected", 6)
    assert maintain(made, *due).stdout.startswith("events: protected: 6 due rows stay: ")


def test_a_forced_loss_is_shown_first_done_with_apply_and_told_again(made: Path) -> None:
    maintain(made, "policy", "events", "--retention", "200d")
    set_marks(made)
    forced = ("retain", "--now", NOW, "--force")
    before = everything(made)
    planned = maintain(made, *forced)
    assert planned.lines[0].startswith("events: would delete 11 rows ")
    losses = {"behind": 6, "careless": 11}
    assert set(planned.lines[1:]) == {
        f"events: {name} will lose {count} rows that it has not read" for name, count in losses.items()
    }
    assert planned.stderr == "Add --apply to do it.\n"
    assert everything(made) == before
    done = maintain(made, *forced, "--apply")
    assert done.lines[0].startswith("events: deleted 11 rows ")
    assert set(done.lines[1:]) == {line.replace("will lose", "has lost") for line in planned.lines[1:]}
    assert done.stderr.splitlines() == planned.lines[1:]
    (record,) = answer(made, "maintain", "history", "events", "--limit", "1")["records"]
    assert (record["outcome"], record["lost"], record["rows_removed"]) == ("retained", losses, 11)
    assert len(rows(made)) == 6


def test_retention_without_a_policy_says_so(still: Path) -> None:
    assert maintain(still, "retain").stdout == "nothing to do: no table has a retention policy\n"
    assert answer(still, "maintain", "retain") == {"outcome": "nothing_to_do", "records": []}
    maintain(still, "retain", "events", code=2).says("Invalid", "maintain policy")


# ── expire and sweep ──


def test_versions_expire_then_their_files_are_listed_then_deleted(made: Path) -> None:
    held = maintain(made, "expire")
    assert re.fullmatch(r"nothing to do: no version before 20\S+Z can expire\n", held.stdout)
    maintain(made, "compact", "--files", "4")
    before = rows(made)
    assert maintain(made, "expire", "--keep", "0s", "--dry-run").stdout == "would expire 10 versions (1 to 10)\n"
    assert maintain(made, "expire", "--keep", "0s").stdout == "expired 10 versions (1 to 10)\n"
    command(made, "changes", "events", "--version", "5", code=2).says("BelowRetention", "5")
    # Their readers still have time.
    assert maintain(made, "sweep").stdout == "nothing to do: no files to delete\n"

    planned = maintain(made, "sweep", "events", "--grace", "0s", "--dry-run")
    head, *listed, total = planned.lines
    files = int(re.match(r"events: would delete (\d+) files \(", head)[1])  # type: ignore[index]
    assert files == len(listed) > 0
    assert total.startswith(f"total: {files} files, ")
    for line in listed:
        found = re.fullmatch(r" +[\d.]+ (?:bytes|kB)  (\w+) +(file:///\S+)  (.+)", line)
        assert found is not None, line
        assert found[1] in ("data", "deletions", "manifest", "list", "metadata")
        assert Path(found[2].removeprefix("file://")).exists()
        assert re.fullmatch(r"only expired versions name it \(\d+ to \d+\)|deletions .*", found[3])
    data = answer(made, "maintain", "sweep", "events", "--grace", "0s", "--dry-run")
    (record,) = data["records"]
    assert (data["outcome"], record["files"], len(record["listing"])) == ("planned", files, files)
    assert record["bytes"] == sum(file["bytes"] for file in record["listing"])
    assert set(record["listing"][0]) == {"file", "kind", "bytes", "reason"}

    assert maintain(made, "sweep", "events", "--grace", "0s").stdout.startswith(f"events: deleted {files} files (")
    assert not any(Path(file["file"].removeprefix("file://")).exists() for file in record["listing"])
    assert rows(made) == before
    nothing = maintain(made, "sweep", "--grace", "0s", "--deep")
    assert set(nothing.lines) == {"nothing to do: no files to delete"}
    done = maintain(made, "sweep", "events", "--grace", "0s", "--dry-run")
    assert done.lines == ["total: 0 files, 0 bytes"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("compact",),
        ("retain", "--now", NOW),
        ("retain", "--now", NOW, "--force"),
        ("expire",),
        ("sweep",),
        ("sweep", "events"),
        ("sweep", "--deep"),
    ],
    ids=lambda arguments: "-".join(arguments) or "everything",
)
def test_a_dry_run_changes_neither_a_row_nor_a_file(due: Path, arguments: tuple[str, ...]) -> None:
    before = everything(due)
    done = answer(due, "maintain", *arguments, "--dry-run")
    assert done["outcome"] == "planned"
    assert everything(due) == before


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake that no test changes, with something to do for every part: settings without window and grace."""
    folder = make_lake(tmp_path_factory.mktemp("due"))
    (folder / "floodmark.toml").write_text('[maintain]\ncompact_files = 4\nkeep_versions = "0s"\ngrace = "0s"\n')
    with fm.open(folder / "lake") as lake:
        lake.maintain.expire(keep="0s")
        lake.maintain.set_policy("events", "30d")
        lake.append("notes", [{"id": 2, "name": "two"}])
        lake.append("notes", [{"id": 3, "name": "three"}])
        # A file of an operation that ended without it.
        folder_of_commit = Path(lake.catalog.files.data_files(lake.catalog.history.head("notes"))[0][7:]).parent
        (folder_of_commit / "late.parquet").write_bytes(b"late")
    return folder


# ── all of it ──


def test_maintenance_alone_does_everything_in_order_and_says_how_it_ended(made: Path) -> None:
    (made / "floodmark.toml").write_text('[maintain]\ncompact_files = 4\nkeep_versions = "0s"\ngrace = "0s"\n')
    maintain(made, "policy", "events", "--retention", "1000 rows")
    before = rows(made)
    status = answer(made, "status")
    assert (status["small_files"], status["files"], status["small_file_ratio"]) == (7, 7, 1.0)
    assert (status["versions"], status["expired_states"], status["health"]) == (10, 0, "fine")
    assert status["due"] == [
        "retain events: policy 1000 rows, last run never",
        "compact events: 6 small files",
        "expire: 9 versions older than 0s",
    ]
    assert status["last_maintenance"] == dict.fromkeys(("retain", "compact", "index", "expire", "sweep"))
    planned = maintain(made, "--dry-run")
    assert planned.lines[-1].startswith("planned: ")

    done = maintain(made)
    assert [line.split()[0] for line in done.lines] == [
        *("retain", "compact", "compact", "index", "expire", "sweep", "sweep"),
        "compacted:",
    ]
    assert done.lines[0] == "retain   events: nothing to do: no row is due (policy 1000 rows)"
    assert done.lines[3] == "index    events: retired 7 segments"
    assert done.lines[4] == "expire   expired 10 versions (1 to 10)"
    assert done.lines[-1] == "compacted: 3 nothing to do, 1 compacted, 1 indexed, 1 expired, 1 swept"
    assert (done.stderr, rows(made)) == ("", before)

    status = answer(made, "status")
    assert (status["small_files"], status["files"], status["versions"], status["due"]) == (2, 2, 1, [])
    outcomes = {verb: run["outcome"] for verb, run in status["last_maintenance"].items()}
    assert outcomes == {
        "retain": "nothing_to_do",
        "compact": "nothing_to_do",
        "index": "indexed",
        "expire": "expired",
        "sweep": "swept",
    }
    assert set(status["last_maintenance"]["sweep"]) == {"at", "outcome", "table", "failed"}
    again = answer(made, "maintain")
    assert (again["outcome"], {one["outcome"] for one in again["records"]}) == ("nothing_to_do", {"nothing_to_do"})


def test_one_table_alone_leaves_the_others_as_they_are(made: Path) -> None:
    done = answer(made, "maintain", "--table", "events", "--files", "4", "--keep", "0s", "--grace", "0s")
    assert [(one["verb"], one["table"], one["outcome"]) for one in done["records"]] == [
        ("compact", "events", "compacted"),
        ("index", "events", "indexed"),
        ("expire", None, "expired"),
        ("sweep", "events", "swept"),
    ]


def test_history_tells_what_maintenance_did_newest_first(made: Path) -> None:
    assert maintain(made, "history").stdout == "no maintenance yet\n"
    maintain(made, "compact", "--files", "4")
    maintain(made, "expire", "--keep", "0s")
    records = answer(made, "maintain", "history")["records"]
    assert [(one["verb"], one["table"]) for one in records] == [
        ("expire", None),
        ("compact", "notes"),
        ("compact", "events"),
    ]
    assert {"verb", "table", "outcome", "at", "files_in", "files_out", "versions"} <= set(records[-1])
    text = maintain(made, "history", "events")
    assert text.lines[0].split() == ["time", "verb", "outcome", "actor", "what"]
    assert len(text.lines) == 2
    assert "events: compacted 6 files into 1 (" in text.lines[1]
    assert len(answer(made, "maintain", "history", "--limit", "2")["records"]) == 2
    maintain(made, "history", "nowhere", code=2).says("NotFound", "nowhere")


# ── health ──


def test_show_has_the_figures_of_a_table_before_and_after(made: Path) -> None:
    set_marks(made)
    shown = answer(made, "show", "events")
    assert (shown["files"], shown["small_files"], shown["small_file_ratio"], shown["snapshots"]) == (6, 6, 1.0, 8)
    assert (shown["orphan_files"], shown["orphan_bytes"], shown["last_maintenance"], shown["due"]) == (0, 0, {}, [])
    assert shown["consumers"] == [
        {"name": "careless", "mark": 0, "lag": 7, "protected": False},
        {"name": "behind", "mark": 2, "lag": 5, "protected": True},
        {"name": "ahead", "mark": 7, "lag": 0, "protected": True},
    ]
    maintain(made, "compact", "--files", "4")
    maintain(made, "expire", "--keep", "0s")
    shown = answer(made, "show", "events")
    assert (shown["files"], shown["small_files"], shown["snapshots"]) == (1, 1, 1)
    waiting = answer(made, "maintain", "sweep", "events", "--grace", "0s", "--dry-run")["records"][0]
    assert (shown["orphan_files"], shown["orphan_bytes"]) == (waiting["files"], waiting["bytes"])
    assert shown["orphan_files"] > 0
    assert answer(made, "status")["expired_states"] > 0
    assert shown["last_maintenance"]["compact"]["outcome"] == "compacted"
    text = command(made, "show", "events").lines
    assert ["behind", "2", "6", "yes"] in [line.split() for line in text]
    maintain(made, "sweep", "--grace", "0s")
    shown = answer(made, "show", "events")
    assert (shown["orphan_files"], shown["orphan_bytes"]) == (0, 0)
    assert answer(made, "status")["expired_states"] == 0


def test_what_the_last_run_left_alone_is_not_due(made: Path) -> None:
    (made / "floodmark.toml").write_text("[maintain]\ncompact_files = 3\n")
    with fm.open(made / "lake") as lake:
        lake.create_table("parts", "id long not null, part string", partition=["part"])
        lake.append("parts", [{"id": number, "part": f"p{number}"} for number in range(4)])
    due = "compact parts: 4 small files"
    assert due in answer(made, "status")["due"]
    # Each partition has one file only, and there is nothing to be gained.
    assert answer(made, "maintain", "compact", "parts")["outcome"] == "nothing_to_do"
    assert due not in answer(made, "status")["due"]
    assert due not in answer(made, "show", "parts")["due"]


# ── wrong input ──


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (("--dry-run", "sweep"), "Invalid", "floodmark maintain sweep"),
        (("--grace", "0s", "sweep"), "Invalid", "floodmark maintain sweep"),
        (("--table", "events", "compact"), "Invalid", "floodmark maintain compact"),
        (("--keep", "soon"), "Invalid", "soon"),
        (("--grace", ""), "Invalid", "24h"),
        (("expire", "--keep", "-1d"), "Invalid", "-1d"),
        (("sweep", "--grace", "1"), "Invalid", "'1'"),
        (("sweep", "events", "--deep"), "Invalid", "whole lake"),
        (("retain", "--now", "tomorrow"), "Invalid", "tomorrow"),
        (("retain", "--apply", "--dry-run"), "Invalid", "--dry-run"),
        (("compact", "nowhere"), "NotFound", "events"),
        (("sweep", "nowhere"), "NotFound", "events"),
        (("--table", "nowhere"), "NotFound", "events"),
    ],
)
def test_wrong_input_is_named_before_anything_is_done(
    still: Path, arguments: tuple[str, ...], kind: str, word: str
) -> None:
    before = everything(still)
    maintain(still, *arguments, code=2).says(kind, word)
    assert everything(still) == before


@pytest.mark.parametrize("arguments", [("--files", "1"), ("compact", "--files", "x"), ("polish",), ("policy",)])
def test_wrong_usage_is_exit_code_2(still: Path, arguments: tuple[str, ...]) -> None:
    done = maintain(still, *arguments, code=2)
    assert done.stdout == ""
    assert "Usage" in done.stderr


@pytest.mark.parametrize(
    ("text", "setting", "word"),
    [
        ('keep_versions = "soon"', "maintain.keep_versions", "soon"),
        ('grace = "24"', "maintain.grace", "24h"),
        ("grace = 24", "maintain.grace", "string"),
        ("compact_files = 1", "maintain.compact_files", "two"),
        ('compact_files = "many"', "maintain.compact_files", "integer"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_done(tmp_path: Path, text: str, setting: str, word: str) -> None:
    (tmp_path / "floodmark.toml").write_text(f"[maintain]\n{text}\n")
    maintain(tmp_path, "--table", "events", code=2).says("Invalid", f"setting={setting}", word)


# ── sentences of what is rare ──


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            Maintenance("compact", "events", "conflict", {"conflicts": 2}),
            "events: conflict: 2 groups of files changed meanwhile; run it again",
        ),
        (
            Maintenance("compact", "events", "conflict", {"message": "it kept changing", "error": "Conflict"}),
            "events: conflict: it kept changing",
        ),
        (
            Maintenance(
                "compact",
                "events",
                "partial",
                {
                    "files_in": 61,
                    "files_out": 1,
                    "bytes_in": 33_633,
                    "bytes_out": 999,
                    "rows": 294,
                    "conflicts": 1,
                    "versions": [65, 67],
                },
            ),
            "events: partial: compacted 61 files into 1 (33.6 kB -> 999 bytes), 294 rows, version 65, 67; "
            "1 group of files changed meanwhile; run it again",
        ),
        (
            Maintenance("compact", "events", "nothing_to_do", {"small_files": 9, "files": 9, "could_not_improve": 1}),
            "events: nothing to do: 9 small files of 9, 1 group could not be improved",
        ),
        (
            Maintenance("sweep", "", "swept", {"files": 2, "bytes": 1_500_000, "states": 0, "unknown_files": 3}),
            "deleted 2 leftover files (1.5 MB); 3 files of unknown origin kept",
        ),
        (
            Maintenance("expire", "", "failed", {"error": "Unavailable", "message": "held", "unrecorded": "held"}),
            "failed: Unavailable: held (this run could not be recorded: held)",
        ),
    ],
    ids=lambda value: f"{value.verb}-{value.outcome}" if isinstance(value, Maintenance) else "",
)
def test_rare_outcomes_have_a_sentence_too(record: Maintenance, expected: str) -> None:
    assert sentence(record) == expected

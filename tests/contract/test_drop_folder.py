"""A drop folder: complete files come in once, bad ones are moved aside with the reason, and none is lost."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.ingest.drop import Drop, DropFolder, DropRun
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids

# What these show does not depend on the database, but for the door that they pass.
pytestmark = pytest.mark.mostly_sqlite(4)


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in"
    made.mkdir()
    return made


def drop(lake: fm.Lake, folder: Path, table: str = "events", **options: Any) -> Drop:
    return Drop(lake, "src", folder, table, **{"settle_s": 0.0, **options})


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def reason(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / ".failed" / f"{name}.reason.json").read_text())
    return found


def test_files_of_every_format_come_in_once_and_go_to_loaded(lake: fm.Lake, folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"id": 1}\n{"id": 2, "name": "b"}\n')
    (folder / "sub").mkdir()
    (folder / "sub" / "b.csv").write_text("name,id\nx,3\n")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b'{"id": 4}\n'))
    pq.write_table(pa.table({"id": pa.array([5], pa.int64()), "name": ["e"]}), folder / "d.parquet")
    source = drop(lake, folder)
    assert source.run() == DropRun(loaded=4, rows=5)
    assert ids(lake) == [1, 2, 3, 4, 5]
    assert files(folder) == sorted(f".loaded/{name}" for name in ("a.jsonl", "c.jsonl.gz", "d.parquet", "sub/b.csv"))
    version = lake.status()["version"]
    assert source.run() == DropRun()
    assert lake.status()["version"] == version


def test_the_same_file_again_is_a_no_op_and_another_name_or_content_is_another_file(
    lake: fm.Lake, folder: Path
) -> None:
    source = drop(lake, folder)
    for name, text in (("a.jsonl", '{"id": 1}'), ("a.jsonl", '{"id": 1}'), ("b.jsonl", '{"id": 1}')):
        (folder / name).write_text(text)
        assert source.run().loaded == 1
    (folder / "a.jsonl").write_text('{"id": 2}')
    assert source.run() == DropRun(loaded=1, rows=1)
    assert ids(lake) == [1, 1, 2]
    # None of them was overwritten.
    assert files(folder) == [".loaded/a.jsonl", ".loaded/a.jsonl.1", ".loaded/a.jsonl.2", ".loaded/b.jsonl"]


def test_into_a_table_with_a_key_files_are_merged_in_the_order_of_their_times(lake: fm.Lake, folder: Path) -> None:
    for time_s, name, text in ((200, "a", "new"), (100, "b", "old")):
        (folder / f"{name}.jsonl").write_text(json.dumps({"id": 1, "name": text}))
        os.utime(folder / f"{name}.jsonl", (time_s, time_s))
    assert drop(lake, folder, "people").run().loaded == 2
    assert lake.read_arrow("people").read_all().to_pylist() == [{"id": 1, "name": "new"}]
    # Appended instead, a key that is there refuses the file.
    (folder / "c.jsonl").write_text('{"id": 1}')
    assert drop(lake, folder, "people", mode="append").run().failed == 1
    assert "key" in reason(folder, "c.jsonl")["text"]


BAD = {
    "a.jsonl": ('{"id": 1}\n{"id": "x"}\n', {"line": "2", "column": "id"}),
    "b.csv": ("id,name\n7,x\ny,z\n", {"line": "3", "column": "id"}),
    "c.jsonl": ('{"id": 1}\n{"id": \n', {"line": "2"}),
    "d.parquet": ("no", {}),
    "e.csv.gz": ("no", {}),
    "f.txt": ("no", {}),
}


def test_bad_files_go_aside_with_the_reason_and_the_others_go_on(lake: fm.Lake, folder: Path) -> None:
    for name, (text, _) in BAD.items():
        (folder / name).write_text(text)
    (folder / "z.jsonl").write_text('{"id": 9}\n')
    source = drop(lake, folder)
    assert source.run() == DropRun(loaded=1, rows=1, failed=len(BAD), set_aside=len(BAD))
    assert ids(lake) == [9]
    for name, (text, facts) in BAD.items():
        assert (folder / ".failed" / name).read_text() == text
        found = reason(folder, name)
        assert (found["file"], found["table"], found["error"]["kind"]) == (name, "events", "Invalid")
        assert facts.items() <= found["error"]["facts"].items()
    # The same again: both are kept, each with its reason; mended, it comes in.
    (folder / "a.jsonl").write_text(BAD["a.jsonl"][0])
    assert source.run() == DropRun(failed=1, set_aside=len(BAD) + 1)
    assert reason(folder, "a.jsonl.1")["file"] == "a.jsonl"
    (folder / "a.jsonl").write_text('{"id": 1}\n')
    assert source.run() == DropRun(loaded=1, rows=1, set_aside=len(BAD) + 1)
    assert ids(lake) == [1, 9]


def test_only_complete_files_are_looked_at(lake: fm.Lake, folder: Path, tmp_path: Path) -> None:
    for name in (".a.jsonl", "_b.jsonl", "c.jsonl.tmp", "d.jsonl.part", "e.jsonl.CRDOWNLOAD"):
        (folder / name).write_text('{"id": 1}')
    (folder / "_half").mkdir()
    (folder / "_half" / "f.jsonl").write_text('{"id": 1}')
    (tmp_path / "elsewhere.jsonl").write_text('{"id": 1}')
    (folder / "g.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    before = files(folder)
    assert drop(lake, folder).run() == DropRun()
    assert files(folder) == before


def test_a_file_settles_before_it_is_taken_for_complete(folder: Path) -> None:
    """By a clock of the test's own."""
    watched = DropFolder(folder, settle_s=2.0)
    path = folder / "a.jsonl"
    path.write_text("1")
    assert watched.complete(10.0) == ([], 1)
    assert watched.complete(11.9) == ([], 1)
    path.write_text("12")
    assert watched.complete(12.1) == ([], 1)
    assert watched.complete(14.0) == ([], 1)
    ((found,), waiting) = watched.complete(14.1)
    assert (found.name, waiting) == ("a.jsonl", 0)
    # Changed between the look and the read: it is not complete after all.
    path.write_text("123")
    assert watched.read(found, 100) is None


def test_what_is_no_files_fault_leaves_all_of_them_where_they_are(lake: fm.Lake, folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"id": 1}')
    with pytest.raises(fm.NotFound):
        drop(lake, folder, "nowhere").run()
    with pytest.raises(fm.Invalid, match="with a key"):
        drop(lake, folder, mode="merge").run()
    with pytest.raises(fm.NotFound):
        drop(lake, folder / "gone").run()
    assert files(folder) == ["a.jsonl"]


def test_a_file_that_cannot_be_moved_keeps_no_other_waiting_and_is_told(lake: fm.Lake, folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "a.jsonl").write_text('{"id": 1}')
    (folder / "b.jsonl").write_text('{"id": 2}')
    (folder / ".loaded").mkdir()
    (folder / ".loaded" / "a").write_text("in the way")
    for _ in range(2):
        with pytest.raises(fm.Unavailable, match="read or moved"):
            drop(lake, folder).run()
    assert ids(lake) == [1, 2]
    (folder / ".loaded" / "a").unlink()
    # It was in already.
    assert drop(lake, folder).run() == DropRun(loaded=1)
    assert ids(lake) == [1, 2]


def test_a_file_that_fails_as_nobody_foresaw_stays_and_keeps_no_other_waiting(
    lake: fm.Lake, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.jsonl").write_text('{"id": 1}')
    (folder / "b.jsonl").write_text('{"id": 2}')
    os.utime(folder / "a.jsonl", (100, 100))
    for _ in range(2):
        passed: list[str] = []

        def surprise(point: str, passed: list[str] = passed) -> None:
            passed.append(point)
            if passed == ["drop.found"]:
                raise RuntimeError("a surprise")

        monkeypatch.setattr(failpoints, "observer", surprise)
        with pytest.raises(fm.FloodmarkError, match=r"could not be loaded.*a\.jsonl.*RuntimeError: a surprise"):
            drop(lake, folder).run()
        assert (files(folder), ids(lake)) == ([".loaded/b.jsonl", "a.jsonl"], [2])
    monkeypatch.undo()
    assert drop(lake, folder).run() == DropRun(loaded=1, rows=1)
    assert ids(lake) == [1, 2]


def test_a_long_value_in_csv_stops_no_other_file(lake: fm.Lake, folder: Path) -> None:
    (folder / "a.csv").write_text(f'id,name\n1,"{"x" * 200_000}"\nfoo,y\n')
    (folder / "b.jsonl").write_text('{"id": 2}')
    assert drop(lake, folder).run() == DropRun(loaded=1, rows=1, failed=1, set_aside=1)
    assert reason(folder, "a.csv")["error"]["facts"]["line"] == "3"


def test_a_name_that_is_no_text_is_a_name_all_the_same(lake: fm.Lake, folder: Path) -> None:
    for name, text in ((b"caf\xe9 [1]\n.jsonl", '{"id": 1}'), (b"bad\xff.jsonl", "{")):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text(text)
    assert drop(lake, folder).run() == DropRun(loaded=1, rows=1, failed=1, set_aside=1)
    assert ids(lake) == [1]
    assert "caf\\udce9" in lake.history(limit=1)[0].message


def test_a_run_that_is_stopped_leaves_the_rest_for_the_next(lake: fm.Lake, folder: Path) -> None:
    for number in range(3):
        (folder / f"{number}.jsonl").write_text(json.dumps({"id": number}))
    asked: list[int] = []

    def is_stopped() -> bool:
        asked.append(1)
        return len(asked) > 1

    assert drop(lake, folder).run(is_stopped) == DropRun(loaded=1, rows=1, waiting=2)
    assert drop(lake, folder).run() == DropRun(loaded=2, rows=2)
    assert ids(lake) == [0, 1, 2]


def test_an_empty_file_has_no_rows_and_is_done(lake: fm.Lake, folder: Path) -> None:
    (folder / "a.jsonl").write_text("")
    assert drop(lake, folder).run() == DropRun(loaded=1)
    assert (files(folder), ids(lake)) == ([".loaded/a.jsonl"], [])

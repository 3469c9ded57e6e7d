"""Dirty CSV: every kind of mistake is named with line, column and value; the rows that fit come through as they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.ingest.csv_rows import MISTAKES_SHOWN, CsvFiles
from floodmark.rows.convert import table_shape
from floodmark.rows.schema import table_schema

COLUMNS = table_shape(
    table_schema("id long not null, name string, amount decimal(8,2), day date").model_dump_json()
).columns
DIRTY = """id,name,amount,day
1,Ann,1.50,2026-11-15
2,"two
lines",much,2026-11-15
,Cid,3,2026-11-15
4,Dan,4,tomorrow
5,Eve,5
6,Fay,lots,2026-11-15

7,Gus,7.25,
"""


def files(tmp_path: Path, text: str | bytes = DIRTY, name: str = "dirty.csv", **options: bool) -> CsvFiles:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return CsvFiles([str(path)], COLUMNS, **options)


def test_the_first_mistakes_of_each_kind_are_told_with_line_column_and_value(tmp_path: Path) -> None:
    found = files(tmp_path).find_mistakes()
    assert found is not None
    assert [(one.line, one.column, one.value) for one in found.mistakes] == [
        (3, "amount", "'much'"),
        (5, "id", "''"),
        (6, "day", "'tomorrow'"),
        (7, None, "3 values"),
        (8, "amount", "'lots'"),
    ]
    assert (found.rows, found.kind, found.as_dict()["mistakes"][0]["line"]) == (5, "Invalid", 3)
    assert "line 3, column amount" in str(found)
    assert "--bad-rows set-aside" in found.advice


def test_of_many_mistakes_of_a_kind_the_first_are_told_and_all_are_counted(tmp_path: Path) -> None:
    lines = "".join(f"x{number},n,1,\n" for number in range(25_000))
    found = files(tmp_path, "id,name,amount,day\n" + lines + "1,n,much,\n").find_mistakes()
    assert found is not None
    assert found.rows == 25_001
    assert [one.line for one in found.mistakes] == [*range(2, 2 + MISTAKES_SHOWN), 25_002]


def test_rows_that_fit_come_through_and_the_others_are_kept_in_a_file_with_the_reasons(tmp_path: Path) -> None:
    judged = files(tmp_path)
    rows = judged.good_rows().read_all().to_pylist()
    assert [row["id"] for row in rows] == [1, 7]
    assert (rows[1]["name"], str(rows[1]["amount"]), rows[1]["day"]) == ("Gus", "7.25", None)
    (aside,) = judged.set_aside
    assert aside == str(tmp_path / "_bad-rows/dirty.csv")
    assert Path(aside).read_text() == (
        'id,name,amount,day\n2,"two\nlines",much,2026-11-15\n,Cid,3,2026-11-15\n4,Dan,4,tomorrow\n5,Eve,5\n'
        "6,Fay,lots,2026-11-15\n"
    )
    reasons = [json.loads(line) for line in (tmp_path / "_bad-rows/dirty.reasons.jsonl").read_text().splitlines()]
    assert [(one["line"], one["column"]) for one in reasons] == [
        (3, "amount"),
        (5, "id"),
        (6, "day"),
        (7, None),
        (8, "amount"),
    ]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        "_bad-rows/dirty.csv",
        "_bad-rows/dirty.reasons.jsonl",
        "dirty.csv",
    ]


def test_rows_that_were_set_aside_before_are_not_written_over_by_others(tmp_path: Path) -> None:
    other = DIRTY.replace("much", "little")
    for text, number in ((DIRTY, ""), (DIRTY, ""), (other, "-2")):
        name = f"_bad-rows/dirty{number}.csv"
        judged = files(tmp_path, text)
        judged.good_rows().read_all()
        assert judged.set_aside == [str(tmp_path / name)]
    judged.forget_set_aside()
    assert not (tmp_path / "_bad-rows/dirty-2.csv").exists()
    assert (tmp_path / "_bad-rows/dirty.csv").exists()


def test_bytes_that_are_no_text_are_a_mistake_and_are_kept_as_they_were(tmp_path: Path) -> None:
    judged = files(tmp_path, b"id,name,amount,day\n1,\xff\xfe,1,\n2,ok,2,\n")
    assert [row["id"] for row in judged.good_rows().read_all().to_pylist()] == [2]
    assert b"1,\xff\xfe,1," in Path(judged.set_aside[0]).read_bytes()
    assert (judged.mistakes.first[0].line, judged.mistakes.first[0].column) == (2, "name")


def test_a_clean_file_has_no_mistakes_and_leaves_no_file(tmp_path: Path) -> None:
    judged = files(tmp_path, gzip.compress(b"id,name,amount,day\n1,a,1,\n"), "clean.csv.gz")
    assert judged.find_mistakes() is None
    assert judged.good_rows().read_all().num_rows == 1
    assert judged.set_aside == []
    assert [path.name for path in tmp_path.iterdir()] == ["clean.csv.gz"]


def test_a_header_that_does_not_fit_is_refused_and_not_set_aside(tmp_path: Path) -> None:
    for header, word in (("id,nmae,amount,day", "nmae"), ("id,name,amount", "day"), ("id,id,amount,day", "id")):
        with pytest.raises(fm.Invalid, match=word):
            files(tmp_path, header + "\n1,a,1,\n").good_rows()
    assert files(tmp_path, "id,amount\n1,2\n", partial=True).good_rows().read_all().column_names == ["id", "amount"]


def test_folders_and_patterns_name_their_files_and_other_places_none(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "_skipped.csv"):
        (tmp_path / name).write_text("id\n1\n")
    both = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    assert CsvFiles.local_files([str(tmp_path)]) == both
    assert CsvFiles.local_files([str(tmp_path / "[ab].csv")]) == both
    assert CsvFiles.local_files([(tmp_path / "a.csv").as_uri()]) == both[:1]
    assert CsvFiles.local_files(["s3://bucket/a.csv"]) is None
    assert CsvFiles.local_files([str(tmp_path / "none.csv")]) is None

"""The journal row of a transaction begins with the tables of the one before: writing to them records nothing more."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from sqlalchemy import event

import floodmark as fm
from floodmark.commit.journal import to_operation
from floodmark.testing.invariants import check_lake
from tests.conftest import ids, rows
from tests.contract.test_foreign_cleanup import foreign_table


class Stop(Exception):
    pass


def write_both(lake: fm.Lake, number: int) -> None:
    with lake.transaction() as tx:
        tx.append("events", rows(number))
        tx.append("notes", rows(number))


def journal_folders(lake: fm.Lake) -> set[str]:
    """The tables whose folders the journal has for the one operation that is at work."""
    unfinished, _ = lake.catalog.journal.unfinished()
    (row,) = (one for one in unfinished if one.state == "staging")
    return {folder.rpartition("/data/")[0] for folder in to_operation(row).folders if "/data/" in folder}


def location(lake: fm.Lake, table: str) -> str:
    return lake.catalog.files.metadata(lake.catalog.history.head(table).metadata_location).location


def test_a_second_transaction_on_the_same_tables_records_no_more_folders(lake: fm.Lake) -> None:
    recorded: list[str] = []

    @event.listens_for(lake.catalog.database.engine, "before_cursor_execute")
    def _seen(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if statement.startswith("UPDATE fm_operations SET folders"):
            recorded.append(statement)

    write_both(lake, 1)
    assert len(recorded) == 2
    write_both(lake, 2)
    assert len(recorded) == 2
    assert ids(lake) == ids(lake, "notes") == [1, 2]
    check_lake(lake.catalog)


def test_expected_tables_are_in_the_journal_before_the_first_byte_and_others_when_they_are_written(
    lake: fm.Lake,
) -> None:
    both = {location(lake, "events"), location(lake, "notes")}
    lake.create_table("third", "id long not null, name string")
    write_both(lake, 1)
    with lake.transaction() as tx:
        assert journal_folders(lake) == both
        tx.append("third", rows(1))
        assert journal_folders(lake) == both | {location(lake, "third")}
    with lake.transaction() as tx:
        assert journal_folders(lake) == {location(lake, "third")}
        tx.append("third", rows(2))
    check_lake(lake.catalog)


def test_an_expected_table_that_is_not_written_is_left_as_it_is(lake: fm.Lake) -> None:
    write_both(lake, 1)
    with suppress(Stop), lake.transaction() as tx:
        tx.append("events", rows(2))
        raise Stop
    check_lake(lake.catalog)
    with lake.transaction() as tx:
        tx.append("events", rows(3))
    assert (ids(lake), ids(lake, "notes")) == ([1, 3], [1])
    check_lake(lake.catalog)


def test_an_expected_table_may_be_gone(lake: fm.Lake) -> None:
    write_both(lake, 1)
    lake.apply({"tables": {"events": {"schema": "id long not null, name string"}}}, allow_destructive=True)
    with lake.transaction() as tx:
        tx.append("events", rows(2))
    assert ids(lake) == [1, 2]
    check_lake(lake.catalog)


def test_an_adopted_table_outside_the_lake_is_not_expected(lake: fm.Lake, tmp_path: Path) -> None:
    """Its store may not answer one day, and undoing a transaction looks into the folders of its journal row."""
    lake.adopt("old", foreign_table(tmp_path / "theirs"))
    with lake.transaction() as tx:
        tx.append("old", [{"id": 3}])
        tx.append("events", rows(1))
    with lake.transaction() as tx:
        assert journal_folders(lake) == {location(lake, "events")}
        tx.append("old", [{"id": 4}])
    assert ids(lake, "old") == [1, 2, 3, 4]
    check_lake(lake.catalog)

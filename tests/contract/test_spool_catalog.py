"""What the catalog says of spools and of the daemon, and which spools are refused until an operator settles them."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import insert, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.riders import AlreadyCommitted, Rider
from floodmark.catalog.spools import HeldRows, RetryRider, SpoolRider
from floodmark.commit.seal import rider_from_dict
from floodmark.report.spools import read_spools
from floodmark.spool.accept import BEGIN_ANEW, GIVE_UP, GO_ON, NOTHING, accept, plan
from floodmark.testing.children import run_child
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.intake_world import QUICK, SLOW, bring, folder_of, intake_of, state_of, table_id, take

TABLE, SPOOL, OTHER = "t" * 36, "S" * 26, "O" * 26


# ── riders ──


def check(lake: fm.Lake, rider: Rider) -> None:
    with lake.catalog.database.read() as tx:
        rider.check(tx)


@pytest.mark.mostly_sqlite
def test_a_feed_is_published_from_where_the_spool_is_and_once(lake: fm.Lake) -> None:
    spools = lake.catalog.spools
    rider = SpoolRider(TABLE, SPOOL, 3, 5, 20)
    with pytest.raises(fm.Conflict, match="does not belong to the table"):
        check(lake, rider)
    row = spools.register(TABLE, "events", SPOOL, "here", "/spool")
    assert spools.register(TABLE, "events", SPOOL, "there", "/spool").host == "there"
    with pytest.raises(fm.Conflict, match="another spool"):
        spools.register(TABLE, "events", OTHER, "here", "/spool")
    with pytest.raises(fm.Conflict, match="another record"):
        check(lake, rider)
    spools.accept(row, SPOOL, 3)
    check(lake, rider)
    held = HeldRows("Q" * 26, 3, 2, '{"kind": "Invalid", "message": "no", "records": {"3": 2}}', "file:///nowhere")
    with lake.catalog.database.write() as tx:
        replace(rider, held=(held,)).apply(tx, "op", 7, 1)
    found = spools.get(TABLE)
    assert found is not None
    assert (found.position, found.version, found.rows, found.quarantined) == (5, 7, 20, 2)
    for late in (rider, SpoolRider(TABLE, SPOOL, 0, 4, 1)):
        with pytest.raises(AlreadyCommitted):
            check(lake, late)
    with pytest.raises(fm.Conflict, match="does not belong to the table"):
        check(lake, SpoolRider(TABLE, OTHER, 5, 6, 1))
    with pytest.raises(fm.Conflict, match="meanwhile"):
        spools.accept(row, OTHER, 0)
    assert spools.put_aside(held.id).bad == {3: 2}
    assert spools.put_aside(held.id).error == {"kind": "Invalid", "message": "no"}
    with pytest.raises(fm.NotFound):
        spools.put_aside("none")
    for sealed in (replace(rider, held=(held,)), RetryRider(held.id)):
        assert rider_from_dict(sealed.as_dict()) == sealed


# ── spools that are refused ──


@pytest.fixture
def fed(lake: fm.Lake) -> Iterator[Path]:
    """A lake whose events took two records, of which one is fed; the folder of the spool."""
    with intake_of(lake) as intake:
        bring(lake, intake, "events", *rows(1))
    with intake_of(lake, SLOW) as intake:
        take(lake, intake, "events", *rows(2))
    yield folder_of(lake) / table_id(lake, "events")
    check_lake(lake.catalog)


def refused(lake: fm.Lake, match: str) -> None:
    """The spool is refused by everybody who looks, and other tables go on."""
    with intake_of(lake) as intake:
        with pytest.raises(fm.FloodmarkError, match=match):
            take(lake, intake, "events", *rows(9))
        assert state_of(intake, "events")["state"] == "refused"
        bring(lake, intake, "notes", *rows(1))
    [seen] = [one for one in read_spools(lake.catalog) if one.table == "events"]
    assert seen.state == "refused"
    assert seen.error is not None
    assert seen.error["advice"]
    assert "spool" in lake.status()["health"]


def settle(lake: fm.Lake, action: str, position: int) -> None:
    """Planning changes nothing; accepting does what was planned, and a second time nothing."""
    before = lake.catalog.spools.all()
    planned = plan(lake.catalog, "events", folder_of(lake))
    assert (planned.action, planned.position) == (action, position)
    assert lake.catalog.spools.all() == before
    accept(lake.catalog, planned)
    assert plan(lake.catalog, "events", folder_of(lake)).action == NOTHING
    with intake_of(lake) as intake:
        bring(lake, intake, "events", *rows(5))
        assert state_of(intake, "events")["state"] == "ok"


@pytest.mark.mostly_sqlite
def test_a_spool_that_is_not_there_is_refused_until_that_is_accepted(lake: fm.Lake, fed: Path, tmp_path: Path) -> None:
    shutil.move(fed, tmp_path / "away")
    refused(lake, "is missing")
    settle(lake, BEGIN_ANEW, 0)
    assert ids(lake) == [1, 5]
    # The old one comes back: its rows would come in for records that the new one has.
    shutil.rmtree(fed)
    shutil.move(tmp_path / "away", fed)
    refused(lake, "another spool")
    settle(lake, GO_ON, 0)
    # Rows of it that were in came twice, as the plan said they might.
    assert ids(lake) == [1, 1, 2, 5, 5]


@pytest.mark.mostly_sqlite
def test_a_spool_that_is_older_than_what_was_fed_is_refused(lake: fm.Lake, fed: Path, tmp_path: Path) -> None:
    shutil.copytree(fed, tmp_path / "older")
    with intake_of(lake) as intake:
        bring(lake, intake, "events", *rows(3))
    shutil.rmtree(fed)
    shutil.copytree(tmp_path / "older", fed)
    refused(lake, "older than what was fed")
    settle(lake, GO_ON, 2)
    assert ids(lake) == [1, 2, 3, 5]


def test_after_a_restore_a_spool_is_refused_and_then_goes_on_where_the_catalog_is(
    new_place: Callable[[str], Place], tmp_path: Path
) -> None:
    place = new_place("sqlite")
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        with intake_of(lake) as intake:
            bring(lake, intake, "events", *rows(1))
            lake.backup(tmp_path / "backup")
            bring(lake, intake, "events", *rows(2))
        assert ids(lake) == [1, 2]
    for file in Path(place.path).glob("catalog.db*"):
        file.unlink()
    fm.restore(tmp_path / "backup", place.path)
    with place.open() as lake:
        assert ids(lake) == [1]
        refused(lake, "another incarnation")
        settle(lake, GO_ON, 1)
        # What the table lost with the catalog was still in the spool.
        assert ids(lake) == [1, 2, 5]


@pytest.mark.mostly_sqlite
def test_a_running_intake_goes_on_by_itself_once_it_was_settled(lake: fm.Lake, fed: Path) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.lake).values(incarnation="I" * 26))
    with intake_of(lake) as intake:
        assert state_of(intake, "events")["state"] == "refused"
        accept(lake.catalog, plan(lake.catalog, "events", None))
        assert intake.wait(table_id(lake, "events"), 1, 30).rows == 1
        bring(lake, intake, "events", *rows(3))
    assert ids(lake) == [1, 2, 3]


@pytest.mark.mostly_sqlite
def test_the_spool_of_a_table_that_is_gone_is_given_up_only_when_that_is_accepted(lake: fm.Lake, fed: Path) -> None:
    gone = table_id(lake, "events")
    lake.apply({"events": {"drop": True}}, allow_destructive=True)
    lake.create_table("events", EVENTS)
    with intake_of(lake) as intake:
        bring(lake, intake, "events", *rows(7))
    planned = plan(lake.catalog, gone, folder_of(lake))
    assert (planned.action, planned.rows, planned.lost) == (GIVE_UP, 1, "1 rows that were not fed")
    assert fed.is_dir()
    accept(lake.catalog, planned)
    assert not fed.exists()
    assert [one.table for one in read_spools(lake.catalog)] == ["events"]
    assert ids(lake) == [7]
    # If nothing waits, nobody has to decide anything.
    lake.apply({"events": {"drop": True}}, allow_destructive=True)
    with intake_of(lake) as intake:
        assert {one["state"] for one in intake.states()} == {"ok"}
    assert [(one.state, one.error) for one in read_spools(lake.catalog)] == [("ok", None)]


@pytest.mark.mostly_sqlite
def test_a_damaged_spool_cannot_be_accepted_and_is_kept(lake: fm.Lake, fed: Path) -> None:
    header = fed / "spool.json"
    text = header.read_text()
    header.write_text("{}")
    refused(lake, "cannot be read")
    with pytest.raises(fm.Conflict, match="cannot be accepted"):
        plan(lake.catalog, "events", None)
    header.write_text(text)
    with intake_of(lake) as intake:
        bring(lake, intake, "events", *rows(3))
    assert ids(lake) == [1, 2, 3]


@pytest.mark.mostly_sqlite
def test_a_second_intake_is_told_who_has_the_spool(lake: fm.Lake, fed: Path) -> None:
    with intake_of(lake, QUICK), intake_of(lake, QUICK) as second:
        with pytest.raises(fm.Busy, match="open"):
            take(lake, second, "events", *rows(9))
        assert state_of(second, "events")["state"] == "refused"


@pytest.mark.mostly_sqlite
def test_a_spool_on_another_machine_is_neither_fed_nor_shadowed_here(lake: fm.Lake, fed: Path) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.spools).values(host="elsewhere", folder="/there/spool"))
    [seen] = read_spools(lake.catalog)
    assert (seen.state, seen.waiting_rows, seen.fed_rows) == ("elsewhere", None, 1)
    aside = fed.parent.parent / "aside"
    shutil.move(fed, aside)
    with intake_of(lake) as intake, pytest.raises(fm.Conflict, match="another machine"):
        take(lake, intake, "events", *rows(9))
    # The same spool under another name of the machine is the same spool.
    shutil.move(aside, fed)
    with intake_of(lake) as intake:
        assert intake.wait(table_id(lake, "events"), 1, 30).rows == 1
    assert read_spools(lake.catalog)[0].host == socket.gethostname()


# ── the daemon ──


def become_daemon(place: Place) -> int:
    """And die without a word: the process ends with the row in place."""
    lake = place.open()
    lake.catalog.daemon.take("http://127.0.0.1:1")
    lake.catalog.daemon.report(tasks=[{"name": "feed", "state": "running"}])
    seen = lake.catalog.daemon.seen()
    assert seen is not None
    assert seen["alive"]
    return int(seen["pid"])


def test_one_daemon_at_a_time_and_a_dead_one_is_taken_over(place: Place, lake: fm.Lake) -> None:
    daemon = lake.catalog.daemon
    assert daemon.seen() is None
    pid = run_child(become_daemon, place)
    seen = daemon.seen()
    assert seen is not None
    assert (seen["pid"], seen["alive"], seen["tasks"][0]["name"]) == (pid, False, "feed")
    daemon.take(None)
    daemon.report(address="http://127.0.0.1:2")
    with place.open() as other:
        with pytest.raises(fm.Busy) as caught:
            other.catalog.daemon.take(None)
        facts = caught.value.facts
        assert {"host", "pid", "since", "address"} <= set(facts)
        assert facts["address"] == "http://127.0.0.1:2"
        # Paused for so long that its lease ended: the other takes over, and the first one hears of it.
        with lake.catalog.database.write() as tx:
            tx.execute(update(tables.processes).values(lease_ms=-1))
        other.catalog.daemon.take(None)
        with pytest.raises(fm.Fenced):
            daemon.report(tasks=[])
        daemon.release()
        assert other.catalog.daemon.seen() is not None
        other.catalog.daemon.release()
        assert other.catalog.daemon.seen() is None
        other.catalog.daemon.take(None)
        other.catalog.daemon.release()


@pytest.mark.mostly_sqlite
def test_a_backup_has_the_spools_and_no_daemon(lake: fm.Lake, fed: Path, tmp_path: Path) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(
            insert(tables.spool_quarantine).values(
                id="Q" * 26, table_id="gone", table_name="gone", spool_id=SPOOL, record=0, rows_held=1, reason="{}",
                location="x", at_ms=1, state="dropped", version=None,
            )
        )  # fmt: skip
    lake.catalog.daemon.take(None)
    lake.backup(tmp_path / "backup")
    text = (tmp_path / "backup").read_text()
    assert '"table": "fm_spools"' in text
    assert '"table": "fm_spool_quarantine"' in text
    assert '"table": "fm_daemon"' not in text

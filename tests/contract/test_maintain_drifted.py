"""Maintenance of a table that another writer moved: it says so, touches nothing of it, and goes on with the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.cli.main import main
from tests.conftest import Place, rows
from tests.foreign_writer import by_another, theirs


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("verb", ["compact", "sweep", "run"])
def test_maintenance_of_a_drifted_table_is_refused_and_the_others_go_on(place: Place, lake: fm.Lake, verb: str) -> None:
    for number in range(3):
        lake.append("events", rows(number))
        lake.append("notes", rows(number))
    by_another(place, "events", lambda table: table.append(theirs(k9="i")))
    before = set(Path(place.path, "tables").glob("events*/**/*.*"))
    options = {} if verb == "sweep" else {"files_min": 2}
    for dry_run in (True, False):
        done = getattr(lake.maintain, verb)(dry_run=dry_run, **options)
        found = [record for record in done.records if record.table == "events"]
        assert {record.outcome for record in found} == {"refused"}
        assert 'lake.repair("events")' in found[0].detail["message"]
        assert done.exit_code == 5
    assert set(Path(place.path, "tables").glob("events*/**/*.*")) == before
    if verb != "sweep":
        assert done.outcome == "partial"
        assert lake.show("notes")["files"] == 1
    lake.repair(apply=True)
    assert getattr(lake.maintain, verb)(**options).exit_code == 0


@pytest.mark.mostly_sqlite
def test_the_maintain_command_on_a_drifted_table_says_so_and_exits_non_zero(
    place: Place, lake: fm.Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    by_another(place, "events", lambda table: table.append(theirs(k9="i")))
    catalog = [] if place.catalog is None else ["--catalog", place.catalog]
    with pytest.raises(SystemExit) as ended:
        main(["--lake", lake.location, *catalog, "--json", "maintain"])
    assert ended.value.code == 5
    records = json.loads(capsys.readouterr().out)["records"]
    assert [one["outcome"] for one in records if one["table"] == "events"] == ["refused", "refused"]

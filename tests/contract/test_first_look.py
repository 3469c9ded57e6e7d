"""What a new user meets at a Python prompt or in a notebook: names, help, how things look, and a settings file."""

from __future__ import annotations

import inspect
import json
import pydoc
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.catalog.jobs import Job
from floodmark.shown import ROWS_MAX, Facts, JobFacts, Listing, html_table
from tests.conftest import Place

TABLES = """
[tables.events]
schema = "id long not null, name string"
[tables.people]
columns = {id = "long", name = "string"}
key = ["id"]
"""


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="<ada>") as lake:
        lake.create_table("events", "id long not null, name string")
        yield lake


def test_dir_of_the_package_shows_its_names_and_nothing_else() -> None:
    assert dir(fm) == sorted([*fm.__all__, "__version__"])
    assert all(hasattr(fm, name) for name in dir(fm))


def test_help_of_a_lake_leads_to_every_verb(lake: fm.Lake) -> None:
    text = pydoc.render_doc(lake, renderer=pydoc.plaintext)
    for verb in ("append", "merge", "transaction", "read_arrow", "changes", "branches.create", "sinks.add"):
        assert verb in text.partition("Method resolution order")[0]
    public = [name for name in dir(type(lake)) if not name.startswith("_")]
    assert [name for name in public if not inspect.getdoc(getattr(type(lake), name))] == []
    for name in ("branches", "sinks", "backfill", "maintain"):
        room = getattr(lake, name)
        verbs = [verb for verb, _ in inspect.getmembers(room, callable) if not verb.startswith("_")]
        assert [verb for verb in verbs if not inspect.getdoc(getattr(room, verb))] == []


def test_repr_and_html_of_a_lake_tell_where_and_what_it_is(lake: fm.Lake) -> None:
    assert repr(lake).startswith(f"<Lake {lake.location} for writing as <ada>, catalog sqlite")
    assert "<td>events</td>" in lake._repr_html_()
    lake.close()
    assert lake.location in repr(lake)


def test_a_lake_whose_catalog_does_not_answer_is_shown_all_the_same(new_place: Callable[[str], Place]) -> None:
    place = new_place("sqlite")
    lake = place.open(create=True)
    lake.close()
    Path(lake.location.removeprefix("file://"), "catalog.db").write_bytes(b"no database at all" * 1000)
    assert "&lt;Lake" in lake._repr_html_()


def test_repr_and_html_of_a_commit(lake: fm.Lake) -> None:
    commit = lake.append("events", [{"id": 1}, {"id": 2}], message="<script>")
    assert repr(commit) == f"<Commit version={commit.version} committed: append by <ada> (events +2)>"
    assert repr(commit.table("events")) == f"<TableCommit events +2 rows=2 sequence={commit.table('events').sequence}>"
    html = commit._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert repr(commit) in repr(lake.history())
    assert "<td>events</td>" in lake.history()._repr_html_()  # type: ignore[attr-defined]


def test_repr_and_html_of_a_table(lake: fm.Lake) -> None:
    lake.append("events", [{"id": 1}])
    shown, listed = lake.show("events"), lake.tables()
    assert repr(shown).startswith("<Table events rows=1 files=1 bytes=")
    assert repr(listed).startswith("[<Table events rows=1 ")
    assert "<th>rows</th>" in listed._repr_html_()  # type: ignore[attr-defined]
    assert "<td>columns</td>" in shown._repr_html_()  # type: ignore[attr-defined]
    # They stay what programs know: dicts and lists.
    assert json.loads(json.dumps(listed)) == [dict(one) for one in listed]


def test_repr_and_html_of_a_sink_and_its_run(lake: fm.Lake, tmp_path: Path) -> None:
    lake.append("events", [{"id": 1}])
    sink = lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"))
    assert repr(sink) == "<Sink out kind=files state=active quarantined=0>"
    assert repr(lake.sinks.status()) == f"[{sink!r}]"
    run = lake.sinks.run("out")
    assert repr(run) == "<SinkRun out shipped rows=1>"
    assert "<td>shipped</td>" in run._repr_html_()
    assert "<caption>Sink out</caption>" in lake.sinks.about("out")._repr_html_()  # type: ignore[attr-defined]


def test_repr_and_html_of_a_job_and_its_run(lake: fm.Lake) -> None:
    run = lake.backfill.column("events", "size", "id * 2")
    assert repr(run).startswith(f"<BackfillRun {run.outcome}: <Job ")
    [job] = lake.backfill.list()
    assert repr(job).startswith(f"<Job {job['job']} kind=column status=done")
    assert f"<caption>Job {job['job']}</caption>" in lake.backfill.show(job["job"])._repr_html_()  # type: ignore[attr-defined]
    assert "<td>outcome</td>" in run._repr_html_()
    assert isinstance(job, JobFacts)
    assert not isinstance(job, Job)


def test_a_long_list_is_cut_in_a_notebook_and_says_so() -> None:
    assert "and 3 more" in html_table("many", ["n"], [[n] for n in range(ROWS_MAX + 3)])
    assert Listing[Facts]()._repr_html_() == "<p>none</p>"


# ── tables as tomllib reads them ──


def test_apply_takes_what_tomllib_reads(lake: fm.Lake) -> None:
    data = tomllib.loads(TABLES)
    assert lake.apply(data).outcome == "committed"
    assert {one["table"] for one in lake.tables()} == {"events", "people"}
    assert lake.apply(data["tables"]).outcome == "nothing_to_do"
    assert lake.plan(data).outcome == "nothing_to_do"


def test_apply_takes_a_settings_file_as_it_is(lake: fm.Lake, tmp_path: Path) -> None:
    file = tmp_path / "floodmark.toml"
    file.write_text(f'[lake]\npath = "x"\n[spark]\nmaster = "local[1]"\n{TABLES}')
    assert lake.apply(file).outcome == "committed"
    assert lake.apply(tomllib.loads(file.read_text())).outcome == "nothing_to_do"


def test_apply_names_a_misspelt_section_and_knows_a_table_named_tables(lake: fm.Lake) -> None:
    with pytest.raises(fm.Invalid, match="tabels"):
        lake.apply({"tables": {"t": {"schema": "id long"}}, "tabels": {}})
    with pytest.raises(fm.Invalid, match="Did you mean schema"):
        lake.apply({"tables": {"t": {"shema": "id long"}}})
    lake.apply({"tables": {"columns": {"id": "long"}}})
    lake.apply({"tables": {"columns": {"columns": {"id": "long"}}}})
    assert {"tables", "columns"} <= {one["table"] for one in lake.tables()}


@pytest.mark.parametrize("name", ["maintain", "backfill", "branches", "sinks"])
def test_what_a_lake_has_below_it_says_what_it_can_do(lake: fm.Lake, name: str) -> None:
    part = getattr(lake, name)
    shown = repr(part)
    assert shown.startswith(f"<lake.{name} of {lake.location}: ")
    for verb in shown.rpartition(": ")[2].rstrip(">").split(", "):
        assert callable(getattr(part, verb))


def test_the_overview_of_a_lake_names_what_drops_a_table_and_brings_it_back() -> None:
    assert "drop_table, undrop" in str(fm.Lake.__doc__)


# ── a settings file opens a lake ──

SETTINGS = """
[lake]
path = "{path}"
[spark]
master = "local[3]"
spark.sql.shuffle.partitions = 7
[storage]
region = "eu-north-1"
[maintain]
compact_files = 5
keep_versions = "3d"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("FLOODMARK_LAKE", "FLOODMARK_CATALOG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "floodmark.toml").write_text(SETTINGS.format(path=tmp_path / "lake"))
    return tmp_path / "floodmark.toml"


@pytest.mark.parametrize("how", ["path", "config", "text"])
def test_a_settings_file_opens_a_lake_with_all_its_settings(file: Path, how: str) -> None:
    given = {"config": file} if how == "config" else {"path": str(file) if how == "text" else file}
    with fm.open(**given, create=True) as lake:
        assert lake.location == f"file://{file.parent}/lake"
        assert lake.sessions.settings == {"master": "local[3]", "spark.sql.shuffle.partitions": "7"}
        assert (lake.keeping.compact_files, lake.keeping.keep_versions) == (5, "3d")
        lake.create_table("t", "id long")
        for number in range(5):
            lake.append("t", [{"id": number}])
        assert lake.show("t")["due"] == ["compact t: 5 small files"]
        assert [one.outcome for one in lake.maintain.compact(dry_run=True).records] == ["planned"]


def test_what_is_given_comes_before_the_settings_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"master": "local[1]"}
    with fm.open(tmp_path / "other", config=file, create=True, settings=settings) as lake:
        assert lake.location.endswith("/other")
        assert lake.sessions.settings == {"master": "local[1]", "spark.sql.shuffle.partitions": "7"}
    monkeypatch.setenv("FLOODMARK_CATALOG", f"sqlite:///{tmp_path}/elsewhere.db")
    with fm.open(file, create=True) as lake:
        assert "elsewhere.db" in repr(lake)


@pytest.mark.parametrize("how", ["path", "config"])
def test_a_settings_file_that_is_named_comes_before_the_environment(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A shell may still have another lake from before: rows must not go there."""
    monkeypatch.setenv("FLOODMARK_LAKE", str(tmp_path / "from_environment"))
    monkeypatch.setenv("FLOODMARK_CATALOG", f"sqlite:///{tmp_path}/elsewhere.db")
    file.write_text(f'[lake]\npath = "{tmp_path}/lake"\ncatalog = "sqlite:///{tmp_path}/own.db"\n')
    with fm.open(**{how: file}, create=True) as lake:
        assert lake.location == f"file://{tmp_path}/lake"
        assert "own.db" in repr(lake)
    file.write_text("[maintain]\n")
    with fm.open(**{how: file}, create=True) as lake:
        assert lake.location == f"file://{tmp_path}/from_environment"


def test_a_settings_file_that_is_missing_or_names_no_lake_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(fm.NotFound, match="settings file"):
        fm.open(tmp_path / "none.toml", create=True)
    file.write_text("[spark]\n")
    with pytest.raises(fm.Invalid, match="no lake was named"):
        fm.open(file, create=True)
    with pytest.raises(fm.Invalid, match="no lake was named"):
        fm.open()

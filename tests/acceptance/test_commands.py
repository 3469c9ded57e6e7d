"""The command in a process of its own: what it prints, where, and its exit code. Nothing here needs Java.

Most processes are forked from a warm one, which saves the interpreter's start; some are started as a shell would.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.cli.main import main
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.contract.test_older_formats import EVERY_OLDER, everything, make_older

STATUS_KEYS = [
    *("lake", "catalog", "format", "incarnation", "version", "branches", "tables", "rows", "files", "bytes"),
    *("small_files", "small_file_ratio", "versions", "expired_states", "last_commit"),
    *("running", "waiting", "pending", "unknown", "drifted", "pins", "recovered", "last_maintenance", "due", "sinks"),
    *("spools", "indexes", "quarantined", "daemon", "jobs", "jobs_error", "blocking", "health"),
]
TABLE_KEYS = {
    *("table", "rows", "files", "bytes", "sequence", "version", "changed", "small_files", "small_file_ratio"),
    *("waiting_rows", "quarantined", "indexes", "due", "health"),
}
COMMIT_KEYS = {"version", "outcome", "operation", "kind", "branch", "actor", "message", "committed_ms", "tables"}
SHOW_KEYS = {
    *("table", "table_id", "location", "rows", "files", "bytes", "sequence", "version", "snapshot", "columns", "key"),
    *("partition", "sort", "comment", "metadata_location", "small_files", "small_file_ratio", "snapshots"),
    *(
        "orphan_files",
        "orphan_bytes",
        "retention",
        "retention_column",
        "indexes",
        "consumers",
        "last_maintenance",
        "due",
    ),
}


def environment(**changes: str) -> dict[str, str]:
    """This environment without anything that names a lake, and with these changes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLOODMARK_")}
    return {**kept, **changes}


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


def run_main(arguments: tuple[str, ...], cwd: str, env: dict[str, str]) -> Done:
    """The command's entry, in this process."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as ended:
            code = ended.code or 0
    return Done(code, out.getvalue(), err.getvalue())


def started(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    """The command as a shell starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "floodmark.cli.main", *arguments],
        cwd=cwd,
        env=environment() if env is None else dict(env),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def command(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None, code: int = 0) -> Done:
    done: Done = run_child(run_main, arguments, str(cwd), environment() if env is None else dict(env))
    assert done.code == code, f"{arguments}: {done.stdout}\n{done.stderr}"
    return done


def answer(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None, code: int = 0) -> Any:
    """The one JSON object on stdout; nothing else may be there."""
    done = command(*arguments, "--json", cwd=cwd, env=env, code=code)
    assert done.stdout.count("\n") == 1, done.stdout
    data = json.loads(done.stdout)
    assert isinstance(data, dict)
    return data


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with a lake in ./lake: two tables, one of them with rows."""
    with fm.open(tmp_path / "lake", create=True, actor="test") as lake:
        lake.create_table("events", "id long not null comment 'the key', at timestamp", partition=["day(at)"])
        lake.create_table("notes", EVENTS)
        lake.append("notes", rows(1, 2), message="the first")
    return tmp_path


def append_batch(place: Place) -> None:
    with place.open() as lake:
        lake.append("notes", rows(3), batch="monday")


def append_plain(place: Place) -> None:
    with place.open() as lake:
        lake.append("notes", rows(4))


# ── make and look ──


def test_init_makes_a_lake_once(tmp_path: Path) -> None:
    done = started("init", "--lake", "lake", cwd=tmp_path)
    assert done == Done(0, f"lake ready at file://{tmp_path}/lake (version 0)\n", "")
    again = answer("init", "--lake", "lake", cwd=tmp_path)
    assert again == {
        "lake": f"file://{tmp_path}/lake",
        "catalog": f"sqlite:///{tmp_path}/lake/catalog.db",
        "format": tables.FORMAT,
        "version": 0,
    }
    with fm.open(tmp_path / "lake") as lake:
        check_lake(lake.catalog)


def test_status_as_text_and_as_json(made: Path) -> None:
    done = started("status", "--json", "--lake", "lake", cwd=made)
    data = json.loads(done.stdout)
    assert (done.code, done.stderr) == (0, "")
    assert list(data) == STATUS_KEYS
    assert (data["version"], data["tables"], data["rows"], data["health"]) == (3, 2, 2, "fine")
    shown = dict(line.split(None, 1) for line in command("--lake", "lake", "status", cwd=made).stdout.splitlines())
    assert list(shown) == [name for name in STATUS_KEYS if name != "blocking"], "health says it in words"
    assert (shown["health"], shown["version"], shown["running"]) == ("fine", "3", "-")


def test_tables_show_and_history_as_text_and_as_json(made: Path) -> None:
    env = environment(FLOODMARK_LAKE="lake")
    found = answer("tables", cwd=made, env=env)["tables"]
    assert [(one["table"], one["rows"], one["files"], one["sequence"]) for one in found] == [
        ("events", 0, 0, 0),
        ("notes", 2, 1, 1),
    ]
    assert set(found[0]) == TABLE_KEYS
    text = command("tables", cwd=made, env=env).stdout.splitlines()
    assert text[0].split() == ["table", "rows", "files", "bytes", "sequence", "version"]
    assert text[2].split()[:2] == ["notes", "2"]

    details = answer("show", "events", cwd=made, env=env)
    assert set(details) == SHOW_KEYS
    assert details["partition"] == ["day(at)"]
    assert details["columns"] == [
        {"name": "id", "type": "long", "required": True, "refers_to": None, "filled": None, "comment": "the key"},
        {"name": "at", "type": "timestamptz", "required": False, "refers_to": None, "filled": None, "comment": ""},
    ]
    text = command("show", "events", cwd=made, env=env).stdout.splitlines()
    assert ["id", "long", "yes", "-", "-", "the", "key"] in [line.split() for line in text]

    commits = answer("history", "--limit", "1", cwd=made, env=env)["commits"]
    assert len(commits) == 1
    assert set(commits[0]) == COMMIT_KEYS
    assert (commits[0]["version"], commits[0]["message"], commits[0]["tables"][0]["rows_added"]) == (3, "the first", 2)
    lines = command("history", "--table", "notes", cwd=made, env=env).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["version", "3", "2"]
    assert "notes+2" in lines[1]


def test_recover_and_audit_say_what_was_done(made: Path) -> None:
    place = Place(str(made / "lake"), None)
    assert command("recover", "--lake", "lake", cwd=made).stdout == "nothing_to_do: nothing to do; 0 files deleted\n"
    assert command("audit", "--lake", "lake", cwd=made).stdout == "no recovery or repair yet\n"
    assert run_killed(append_batch, place, failpoint="append.sealed")
    status = answer("status", "--lake", "lake", cwd=made)
    assert len(status["pending"]) == 1
    assert status["health"].startswith("recovery pending: 1 dead operation(s)")
    done = answer("recover", "--lake", "lake", cwd=made)
    assert done["outcome"] == "recovered"
    assert done["rolled_forward"] == status["pending"]
    assert set(done) == {"outcome", "rolled_forward", "rolled_back", "discarded", "refused", "files_deleted", "waiting"}
    assert run_killed(append_plain, place, failpoint="append.sealed")
    done = command("recover", "--lake", "lake", cwd=made)
    assert done.stdout.startswith("recovered: 1 rolled back;")
    audit = answer("audit", "--lake", "lake", cwd=made)["audit"]
    assert [row["outcome"] for row in audit] == ["rolled_back", "rolled_forward"]
    assert set(audit[0]) == {"time", "operation", "kind", "found", "outcome", "version", "detail"}
    text = command("audit", "--limit", "1", "--lake", "lake", cwd=made).stdout.splitlines()
    assert text[0].split() == list(audit[0])
    assert len(text) == 2


def test_a_lake_that_cannot_be_understood_is_refused_until_an_operator_gives_the_operation_up(made: Path) -> None:
    place = Place(str(made / "lake"), None)
    assert run_killed(append_batch, place, failpoint="append.sealed")
    with place.open(recover=False) as lake, lake.catalog.database.write() as tx:
        tx.execute(update(tables.operations).where(tables.operations.c.state == "staged").values(state="floating"))
    operation = answer("status", "--lake", "lake", cwd=made)["unknown"][0]
    refused = answer("recover", "--lake", "lake", cwd=made, code=5)
    assert refused["error"]["kind"] == "Corrupt"
    assert refused["error"]["facts"]["operation"] == operation
    examined = answer("doctor", "--lake", "lake", cwd=made, code=1)
    journal = next(check for check in examined["checks"] if check["check"] == "journal")
    assert journal["result"] == "FAILED"
    assert operation in journal["detail"]
    # Without --apply a destructive command only says what it would do.
    plan = answer("recover", "--discard", operation, "--lake", "lake", cwd=made, code=2)
    assert "--apply" in plan["error"]["advice"]
    assert answer("status", "--lake", "lake", cwd=made)["unknown"] == [operation]
    done = answer("recover", "--discard", operation, "--apply", "--lake", "lake", cwd=made)
    assert (done["outcome"], done["discarded"]) == ("recovered", [operation])
    with place.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake, "notes") == [1, 2]


def test_backup_and_restore(made: Path) -> None:
    taken = answer("backup", "lake.backup", "--lake", "lake", cwd=made)
    assert set(taken) == {"floodmark_backup", "format", "version", "incarnation", "location", "taken", "rows", "file"}
    assert (taken["version"], taken["file"]) == (3, "lake.backup")
    assert command("backup", "again", "--lake", "lake", cwd=made).stdout == (
        f"version 3 backed up to again ({taken['rows']} rows)\n"
    )
    refused = answer("restore", "lake.backup", "--lake", "lake", cwd=made, code=2)
    assert refused["error"]["message"] == "a catalog exists already"
    for lost in (made / "lake").glob("catalog.db*"):
        lost.unlink()
    (made / "torn").write_bytes((made / "lake.backup").read_bytes()[:-100])
    assert answer("restore", "torn", "--lake", "lake", cwd=made, code=5)["error"]["kind"] == "Corrupt"
    assert answer("restore", "nothing", "--lake", "lake", cwd=made, code=2)["error"]["kind"] == "NotFound"
    restored = answer("restore", "lake.backup", "--lake", "lake", cwd=made)
    assert restored["incarnation"] != restored["backup_incarnation"] == taken["incarnation"]
    assert (restored["missing"], restored["version"]) == ([], 3)
    with fm.open(made / "lake") as lake:
        assert ids(lake, "notes") == [1, 2]
        check_lake(lake.catalog)


def test_doctor_checks_every_part(made: Path) -> None:
    checks = answer("doctor", "--lake", "lake", cwd=made)["checks"]
    assert [check["check"] for check in checks] == [
        *("python", "java", "pyspark", "pyiceberg", "pyarrow", "catalog", "journal", "table events", "table notes"),
        *("versions", "jobs"),
    ]
    assert {check["result"] for check in checks} == {"ok"}
    with fm.open(made / "lake", read_only=True) as lake:
        path = lake.catalog.files.data_files(lake.catalog.history.head("notes"))[0].removeprefix("file://")
    os.unlink(path)
    done = command("doctor", "--lake", "lake", cwd=made, code=1)
    line = next(line for line in done.stdout.splitlines() if line.startswith("table notes"))
    assert "FAILED" in line
    assert "missing" in line
    missing = answer("doctor", "--lake", "nowhere", cwd=made, code=1)["checks"][-1]
    assert (missing["check"], missing["result"]) == ("lake", "FAILED")


# ── wrong input, and where it is said ──


@pytest.mark.parametrize(
    ("arguments", "kind", "fact"),
    [
        (("status", "--lake", "nowhere"), "NotFound", "nowhere"),
        (("show", "missing", "--lake", "lake"), "NotFound", "events,notes"),
        (("history", "--table", "missing", "--lake", "lake"), "NotFound", "missing"),
        (("status",), "Invalid", "FLOODMARK_LAKE"),
        (("status", "--lake", "lake", "--catalog", "mysql://host/db"), "Invalid", "mysql"),
        (("status", "--lake", "lake", "--config", "missing.toml"), "NotFound", "missing.toml"),
    ],
)
def test_wrong_input_is_exit_code_2_and_said_on_stderr(
    made: Path, arguments: tuple[str, ...], kind: str, fact: str
) -> None:
    done = command(*arguments, cwd=made, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"floodmark: {kind}: ")
    assert fact in done.stderr
    assert "Traceback" not in done.stderr
    assert not (made / "nowhere").exists()


def test_an_error_as_json_is_one_object_too(made: Path) -> None:
    data = answer("show", "missing", "--lake", "lake", cwd=made, code=2)
    assert set(data) == {"error"}
    assert set(data["error"]) == {"kind", "message", "facts", "advice"}
    assert data["error"]["facts"] == {"table": "missing", "tables": "events,notes"}


@pytest.mark.parametrize("arguments", [("vanish",), ("show",), ("history", "--limit", "0"), ("status", "--wat")])
def test_wrong_usage_is_exit_code_2(made: Path, arguments: tuple[str, ...]) -> None:
    done = command("--lake", "lake", *arguments, cwd=made, code=2)
    assert done.stdout == ""
    assert "Usage" in done.stderr


def test_a_newer_lake_is_exit_code_5(made: Path) -> None:
    with fm.open(made / "lake") as lake, lake.catalog.database.write() as tx:
        tx.execute(update(tables.lake).values(format=tables.FORMAT + 1))
    data = answer("status", "--lake", "lake", cwd=made, code=5)
    assert data["error"]["kind"] == "TooNew"
    assert "Upgrade" in command("tables", "--lake", "lake", cwd=made, code=5).stderr


@pytest.mark.whole
@EVERY_OLDER
def test_a_lake_from_before_the_first_release_is_exit_code_5(tmp_path: Path, number: int) -> None:
    place = Place(str(tmp_path / "lake"), None)
    make_older(place, number)
    there = everything(place)
    error = answer("status", "--lake", "lake", cwd=tmp_path, code=5)["error"]
    assert (error["kind"], error["facts"]) == ("TooOld", {"format": str(number), "format_known": str(tables.FORMAT)})
    said = command("status", "--lake", "lake", cwd=tmp_path, code=5).stderr
    assert said.startswith("floodmark: TooOld: this lake was made by a Floodmark from before the first release")
    assert "export its rows" in said
    for arguments in (("init",), ("recover",), ("sink", "list"), ("spool", "list"), ("maintain", "--dry-run")):
        assert answer(*arguments, "--lake", "lake", cwd=tmp_path, code=5)["error"]["kind"] == "TooOld"
    assert everything(place) == there


# ── which lake ──


def test_options_stand_before_or_behind_the_command_and_win_over_environment_and_file(made: Path) -> None:
    (made / "floodmark.toml").write_text('[lake]\npath = "from_file"\n')
    (made / "other.toml").write_text('[lake]\npath = "lake"\n')
    env = environment(FLOODMARK_LAKE="from_environment")
    for arguments in (("--lake", "lake", "--json", "status"), ("status", "--json", "--lake=lake")):
        done = command(*arguments, cwd=made, env=env)
        assert json.loads(done.stdout)["version"] == 3
    assert "from_environment" in command("status", cwd=made, env=env, code=2).stderr
    assert "from_file" in command("status", cwd=made, code=2).stderr
    for given in (None, env):
        assert answer("status", "--config", "other.toml", cwd=made, env=given)["version"] == 3
    # A file that names no lake leaves it to the environment.
    (made / "other.toml").write_text("[maintain]\n")
    assert "from_environment" in command("status", "--config", "other.toml", cwd=made, env=env, code=2).stderr


def test_a_file_that_is_named_wins_with_its_catalog_too(made: Path) -> None:
    (made / "other.toml").write_text(f'[lake]\npath = "lake"\ncatalog = "sqlite:///{made}/lake/catalog.db"\n')
    env = environment(FLOODMARK_LAKE="elsewhere", FLOODMARK_CATALOG=f"sqlite:///{made}/elsewhere.db")
    assert answer("status", "--config", "other.toml", cwd=made, env=env)["version"] == 3


def test_the_settings_file_of_the_folder_names_the_lake(made: Path) -> None:
    (made / "floodmark.toml").write_text(
        '[lake]\npath = "lake"\n\n[spark]\nmaster = "local[1]"\nspark.ui.enabled = false\n'
    )
    assert answer("status", cwd=made)["lake"] == f"file://{made}/lake"


@pytest.mark.parametrize(
    ("text", "setting", "nearest"),
    [
        ('[lake]\npaht = "lake"\n', "lake.paht", "path"),
        ('[laek]\npath = "lake"\n', "laek", "lake"),
        ('[spark]\nmastre = "local"\n', "spark.mastre", "master"),
        ("[maintain]\ncompact_flies = 3\n", "maintain.compact_flies", "compact_files"),
        ('[maintian]\ngrace = "1h"\n', "maintian", "maintain"),
    ],
)
def test_an_unknown_setting_names_the_nearest(made: Path, text: str, setting: str, nearest: str) -> None:
    (made / "floodmark.toml").write_text(text)
    error = answer("status", "--lake", "lake", cwd=made, code=2)["error"]
    assert error["message"] == "there is no such setting"
    place = "1:2" if "." not in setting else "2:1"
    assert error["facts"] == {"setting": setting, "file": f"floodmark.toml:{place}"}
    assert nearest in error["advice"]


def test_a_settings_file_that_is_no_toml_is_wrong_input(made: Path) -> None:
    (made / "floodmark.toml").write_text("[lake\n")
    assert (
        answer("status", "--lake", "lake", cwd=made, code=2)["error"]["message"]
        == "the settings file is not valid TOML"
    )


# ── what it costs ──


def test_questions_of_state_import_neither_spark_nor_arrow_nor_iceberg(made: Path) -> None:
    script = """
import sys
from floodmark.cli.main import main
for command in ("status", "tables", "history", "audit"):
    try:
        main([command, "--lake", "lake"])
    except SystemExit as ended:
        assert not ended.code, ended.code
print("LOADED", sorted({name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=made, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("LOADED")[2].replace("'", "").strip(" []\n").split(", "))
    assert "sqlalchemy" in loaded, "the list of modules is not what was printed"
    assert loaded & {"pyspark", "pyarrow", "pyiceberg", "pandas", "numpy", "py4j"} == set()


# ── failpoints ──


def test_failpoints_are_listed_a_line_each_with_their_operation(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "floodmark.failpoints"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [tuple(line.split()) for line in done.stdout.splitlines()] == list(FAILPOINTS.items())
    assert ("append.sealed", "append") in FAILPOINTS.items()


def test_a_failpoint_kills_the_command_and_the_next_one_heals(tmp_path: Path) -> None:
    env = environment(FLOODMARK_FAILPOINT="init.registered")
    assert started("init", "--lake", "lake", cwd=tmp_path, env=env) == Done(-9, "", "")
    assert command("init", "--lake", "lake", cwd=tmp_path).stdout.endswith("(version 0)\n")


@pytest.mark.parametrize(
    ("verb", "setting"),
    [("init", "nonsense"), ("init", "init.registered:x"), ("status", "append.seeled"), ("recover", "append.seeled")],
)
def test_an_unknown_failpoint_is_refused_at_once(made: Path, verb: str, setting: str) -> None:
    done = started(verb, "--lake", "lake", cwd=made, env=environment(FLOODMARK_FAILPOINT=setting))
    assert done.code not in (0, -9), done.stdout
    assert f"no such failpoint [setting=FLOODMARK_FAILPOINT={setting}]" in done.stderr
    assert "Traceback" not in done.stderr

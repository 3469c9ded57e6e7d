"""What docs/deployment.md and deploy/ promise, with the real parts: the unit as systemd reads it, every settings file
that is shown, the package as the container installs it, and a lake on PostgreSQL and S3 behind the real daemon."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import floodmark as fm
from floodmark import clock
from floodmark.rows.session import JAVA_VERSIONS
from floodmark.serve.http.access import token_hash
from floodmark.serve.http.body import RequestLimits
from floodmark.settings.settings import load_settings
from floodmark.testing.invariants import check_lake
from floodmark.testing.postgres import PostgresServer
from floodmark.testing.s3 import ENVIRONMENT, S3Server, s3_environment, s3_stand_in
from tests.conftest import EVENTS
from tests.load.check import tally
from tests.load.clients import APPENDED, COLUMNS, Load, body_of, finish
from tests.load.daemon import NO_KILLS, LoadDaemon, run_load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deployment.md").read_text()
UNIT = ROOT / "deploy/floodmark.service"
CONTAINERFILE = (ROOT / "deploy/Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
RECIPE = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)[0]
WAIT_S = 60


# ── systemd ──


def unit() -> dict[str, list[str]]:
    """Values by name, all sections in one: no name is in two of them."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    """With the command that is there; it prints whatever it does not know."""
    (command,) = unit()["ExecStart"]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(shlex.split(command)[0], sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=WAIT_S)
    own = [line for line in (done.stdout + done.stderr).splitlines() if "floodmark" in line]
    assert own == []


def test_the_unit_starts_the_daemon_and_gives_it_the_time_to_end() -> None:
    found = unit()
    command = shlex.split(found["ExecStart"][0])
    assert [Path(command[0]).name, *command[1:]] == ["floodmark", "--config", "/etc/floodmark/floodmark.toml", "run"]
    assert "floodmark" in PROJECT["scripts"]
    drains_ms = [
        clock.parse_duration_ms(example["serve"].get("drain", "20s")) for example in map(tomllib.loads, EXAMPLES)
    ]
    assert clock.parse_duration_ms(found["TimeoutStopSec"][0]) > 2 * max(drains_ms)
    # Only what a start later may mend is tried again.
    (codes,) = found["RestartPreventExitStatus"]
    assert {int(code) for code in codes.split()} == {fm.Invalid.exit_code, fm.Corrupt.exit_code}
    assert found["Restart"] == ["on-failure"]
    assert f"/var/lib/{found['StateDirectory'][0]}" == found["WorkingDirectory"][0]
    for hardening in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert found[hardening] == ["true"]
    assert found["ProtectSystem"] == ["strict"]
    assert found["CapabilityBoundingSet"] == [""]
    # Java could not compile.
    assert "MemoryDenyWriteExecute" not in found


# ── settings ──


def test_there_are_examples_of_all_three_kinds() -> None:
    lakes = [tomllib.loads(example)["lake"]["path"] for example in EXAMPLES]
    assert len(lakes) == 3
    assert sum(lake.startswith("s3://") for lake in lakes) == 1


@pytest.mark.whole
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_settings_file_that_is_shown_is_right(tmp_path: Path, number: int) -> None:
    path = tmp_path / "floodmark.toml"
    path.write_text(EXAMPLES[number])
    settings = load_settings(path)
    # Beyond this machine nothing is served without a token, and rows wait on a local disk.
    assert settings.serve.tokens
    assert settings.serve.spool or not str(settings.lake.path).startswith("s3://")
    # Nobody has the token of such a hash.
    assert {token.sha256 for token in settings.serve.tokens.values()} == {"0" * 64}


def test_the_one_for_a_machine_passes_the_check_of_the_daemon(tmp_path: Path) -> None:
    """As it is shown, but for where its folders are, and after the commands that are shown."""
    path = tmp_path / "floodmark.toml"
    path.write_text(EXAMPLES[0].replace("/var/lib/floodmark", str(tmp_path)))
    assert "/var/lib/floodmark/incoming" in RECIPE
    (tmp_path / "incoming").mkdir()
    shown = re.findall(r"floodmark --config /etc/floodmark/floodmark.toml (.*)", RECIPE)
    assert shown == ["init", "apply", "run --check"]
    for arguments in shown[:-1]:
        assert command(tmp_path, "--config", str(path), arguments).returncode == 0
    with fm.open(tmp_path / "lake") as lake:
        assert [head.table for head in lake.heads()] == ["events"]
    done = command(tmp_path, "--config", str(path), "--json", *shown[-1].split())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "checked"


def command(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLOODMARK_")}
    return subprocess.run(
        [sys.executable, "-m", "floodmark.cli.main", *arguments],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_the_proxy_takes_what_the_daemon_takes() -> None:
    (size,) = re.findall(r"client_max_body_size (\d+)m;", PAGE)
    assert int(size) * 1024 * 1024 >= RequestLimits().body_bytes_max


# ── the container ──


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments, as the builder joins lines; comments left out."""
    lines = [line for line in CONTAINERFILE.splitlines() if line and not line.startswith("#")]
    return [
        (line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in "\n".join(lines).replace("\\\n", "").splitlines()
    ]


def told(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def test_the_container_has_the_python_and_java_that_are_needed_and_no_rights() -> None:
    known = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert {name for name, _ in instructions()} == known | {"ENTRYPOINT", "CMD"}
    (python,) = re.findall(r"python:(\d+)\.(\d+)", told("FROM")[0])
    needed = re.findall(r"(\d+)\.(\d+)", PROJECT["requires-python"])[0]
    assert tuple(map(int, python)) >= tuple(map(int, needed))
    (java,) = re.findall(r"openjdk-(\d+)-jre-headless", " ".join(told("RUN")))
    assert int(java) in JAVA_VERSIONS
    assert told("USER")[-1].split(":")[0] not in ("0", "root")
    assert json.loads(told("ENTRYPOINT")[0])[-1] in PROJECT["scripts"]
    assert json.loads(told("CMD")[0])[-1] == "run"
    # The packages come from the index that pip asks by itself, and from nowhere else.
    assert not re.search(r"https?://(?!127\.0\.0\.1)|--(extra-)?index-url", "\n".join(told("RUN")))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as the container has it: only what the file copies, built, unpacked where no source is."""
    folder = tmp_path_factory.mktemp("container")
    source = folder / "src"
    source.mkdir()
    for copied in told("COPY"):
        *names, _ = copied.split()
        for name in names:
            assert (ROOT / name).exists(), name
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source)
    (install,) = [line for line in told("RUN") if line.startswith("pip install")]
    assert "--constraint /src/requirements.lock /src " in install
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True, timeout=WAIT_S
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    shutil.rmtree(source)
    return folder / "installed"


def test_the_package_has_everything_that_the_source_has(installed: Path) -> None:
    """Templates, scripts and migrations too: a page that is only in the checkout would be missing in the container."""
    kept = {path.relative_to(ROOT) for path in (ROOT / "floodmark").rglob("*") if path.is_file()}
    source = {str(path) for path in kept if "__pycache__" not in path.parts}
    assert source - {str(path.relative_to(installed)) for path in installed.rglob("*")} == set()


def test_the_installed_package_serves_and_its_health_check_says_so(installed: Path, tmp_path: Path) -> None:
    with fm.open(tmp_path / "lake", create=True) as lake:
        lake.create_table("events", EVENTS)
    with LoadDaemon(tmp_path, ["--lake", "lake"], environment={"PYTHONPATH": str(installed)}) as daemon:
        # It is that one, and the page is there.
        assert httpx.get(f"{daemon.url}/", timeout=WAIT_S).status_code == 200
        (check,) = told("HEALTHCHECK")
        asked = json.loads(check.partition(" CMD ")[2])
        asked[2] = asked[2].replace(":8787/", f":{daemon.port}/")
        assert subprocess.run([sys.executable, *asked[1:]], capture_output=True, timeout=WAIT_S).returncode == 0
        assert daemon.stop() == 0
        # Nobody is there any more.
        assert subprocess.run([sys.executable, *asked[1:]], capture_output=True, timeout=WAIT_S).returncode != 0


# ── PostgreSQL and S3 ──


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_environment(), s3_stand_in() as server:
        yield server


def remote_settings(folder: Path, s3: S3Server, postgres: PostgresServer, token: str) -> dict[str, Any]:
    """The example for PostgreSQL and S3, with the places that are here."""
    text = EXAMPLES[2]
    example = tomllib.loads(text)
    catalog = postgres.url(postgres.new_database())
    for shown, here in (
        (example["lake"]["path"], f"s3://{s3.make_bucket()}/main"),
        (example["lake"]["catalog"], catalog),
        ('region = "eu-central-1"', "\n".join(f'{name} = "{value}"' for name, value in s3.options.items())),
        (example["serve"]["spool"], str(folder / "spool")),
        (example["serve"]["tokens"]["collectors"]["sha256"], token_hash(token)),
        (example["spark"]["master"], "local[1]"),
    ):
        assert shown in text
        text = text.replace(shown, here)
    (folder / "floodmark.toml").write_text(text)
    return tomllib.loads(text)


def test_a_lake_on_postgresql_and_s3_takes_rows_into_a_local_spool(
    tmp_path: Path, s3: S3Server, postgres: PostgresServer
) -> None:
    settings = remote_settings(tmp_path, s3, postgres, "a token")
    place = {"catalog": settings["lake"]["catalog"], "storage_options": s3.options}
    with fm.open(settings["lake"]["path"], create=True, **place) as lake:
        lake.create_table("events", COLUMNS[APPENDED])
    config = ["--config", str(tmp_path / "floodmark.toml")]
    with LoadDaemon(tmp_path, config, environment=dict(ENVIRONMENT)) as daemon:
        load = Load("127.0.0.1", daemon.port, "events", APPENDED, 20, 20, 50, 0.0, token="a token")
        refused = httpx.post(f"{daemon.url}/api/tables/events/rows", content=body_of(load, 0), timeout=WAIT_S)
        assert refused.status_code == 401
        load = load.starting_in(1.0)
        sent = run_load(daemon, [load], NO_KILLS, tmp_path)["events"]
        daemon.kill()
        assert [path.name for path in (tmp_path / "spool").iterdir()] != []
        daemon.start()
        daemon.wait_up()
        sent.append(finish(daemon.url, load))
        assert daemon.stop() == 0, daemon.errors.read_text()
    with fm.open(settings["lake"]["path"], **place) as lake:
        check_lake(lake.catalog)
        found = tally(lake, load, sent)
        assert (found.clean, found.acknowledged) == (True, 21 * 50), found


@pytest.mark.soak
def test_without_a_place_for_the_spool_a_remote_lake_takes_only_what_waits_for_its_commit(
    tmp_path: Path, s3: S3Server, postgres: PostgresServer
) -> None:
    settings = remote_settings(tmp_path, s3, postgres, "a token")
    path = tmp_path / "floodmark.toml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("spool")))
    place = {"catalog": settings["lake"]["catalog"], "storage_options": s3.options}
    with fm.open(settings["lake"]["path"], create=True, **place) as lake:
        lake.create_table("events", EVENTS)
    with LoadDaemon(tmp_path, ["--config", str(path)], environment=dict(ENVIRONMENT)) as daemon:
        with httpx.Client(headers={"Authorization": "Bearer a token"}, timeout=WAIT_S) as client:
            rows = f"{daemon.url}/api/tables/events/rows"
            answer = client.post(rows, content='{"id": 1}\n')
            assert (answer.status_code, "spool" in answer.text) == (409, True)
            assert client.post(f"{rows}?wait=committed", content='{"id": 1}\n').status_code == 200
        assert daemon.stop() == 0

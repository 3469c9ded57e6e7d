"""Official Iceberg Java, from Maven Central, for tests that let it read and change our tables.

The jars are resolved once by Maven and kept in the user's cache. Without Java's compiler, Maven or a repository that it
can reach, the tests are skipped with the reason. A test asks for the fixture `iceberg_java`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from floodmark.catalog.database import SQLITE_NAME
from tests.conftest import Place

PROBE = Path(__file__).with_name("IcebergProbe.java")
WAIT_S = 600
JARS = (
    "org.apache.iceberg:iceberg-parquet:1.9.2",
    "org.apache.iceberg:iceberg-data:1.9.2",
    "org.apache.hadoop:hadoop-client-api:3.4.1",
    "org.apache.hadoop:hadoop-client-runtime:3.4.1",
    "org.xerial:sqlite-jdbc:3.50.3.0",
    "org.slf4j:slf4j-nop:2.0.17",
)


class Missing(Exception):
    """Why Iceberg Java cannot be had here."""


@dataclass(frozen=True)
class IcebergJava:
    """`classes` is a Java class path: the jars, and our compiled probe."""

    classes: str

    def describe(self, metadata_location: str) -> dict[str, Any]:
        """What Java's parser finds in a metadata file: timestamps, properties, snapshots."""
        return self._run("describe", metadata_location)

    def rows(self, metadata_location: str) -> list[dict[str, Any]]:
        """The rows of the newest snapshot, as Java reads them; values that JSON does not know are text."""
        answer = self._run("rows", metadata_location)
        assert "rows" in answer, answer
        found: list[dict[str, Any]] = answer["rows"]
        return found

    def commit(self, command: str, place: Place, table: str, *arguments: str) -> dict[str, Any]:
        """Change a table of a lake with SQLite through Java's JDBC catalog; the answer has `error` if Java refused."""
        assert place.catalog is None, "the probe knows SQLite only"
        url = f"jdbc:sqlite:{place.path}/{SQLITE_NAME}"
        return self._run(command, url, "floodmark", f"file://{place.path}", f"default.{table}", *arguments)

    def _run(self, *arguments: str) -> dict[str, Any]:
        command = ["java", "-XX:TieredStopAtLevel=1", "-cp", self.classes, "IcebergProbe", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


def prepare() -> IcebergJava:
    """The jars and the compiled probe, made once per version of both; Missing if they cannot be had."""
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            raise Missing(f"`{tool}` is not installed")
    identity = hashlib.sha256("\n".join([*JARS, PROBE.read_text()]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "floodmark-tests" / "iceberg-java"
    jars, classes = folder / hashlib.sha256("\n".join(JARS).encode()).hexdigest()[:16], folder / identity
    if not jars.exists():
        _download(jars)
    path = f"{classes}{os.pathsep}{jars}/*"
    if not classes.exists():
        _whole(classes, lambda made: _call("javac", "-nowarn", "-d", str(made), "-cp", f"{jars}/*", str(PROBE)))
    return IcebergJava(path)


def _download(folder: Path) -> None:
    wanted = "".join(
        "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>".format(
            *jar.split(":")
        )
        for jar in JARS
    )
    project = (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>floodmark</groupId><artifactId>probe</artifactId><version>1</version>"
        f"<dependencies>{wanted}</dependencies></project>"
    )

    def fetch(made: Path) -> None:
        described = made / "pom.xml"
        described.write_text(project)
        goal = "dependency:copy-dependencies"
        _call("mvn", "-q", "-B", "-f", str(described), goal, f"-DoutputDirectory={made}", "-DincludeScope=runtime")

    _whole(folder, fetch)


def _whole(folder: Path, fill: Any) -> None:
    """Fill a folder beside its place and move it there: a process that dies in between leaves no half of it."""
    made = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        fill(made)
        made.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Missing(f"`{command[0]}` did not end within {WAIT_S} s") from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Missing(f"`{command[0]}` failed: {' '.join(lines[:2])[:300]}")


@pytest.fixture(scope="session")
def iceberg_java() -> IcebergJava:
    try:
        return prepare()
    except Missing as why:
        pytest.skip(f"official Iceberg Java cannot be had here: {why}")

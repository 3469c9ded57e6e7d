"""The session: Java is checked first, the caller's session is used, nothing starts before it must."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from floodmark.errors import Invalid, Unavailable
from floodmark.rows.session import Sessions, check_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def fake_java(folder: Path, answer: str, code: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "java"
    script.write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit {code}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "21.0.1"', 21),
    ],
)
def test_a_fitting_java_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, version: int) -> None:
    fake_java(tmp_path, answer)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert check_java() == version


@pytest.mark.parametrize(
    ("answer", "code", "version"),
    [
        ('java version "1.8.0_402"', 0, 8),
        ('openjdk version "11.0.2"', 0, 11),
        ('openjdk version "25"', 0, 25),
        ("nonsense", 0, "unknown"),
        ('openjdk version "17.0.1"', 1, None),
    ],
)
def test_another_java_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, version: int | str | None
) -> None:
    # JAVA_HOME goes before the PATH, for Spark and so for us.
    fake_java(tmp_path / "home" / "bin", answer, code)
    fake_java(tmp_path / "path", 'openjdk version "17.0.1"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    with pytest.raises(Unavailable, match="Java 17 or 21") as refused:
        check_java()
    assert refused.value.facts.get("version") == version
    assert all(word in refused.value.advice for word in ("apt", "brew", "winget"))


def test_no_java_is_said_before_spark_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from floodmark.errors import Unavailable\n"
        "from floodmark.rows.session import Sessions\n"
        "try:\n    Sessions().get()\n"
        "except Unavailable as error:\n    print(error.advice)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('pyspark', 'py4j')]\n"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("JAVA_HOME", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "apt install" in done.stdout


def test_importing_the_room_imports_nothing_heavy() -> None:
    code = (
        "import sys, floodmark.rows, floodmark.rows.session\n"
        "print([n for n in ('pyspark', 'pyarrow', 'pyiceberg', 'pandas', 'numpy') if n in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


def test_a_setting_that_is_not_sparks_is_refused() -> None:
    with pytest.raises(Invalid) as refused:
        Sessions({"mastr": "local"})
    assert refused.value.facts["setting"] == "mastr"


def test_our_session_has_the_settings_that_reading_needs(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.parquet.fieldId.read.enabled") == "true"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert os.environ["PYSPARK_PYTHON"]


def test_a_running_session_is_used_and_not_stopped(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.parquet.fieldId.read.enabled", "false")
    found = Sessions({"master": "local[1]"})
    assert found.get() is spark
    assert spark.conf.get("spark.sql.parquet.fieldId.read.enabled") == "true"
    found.stop()
    assert spark.range(3).count() == 3


def test_a_given_session_is_used_with_only_what_is_needed_changed(spark: SparkSession) -> None:
    other = spark.newSession()
    other.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    assert Sessions({}, other).get() is other
    assert other.conf.get("spark.sql.parquet.fieldId.read.enabled") == "true"
    assert other.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"

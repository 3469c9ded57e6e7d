"""A task on every executor: what `doctor --deep` and `run --check` find out before rows depend on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.rows.executors import Executor, ask_executors
from floodmark.storage import Storage
from floodmark.testing.s3 import S3Process, s3_environment, s3_process
from floodmark.testing.standalone import standalone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Process]:
    with s3_environment(), s3_process(tmp_path_factory.mktemp("s3")) as running:
        yield running


@contextmanager
def on_executors(spark: SparkSession, **environment: str) -> Iterator[None]:
    """What the Python of tasks is started with, inside the block."""
    known = spark.sparkContext.environment
    before = dict(known)
    known.update(environment)
    try:
        yield
    finally:
        known.clear()
        known.update(before)


def ask(spark: SparkSession, root: str, options: dict[str, str]) -> Executor:
    (found,) = ask_executors(spark, fm.__version__, root, options, hold_s=0.2)
    return found


def test_an_executor_that_can_work_has_no_problem(spark: SparkSession, s3: S3Process) -> None:
    root = f"s3://{s3.make_bucket()}/lake"
    found = ask(spark, root, s3.options)
    assert (found.version, found.problem) == (fm.__version__, "")
    assert list(Storage(s3.options).list(root)) == []


def test_executors_without_credentials_are_named_with_their_host(spark: SparkSession, s3: S3Process) -> None:
    nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"}
    with on_executors(spark, **nothing):
        found = ask(spark, f"s3://{s3.make_bucket()}/lake", s3.options)
    assert "there are no credentials for the object store" in found.problem
    assert f"host={found.host}" in found.problem


def test_executors_of_another_version_are_named(spark: SparkSession, tmp_path: Path) -> None:
    (found,) = ask_executors(spark, "9.9.9", f"file://{tmp_path}", {}, hold_s=0.2)
    assert found.problem == f"Floodmark {fm.__version__} is installed there, and 9.9.9 here"


def test_executors_that_do_not_see_the_lakes_folder_are_named(spark: SparkSession, tmp_path: Path) -> None:
    assert "is not on this host" in ask(spark, f"file://{tmp_path}/elsewhere", {}).problem
    assert not (tmp_path / "elsewhere").exists()


def run(folder: Path, command: str, **spark: str) -> tuple[int, Any, str]:
    """The command, with a lake in this folder and these settings of Spark."""
    with fm.open(folder / "lake", create=True):
        pass
    lines = ["[lake]", f'path = "{folder}/lake"', "[spark]", *(f'{name} = "{value}"' for name, value in spark.items())]
    (folder / "floodmark.toml").write_text("\n".join(lines) + "\n")
    words = [sys.executable, "-m", "floodmark.cli.main", "--json", *command.split()]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr


def test_doctor_deep_asks_the_executors(tmp_path: Path) -> None:
    code, found, said = run(tmp_path, "doctor --deep", master="local[2]")
    assert code == 0, (found, said)
    (check,) = [check for check in found["checks"] if check["check"].startswith("executor")]
    assert (check["result"], f"Floodmark {fm.__version__}" in check["detail"]) == ("ok", True)


@pytest.mark.timeout(600)
def test_run_check_asks_every_executor_of_a_cluster(tmp_path: Path) -> None:
    stub = tmp_path / "stub" / "floodmark"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'floodmark'\")")
    with standalone(tmp_path, cores=2) as cluster:
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            # All executors register before the first task, however slow this machine is.
            "spark.cores.max": "2",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
            "spark.executorEnv.PYTHONPATH": str(stub.parent),
        }
        code, _, said = run(tmp_path, "run --check", master=cluster.master, **settings)
    assert code == 4, said
    assert said.count("Floodmark cannot be imported there") == 2, said

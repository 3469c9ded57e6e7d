"""A standalone Spark cluster from PySpark's own jars: a master and workers that tests kill and start again.

The master keeps no state: after a restart it has no application, as after any restart of one without a recovery folder.
Each worker gives one core and little memory.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_START_S_MAX = 120
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


@dataclass
class Cluster:
    """A master at one address, for as many starts as wanted, and its workers."""

    folder: Path
    cores: int = 1
    port: int = field(default=0, init=False)
    _master: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _workers: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        with closing(socket.socket()) as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        """Returns when it listens."""
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0"]
        self._master = self._start("master", _MASTER, arguments)
        until_s = time.monotonic() + _START_S_MAX
        while self._master.poll() is None and time.monotonic() < until_s:
            with closing(socket.socket()) as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the master did not start: {self.log('master')[-2000:]}")

    def kill_master(self) -> None:
        if self._master is not None:
            _kill(self._master)
            self._master = None

    def start_worker(self) -> None:
        """Returns when the master took it."""
        name = f"worker{len(self._workers)}"
        before = self.log("master").count("Registering worker")
        arguments = ["--host", "127.0.0.1", "--webui-port", "0", "--cores", str(self.cores), "--memory", "1g"]
        process = self._start(name, _WORKER, [*arguments, "--work-dir", str(self.folder / name), self.master])
        self._workers.append(process)
        until_s = time.monotonic() + _START_S_MAX
        while process.poll() is None and time.monotonic() < until_s:
            if self.log("master").count("Registering worker") > before:
                return
            time.sleep(0.1)
        raise RuntimeError(f"a worker did not start: {self.log(name)[-2000:]}")

    def kill_workers(self) -> None:
        """Workers and their executors, which end when their worker is gone."""
        for process in self._workers:
            _kill(process)
        self._workers.clear()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(self, name: str, main: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        import pyspark

        home = Path(pyspark.__file__).parent
        java_home = os.environ.get("JAVA_HOME")
        java = shutil.which("java", path=os.path.join(java_home, "bin")) if java_home else shutil.which("java")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
        environment |= {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        # Spark's own scripts set it; without it a worker looks for a source tree.
        environment["SPARK_SCALA_VERSION"] = "2.13"
        command = [str(java), "-Xmx256m", "-XX:+UseSerialGC", "-cp", f"{home / 'jars'}/*", main, *arguments]
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=environment)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def standalone(folder: Path, workers: int = 1, cores: int = 1) -> Iterator[Cluster]:
    """A running cluster; killed at the end."""
    cluster = Cluster(folder, cores)
    try:
        cluster.start_master()
        for _ in range(workers):
            cluster.start_worker()
        yield cluster
    finally:
        cluster.kill_workers()
        cluster.kill_master()

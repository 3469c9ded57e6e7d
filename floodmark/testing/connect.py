"""A warm Spark Connect server: crash tests kill its clients in about a second each, and its executors outlive them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

START_S_MAX = 120


@dataclass
class ConnectServer:
    """A server at one address, for as many starts as wanted."""

    folder: Path
    master: str = "local[2]"
    port: int = field(default_factory=lambda: _free_port())
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def address(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it listens."""
        with open(self.folder / "connect.log", "ab") as log:
            # A group of its own: its shell script is the parent of its JVM.
            self._process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, cwd=self.folder, env=_environment(), start_new_session=True
            )
        _wait_until_up(self._process, self.port, self.folder / "connect.log")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None

    def kill(self) -> None:
        """SIGKILL, like a machine that fails."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _command(self) -> list[str]:
        settings = {
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.session.timeZone": "UTC",
        }
        command = [f"{_home()}/bin/spark-submit", "--master", self.master, "--driver-memory", "1g"]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        return [*command, "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]


@contextmanager
def connect_server(folder: Path, master: str = "local[2]") -> Iterator[str]:
    """Start a server on a free port of this machine; gives its sc:// address."""
    server = ConnectServer(folder, master)
    try:
        server.start()
        yield server.address
    finally:
        server.stop()


def _home() -> str:
    import pyspark

    return str(Path(pyspark.__file__).parent)


def _environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))},
        "SPARK_HOME": _home(),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def _free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with closing(socket.socket()) as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the Connect server did not start: {log.read_text()[-2000:]}")

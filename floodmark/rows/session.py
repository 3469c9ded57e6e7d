"""The Spark session, started when rows must move and not before.

A session that the caller has is used as it is, with only those settings changed that correctness needs. Without one, a
session is built: local, on a cluster, or over Spark Connect, by the master's address. Java is checked first: without a
suitable one Spark fails with a stack trace, and the user should get a sentence. Only the DataFrame API is used on it,
so that every kind of session works.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

from floodmark import clock, log
from floodmark.errors import Invalid, Unavailable
from floodmark.rows.stall import STALL_S, is_connect, is_lost, watch_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

JAVA_VERSIONS = (17, 21)
_JAVA_ADVICE = (
    "Install it, then set JAVA_HOME if it is not found: Debian or Ubuntu: apt install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17; Windows: winget install EclipseAdoptium.Temurin.17.JRE."
)
_JAVA_WAIT_S = 20
CONNECT_PORT = 15002
CONNECT_WAIT_S = 5.0

# Settings that correct reads depend on; set on every session. All of them can be set while it runs.
NEEDED = {"spark.sql.parquet.fieldId.read.enabled": "true"}
# Files are listed by the driver from an explicit list, however long; a Spark job for that costs seconds.
LISTED_BY_DRIVER = {"spark.sql.sources.parallelPartitionDiscovery.threshold": str(2**31 - 1)}
# Defaults for a session of ours; each can be overridden.
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Whether a task runs is asked by stall.py. By default a start within 100 ms of the one before shows only with the
    # next heartbeat, seconds later, and a running task looks like one that waits for an executor.
    "spark.ui.liveUpdate.period": "0",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
    **LISTED_BY_DRIVER,
}
_LOG_SETTINGS = Path(__file__).parent / "log4j2.properties"


def _local_defaults() -> dict[str, str]:
    """A driver for this machine alone: on loopback, and it prints only errors from its first line on."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return {
        "spark.driver.host": "localhost",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}",
    }


def check_java() -> int:
    """The major version of the Java that Spark would start, or `Unavailable` with how to get one."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")
    if java is None:
        where = f"JAVA_HOME={home}" if home else "PATH"
        raise Unavailable("Spark needs Java 17 or 21, but Java is not installed", looked_in=where, advice=_JAVA_ADVICE)
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_WAIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            "Spark needs Java 17 or 21, but Java does not start", java=java, advice=_JAVA_ADVICE
        ) from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    version = int(found[1]) if found else 0
    if version not in JAVA_VERSIONS:
        raise Unavailable(
            "Spark needs Java 17 or 21, but another version is installed",
            java=java,
            version=version or "unknown",
            advice=_JAVA_ADVICE,
        )
    return version


def master_of(settings: Mapping[str, str]) -> str:
    return settings.get("master", settings.get("spark.master", "local[*]"))


def is_local(settings: Mapping[str, str]) -> bool:
    """Whether a session of these settings runs its tasks in this machine's own JVM."""
    return master_of(settings).startswith("local")


def stall_of(settings: Mapping[str, str]) -> float:
    """How long a job may wait for an executor, in seconds: `stall`, as seconds or a span like 5m."""
    text = settings.get("stall")
    if text is None:
        return STALL_S
    found_s = float(text) if text.isdecimal() else clock.parse_duration_ms(text) / 1000
    if found_s <= 0:
        raise Invalid("this duration must be above zero", setting="stall", value=text)
    return found_s


# Settings by which a new session may have other tables, and variables that lead to more settings.
_OTHER_TABLES = (
    *("spark.sql.catalog", "spark.sql.defaultCatalog", "spark.sql.extensions", "spark.sql.hive"),
    *("spark.hadoop.", "spark.hive."),
)
_OTHER_SETTINGS = (
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "SPARK_REMOTE",
    "PYSPARK_SUBMIT_ARGS",
    "HIVE_CONF_DIR",
    "HADOOP_CONF_DIR",
)


class Sessions:
    """Returns the Spark session that a lake works with. `settings` are spark.* keys, `master` and `stall`."""

    def __init__(self, settings: Mapping[str, str] | None = None, spark: SparkSession | None = None) -> None:
        self._settings = dict(settings or {})
        for key in self._settings:
            if key not in ("master", "stall") and not key.startswith("spark."):
                advice = 'Use "master", "stall" or a spark.* key.'
                raise Invalid("not a Spark setting", setting=key, advice=advice)
        self._stall_s = stall_of(self._settings)
        self._spark = spark
        self._prepared = False
        self._ours = False
        self._lock = Lock()

    @property
    def settings(self) -> dict[str, str]:
        """The settings that a session would be started with."""
        return dict(self._settings)

    def starts_empty(self) -> bool:
        """Whether `get` would start a session of ours that has only the tables registered in it: no metastore, no other
        catalogs, no server with views of its own. False in doubt."""
        own = self._spark is None and not is_spark_running() and is_local(self._settings)
        return (
            own
            and not any(key.startswith(_OTHER_TABLES) for key in self._settings)
            and not any(os.environ.get(name) for name in _OTHER_SETTINGS)
        )

    def get(self) -> SparkSession:
        with self._lock:
            if self._spark is not None and self._is_lost(self._spark):
                # Its callers undid their work: each got an error.
                _end(self._spark)
            if self._spark is None or _is_over(self._spark):
                self._ours = False
                self._spark = self._active() or self._build()
                self._prepared = False
            if not self._prepared:
                watch_session(self._spark, self._stall_s, own=self._ours)
                prepare(self._spark)
                self._prepared = True
            return self._spark

    def stop(self) -> None:
        """Stop the session if it was started here; a session of the caller continues."""
        with self._lock:
            if self._spark is not None and self._ours:
                self._spark.stop()
                self._spark, self._ours = None, False

    def _is_lost(self, spark: SparkSession) -> bool:
        return is_lost(spark) or (self._ours and not _answers(spark, master_of(self._settings)))

    def _active(self) -> SparkSession | None:
        if "pyspark" not in sys.modules:
            return None
        # A Connect session can only exist if its module is loaded; importing it needs more packages than a classic one.
        connect = sys.modules.get("pyspark.sql.connect.session")
        if connect is not None:
            remote = connect.SparkSession.getActiveSession()
            if remote is not None and not remote.is_stopped:
                return _session(remote)
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        try:
            return _session(SparkSession.active())
        except PySparkException:
            return None

    def _build(self) -> SparkSession:
        master = master_of(self._settings)
        remote = master.startswith("sc://")
        if remote:
            _await_connect(master, self._stall_s)
        else:
            check_java()
        # The same Python everywhere: Spark's own default is whatever python3 the PATH has.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        given = {key: value for key, value in self._settings.items() if key not in ("master", "stall", "spark.master")}
        builder = SparkSession.builder.appName("floodmark")
        if remote:
            settings = {key: value for key, value in DEFAULTS.items() if key.startswith("spark.sql.")} | given
            builder = builder.remote(master)
        else:
            local = _local_defaults() if master.startswith("local") else {}
            settings = {**DEFAULTS, **local, **given}
            builder = builder.master(master)
        for key, value in {**settings, **NEEDED}.items():
            builder = builder.config(key, value)
        if not remote:
            _start_jvm({**settings, **NEEDED, "spark.master": master, "spark.app.name": "floodmark"})
        try:
            session = _session(builder.getOrCreate())
        except (PySparkException, Py4JError, RuntimeError) as error:
            raise Unavailable(
                "Spark did not start", master=master, cause=str(error).splitlines()[0], advice="See the cause."
            ) from error
        self._ours = True
        _quiet_errors()
        return session


def _is_over(spark: SparkSession) -> bool:
    """Whether it was stopped, here or by its owner."""
    if is_connect(spark):
        return getattr(spark, "is_stopped", False) is True
    # A classic session does not report it; its context drops the handle when it is stopped.
    return getattr(spark.sparkContext, "_jsc", spark) is None


def _answers(spark: SparkSession, master: str) -> bool:
    """Whether a Connect session still has its server, and the server the session; a classic one fails in its jobs."""
    if not is_connect(spark) or _is_over(spark):
        return True
    if not _listens(master):
        return False
    try:
        spark.conf.get("spark.sql.session.timeZone")
    except Exception:  # noqa: BLE001 - any error: a session that answers no query cannot do work
        return False
    return True


def _await_connect(master: str, stall_s: float) -> None:
    """Wait until the server of this sc:// address listens: Connect's own client would try for ten minutes."""
    until_s = time.monotonic() + stall_s
    while not _listens(master):
        if time.monotonic() >= until_s:
            advice = "Start it, or check the address; then try again."
            server = "sc://" + ":".join(map(str, _server_of(master)))
            raise Unavailable("the Spark Connect server does not answer", master=server, advice=advice)
        time.sleep(0.2)


def _server_of(master: str) -> tuple[str, int]:
    # Parameters follow the address, perhaps a token (I18).
    host, _, port = master.removeprefix("sc://").partition("/")[0].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else (f"{host}:{port}".strip(":[]"), CONNECT_PORT)


def _listens(master: str) -> bool:
    """Whether a server listens there. Through a proxy that is unknown: then Connect's client detects it."""
    if any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        return True
    try:
        with socket.create_connection(_server_of(master), CONNECT_WAIT_S):
            return True
    except OSError:
        return False


def _end(spark: SparkSession) -> None:
    """Stop a session that cannot be used any more, and ignore its errors."""
    if is_connect(spark):
        # There is no server to release it at.
        spark.release_session_on_close = False
    try:
        spark.stop()
    except Exception as error:  # noqa: BLE001 - it is given up either way
        log.get().warning("a lost Spark session could not be stopped", cause=repr(error))


def is_spark_running() -> bool:
    """Whether this process already has a Spark session, ours or another."""
    classic, connect = sys.modules.get("pyspark.sql.session"), sys.modules.get("pyspark.sql.connect.session")
    found = [module.SparkSession.getActiveSession() for module in (classic, connect) if module is not None]
    return any(session is not None for session in found)


def _start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM of a session of ours and filter its stderr: users should not see the noise of its start.

    All other output is passed on. A JVM that runs already stays as it is; without a stderr there is nothing to filter.
    If this process dies, the JVM finds its stdin closed and ends, as it would anyway.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    with SparkContext._lock:
        if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
            return
        try:
            goal = os.dup(2)
        except OSError:
            return
        source, sink = os.pipe()
        Thread(target=_pass_on, args=(source, goal), name="floodmark-jvm-stderr", daemon=True).start()
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        try:
            gateway = launch_gateway(conf, {"stderr": sink})
        except PySparkException as error:
            raise Unavailable(
                "Spark did not start", cause=str(error).splitlines()[0], advice="See the output of Java above."
            ) from error
        finally:
            os.close(sink)
        SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm


# Output of the JVM and Spark that is useless to the user of a terminal.
_NOISE = re.compile(rb"^WARNING: Using incubator modules: [^\n]*\n|\r?\[Stage \d+:[^\r\n]*\]?|\r *\r", re.MULTILINE)


def without_noise(text: bytes) -> bytes:
    """The JVM's output, without its warning of modules and without Spark's progress bars."""
    return _NOISE.sub(b"", text)


def _pass_on(source: int, goal: int) -> None:
    waiting = b""
    with suppress(OSError):
        while piece := os.read(source, 65536):
            # Whole lines: a warning may come in two pieces.
            lines, newline, waiting = (waiting + piece).rpartition(b"\n")
            os.write(goal, without_noise(lines + newline))
        os.write(goal, without_noise(waiting))


def _quiet_errors() -> None:
    """PySpark prints the errors of a query, with stack traces, before it raises them; raising is enough."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def _session(session: SparkSession | ConnectSession) -> SparkSession:
    # Classic and Connect sessions are different classes with one interface.
    found: SparkSession = session
    return found


def prepare(spark: SparkSession) -> None:
    """Set the settings that correct reads depend on."""
    # Some pairs of versions warn at every Arrow task; pandas is not used here.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    for key, value in NEEDED.items():
        if spark.conf.get(key) != value:
            spark.conf.set(key, value)


class SharedSettings:
    """Settings of sessions that jobs of several threads share: the first job sets them, the last restores them.

    Meanwhile other queries of the same session see them too. `keeps` decides for a setting and its value whether it
    stays as it is; of what the running jobs want, `choose` returns the value to set. A crash takes the session with it.
    """

    def __init__(self, keeps: Callable[[str, str], bool], choose: Callable[[Sequence[str]], str]) -> None:
        self._keeps = keeps
        self._choose = choose
        self._lock = Lock()
        # By session: the session, the values before, and what each running job wants.
        self._held: dict[int, tuple[SparkSession, dict[str, str], list[Mapping[str, str]]]] = {}

    @contextmanager
    def held(self, spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
        with self._lock:
            if id(spark) not in self._held:
                found = {key: str(spark.conf.get(key)) for key in wanted}
                before = {key: value for key, value in found.items() if not self._keeps(key, value)}
                self._held[id(spark)] = (spark, before, [])
            _, before, jobs = self._held[id(spark)]
            jobs.append(wanted)
            self._set(spark, before, jobs)
        try:
            yield
        finally:
            with self._lock:
                jobs.remove(wanted)
                if not jobs:
                    del self._held[id(spark)]
                # A lost session is not used again, and would make this wait once more.
                if not is_lost(spark):
                    self._set(spark, before, jobs)

    def _set(self, spark: SparkSession, before: Mapping[str, str], jobs: Sequence[Mapping[str, str]]) -> None:
        for key, value in before.items():
            spark.conf.set(key, self._choose([job[key] for job in jobs]) if jobs else value)

"""The Spark session, started when rows must move and not before.

A session that the caller has is used as it is, with only those settings changed that correctness needs. Without one, a
session is built: local, on a cluster, or over Spark Connect, by the master's address. Java is checked first: without
a fitting one Spark dies with a stack trace, and people deserve a sentence.
Only the DataFrame API is used on it, so that every kind of session will do.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from floodmark.errors import Invalid, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_VERSIONS = (17, 21)
_JAVA_ADVICE = (
    "Install it, then set JAVA_HOME if it is not found: Debian or Ubuntu: apt install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17; Windows: winget install EclipseAdoptium.Temurin.17.JRE."
)
_JAVA_WAIT_S = 20

# What reading a table right depends on; set on every session. All of them can be set while it runs.
NEEDED = {"spark.sql.parquet.fieldId.read.enabled": "true"}
# What makes a session of ours pleasant; every one can be set otherwise.
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
    # Files are listed by the driver from an explicit list; a Spark job for that costs seconds.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
}
_LOG_SETTINGS = Path(__file__).parent / "log4j2.properties"


def _local_defaults() -> dict[str, str]:
    """A driver for this machine alone: on loopback, and silent about everything but errors from its first line."""
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
        raise Unavailable("Spark needs Java 17 or 21, and there is none", looked_in=where, advice=_JAVA_ADVICE)
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_WAIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            "Spark needs Java 17 or 21, and this one does not start", java=java, advice=_JAVA_ADVICE
        ) from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    version = int(found[1]) if found else 0
    if version not in JAVA_VERSIONS:
        raise Unavailable(
            "Spark needs Java 17 or 21, and this is another",
            java=java,
            version=version or "unknown",
            advice=_JAVA_ADVICE,
        )
    return version


class Sessions:
    """Gives the Spark session that a lake works with. `settings` are spark.* keys and `master`."""

    def __init__(self, settings: Mapping[str, str] | None = None, spark: SparkSession | None = None) -> None:
        self._settings = dict(settings or {})
        for key in self._settings:
            if key != "master" and not key.startswith("spark."):
                raise Invalid("this is not a Spark setting", setting=key, advice='Use "master" or a spark.* key.')
        self._spark = spark
        self._prepared = False
        self._ours = False
        self._lock = Lock()

    def get(self) -> SparkSession:
        with self._lock:
            if self._spark is None or getattr(self._spark, "is_stopped", False) is True:
                self._spark = self._active() or self._build()
                self._prepared = False
            if not self._prepared:
                prepare(self._spark)
                self._prepared = True
            return self._spark

    def stop(self) -> None:
        """Stop the session if it was started here; somebody else's goes on."""
        with self._lock:
            if self._spark is not None and self._ours:
                self._spark.stop()
                self._spark, self._ours = None, False

    def _active(self) -> SparkSession | None:
        if "pyspark" not in sys.modules:
            return None
        # A Connect session can only be there if its module is; importing it needs packages that a classic one does not.
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
        master = self._settings.get("master", self._settings.get("spark.master", "local[*]"))
        remote = master.startswith("sc://")
        if not remote:
            check_java()
        # The same Python everywhere: Spark's own default is whatever python3 the PATH has.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        given = {key: value for key, value in self._settings.items() if key not in ("master", "spark.master")}
        builder: Any = SparkSession.builder.appName("floodmark")
        if remote:
            settings = {key: value for key, value in DEFAULTS.items() if key.startswith("spark.sql.")} | given
            builder = builder.remote(master)
        else:
            local = _local_defaults() if master.startswith("local") else {}
            settings = {**DEFAULTS, **local, **given}
            builder = builder.master(master)
        for key, value in {**settings, **NEEDED}.items():
            builder = builder.config(key, value)
        try:
            session = _session(builder.getOrCreate())
        except (PySparkException, RuntimeError) as error:
            raise Unavailable(
                "Spark did not start", master=master, cause=str(error).splitlines()[0], advice="Look at the cause."
            ) from error
        self._ours = True
        _quiet_errors()
        return session


def _quiet_errors() -> None:
    """PySpark prints the errors of a query, with stack traces, before it raises them; raised is enough."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def _session(session: Any) -> SparkSession:
    # Classic and Connect sessions are different classes with one interface.
    found: SparkSession = session
    return found


def prepare(spark: SparkSession) -> None:
    """Set what reading a table right depends on."""
    # Said at every Arrow task by some pairs of versions; pandas has no part in what is done here.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    for key, value in NEEDED.items():
        if spark.conf.get(key) != value:
            spark.conf.set(key, value)

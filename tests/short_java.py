"""A Java for JVMs that live for seconds: tests start dozens of them, and most of each is loading and compiling classes.

`use` sets JAVA_HOME to a folder whose `java` starts the real one with its first compiler only, one thread to collect
garbage, and Spark's classes from an archive. Spark, its cluster, its Connect server and every command that a test
starts find it there, as they would any Java. `python -m tests.short_java` makes the archive, which `make test` does
once; without it, or with one that does not fit, Java loads its classes as always.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

BUILD = Path(__file__).parent.parent / "build" / "java"
# Above all it must say nothing: what Java writes to standard output is read by Spark's scripts.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -Xlog:disable"

# An archive that is named and missing would keep Java from its own one too.
PROGRAM = """#!/bin/sh
test -f "{archive}" && set -- "-XX:SharedArchiveFile={archive}" "$@"
exec "{java}" {options} "$@"
"""


def use() -> None:
    """From now on this process and its children start the short-lived Java; where no home of one is found, nothing
    changes."""
    real = _real_home()
    if real is not None and BUILD not in real.parents and (real / "release").exists():
        os.environ["JAVA_HOME"] = str(_made(real))


def _real_home() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")
    # Not resolved to its end if JAVA_HOME names it: that folder may be one of these.
    return None if found is None else Path(home) if home else Path(found).resolve().parent.parent


def _made(real: Path) -> Path:
    """A home like the real one but for its `java`, made beside its place: two workers may make it at once."""
    home = BUILD / f"{real.name}-spark-{version('pyspark')}"
    if not home.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=BUILD) as folder:
            new = Path(folder) / "home"
            (new / "bin").mkdir(parents=True)
            for one in (*real.iterdir(), *(real / "bin").iterdir()):
                if one.name not in ("bin", "java"):
                    (new / one.relative_to(real)).symlink_to(one)
            program = new / "bin" / "java"
            program.write_text(PROGRAM.format(java=real / "bin" / "java", options=OPTIONS, archive=_archive(home)))
            program.chmod(0o755)
            try:
                new.rename(home)
            except OSError:
                if not home.exists():
                    raise
    return home


def _archive(home: Path) -> Path:
    return home / "spark-classes.jsa"


def _jars() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent / "jars"


def make_archive() -> None:
    """Let Spark write and read a lake, and Java keep the classes that this took."""
    use()
    if BUILD not in Path(os.environ.get("JAVA_HOME", "")).parents:
        return
    home = Path(os.environ["JAVA_HOME"])
    archive = _archive(home)
    if archive.exists() and archive.stat().st_mtime > max(one.stat().st_mtime for one in (_jars(), home / "release")):
        return
    archive.unlink(missing_ok=True)
    print("Spark's classes are kept for the tests, once …", flush=True)
    new = archive.with_suffix(".new")
    with TemporaryDirectory() as folder:
        _use_spark(folder, f"-XX:ArchiveClassesAtExit={new}")
    if new.exists():
        new.rename(archive)


def _use_spark(folder: str, options: str) -> None:
    import floodmark as fm

    quiet = f"-Dlog4j2.configurationFile={(Path(fm.__file__).parent / 'rows' / 'log4j2.properties').as_uri()}"
    settings = {"master": "local[2]", "spark.driver.extraJavaOptions": f"{quiet} {options}"}
    with fm.open(f"{folder}/lake", create=True, settings=settings) as lake:
        lake.create_table("events", "id long not null, name string", key=["id"])
        lake.append("events", lake.spark.range(100).selectExpr("id", "cast(id as string) as name"))
        lake.merge("events", lake.spark.range(50, 60).selectExpr("id", "'again' as name"))
        lake.read("events").groupBy("name").count().orderBy("count").collect()
        java = lake.spark.sparkContext._gateway
        lake.sessions.stop()
        # It writes the archive when it ends, which is when its standard input does.
        java.shutdown()
        java.proc.stdin.close()
        java.proc.wait()


if __name__ == "__main__":
    make_archive()
    sys.exit(0)

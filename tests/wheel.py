"""The packages in dist/, as a user gets them: `python -m tests.wheel`, which `make dist` runs after building.

Their files are compared with the source, and the wheel is installed with the locked versions where nothing else is.
There the first commands are tried, and every module is imported: one that needs a package for development fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME, VERSION = PROJECT["name"], PROJECT["version"]
INFO = f"{NAME}-{VERSION}.dist-info/"
WHEEL = f"{NAME}-{VERSION}-py3-none-any.whl"
SOURCE = f"{NAME}-{VERSION}.tar.gz"
# One of each kind that is no module, and the migrations, which are modules that nothing imports by name.
NEEDED = (
    "floodmark/py.typed",
    "floodmark/rows/log4j2.properties",
    "floodmark/catalog/migrations/script.py.mako",
    "floodmark/catalog/migrations/versions/f0010_lake.py",
    "floodmark/catalog/migrations/versions/f0011_waiting.py",
    "floodmark/catalog/migrations/versions/f0012_indexes.py",
    "floodmark/serve/page/templates/",
    "floodmark/serve/page/static/",
    f"{INFO}licenses/LICENSE",
)
STEP_S = 300
# Migrations run when they are imported; floodmark/testing starts servers that only tests need.
IMPORT_ALL = """
import importlib, pkgutil, sys, floodmark
left_out = ("floodmark.testing", "floodmark.catalog.migrations")
names = [found.name for found in pkgutil.walk_packages(floodmark.__path__, "floodmark.", onerror=lambda name: None)]
names = [name for name in names if not name.startswith(left_out)]
for name in names:
    importlib.import_module(name)
print(floodmark.__file__, len(names))
"""


class Wrong(Exception):
    """Something that a user would miss."""


def files_of_the_source() -> set[str]:
    found = (path for path in (ROOT / NAME).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


def check_wheel(names: set[str], source: set[str]) -> None:
    """All of the package's files are in it, and beside them only what describes it."""
    if missing := [name for name in NEEDED if not any(found.startswith(name) for found in names)]:
        raise Wrong(f"the wheel has no {', '.join(missing)}")
    if lost := sorted(source - names):
        raise Wrong(f"the wheel lacks files of the source: {', '.join(lost)}")
    if more := sorted(name for name in names - source if not name.startswith(INFO)):
        raise Wrong(f"the wheel has what is no part of the package: {', '.join(more)}")


def check_source(names: set[str], source: set[str]) -> None:
    """It has what the wheel is built from, its license, and no part of the tests."""
    top = f"{NAME}-{VERSION}/"
    inside = {name.removeprefix(top) for name in names}
    if lost := sorted((source | {"LICENSE", "README.md", "pyproject.toml"}) - inside):
        raise Wrong(f"the source package lacks {', '.join(lost)}")
    if more := sorted(name for name in inside if name.startswith(("tests/", "bench/"))):
        raise Wrong(f"the source package has {', '.join(more)}")


def locked() -> set[tuple[str, str]]:
    return set(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE))


def run(folder: Path, *command: str | Path) -> str:
    """What a command prints. Nothing of the environment leads it to the source or to another lake."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("FLOODMARK_", "PYTHON", "VIRTUAL_"))
    }
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=kept, capture_output=True, text=True, timeout=STEP_S
    )
    if done.returncode != 0:
        raise Wrong(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def try_wheel(folder: Path) -> str:
    """Installs the wheel below this folder, and uses it there."""
    uv, place, empty = Path(sys.executable).parent / "uv", folder / "venv", folder / "empty"
    empty.mkdir()
    run(empty, uv, "venv", "--quiet", "--python", sys.executable, place)
    python, floodmark = place / "bin/python", place / "bin/floodmark"
    locked_only: list[str | Path] = ["--constraints", ROOT / "requirements.lock"]
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", python, *locked_only, DIST / WHEEL]
    try:
        run(empty, *install, "--offline")
    except Wrong:
        # Not all of it is in uv's cache. Asked first, an index whose answers cannot be kept has Spark built each time.
        run(empty, *install)
    frozen = run(empty, uv, "pip", "list", "--format", "freeze", "--python", python).split()
    installed = {(name, version) for name, _, version in (line.partition("==") for line in frozen)}
    if other := sorted(installed - locked() - {(NAME, VERSION)}):
        raise Wrong(f"versions that are not locked: {other}")
    if (said := run(empty, floodmark, "--version").strip()) != f"{NAME} {VERSION}":
        raise Wrong(f"floodmark --version says {said}")
    run(empty, floodmark, "--lake", "lake", "init")
    if (said := run(empty, floodmark, "--json", "--lake", "lake", "tables").strip()) != '{"tables": []}':
        raise Wrong(f"the tables of a new lake: {said}")
    run(empty, python, "-c", "import floodmark")
    where, modules = run(empty, python, "-c", IMPORT_ALL).split()
    if not Path(where).is_relative_to(place):
        raise Wrong(f"floodmark was imported from {where}")
    return f"{len(installed)} packages, {modules} modules imported"


def main() -> int:
    source = files_of_the_source()
    try:
        if lost := [name for name in (WHEEL, SOURCE) if not (DIST / name).exists()]:
            raise Wrong(f"dist/ has no {', '.join(lost)}: run `make dist`")
        with zipfile.ZipFile(DIST / WHEEL) as archive:
            check_wheel(set(archive.namelist()), source)
        with tarfile.open(DIST / SOURCE) as archive:
            check_source({member.name for member in archive if member.isfile()}, source)
        with tempfile.TemporaryDirectory(prefix="floodmark-wheel-") as folder:
            tried = try_wheel(Path(folder))
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
    print(f"{WHEEL}: {len(source)} files as in the source; alone in an environment: {tried}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

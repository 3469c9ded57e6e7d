"""Which Chromium the browser tests use, and how `make test` gets one where none is: announced, and refusable.

`python -m tests.browser.chromium` is what `make test` runs first. The variable BROWSER decides: `skip` refuses, and the
browser tests are skipped; `demand` (continuous integration) fails without one; otherwise they are skipped, with one
line that cannot be overlooked, if none can be had.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE, SKIP, DEMAND = "BROWSER", "skip", "demand"
NAMES = ("chromium", "chromium-browser", "google-chrome")
SKIPPED = "BROWSER TESTS ARE SKIPPED"
VERSION_S_MAX = 60


def wish() -> str:
    """What is asked for. Desktops use this variable too, for the name of a browser: that is no wish."""
    given = os.environ.get(VARIABLE, "")
    return given if given in (SKIP, DEMAND) else ""


def find() -> str | None:
    """The path of a Chromium that starts: one of the system, or Playwright's own."""
    return next((path for path in _candidates() if _starts(path)), None)


def why_not() -> str | None:
    """Why browser tests cannot run; None if they can."""
    if wish() == SKIP:
        return f"{VARIABLE}={SKIP}"
    return None if find() is not None else "no Chromium was found"


def _candidates() -> Iterator[str]:
    yield from (found for name in NAMES if (found := shutil.which(name)))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    if Path(own).exists():
        yield own


def _starts(path: str) -> bool:
    """Libraries that are missing show here."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=VERSION_S_MAX)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def installers() -> list[list[str]]:
    """Debian's package if we may (it brings its libraries), then Playwright's own, which needs no rights."""
    own = [sys.executable, "-m", "playwright", "install", "chromium"]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        return [["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], own]
    return [own]


def main() -> int:
    if wish() == SKIP:
        print(f"{VARIABLE}={SKIP}: no browser is looked for, and {SKIPPED}", flush=True)
        return 0
    if find() is not None:
        return 0
    for command in installers():
        shown = " ".join(command).replace(sys.executable, "python")
        print(f"No Chromium for the browser tests; getting one ({VARIABLE}={SKIP} refuses): {shown}", flush=True)
        if command[0] == "apt-get":
            subprocess.run(["apt-get", "update", "-qq"], check=False)
        if subprocess.run(command, check=False).returncode == 0 and find() is not None:
            return 0
    print(f"*** {SKIPPED}: no Chromium could be had. Install one, or Playwright's. ***", flush=True)
    return 1 if wish() == DEMAND else 0


if __name__ == "__main__":
    sys.exit(main())

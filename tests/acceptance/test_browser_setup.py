"""`make test` without a Chromium: it gets one, says so, can be refused; else browser tests are skipped, out loud."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IS_ROOT = os.geteuid() == 0
FAKE = "#!/bin/sh\necho Chromium 1.0\n"


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """A machine without a browser, whose installers fail; what apt-get is asked is written down."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "bash", "env", "dirname", "chmod", "cat", "grep"):
        (tools / name).symlink_to(str(shutil.which(name)))
    program(tools / "apt-get", f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit 1\n')
    return {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path / "none"),
        # Nothing is loaded from anywhere.
        "PLAYWRIGHT_DOWNLOAD_HOST": "http://127.0.0.1:1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(command: list[str], environment: dict[str, str], **more: str) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


def get(environment: dict[str, str], **more: str) -> tuple[int, str]:
    return run([sys.executable, "-m", "tests.browser.chromium"], environment, **more)


def browser_tests(environment: dict[str, str], tmp_path: Path, **more: str) -> tuple[int, str]:
    chosen = "tests/browser/test_page.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/run", chosen]
    return run(command, environment, **more)


def test_refused_by_the_variable_nothing_is_installed(bare: dict[str, str], tmp_path: Path) -> None:
    code, text = get(bare, BROWSER="skip")
    assert (code, "BROWSER=skip" in text, "SKIPPED" in text) == (0, True, True)
    assert not (tmp_path / "asked").exists()


def test_one_is_got_where_that_is_possible_and_announced(bare: dict[str, str], tmp_path: Path) -> None:
    chromium = tmp_path / "bin/chromium"
    if IS_ROOT:
        program(
            tmp_path / "bin/apt-get",
            f"#!/bin/sh\ncat > {chromium} <<'END'\n{FAKE}END\nchmod +x {chromium}\n",
        )
        code, text = get(bare)
        assert (code, "getting one (BROWSER=skip refuses): apt-get install" in text) == (0, True)
        assert "SKIPPED" not in text
    else:
        program(chromium, FAKE)
    assert get(bare) == (0, "")  # one that is there is taken without a word


def test_where_none_can_be_had_the_line_is_loud_and_only_a_demand_fails(bare: dict[str, str], tmp_path: Path) -> None:
    code, text = get(bare)
    assert code == 0
    assert "playwright install chromium" in text
    assert text.count("*** BROWSER TESTS ARE SKIPPED") == 1
    assert (tmp_path / "asked").exists() == IS_ROOT
    assert get(bare, BROWSER="demand")[0] == 1
    # A desktop's own meaning of the variable is no wish.
    assert get(bare, BROWSER="firefox")[0] == 0


def test_browser_tests_are_skipped_with_one_loud_line_and_fail_where_they_are_demanded(
    bare: dict[str, str], tmp_path: Path
) -> None:
    code, text = browser_tests(bare, tmp_path)
    assert code == 0, text
    assert text.count("BROWSER TESTS ARE SKIPPED: the page was not tested") == 1
    assert "passed" not in text
    code, text = browser_tests(bare, tmp_path, BROWSER="demand")
    assert code != 0
    assert "browser tests are demanded, and no Chromium was found" in text


def test_continuous_integration_demands_them(bare: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path / "bin/make", '#!/bin/sh\necho "make $@ with BROWSER=$BROWSER"\n')
    verbs = [f"make {verb} with BROWSER=demand\n" for verb in ("dist", "test")]
    assert run([str(ROOT / ".ci/run")], bare) == (0, "".join(verbs))


def test_make_test_looks_for_a_browser_first() -> None:
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    looked, tested = done.stdout.find("-m tests.browser.chromium"), done.stdout.find("-m pytest")
    assert 0 <= looked < tested

"""The check of the packages (tests/wheel.py) sees what is missing in them, and what should not be there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import wheel

TOP = f"{wheel.NAME}-{wheel.VERSION}/"
SOURCE = frozenset(wheel.files_of_the_source())
WHEEL = SOURCE | {f"{wheel.INFO}licenses/LICENSE", f"{wheel.INFO}METADATA"}
PACKED = frozenset(TOP + name for name in SOURCE | {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"})


def test_packages_with_all_of_the_source_pass() -> None:
    wheel.check_wheel(set(WHEEL), set(SOURCE))
    wheel.check_source(set(PACKED), set(SOURCE))


@pytest.mark.whole
@pytest.mark.parametrize("needed", wheel.NEEDED)
def test_a_wheel_that_lacks_a_kind_of_file_is_refused_even_if_the_source_lacks_it_too(needed: str) -> None:
    kept = {name for name in WHEEL if not name.startswith(needed)}
    assert kept < WHEEL
    with pytest.raises(wheel.Wrong, match="has no"):
        wheel.check_wheel(kept, kept & SOURCE)


def test_a_wheel_that_lacks_one_file_of_the_source_is_refused() -> None:
    with pytest.raises(wheel.Wrong, match=r"lacks files of the source: floodmark/lake\.py$"):
        wheel.check_wheel(set(WHEEL - {"floodmark/lake.py"}), set(SOURCE))


@pytest.mark.whole
@pytest.mark.parametrize("extra", ["tests/conftest.py", "bench/load.py", "floodmark/left_over.py"])
def test_a_wheel_with_anything_else_is_refused(extra: str) -> None:
    with pytest.raises(wheel.Wrong, match=f"no part of the package: {extra}$"):
        wheel.check_wheel({*WHEEL, extra}, set(SOURCE))


@pytest.mark.whole
@pytest.mark.parametrize("lost", ["LICENSE", "pyproject.toml", "floodmark/py.typed"])
def test_a_source_package_that_lacks_something_is_refused(lost: str) -> None:
    with pytest.raises(wheel.Wrong, match=f"lacks {lost}$"):
        wheel.check_source(set(PACKED - {TOP + lost}), set(SOURCE))


@pytest.mark.whole
@pytest.mark.parametrize("extra", ["tests/test_tidy.py", "bench/load.py"])
def test_a_source_package_with_tests_is_refused(extra: str) -> None:
    with pytest.raises(wheel.Wrong, match=f"has {extra}$"):
        wheel.check_source({*PACKED, TOP + extra}, set(SOURCE))


def test_a_command_that_fails_is_shown_with_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(wheel.Wrong, match=r"exit code 3\nout\n"):
        wheel.run(tmp_path, sys.executable, "-c", "print('out'); raise SystemExit(3)")


def test_commands_see_neither_the_source_nor_another_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLOODMARK_LAKE", "PYTHONPATH", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "/elsewhere")
    seen = wheel.run(tmp_path, sys.executable, "-c", "import os; print(*os.environ)").split()
    assert not {"FLOODMARK_LAKE", "PYTHONPATH", "VIRTUAL_ENV"} & set(seen)
    assert "PATH" in seen


def test_every_line_of_the_lock_is_read() -> None:
    locked = wheel.locked()
    assert len(locked) == len((wheel.ROOT / "requirements.lock").read_text().splitlines())
    assert all(version[0].isdigit() for _, version in locked)

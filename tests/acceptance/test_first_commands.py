"""What a new user types first: the version, help, and completion by the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import floodmark as fm

COMMAND = Path(sys.executable).parent / "floodmark"


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [str(COMMAND), *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_printed() -> None:
    assert run("--version") == f"floodmark {fm.__version__}\n"


@pytest.mark.parametrize("command", [[], ["query"], ["sink"], ["sink", "add"], ["maintain", "sweep"]])
def test_help_is_had_by_h_too(command: list[str]) -> None:
    assert run(*command, "-h") == run(*command, "--help")


def test_the_shell_completes_commands_and_options() -> None:
    bash = {"_FLOODMARK_COMPLETE": "complete_bash"}
    assert run(**bash, COMP_WORDS="floodmark ma", COMP_CWORD="1").split() == ["maintain"]
    assert "quarantine" in run(**bash, COMP_WORDS="floodmark sink ", COMP_CWORD="2").split()
    assert "--batch" in run(**bash, COMP_WORDS="floodmark load --ba", COMP_CWORD="2").split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(shell: str) -> None:
    assert "_FLOODMARK_COMPLETE" in run("--show-completion", shell)

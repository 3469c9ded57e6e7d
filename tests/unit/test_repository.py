"""What surrounds the code holds together: license and policy, workflows, forms, hooks, and one version everywhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

import floodmark

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
EVERY_WORKFLOW = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir())
TEMPLATE = ROOT / ".github/pull_request_template.md"
HOOKS = ROOT / ".pre-commit-config.yaml"
MISSPELLED = "tests/misspelled.txt"
# Of a run, what may be called without being in the tree or in the Makefile.
PROGRAMS = {"docker", "echo", "exit", "fi", "gh", "git", "if", "version=$(python3"}
PYTHONS = ["3.11", "3.12", "3.13"]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def verbs() -> set[str]:
    """The verbs that the Makefile has a rule for, and lists."""
    return set(re.findall(r"^([a-z-]+):.*##", read("Makefile"), flags=re.MULTILINE))


def verbs_called(text: str) -> set[str]:
    """The verbs of each `make`, without its options."""
    calls = re.findall(r"\bmake((?: +(?:-\S+|[a-z][a-z-]*))+)", text)
    return {word for call in calls for word in call.split() if not word.startswith("-")}


def jobs(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())["jobs"]
    assert isinstance(found, dict)
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job.get("steps", [])]


def scripts(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


# ── version, license, policy ──


def test_the_version_is_the_same_for_the_package_and_for_the_code() -> None:
    assert PROJECT["project"]["version"] == floodmark.__version__


def test_the_changelog_begins_with_this_version() -> None:
    first = re.findall(r"^## (\S+)", read("CHANGELOG.md"), flags=re.MULTILINE)[0]
    assert first == floodmark.__version__


@pytest.mark.parametrize("name", ["LICENSE", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_what_a_visitor_looks_for_is_there_and_linked_from_the_readme(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0
    assert f"]({name})" in read("README.md").partition("## Read on")[2]


def test_the_license_is_the_one_that_the_package_names_and_goes_wherever_the_code_goes() -> None:
    project = PROJECT["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    text = " ".join(read("LICENSE").split())
    assert text.startswith("Apache License Version 2.0")
    assert "9. Accepting Warranty or Additional Liability." in text
    copied = re.findall(r"^COPY (.*) \S+$", read("deploy/Containerfile"), flags=re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert "LICENSE" in names
    # The builder is given these files, and no others.
    assert {line.removeprefix("!") for line in read(".dockerignore").splitlines() if line.startswith("!")} == names


# ── workflows ──


def test_there_are_workflows_for_changes_and_for_releases() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    assert set(jobs(WORKFLOWS[0])) == {"lint", "test", "docs", "build"}
    assert {"lint", "docs", "dist"} <= verbs_called("\n".join(scripts(WORKFLOWS[0])))


@EVERY_WORKFLOW
def test_workflows_call_verbs_and_files_that_exist(path: Path) -> None:
    assert scripts(path)
    for script in scripts(path):
        assert verbs_called(script) <= verbs()
        called = {line.split()[0] for line in script.splitlines() if line.strip()} - {"make"} - PROGRAMS
        assert [name for name in called if not (ROOT / name).is_file()] == []
        assert [name for name in re.findall(r"--file (\S+)", script) if not (ROOT / name).is_file()] == []


def test_verbs_are_found_wherever_a_script_calls_them() -> None:
    assert verbs_called("make lint\nBROWSER=skip make docs dist || make -s clean") == {"lint", "docs", "dist", "clean"}
    assert verbs_called("cmake polish; echo made up") == set()
    assert {"lint", "test", "docs", "dist"} <= verbs()
    assert "polish" not in verbs()


def test_what_continuous_integration_runs_calls_verbs_that_exist() -> None:
    called = verbs_called("\n".join(line for line in read(".ci/run").splitlines() if not line.startswith("#")))
    assert called == {"dist", "test"}
    assert called <= verbs()
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


@EVERY_WORKFLOW
def test_workflows_may_read_and_no_more_unless_a_job_says_what_for(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    granted = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
    wanted = {"publish": {"id-token": "write"}, "attach": {"contents": "write"}}
    assert granted == (wanted if path.name == "release.yml" else {})
    # Steps that run our code after a checkout find no credentials.
    checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@EVERY_WORKFLOW
def test_jobs_end_and_actions_have_their_major_version(path: Path) -> None:
    for name, job in jobs(path).items():
        # A job that calls a workflow of ours has no time of its own.
        assert ("timeout-minutes" in job) != ("uses" in job), name
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file(), name
    actions = [step["uses"] for step in steps(path) if "uses" in step]
    assert actions
    assert [action for action in actions if not re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action)] == []


def test_no_two_workflows_wait_for_each_other() -> None:
    groups = [yaml.safe_load(path.read_text())["concurrency"]["group"] for path in WORKFLOWS]
    assert len(set(groups)) == len(groups)
    assert [group for group in groups if "github.workflow" in group] == []


def test_tests_run_on_every_python_that_is_promised() -> None:
    job = jobs(ROOT / ".github/workflows/ci.yml")["test"]
    assert job["strategy"]["matrix"]["python"] == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_a_release_publishes_what_was_tested_for_its_tag() -> None:
    release = jobs(ROOT / ".github/workflows/release.yml")
    assert [release[name].get("needs") for name in ("version", "ci", "publish", "attach")] == [
        None,
        "version",
        "ci",
        "publish",
    ]
    assert release["ci"]["uses"] == "./.github/workflows/ci.yml"
    built = [step["with"]["name"] for step in steps(WORKFLOWS[0]) if "upload-artifact" in step.get("uses", "")]
    taken = [step["with"]["name"] for step in steps(WORKFLOWS[1]) if "download-artifact" in step.get("uses", "")]
    assert (built, taken) == (["dist"], ["dist", "dist"])


# ── forms ──


def test_the_forms_ask_for_something() -> None:
    assert [path.name for path in FORMS] == ["bug.yml", "feature.yml"]
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        assert any(part.get("validations", {}).get("required") for part in asked), path.name
        assert len({part["id"] for part in asked}) == len(asked), path.name


def test_the_list_for_pull_requests_names_verbs_and_files_that_exist() -> None:
    text = TEMPLATE.read_text()
    assert {"lint", "test"} <= verbs_called(text) <= verbs()
    files = re.findall(r"`([\w/]+\.md)`", text)
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []


# ── hooks and spelling ──


def hooks() -> list[dict[str, Any]]:
    return [hook for repo in yaml.safe_load(HOOKS.read_text())["repos"] for hook in repo["hooks"]]


def programs_of(requirements: list[str]) -> set[str]:
    """What the packages that are required put into the bin of an environment."""
    names = [found[0] for text in requirements if (found := re.match(r"[\w-]+", text))]
    files = [file for name in names for file in distribution(name).files or ()]
    return {file.name for file in files if file.parent.name == "bin"}


def test_hooks_fetch_nothing_and_call_programs_of_the_dev_dependencies() -> None:
    assert {repo["repo"] for repo in yaml.safe_load(HOOKS.read_text())["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks()} == {"system"}
    called = [Path(shlex.split(hook["entry"])[0]) for hook in hooks()]
    assert {path.parent.as_posix() for path in called} == {".venv/bin"}
    programs = {path.name for path in called}
    assert programs == {"ruff", "codespell", "check-added-large-files"}
    there = programs_of(PROJECT["project"]["optional-dependencies"]["dev"])
    assert "pre-commit" in there
    assert programs <= there
    assert "ruff" not in programs_of(["pytest"])


def test_hooks_check_the_spelling_as_lint_does() -> None:
    lint = read("Makefile").partition("\nlint:")[2].partition("\n\n")[0]
    checks = [hook for hook in hooks() if "codespell" in hook["entry"]]
    assert len(checks) == lint.count("/codespell ") == 2
    given = [hook for hook in checks if f"--ignore-words {MISSPELLED}" in hook["entry"]]
    assert [hook["files"] for hook in given] == ["^tests/"]
    assert f"--ignore-words {MISSPELLED} tests\n" in f"{lint}\n"


def test_words_that_are_let_pass_are_still_needed() -> None:
    texts = {path: path.read_text().lower() for name in ("floodmark", "tests") for path in (ROOT / name).rglob("*.py")}
    tests = " ".join(text for path, text in texts.items() if path.is_relative_to(ROOT / "tests"))
    words = read(MISSPELLED).split()
    assert words == sorted(set(words))
    assert [word for word in words if not re.search(rf"\b{word}\b", tests)] == []
    terms = PROJECT["tool"]["codespell"]["ignore-words-list"].split(",")
    everything = " ".join(texts.values())
    assert [term for term in terms if not re.search(rf"\b{term}\b", everything)] == []


def test_the_package_is_found_from_the_folder_above_a_clone(tmp_path: Path) -> None:
    """A folder named like it, without code of its own: as the clone is to a Python that starts above it."""
    (tmp_path / "floodmark").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import floodmark; print(floodmark.open.__name__)"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "open\n"), done.stderr

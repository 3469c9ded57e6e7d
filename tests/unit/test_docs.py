"""The docs say what the code says: the generated page, commands, links, files, and every name that is listed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from docs import generate
from floodmark.catalog import tables
from floodmark.cli.main import app
from floodmark.failpoints import FAILPOINTS
from floodmark.lake import Lake

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
SOURCE = {
    path: path.read_text()
    for folder in ("floodmark", "tests", "bench")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
GROUP: Any = get_command(app)
CONTEXT = GROUP.make_context("floodmark", [], resilient_parsing=True)


def code(text: str) -> list[str]:
    """What a page has in code font inside its lines."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def read(name: str) -> str:
    return (ROOT / name).read_text()


def find_command(line: str) -> tuple[Any, str]:
    """The command that a line begins with, of a group the one inside it, and the rest; None if there is no such one."""
    found = re.match(r"floodmark ((?:--\w+ \S+ )*)([a-z]+)\b(.*)", line)
    if found is None:
        return GROUP, ""
    command, rest = GROUP.get_command(CONTEXT, found[2]), found[3]
    while hasattr(command, "list_commands") and (inner := re.match(r" ([a-z]+)\b(.*)", rest)) is not None:
        command, rest = command.get_command(CONTEXT, inner[1]), inner[2]
    return command, found[1] + rest


def options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


# ── the generated page ──


def test_the_command_page_is_what_the_commands_say_now() -> None:
    assert read("docs/cli.md") == generate.page(), "run `make docs`"


def test_every_error_kind_and_setting_is_on_the_command_page() -> None:
    page = read("docs/cli.md")
    kinds = {kind.__name__: kind.exit_code for kind in generate.error_kinds()}
    assert {"Invalid", "CommitUnknown", "TooNew"} <= set(kinds)
    for name, exit_code in kinds.items():
        assert f"| {exit_code} | `{name}` |" in page
    assert set(generate.SETTING_HELP) == set(generate.setting_names())


# ── commands, links, files ──


def test_the_changelog_lists_every_command() -> None:
    (listed,) = re.findall(r"^- Commands: `([^`]+)`", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert sorted(listed.split()) == sorted(GROUP.list_commands(CONTEXT))


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    gone = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert gone == []


@EVERY_PAGE
def test_files_that_are_named_exist(page: Path) -> None:
    own = re.compile(r"(?:floodmark|tests|docs|examples|bench)/[\w./-]+|pyproject\.toml|requirements\.(?:in|lock)")
    named = [name for name in code(page.read_text()) if own.fullmatch(name)]
    # What runs write is not in the repository.
    gone = [name for name in named if not name.startswith("bench/out") and not (ROOT / name).exists()]
    assert gone == []


@EVERY_PAGE
def test_commands_that_are_shown_exist_with_their_options(page: Path) -> None:
    text = page.read_text()
    lines = code(text) + [line for block in blocks(text, "sh") for line in block.splitlines()]
    wrong = []
    for line in lines:
        command, rest = find_command(line.replace("\\\n", ""))
        given = set(re.findall(r"(--[a-z-]+)", rest))
        if command is None or given - options(command) - options(GROUP):
            wrong.append(line)
    assert wrong == []


def test_commands_of_a_group_are_looked_up_in_it() -> None:
    assert find_command("floodmark maintain sweep --deep")[0].name == "sweep"
    assert find_command("floodmark maintain --dry-run")[0].name == "maintain"
    assert find_command("floodmark maintain polish")[0] is None
    assert find_command("floodmark polish")[0] is None


@EVERY_PAGE
def test_make_verbs_that_are_shown_exist(page: Path) -> None:
    verbs = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    text = page.read_text()
    lines = code(text) + [line for block in blocks(text, "sh") for line in block.splitlines()]
    shown = {found[1] for line in lines if (found := re.match(r"make ([a-z-]+)", line))}
    assert shown <= verbs


def test_the_readme_shows_every_verb_it_promises_and_stays_one_screen() -> None:
    readme = read("README.md")
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in blocks(readme, "sh")[0].splitlines()}
    assert len(readme.splitlines()) <= 90


@EVERY_PAGE
def test_verbs_of_a_lake_that_are_named_exist(page: Path) -> None:
    named = {found for text in code(page.read_text()) for found in re.findall(r"\blake\.([a-z_]+)\(?", text)}
    settings = {name.partition(".")[2] for name in generate.setting_names() if name.startswith("lake.")}
    gone = {name for name in named - settings - {"py"} if not hasattr(Lake, name)}
    assert gone == set()


# ── names ──


def test_the_protocol_lists_every_failpoint_once() -> None:
    table = read("docs/protocol.md").partition("## 7.")[2].partition("## 8.")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in code(row)]
    assert sorted(listed) == sorted(FAILPOINTS)


@EVERY_PAGE
def test_failpoints_that_are_named_exist(page: Path) -> None:
    operations = "|".join(sorted(set(FAILPOINTS.values())))
    named = {name for name in code(page.read_text()) if re.fullmatch(rf"(?:{operations})\.(?!py$|md$)\w+", name)}
    assert named - set(generate.setting_names()) <= set(FAILPOINTS)


def test_the_protocol_lists_every_catalog_table_with_its_format() -> None:
    section = read("docs/protocol.md").partition("## 9.")[2]
    listed = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", section, flags=re.MULTILINE))
    # Alembic's own table is known to env.py only.
    assert set(listed) == {*tables.metadata.tables, "fm_migrations"}
    migrations = {
        path.name[1:5]: path.read_text() for path in (ROOT / "floodmark/catalog/migrations/versions").glob("f*.py")
    }
    for name, made in listed.items():
        assert name == "fm_migrations" or f'"{name}"' in migrations[f"{int(made):04d}"], name
    assert f"writes format {tables.FORMAT}" in section


@EVERY_PAGE
def test_catalog_tables_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"\b(?:fm|iceberg)_[a-z_]+\b", " ".join(code(page.read_text()))))
    assert named <= {*tables.metadata.tables, "fm_migrations"}


def test_every_invariant_that_code_cites_is_in_the_list() -> None:
    numbers = re.compile(r"\bI(\d{1,2})\b")
    listed = re.findall(r"^\| I(\d+) \|", read("docs/invariants.md"), flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    cited = {number for text in SOURCE.values() for number in numbers.findall(text)}
    cited |= {number for page in PAGES for number in numbers.findall(page.read_text()) if page.name != "invariants.md"}
    assert cited
    assert cited <= set(listed)


@EVERY_PAGE
def test_names_in_the_style_of_classes_are_names_of_the_code(page: Path) -> None:
    known = set(re.findall(r"\w+", " ".join(SOURCE.values())))
    named = {found for text in code(page.read_text()) for found in re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", text)}
    kinds = {kind.__name__ for kind in generate.error_kinds()}
    assert named <= known | kinds


# ── dependencies ──


def test_every_direct_dependency_has_its_reason() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w-]+", text)[0] for text in wanted}  # type: ignore[index]
    listed = re.findall(r"^\| ([\w-]+) \| \S", read("docs/dependencies.md"), flags=re.MULTILINE)
    assert sorted(name for name in listed if name != "package") == sorted(names)


# ── decisions ──


def test_every_decision_has_its_number_and_its_three_parts() -> None:
    records = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [record.name[:4] for record in records] == [f"{number:04d}" for number in range(1, len(records) + 1)]
    for record in records:
        text = record.read_text()
        assert text.startswith(f"# {record.name[:4]} "), record.name
        places = [text.find(f"**{part}.**") for part in ("Context", "Decision", "Consequences")]
        assert -1 not in places, record.name
        assert places == sorted(places), record.name

"""What errors say: the method to a program, the command to a person; causes with their text, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark import errors
from floodmark.errors import cause_text, read_on_the_command_line, with_methods, without_secrets
from floodmark.testing.database_faults import DatabaseFaults
from tests.acceptance.test_run_command import command
from tests.conftest import Place, rows

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    """Every command that an advice in the package names."""
    text = "".join(path.read_text() for path in (ROOT / "floodmark").rglob("*.py") if path.name != "errors.py")
    return sorted(set(re.findall(r"`floodmark [^`\n]*`", text)))


@pytest.mark.parametrize(
    ("message", "facts", "advice", "said"),
    [
        ("no lake was named", {}, "Use --lake PATH.", "no lake was named. Use --lake PATH."),
        ("nothing to set", {"sink": "out"}, "Name one.", "nothing to set [sink=out]. Name one."),
        ("is it there?", {}, "Look.", "is it there? Look."),
        ("it is gone.", {}, "Look.", "it is gone. Look."),
        ("it is gone", {"a": 1}, "", "it is gone [a=1]"),
    ],
)
def test_message_and_advice_are_sentences_of_their_own(
    message: str, facts: dict[str, Any], advice: str, said: str
) -> None:
    error = fm.Invalid(message, advice=advice, **facts)
    assert str(error) == said
    assert (error.as_dict()["message"], error.as_dict()["advice"]) == (message, advice)


@pytest.mark.parametrize("raised", ["missing lake", "missing table"])
def test_an_error_in_python_names_the_method_and_on_the_command_line_the_command(tmp_path: Path, raised: str) -> None:
    method, name, arguments = {
        "missing lake": ("floodmark.open(path, create=True)", "floodmark init", ["tables"]),
        "missing table": ("lake.tables()", "floodmark tables", ["show", "nothing"]),
    }[raised]
    if raised == "missing table":
        fm.open(tmp_path / "lake", create=True).close()
    with pytest.raises(fm.NotFound) as caught, fm.open(tmp_path / "lake") as lake:
        lake.show("nothing")
    assert f"`{method}`" in str(caught.value)
    assert name not in str(caught.value)
    # What is stored, or sent over HTTP, is for people.
    assert f"`{name}`" in caught.value.as_dict()["advice"]
    code, text = command(tmp_path, "--lake", "lake", *arguments)
    assert code == 2
    assert f"`{name}`" in text
    assert "lake." not in text


def test_the_command_line_is_left_when_its_command_ends() -> None:
    error = fm.Invalid("no", advice="See `floodmark tables`.")
    with read_on_the_command_line():
        assert "`floodmark tables`" in str(error)
    assert "`lake.tables()`" in str(error)


def test_an_unknown_commit_is_asked_for_by_method_or_by_command() -> None:
    error = fm.CommitUnknown("the reply was lost", operation="01X")
    assert "lake.resolve(operation)" in str(error)
    with read_on_the_command_line():
        assert "`floodmark recover`" in str(error)
        assert "lake." not in str(error)


def test_every_method_that_an_advice_names_exists(tmp_path: Path) -> None:
    """And its command is in some advice, or could be: none is left of both."""
    with fm.open(tmp_path / "lake", create=True) as lake:
        for text in commands():
            for name in re.findall(r"`((?:lake|floodmark)\.[\w.]+)", with_methods(text)):
                found: Any = {"lake": lake, "floodmark": fm}
                first, *rest = name.split(".")
                found = found[first]
                for part in rest:
                    found = getattr(found, part)


@pytest.mark.parametrize(
    "command_name",
    ["doctor", "spool accept {row.table}", "run", "export TABLE FILE"],
)
def test_a_command_that_no_method_does_stays_a_command(command_name: str) -> None:
    assert with_methods(f"See `floodmark {command_name}`.") == f"See `floodmark {command_name}`."


@pytest.mark.whole
@pytest.mark.parametrize(
    ("said", "method"),
    [
        ("sink replay 'out' --table 'events' --from mark", 'lake.sinks.replay("out", table="events", start="mark")'),
        ("sink replay out --from head", 'lake.sinks.replay("out", start="head")'),
        ("sink resume out", 'lake.sinks.resume("out")'),
        ("sink set", "lake.sinks.set(name, …)"),
        ("repair people --accept --apply", 'lake.repair("people", choice="accept", apply=True)'),
        ("recover --discard 01X --apply", 'lake.recover(discard=["01X"])'),
        ("backfill unbind events nick", 'lake.backfill.unbind("events", "nick")'),
        ("maintain policy events --retention 90d", 'lake.maintain.set_policy("events", "90d")'),
    ],
)
def test_a_method_has_the_arguments_of_its_command(said: str, method: str) -> None:
    assert with_methods(f"Run `floodmark {said}`.") == f"Run `{method}`."


# ── causes ──


def test_a_cause_keeps_the_type_and_text_of_what_the_database_said(new_place: Callable[[str], Place]) -> None:
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("events", "id long not null, name string")
        faults = DatabaseFaults(lake.catalog.database, fail_at=1, mode="before")
        with pytest.raises(fm.Unavailable) as caught:
            lake.append("events", rows(1))
        faults.remove()
    assert "OperationalError: injected: the connection was lost" in str(caught.value)


def test_a_database_that_cannot_be_reached_is_named_with_its_own_words_and_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(fm.Unavailable) as caught:
        fm.open(tmp_path / "lake", create=True, catalog="postgresql+psycopg://ada:s3cr3t-word@127.0.0.1:1/lake")
    assert re.search(r"cause=OperationalError: .*127\.0\.0\.1", str(caught.value))
    assert "s3cr3t-word" not in str(caught.value)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("cannot reach postgresql://ada:hunter22@db/lake", "hunter22"),
        ("header Authorization: Bearer abc.def-123", "abc.def-123"),
        ("refused: password=hunter22 host=db", "hunter22"),
        ('{"secret_access_key": "wJalrXUtnFEMI/K7"}', "wJalrXUtnFEMI/K7"),
        ("GET https://s3/x?X-Amz-Signature=deadbeef&X-Amz-Date=1", "deadbeef"),
        ("the key AKIAIOSFODNN7EXAMPLE is not known", "AKIAIOSFODNN7EXAMPLE"),
        (f"not a token: fmt_{'a' * 43}", "a" * 43),
        ("it answered: the-value-of-a-variable", "the-value-of-a-variable"),
    ],
)
def test_secrets_are_removed_from_causes(text: str, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEB_TOKEN", "the-value-of-a-variable")
    error = fm.Unavailable("it did not answer", cause=RuntimeError(text))
    for said in (str(error), str(error.as_dict())):
        assert "RuntimeError: " in said
        assert hidden not in said
        assert "***" in said


def test_what_is_no_secret_stays() -> None:
    plain = 'connection to server at "db", port 5432 failed: FATAL: password authentication failed for user "ada"'
    assert without_secrets(plain) == plain


def test_a_cause_is_one_line_and_not_endless() -> None:
    said = cause_text(ValueError("first\n  second\n" + "x" * 10_000))
    assert said.startswith("ValueError: first second x")
    assert len(said) == errors.CAUSE_CHARACTERS_MAX
    assert cause_text(ValueError()) == "ValueError"
    assert cause_text(fm.Conflict("moved", table="t")) == "Conflict: moved [table=t]"

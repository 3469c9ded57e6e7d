"""What a person sees of results: stored text as it is, whatever it looks like."""

from __future__ import annotations

import pytest

from floodmark.cli.output import Output


@pytest.mark.parametrize("value", ["[x]", "[bold]loud[/bold]", "[/]", ":smile:", "a [location=b c=d] e"])
def test_a_table_shows_text_that_looks_like_markup_as_it_is(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    Output().rows([{"[a]": value}], ["[a]"], name="rows", empty="")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["[a]", value]

"""Where settings stand in their file, whatever way they are written in."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.settings.places import NO_TEXT, TextPosition, TomlText, where_stopped

TEXT = '''\
# a = 0
a.b = 1 # [not.this]
"q.x" = {y = [1, 2, {z = 3}], w = "} # no"}
[t."a.b".'c d']   # here
s = """
x = 5
[no]
"quote\\\\" """"
l = \'\'\'it's
[[no]]\'\'\'
d = 1979-05-27 07:32:00
  \u00fc = "indented" 

[[list]]
k = 1
[[list]]
k = [
  1, # one ]
  "],", [2], { v.w = 1 },
]
[list.sub]
v = true
'''.replace("\u00fc =", '"\u00fc" =').replace(" \n", "\n")
KEYS: list[tuple[tuple[str | int, ...], tuple[int, int], tuple[int, int]]] = [
    (("a", "b"), (2, 3), (2, 7)),
    (("q.x",), (3, 1), (3, 9)),
    (("q.x", "y", 1), (3, 18), (3, 18)),
    (("q.x", "y", 2, "z"), (3, 22), (3, 26)),
    (("q.x", "w"), (3, 31), (3, 35)),
    (("t", "a.b", "c d"), (4, 10), (4, 1)),
    (("t", "a.b", "c d", "s"), (5, 1), (5, 5)),
    (("t", "a.b", "c d", "l"), (9, 1), (9, 5)),
    (("t", "a.b", "c d", "d"), (11, 1), (11, 5)),
    (("t", "a.b", "c d", "\u00fc"), (12, 3), (12, 9)),
    (("list", 0, "k"), (15, 1), (15, 5)),
    (("list", 1, "k"), (17, 1), (17, 5)),
    (("list", 1, "k", 1), (19, 3), (19, 3)),
    (("list", 1, "k", 3, "v", "w"), (19, 18), (19, 22)),
    (("list", 1, "sub", "v"), (22, 1), (22, 5)),
]


@pytest.mark.parametrize(("path", "key", "value"), KEYS, ids=lambda one: str(one))
def test_keys_and_values_have_their_places(
    path: tuple[str | int, ...], key: tuple[int, int], value: tuple[int, int]
) -> None:
    tomllib.loads(TEXT)  # it is TOML
    text = TomlText(TEXT, "f.toml")
    assert text.find(path) == TextPosition(*key)
    assert text.find(path, value=True) == TextPosition(*value)


def test_a_name_with_dots_is_found_by_its_whole_text() -> None:
    text = TomlText(TEXT, "f.toml")
    assert text.where("q.x.y") == "f.toml:3:10"
    assert text.where("t.a.b.c d.s", value=True) == "f.toml:5:5"


def test_what_is_not_there_has_the_place_of_what_it_would_be_in() -> None:
    text = TomlText(TEXT, "f.toml")
    assert text.where(("list", 1, "sub", "nothing", "here")) == "f.toml:21:7"
    assert text.where("a.c") == "f.toml:2:1"
    assert text.where("nothing") == "f.toml"
    assert NO_TEXT.where("a") == ""


@pytest.mark.parametrize(
    ("text", "place"),
    [("a = ", (1, 5)), ("[a\nb = 1\n", (1, 3)), ("a = 1\na = 2\n", (2, 6)), ('x = """\n', (2, 1)), ("=", (1, 1))],
)
def test_of_what_is_no_toml_it_says_where_the_reader_stopped(text: str, place: tuple[int, int]) -> None:
    with pytest.raises(tomllib.TOMLDecodeError) as failed:
        tomllib.loads(text)
    found, problem = where_stopped(failed.value, text)
    assert found == TextPosition(*place)
    assert problem


# ── anything ──

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=6)
LEAVES = st.integers(-9, 9) | st.booleans() | NAMES
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


class Writer:
    """Writes data as TOML, and where each value went; every choice of style is drawn."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.text = ""
        self.keys: dict[tuple[str | int, ...], int] = {}
        self.values: dict[tuple[str | int, ...], int] = {}

    def choice(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def key(self, path: tuple[str | int, ...]) -> None:
        name = str(path[-1])
        self.keys.setdefault(path, len(self.text))
        bare = re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
        literal = "'" not in name
        styles = [json.dumps(name, ensure_ascii=self.draw(st.booleans()) and name.isascii())]
        styles += [name] * bare + [f"'{name}'"] * literal
        self.text += self.choice(*styles)

    def blank(self) -> None:
        self.text += self.choice("", " ", "\t")

    def between(self) -> None:
        self.text += self.choice("", " ", "\n", " # ] } , = [x]\n", "\n\n")

    def value(self, path: tuple[str | int, ...], value: Any) -> None:
        self.values[path] = len(self.text)
        if isinstance(value, dict):
            self.text += "{"
            for number, (name, inner) in enumerate(value.items()):
                self.text += ", " if number else ""
                self.pair((*path, name), inner)
            self.text += "}"
        elif isinstance(value, list):
            self.text += "["
            for number, inner in enumerate(value):
                self.between()
                self.keys[(*path, number)] = len(self.text)
                self.value((*path, number), inner)
                self.between()
                self.text += "," if number < len(value) - 1 or self.draw(st.booleans()) else ""
            self.between()
            self.text += "]"
        elif isinstance(value, str):
            styles = [json.dumps(value, ensure_ascii=False)]
            styles += [f'"""\n{value}"""'] * ('"' not in value and "\\" not in value)
            styles += [f"'''{value}'''"] * ("'" not in value)
            self.text += self.choice(*styles)
        else:
            self.text += json.dumps(value)

    def pair(self, path: tuple[str | int, ...], value: Any) -> None:
        self.blank()
        self.key(path)
        self.blank()
        self.text += "="
        self.blank()
        self.value(path, value)
        self.blank()

    def table(self, path: tuple[str | int, ...], data: dict[str, Any]) -> None:
        later = {name: inner for name, inner in data.items() if isinstance(inner, dict) and self.draw(st.booleans())}
        for name, inner in data.items():
            if name not in later:
                self.pair((*path, name), inner)
                self.text += self.choice("\n", " # [no]\n")
        for name, inner in later.items():
            self.text += "["
            for end in range(1, len(path) + 2):
                self.blank()
                self.key((*path, name)[:end])
                self.blank()
                self.text += "." if end <= len(path) else ""
            self.text += "]\n"
            self.table((*path, name), inner)


@given(st.dictionaries(NAMES, TREES, max_size=4), st.data())
def test_every_key_and_value_of_any_text_is_found(data: dict[str, Any], drawn: st.DataObject) -> None:
    writer = Writer(drawn.draw)
    writer.table((), data)
    assert tomllib.loads(writer.text) == data
    text = TomlText(writer.text, "f.toml")
    for known, is_value in ((writer.keys, False), (writer.values, True)):
        for path, at in known.items():
            place = text.find(path, value=is_value)
            assert place is not None
            assert sum(len(line) + 1 for line in writer.text.split("\n")[: place.line - 1]) + place.column - 1 == at

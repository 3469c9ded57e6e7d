"""The settings file: every mistake is told with file, line and column, and no secret is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest

import floodmark as fm
from floodmark.serve.daemon.declaration import check_apart, check_file, check_lake, source_path
from floodmark.settings.settings import Settings, check_settings, load_settings

SHA = "ab" * 32
GOOD = f"""\
[lake]
path = "./lake"
[tables.events]
schema = "id long not null, name string"
[sources.drop]
type = "files"
path = "in"
table = "events"
[sinks.out]
type = "files"
tables = "events"
path = "out"
every = "1m"
part_bytes = "8MiB"
[maintain]
every = "off"
[jobs]
resume = false
[serve]
drain = "5s"
[serve.tokens.ci]
sha256 = "{SHA}"
role = "write"
"""


def read(folder: Path, text: str) -> Settings:
    path = folder / "f.toml"
    path.write_text(text)
    return load_settings(path)


def test_a_file_that_is_right_says_all_of_it(tmp_path: Path) -> None:
    settings = read(tmp_path, GOOD)
    declaration = check_file(settings)
    assert settings.serve.tokens["ci"].role == "write"
    assert (settings.serve.drain_s, settings.jobs.resume, settings.maintain.every) == (5, False, "off")
    assert settings.sources["drop"].every == "5s"
    sink = declaration.sinks["out"]
    assert (sink.declared.tables, sink.declared.every, sink.settings.part_bytes) == (["events"], "1m", 8 * 2**20)  # type: ignore[union-attr]
    check_lake(declaration, set())


# What is wrong, and where it is: the last line of the text, at this column.
WRONG = {
    "no TOML": ("[lake]\npath = ", 8, "not valid TOML"),
    "unknown section": ("[lake]\n[laek]", 2, "Did you mean lake"),
    "unknown key": ('[serve]\nbnd = "x"', 1, "Did you mean bind"),
    "unknown key of a source": ('[sources.a]\ntype = "files"\npath = "x"\ntabel = "t"', 1, "Did you mean table"),
    "unknown key of a token": (f'[serve.tokens.a]\nsha256 = "{SHA}"\nrole = "read"\nrol = 1', 1, "Did you mean role"),
    "wrong type": ("[serve]\nbind = 5", 8, "string"),
    "wrong kind of source": ('[sources.a]\npath = "x"\ntable = "t"\ntype = "kafka"', 8, "files"),
    "wrong role": (f'[serve.tokens.a]\nsha256 = "{SHA}"\nrole = "king"', 8, "admin"),
    "missing key": ('[sources]\na = { type = "files", path = "x" }', 5, "sources.a.table"),
    "no span of time": ('[maintain]\nevery = "soon"', 9, "duration"),
    "never": ('[maintain]\nevery = "0s"', 9, "above zero"),
    "no span at all": ("[sinks.a]\nevery = 5", 9, "duration"),
    "drain": ('[serve]\ndrain = "x"', 9, "duration"),
    "spark": ('[spark]\nmaster = "local"\nmaser = "x"', 1, "spark.master"),
    "no section": ("[lake]\n[serve]\n[jobs]\nresume = true\n[maintain]\n[tables]\n[sinks]\nx = 1", 5, "sinks.x"),
    "spark is no section": ("spark = 5", 9, "[spark]"),
    "option of a store": ('[storage]\nregoin = "x"', 1, "region"),
    "a spool elsewhere": ('[serve]\nspool = "s3://b/x"', 9, "disk"),
    "kind of sink": ('[sinks.a]\ntables = "t"\npath = "x"\ntype = "file"', 8, "files"),
    "key of a sink": ('[sinks.a]\ntype = "files"\ntables = "t"\npath = "x"\nformt = "x"', 1, "Did you mean format"),
    "value of a sink": ('[sinks.a]\ntype = "files"\ntables = "t"\npath = "x"\nformat = "xls"', 10, "jsonl"),
    "size of a sink": ('[sinks.a]\ntype = "files"\ntables = "t"\npath = "x"\npart_bytes = "big"', 14, "size"),
    "sink without a table": ('[sinks.a]\ntype = "files"\ntables = []', 10, "at least one"),
    "a folder twice": (
        '[sources.a]\ntype = "files"\npath = "in"\ntable = "t"\n'
        '[sources.b]\ntype = "files"\ntable = "t"\npath = "./x/../in/"',
        8,
        "source a",
    ),
    "a folder in another": (
        '[sources.a]\ntype = "files"\npath = "in"\ntable = "t"\n'
        '[sources.b]\ntype = "files"\ntable = "t"\npath = "in/deep"',
        8,
        "source a",
    ),
    "a sink's folder in a source's": (
        '[sinks.s]\ntype = "files"\ntables = "t"\npath = "d/out"\n'
        '[sources.a]\ntype = "files"\ntable = "t"\npath = "./d"',
        8,
        "sink s uses this folder",
    ),
    "a source's folder in a sink's": (
        '[sources.a]\ntype = "files"\ntable = "t"\npath = "x"\n'
        '[sinks.s]\ntype = "files"\ntables = "t"\npath = "file:///out"\n'
        '[sources.b]\ntype = "files"\ntable = "t"\npath = "/out/in"',
        8,
        "sink s uses this folder",
    ),
    "key of a table": ('[tables.t]\nschema = "id long"\nprtition = ["id"]', 1, "Did you mean partition"),
    "type of a column": ('[tables.t]\ncolumns.id = "lung"', 14, "tables.t"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, name: str) -> None:
    text, column, words = WRONG[name]
    with pytest.raises(fm.Invalid) as refused:
        check_file(read(tmp_path, f"{text}\n" if name != "no TOML" else text))
    said = str(refused.value)
    assert words in said
    line = text.count("\n") + 1
    assert f"{tmp_path}/f.toml:{line}:{column}" in said


@pytest.mark.parametrize("where", ["[serve]\ntoken_sha256 = ", '[serve.tokens.a]\nrole = "read"\nsha256 = '])
def test_a_token_that_stands_in_the_place_of_its_hash_is_not_shown(tmp_path: Path, where: str) -> None:
    with pytest.raises(fm.Invalid) as refused:
        read(tmp_path, f'{where}"fmt_the_token_itself"\n')
    assert "fmt_" not in str(refused.value)
    assert "--new-token" in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('table = "events"', 'table = "evnts"', "sources.drop.table"),
        ('= "events"\np', '= "evnts"\np', "sinks.out.tabl"),
    ],
)
def test_a_table_that_is_nowhere_is_told_with_its_place(tmp_path: Path, old: str, new: str, words: str) -> None:
    declaration = check_file(read(tmp_path, GOOD.replace(old, new)))
    with pytest.raises(fm.Invalid, match="declares none") as refused:
        check_lake(declaration, {"others"})
    said = str(refused.value)
    assert words in said
    assert "f.toml:" in said
    assert "events" in said
    check_lake(declaration, {"evnts"})


@pytest.mark.parametrize("path", ["lake", "lake/in", "."])
def test_a_drop_folder_is_apart_from_the_lake(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    apart = GOOD.replace('path = "out"', 'path = "s3://bucket/out"')
    settings = read(tmp_path, apart.replace('path = "in"', f'path = "{path}"'))
    with pytest.raises(fm.Invalid, match="invalid setting") as refused:
        check_apart(check_file(settings), str(tmp_path / "lake"), None)
    assert "f.toml:7:8" in str(refused.value)
    assert source_path(settings.sources["drop"]) == (tmp_path / path).resolve()


@pytest.mark.parametrize("path", ["spool", "spool/in", "."])
def test_a_drop_folder_is_apart_from_the_spool(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spool may be elsewhere than the lake."""
    monkeypatch.chdir(tmp_path)
    elsewhere = GOOD.replace('path = "out"', 'path = "s3://bucket/out"')
    settings = read(tmp_path, elsewhere.replace('path = "in"', f'path = "{path}"'))
    with pytest.raises(fm.Invalid, match="outside of") as refused:
        check_apart(check_file(settings), "s3://bucket/lake", tmp_path / "spool")
    assert "f.toml:7:8" in str(refused.value)


def test_of_a_table_that_is_like_no_other_all_are_told(tmp_path: Path) -> None:
    text = '[sources.a]\ntype = "files"\npath = "in"\ntable = "zzz"\n'
    declaration = check_file(read(tmp_path, text))
    with pytest.raises(fm.Invalid, match=r"The tables are: events, people\."):
        check_lake(declaration, {"people", "events"})
    with pytest.raises(fm.Invalid, match="There are no tables yet"):
        check_lake(declaration, set())


def test_the_example_is_right() -> None:
    declaration = check_file(load_settings(Path(__file__).parents[2] / "examples" / "floodmark.toml"))
    check_lake(declaration, set())
    assert set(declaration.sources) | set(declaration.sinks) == {"drop", "out"}


def test_data_without_a_text_have_no_places_but_the_same_checks() -> None:
    with pytest.raises(fm.Invalid, match="no such setting"):
        check_settings({"serve": {"x": 1}}, "data")

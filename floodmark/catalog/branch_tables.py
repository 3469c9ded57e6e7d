"""The catalog's tables of branches: the line of every one that ever was, what was merged where, who follows one."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, MetaData, String, Table, Text


def _whole(name: str, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def make_lines(metadata: MetaData) -> Table:
    """One row for every branch that ever was, but main. A name may be given again; an id never is."""
    return Table(
        "fm_lines",
        metadata,
        Column("id", String(26), primary_key=True),
        Column("name", String(255), nullable=False, index=True),
        # The id of a line, or `main`.
        Column("parent", String(26), nullable=False),
        # Where it left its parent: the newest of the parent's versions that it stands on.
        _whole("base_version"),
        # The lake's version when it was made: its own commits are above this one.
        _whole("born_version"),
        # What its next merge with its parent compares with, and which version of it the parent has, and it of that.
        _whole("common_version"),
        _whole("sent_version"),
        _whole("taken_version"),
        _whole("created_ms"),
        # The lake's version when it was deleted: its own commits are not above this one. None while it lives.
        _whole("ended_version", nullable=True),
        _whole("ended_ms", nullable=True),
        Column("actor", Text, nullable=False),
    )


def make_merges(metadata: MetaData) -> Table:
    """The commits that are merges of branches: `version` of line `target` holds all that `source` had."""
    return Table(
        "fm_merges",
        metadata,
        Column("version", BigInteger, primary_key=True, autoincrement=False),
        Column("source", String(26), nullable=False),
        _whole("source_version"),
        Column("target", String(26), nullable=False),
        # JSON: by table id, how a conflict of the table as a whole was settled (kept, replaced); empty if none was.
        Column("settled", Text, nullable=False),
    )


def make_sink_lines(metadata: MetaData) -> Table:
    """The sinks that follow another branch than main: by its line, since its name may be given again."""
    return Table(
        "fm_sink_lines",
        metadata,
        Column("sink", String(26), primary_key=True),
        Column("line", String(26), nullable=False),
    )

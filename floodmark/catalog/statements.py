"""Statements that SQLAlchemy has compiled, kept for every catalog that this process opens.

SQLAlchemy keeps them with an engine, and each open of a lake makes an engine: a short one would mostly compile.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping

from sqlalchemy import Compiled, Dialect

# Far more than the catalog has: a bound for statements whose text depends on their values.
KEPT_MAX = 2_000

Key = tuple[Dialect, Hashable]


class CompiledStatements(MutableMapping[Key, Compiled]):
    """SQLAlchemy's `compiled_cache`, shared by engines that speak the same SQL. Threads may share it."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Compiled] = {}

    def __getitem__(self, key: Key) -> Compiled:
        return self._kept[_without_engine(key)]

    def __setitem__(self, key: Key, compiled: Compiled) -> None:
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        self._kept[_without_engine(key)] = compiled

    def __delitem__(self, key: Key) -> None:
        del self._kept[_without_engine(key)]

    def __iter__(self) -> Iterator[Key]:
        raise NotImplementedError("the engines that statements were compiled for are not kept")

    def __len__(self) -> int:
        return len(self._kept)


def _without_engine(key: Key) -> Hashable:
    """The first part of a key is the engine's own dialect object: what counts of it is its kind, and the server's."""
    dialect, *statement = key
    return (type(dialect), getattr(dialect, "server_version_info", None), *statement)


STATEMENTS = CompiledStatements()

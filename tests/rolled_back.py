"""A catalog that is copied, and put back as it was: a file copy with SQLite, a template database with PostgreSQL."""

from __future__ import annotations

import shutil
from pathlib import Path

from sqlalchemy import create_engine, make_url, text

from floodmark.catalog.database import SQLITE_NAME
from floodmark.catalog.witness import FOLDER
from tests.conftest import Place


class CatalogCopy:
    """The catalog of a lake that no process has open, as it is now. `witnesses`: storage is put back with it."""

    def __init__(self, place: Place, folder: Path, *, witnesses: bool = False) -> None:
        self._place = place
        self._folder = folder
        self._witnesses = witnesses
        folder.mkdir()
        if place.catalog is None:
            self._copy_files(Path(place.path), folder)
        else:
            self._database(self._copy, self._name)
        if witnesses and (Path(place.path) / FOLDER).exists():
            shutil.copytree(Path(place.path) / FOLDER, folder / FOLDER)

    def put_back(self) -> None:
        if self._place.catalog is None:
            for path in Path(self._place.path).glob(f"{SQLITE_NAME}*"):
                path.unlink()
            self._copy_files(self._folder, Path(self._place.path))
        else:
            self._run(f"DROP DATABASE {self._name} WITH (FORCE)")
            self._database(self._name, self._copy)
        if self._witnesses:
            shutil.rmtree(Path(self._place.path) / FOLDER)
            if (self._folder / FOLDER).exists():
                shutil.copytree(self._folder / FOLDER, Path(self._place.path) / FOLDER)

    @property
    def _name(self) -> str:
        return str(make_url(self._place.catalog or "").database)

    @property
    def _copy(self) -> str:
        """One for each folder: a test may keep several."""
        return f"{self._name}_copy_{self._folder.name}"

    def _copy_files(self, source: Path, target: Path) -> None:
        for path in source.glob(f"{SQLITE_NAME}*"):
            shutil.copy2(path, target / path.name)

    def _database(self, name: str, template: str) -> None:
        self._run(f"CREATE DATABASE {name} TEMPLATE {template}")

    def _run(self, statement: str) -> None:
        engine = create_engine(
            make_url(self._place.catalog or "").set(database="postgres"), isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()

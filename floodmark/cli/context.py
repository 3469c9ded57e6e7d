"""What every command gets: which lake is meant, and where output goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from floodmark.cli.output import Output
from floodmark.config import Settings, find_catalog, find_lake, load_settings
from floodmark.lake import Lake
from floodmark.opening import open as open_lake


@dataclass
class Context:
    lake: str | None
    catalog: str | None
    config: Path | None
    output: Output

    @cached_property
    def settings(self) -> Settings:
        return load_settings(self.config)

    @property
    def path(self) -> str:
        return find_lake(self.lake, self.settings, named=self.config is not None)

    @property
    def catalog_url(self) -> str | None:
        return find_catalog(self.catalog, self.settings, named=self.config is not None)

    def open(self, *, read_only: bool = True, create: bool = False, heal: bool = True) -> Lake:
        return open_lake(
            self.path,
            read_only=read_only,
            create=create,
            heal=heal,
            catalog=self.catalog_url,
            settings=self.settings.spark,
            storage_options=self.settings.storage,
        )

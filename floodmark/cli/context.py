"""What every command gets: the lake to use, where output goes, and options and exit codes that commands share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from floodmark.cli.output import Output
from floodmark.lake import Lake
from floodmark.opening import open as open_lake
from floodmark.settings.settings import Settings, find_catalog, find_lake, load_settings

OnBranch = Annotated[str, typer.Option("--branch", help="Branch to use.")]

IfVersion = Annotated[
    int | None,
    typer.Option("--if-version", help="Change it only if it is still as it was at this version; else exit code 3."),
]

# Like a command that a person interrupted.
STOPPED_CODE = 130


@dataclass
class CommandContext:
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

    def open(self, *, read_only: bool = True, create: bool = False, recover: bool = True) -> Lake:
        return open_lake(
            self.path,
            read_only=read_only,
            create=create,
            recover=recover,
            catalog=self.catalog_url,
            settings=self.settings.spark,
            storage_options=self.settings.storage,
        )


def open_without_recovery(context: typer.Context, *, read_only: bool = True) -> Lake:
    """The lake for verbs that recover by themselves before they write."""
    opened: Lake = context.obj.open(read_only=read_only, recover=False)
    return opened

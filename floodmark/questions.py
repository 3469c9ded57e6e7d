"""Questions about the state of a lake, answered from the catalog and metadata alone: no JVM, nothing written (I17).

Each is asked of a branch, `main` unless told otherwise; a branch that is not there is NotFound, never an empty lake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from floodmark.catalog.catalog import Catalog
from floodmark.config import MaintainSettings
from floodmark.json_form import as_json
from floodmark.model import MAIN, AuditRow, Commit, Head
from floodmark.reading import Moment, Reader
from floodmark.report.health import Health
from floodmark.report.status import lake_health, lake_status, lake_tables
from floodmark.report.tables import table_contents, table_details
from floodmark.shown import Listing, TableFacts

if TYPE_CHECKING:
    from pyiceberg.schema import Schema


class Questions:
    catalog: Catalog
    keeping: MaintainSettings
    _reader: Reader

    def heads(self, branch: str = MAIN) -> list[Head]:
        """The newest state of every table of a branch, as the catalog has it."""
        return self.catalog.history.heads(branch)

    def tables(self, *, branch: str = MAIN, keeping: MaintainSettings | None = None) -> list[dict[str, Any]]:
        """Every table in one line. `keeping`: from when on maintenance is due; by default as the settings say."""
        lines = lake_tables(self.catalog, keeping or self.keeping, branch)
        return Listing(TableFacts(as_json(line)) for line in lines)

    def show(self, table: str, *, branch: str = MAIN, keeping: MaintainSettings | None = None) -> dict[str, Any]:
        """One table: its columns, layout, size and place. `keeping`: from when on maintenance is due."""
        return TableFacts(as_json(table_details(self.catalog, self._head(table, branch), keeping or self.keeping)))

    def contents(self, table: str, *, branch: str = MAIN, limit: int = 50) -> dict[str, Any]:
        """What a table is made of: its partitions and its largest files, so many of each, and how many there are."""
        return as_json(self.catalog.at_head(table, lambda head: table_contents(self.catalog, head, limit), branch))

    def sample(self, table: str, *, rows: int = 20) -> list[dict[str, Any]]:
        """A few rows of a table, whichever come first; without Spark."""
        found: list[dict[str, Any]] = []
        with self._reader.arrow(table, Moment(None, None, MAIN), with_seq=False) as batches:
            for batch in batches:
                found += batch.slice(0, rows - len(found)).to_pylist()
                if len(found) >= rows:
                    break
        return found

    def schema(self, table: str, *, branch: str = MAIN) -> Schema:
        """The table's Iceberg schema at the head."""
        return self._reader.schema(self._head(table, branch))

    def filled_columns(self, table: str, *, branch: str = MAIN) -> tuple[str, ...]:
        """The columns that rows need not bring: the table fills them by an expression."""
        return self._reader.filled_columns(self._head(table, branch))

    def history(
        self, *, limit: int = 20, table: str | None = None, branch: str | None = None, before: int | None = None
    ) -> list[Commit]:
        """Commits, newest first: of all branches, or those that one branch stands on; only versions `before` one."""
        commits = self.catalog.history.commits(limit=limit, table=table, branch=branch, before=before)
        if table is not None and not commits and before is None:
            self._head(table, branch or MAIN)  # a name that never was is not a table without a history
        return Listing(commits)

    def status(self) -> dict[str, Any]:
        """The lake on one screen: version, tables, rows, sinks, jobs, and whether all is well."""
        return as_json(lake_status(self.catalog, self.keeping))

    def health(self) -> Health:
        """Is it fine, and if not, what is wrong: as `status` says, and quicker."""
        return lake_health(self.catalog)

    def audit(self, limit: int = 1000) -> list[AuditRow]:
        """What healing and repairs did, ever; newest first."""
        return self.catalog.history.audit(limit)

    def _head(self, table: str, branch: str) -> Head:
        return self.catalog.history.head(table, branch)

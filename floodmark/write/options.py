"""How a verb treats its rows and the table's: one record for append, merge, delete, overwrite and update.

Apart from the steps that use it: `Lake` names it, and questions of state must not import Arrow or Iceberg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from floodmark.errors import Invalid

if TYPE_CHECKING:
    from floodmark.runs import WriteCallback
    from floodmark.write.step import Remover


@dataclass(frozen=True)
class WriteOptions:
    """`where`: the condition of a delete, an overwrite or an update. `assigned`: of an update, columns and the
    expressions whose values they get. `order`: of rows with one key the last in this column's order
    counts; without it they are Invalid. `skip_unchanged`: of a merge, equal rows keep their sequence. `newest_by`: of a
    merge, existing rows that are no older by this column stay; of an empty name, all existing rows. `evolve`: columns
    that the table does not have are added. `partial`: a merge updates only the columns that its rows bring.
    `whole_rows=False`: the sender's rows are whole by contract, and a column that dicts leave out is null; else a merge
    refuses them. `remover`: which rows retention takes out. `progress(files, bytes)` is called while rows are staged.
    """

    where: str | None = None
    assigned: tuple[tuple[str, str], ...] = ()
    order: str | None = None
    skip_unchanged: bool = True
    newest_by: str | None = None
    evolve: bool = False
    partial: bool = False
    whole_rows: bool = True
    remover: Remover | None = None
    progress: WriteCallback | None = None

    @classmethod
    def of_update(
        cls, table: str, assigned: Mapping[str, str], where: str | None, progress: WriteCallback | None = None
    ) -> WriteOptions:
        """Of an update. `Invalid` without a condition: a forgotten one must not mean all rows."""
        if where is None:
            advice = 'Say which rows; where="true" is all of them.'
            raise Invalid("an update needs a condition", table=table, advice=advice)
        return cls(where=where, assigned=tuple(assigned.items()), progress=progress)


DEFAULT = WriteOptions()

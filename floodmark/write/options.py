"""How a verb treats its rows and the table's: one record for append, merge, delete and overwrite.

Apart from the steps that use it: `Lake` names it, and questions of state must not import Arrow or Iceberg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from floodmark.runs import WriteCallback
    from floodmark.write.step import Remover


@dataclass(frozen=True)
class WriteOptions:
    """`where`: the condition of a delete or an overwrite. `order`: of rows with one key the last in this column's order
    counts; without it they are Invalid. `skip_unchanged`: of a merge, equal rows keep their sequence. `newest_by`: of a
    merge, existing rows that are no older by this column stay; of an empty name, all existing rows. `evolve`: columns
    that the table does not have are added. `partial`: a merge updates only the columns that its rows bring.
    `whole_rows=False`: the sender's rows are whole by contract, and a column that dicts leave out is null; else a merge
    refuses them. `remover`: which rows retention takes out. `progress(files, bytes)` is called while rows are staged.
    """

    where: str | None = None
    order: str | None = None
    skip_unchanged: bool = True
    newest_by: str | None = None
    evolve: bool = False
    partial: bool = False
    whole_rows: bool = True
    remover: Remover | None = None
    progress: WriteCallback | None = None


DEFAULT = WriteOptions()

"""One step of a plan: what it does to which table, whether it loses data, and if it is refused, why and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from floodmark.json_form import Json, as_json

# Metadata only; rows are rewritten in the same publish; data is lost, which must be allowed; refused, and then nothing
# of the plan is done.
SAFE, NEEDS_REWRITE, DESTRUCTIVE, REFUSED = "safe", "needs_rewrite", "destructive", "refused"

CREATE_TABLE, DROP_TABLE, RENAME_TABLE = "create_table", "drop_table", "rename_table"
ADD_COLUMN, RENAME_COLUMN, DROP_COLUMN = "add_column", "rename_column", "drop_column"
WIDEN_TYPE, RELAX_REQUIRED, REQUIRE, SET_DEFAULT, COMMENT = (
    "widen_type",
    "relax_required",
    "require",
    "set_default",
    "comment",
)
ADD_KEY, CHANGE_PARTITION, CHANGE_SORT, SET_RETENTION = "add_key", "change_partition", "change_sort", "set_retention"
ADD_INDEX, DROP_INDEX = "add_index", "drop_index"
ADD_REFERENCE, DROP_REFERENCE = "add_reference", "drop_reference"


@dataclass(frozen=True)
class Step:
    """`text` describes it; `reason` and `way`: of a refused step, why, and the alternative."""

    table: str
    action: str
    column: str | None
    kind: str
    text: str
    reason: str = ""
    way: str = ""

    def as_dict(self) -> dict[str, Json]:
        return as_json(self)


def refused(table: str, action: str, column: str | None, text: str, reason: str, way: str) -> Step:
    return Step(table, action, column, REFUSED, text, reason, way)

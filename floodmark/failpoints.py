"""Named crash points: one after every step of every operation.

`FLOODMARK_FAILPOINT=name[:N]` kills this process with SIGKILL at the Nth passing of that point, so a test can check,
for every window between two steps, what a real crash there leaves behind. `python -m floodmark.failpoints` lists them.
A name that is not registered is refused at once: a typo must not look like a surviving process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from floodmark.errors import Invalid

# The steps of a change of the lake, in order (docs/protocol.md). Every kind of write passes them, but for NOT_PASSED.
WRITE_STEPS = (
    "begun",  # the journal has the operation; no file exists
    "staged",  # the incoming rows are data files; nothing refers to them
    "rewritten",  # what they replace is rewritten; nothing refers to that either
    "sealed",  # the journal has the file records; from here recovery can finish a repeatable operation
    "planned_again",  # the tables changed: its steps run again, the seal is still that of the old plan
    "built",  # manifests, list and metadata exist; nothing refers to them
    "locked",  # inside the publish, nothing written yet
    "moved",  # inside the publish, everything written, COMMIT not sent
    "published",  # COMMIT was acknowledged
    "cleaned",  # leftovers of lost attempts are gone
)
WRITE_KINDS = (
    *("create_table", "append", "merge", "delete", "overwrite", "update", "adopt"),
    *("transaction", "compact", "retain"),
    *("add_column", "fill", "chunk", "prune", "redo", "branch_merge", "apply", "repair", "undrop", "rollback"),
)
# A delete, an update, maintenance, a new shape or a repair brings no rows, an append replaces none, and a new table or
# column does neither. A repair does not plan again: what it was asked to judge has changed. Neither does an undrop: no
# writer can write to its table.
NOT_PASSED = frozenset(
    {
        *("create_table.staged", "create_table.rewritten", "create_table.planned_again"),
        *("adopt.staged", "adopt.rewritten", "adopt.planned_again"),
        *("append.rewritten", "delete.staged", "update.staged", "compact.staged", "retain.staged"),
        *("add_column.staged", "add_column.rewritten", "fill.staged", "prune.staged", "redo.staged"),
        *("apply.staged", "repair.staged", "repair.planned_again"),
        *("undrop.staged", "undrop.rewritten", "undrop.planned_again"),
    }
)

OTHER = {
    "init": ("folder_made", "tables_made", "registered"),
    "migrate": ("locked", "migrated"),
    "heal": ("found", "fenced", "files_deleted", "built", "locked", "moved", "published", "cleaned"),
    "abandon": ("fenced", "files_deleted"),
    # A sealed operation whose tables' turn another one has (docs/protocol.md): it waits; asks again; has the turn; the
    # one that has it read the seals of those that wait.
    "turn": ("queued", "waiting", "taken", "joined"),
    # Segments alone (docs/protocol.md, section 2b) pass the steps of a write, but for those that stage rows.
    # written: also of segments that are published with rows; retired: without another segment in their place;
    # declared, dropped: an index, after its COMMIT.
    "index": (
        *("begun", "written", "sealed", "built", "locked", "moved", "published", "cleaned"),
        *("retired", "declared", "dropped"),
    ),
    "branch": ("creating", "created", "deleting", "deleted"),  # before and after the COMMIT
    "expire": ("marked",),
    "give_up": ("marked",),
    "sweep": (
        *("segments_deleted", "segments_forgotten"),  # before the files of states
        *("planned", "data_deleted", "metadata_deleted", "marked"),
    ),
    "maintain": ("recorded",),
    # A table that a sink ships to: its snapshots are gone, their files still exist; then the files are gone too.
    "destination": ("expired", "swept"),
    # A unit of a sink (docs/protocol.md): the state after each step.
    "unit": (
        "held",  # the run holds the sink; nothing else
        "opened",  # the intent is recorded and its version pinned
        "witnessed",  # storage has a record of the unit; nothing was sent
        "sealed",  # the boundaries of parts are recorded, none of them is sent
        "staged",  # Iceberg: files at the destination that nothing refers to
        "sent",  # a part is at its destination; the catalog has no record of it
        "committed",  # Iceberg: the destination has the commit; the catalog has no record of it
        "manifest",  # files: the unit's manifest exists
        "acknowledged",  # the catalog has recorded the part
        "shipped",  # everything is at the destination; the mark has not moved
        "settled",  # mark, unit and pin have ended
    ),
    "check": ("put",),  # an object that tests the destination of a sink exists
    # made: pending; held: running, nothing done by this run; kept: its tip, before rows below the floor go; ended: all
    "job": ("made", "held", "kept", "ended"),
    # A group of records on its way from a spool into its table (docs/protocol.md).
    "feed": (
        "registered",  # the catalog has the spool as the table's; no record was taken before
        "grouped",  # records were read; nothing else
        "quarantined",  # rows that do not fit are in an object; nothing refers to it
        "fed",  # published; the spool has no record of it
        "forgotten",  # the spool deleted what is in the table
    ),
    # stamped: the spool names this lake's incarnation, the catalog has no record of it; mended: a damaged file keeps
    # another name, and has a successor; accepted: the catalog goes on with it
    "accept": ("stamped", "kept", "mended", "accepted"),
    # The row records that rows were published after all, or given up; their object still exists.
    "spool_quarantine": ("retried", "dropped"),
    # A file of a drop folder: complete; its rows are published and the file still exists; in .loaded. Refused: judged,
    # and still in the folder; set_aside: in .failed with the reason.
    "drop": ("found", "loaded", "moved", "refused", "set_aside"),
    # A load of CSV with bad rows: they are in a file of their own, and nothing is published.
    "load": ("set_aside",),
    "backup": ("copied", "written"),
    "restore": ("tables_made", "copied", "stamped"),
    # A spool of rows that arrived over HTTP (docs/protocol.md).
    "spool": (
        "made",  # folder and header are durable, the spool is empty
        "written",  # the bytes of a group are in the file, not synced
        "synced",  # durable; no client got a reply
        "rolled",  # a new segment exists, and is empty
        "keys_written",  # on a full disk: over the reserve, which is not yet the file of keys
        "keys_kept",  # the keys of a fed segment are durable elsewhere, the segment still exists
        "forgotten",  # the segment is deleted
    ),
    "task": ("file_written",),  # in an executor: kills that worker, not the driver
}


def _register() -> dict[str, str]:
    writes = {f"{kind}.{step}": kind for kind in WRITE_KINDS for step in WRITE_STEPS}
    points = {name: kind for name, kind in writes.items() if name not in NOT_PASSED}
    points.update({f"{operation}.{step}": operation for operation, steps in OTHER.items() for step in steps})
    return points


FAILPOINTS: dict[str, str] = _register()
VARIABLE = "FLOODMARK_FAILPOINT"

_passed: dict[str, int] = {}
# A test may watch or interleave the steps of operations in its own process; nothing else sets this.
observer: Callable[[str], None] | None = None


def armed() -> tuple[str, int] | None:
    """The point and the passing at which this process dies, from the environment."""
    setting = os.environ.get(VARIABLE)
    if not setting:
        return None
    name, _, count = setting.partition(":")
    if name not in FAILPOINTS or not (count or "1").isdigit():
        raise Invalid(
            "there is no such failpoint",
            setting=f"{VARIABLE}={setting}",
            advice="`python -m floodmark.failpoints` lists them.",
        )
    return name, int(count or 1)


def hit(name: str) -> None:
    """Pass the failpoint `name`; die here if the environment asks for it."""
    if name not in FAILPOINTS:
        raise ValueError(f"unregistered failpoint {name}")
    if observer is not None:
        observer(name)
    at = armed()
    if at is None or at[0] != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == at[1]:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    width = max(map(len, FAILPOINTS))
    for name, operation in FAILPOINTS.items():
        sys.stdout.write(f"{name:<{width}}  {operation}\n")


if __name__ == "__main__":
    main()

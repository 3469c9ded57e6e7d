"""The tables of the catalog database, as SQLAlchemy Core describes them.

Alembic creates and migrates them (migrations/); this module only names them. `iceberg_tables` and
`iceberg_namespace_properties` have the shape that PyIceberg's SqlCatalog and the Java JDBC catalog expect, so other
engines see the same lake in the same database. Everything of ours has the prefix `fm_`. Times are milliseconds since
the epoch by the database's clock.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, Text, UniqueConstraint, text

# The format that this code reads and writes. A migration that changes the tables raises it.
FORMAT = 12
# The format of the first release. An older one is refused; those from here on are migrated.
OLDEST_FORMAT = 10
# The first format with fm_waiting and fm_led: read-only, an older lake is served as it is.
TOGETHER_FORMAT = 11
# The first format with fm_indexes and fm_segments: read-only, an older lake is served without indexes.
INDEXES_FORMAT = 12

CATALOG_NAME = "floodmark"
NAMESPACE = "default"

metadata = MetaData()

iceberg_tables = Table(
    "iceberg_tables",
    metadata,
    Column("catalog_name", String(255), primary_key=True),
    Column("table_namespace", String(255), primary_key=True),
    Column("table_name", String(255), primary_key=True),
    Column("metadata_location", String(1000)),
    Column("previous_metadata_location", String(1000)),
    Column("iceberg_type", String(5)),
)

iceberg_namespace_properties = Table(
    "iceberg_namespace_properties",
    metadata,
    Column("catalog_name", String(255), primary_key=True),
    Column("namespace", String(255), primary_key=True),
    Column("property_key", String(255), primary_key=True),
    Column("property_value", String(1000), nullable=False),
)

# One row. Locking it is the total order of everything that changes the lake.
lake = Table(
    "fm_lake",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("format", Integer, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("incarnation", String(26), nullable=False),
    Column("location", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
)

# One heartbeat row per open lake of a process; the lease of its operations.
processes = Table(
    "fm_processes",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("host", Text, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("pid_namespace", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started", Text, nullable=False),
    Column("beat_ms", BigInteger, nullable=False),
    Column("lease_ms", BigInteger, nullable=False),
)

# The journal. state: staging, staged, published, abandoned. `cleaned` of an operation that has ended:
CLEANED, LOOK_ONCE_MORE = 1, 2

operations = Table(
    "fm_operations",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("branch", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("process", String(26), nullable=False),
    Column("base_version", BigInteger, nullable=False),
    Column("begun_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    # Folders that only this operation writes into, as a JSON list: recovery may delete them once it is fenced.
    Column("folders", Text, nullable=False),
    Column("seal", Text),
    Column("seal_location", Text),
    Column("seal_hash", String(64)),
    Column("version", BigInteger),
    # 1 when the operation has ended and only the files that its commit names are on disk; 2 when that is so, but
    # executors of it may still be writing: a sweep checks once more.
    Column("cleaned", Integer, nullable=False),
)

# What the index fm_operations_unfinished holds; written out, because a bound parameter would not match the index.
unfinished = text("fm_operations.cleaned = 0")

# state: live, expired.
commits = Table(
    "fm_commits",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("parent", BigInteger, nullable=False),
    Column("branch", Text, nullable=False),
    Column("operation", String(26), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("actor", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("committed_ms", BigInteger, nullable=False, index=True),
    Column("state", String(16), nullable=False),
)

commit_tables = Table(
    "fm_commit_tables",
    metadata,
    Column("version", BigInteger, primary_key=True),
    Column("table_id", String(36), primary_key=True),
    Column("table_name", String(255), nullable=False),
    Column("snapshot", BigInteger),
    Column("sequence", BigInteger, nullable=False),
    Column("schema_id", Integer, nullable=False),
    Column("spec_id", Integer, nullable=False),
    Column("manifest_list", Text),
    Column("metadata_location", Text, nullable=False),
    Column("rows_total", BigInteger, nullable=False),
    Column("files_total", BigInteger, nullable=False),
    Column("bytes_total", BigInteger, nullable=False),
    Column("rows_added", BigInteger, nullable=False),
    Column("rows_updated", BigInteger, nullable=False),
    Column("rows_deleted", BigInteger, nullable=False),
)

# The existing branches. parent and base_version record where one left another; main has none (fm_lines has more).
branches = Table(
    "fm_branches",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("parent", String(255)),
    Column("base_version", BigInteger, nullable=False),
    Column("head_version", BigInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
)

heads = Table(
    "fm_heads",
    metadata,
    Column("branch", String(255), primary_key=True),
    Column("table_id", String(36), primary_key=True),
    Column("table_name", String(255), nullable=False),
    Column("snapshot", BigInteger),
    Column("sequence", BigInteger, nullable=False),
    Column("schema_id", Integer, nullable=False),
    Column("spec_id", Integer, nullable=False),
    Column("manifest_list", Text),
    Column("metadata_location", Text, nullable=False),
    Column("rows_total", BigInteger, nullable=False),
    Column("files_total", BigInteger, nullable=False),
    Column("bytes_total", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
)

# The published batches, by the identity that the sender gave: committed with the rows.
sources = Table(
    "fm_sources",
    metadata,
    Column("scope", String(300), primary_key=True),
    Column("id", String(512), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("operation", String(26), nullable=False),
    # Of a source that counts (a stream's micro-batches): the newest published one; one row per source, not per batch.
    Column("position", BigInteger),
)

# The keys that commits deleted from keyed tables: files of key columns, each with its commit's sequence.
deletions = Table(
    "fm_deletions",
    metadata,
    Column("table_id", String(36), primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("location", String(1000), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("rows_total", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    # Since when no reader may request it any more; None as long as one may.
    Column("below_ms", BigInteger),
)

audit = Table(
    "fm_audit",
    metadata,
    Column("operation", String(26), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("found", String(16), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("detail", Text, nullable=False),
    Column("version", BigInteger),
    Column("at_ms", BigInteger, nullable=False),
)

# A reason why a version must not be expired.
pins = Table(
    "fm_pins",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("taken_ms", BigInteger, nullable=False),
)

# States of tables that only expired versions name: their files exist until a sweep has deleted them.
expired = Table(
    "fm_expired",
    metadata,
    Column("version", BigInteger, primary_key=True),
    Column("table_id", String(36), primary_key=True),
    Column("expired_ms", BigInteger, nullable=False),
)

# A table's maintenance: its policy, how small its files are, and below which sequence its deletions are gone.
upkeep = Table(
    "fm_upkeep",
    metadata,
    Column("table_id", String(36), primary_key=True),
    # "90d", "1000000 rows", "10 GB"; None keeps everything. The time column is for the first kind.
    Column("retention", Text),
    Column("retention_column", Text),
    # Files far below the target size at the head of main; None if they were not counted yet.
    Column("small_files", BigInteger),
    Column("deletions_floor", BigInteger, nullable=False),
)

# The consumers of a table, each with the sequence up to which it is done. `protected`: retention waits for it.
consumers = Table(
    "fm_consumers",
    metadata,
    Column("name", String(300), primary_key=True),
    Column("table_id", String(36), primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("mark", BigInteger, nullable=False),
    Column("protected", Integer, nullable=False),
    Column("updated_ms", BigInteger, nullable=False),
)

# What maintenance did: one row per table and verb of a run, the newest few of each.
maintenance = Table(
    "fm_maintenance",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("verb", String(16), nullable=False),
    # Empty for work on the whole lake.
    Column("table_id", String(36), nullable=False),
    Column("table_name", String(255), nullable=False),
    Column("outcome", String(24), nullable=False),
    Column("detail", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger, nullable=False),
)

# A table's turn: after lost races one builder publishes alone, until its lease ends.
turns = Table(
    "fm_turns",
    metadata,
    Column("table_id", String(36), primary_key=True),
    Column("operation", String(26), nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)

# An operation that the process of another one, the leader, published with its own: the folders of the leader hold its
# metadata files. The index fm_led_leader finds them.
led = Table(
    "fm_led",
    metadata,
    Column("operation", String(26), primary_key=True),
    Column("leader", String(26), nullable=False),
    Column("version", BigInteger, nullable=False),
)

# Sealed operations that wait for the turn of their tables (a JSON list of ids). `joins`: the process of another
# operation may publish them. `asks`: 0 once it was given a turn, until it waits again.
waiting = Table(
    "fm_waiting",
    metadata,
    Column("operation", String(26), primary_key=True),
    Column("table_ids", Text, nullable=False),
    Column("since_ms", BigInteger, nullable=False),
    Column("joins", Integer, nullable=False),
    Column("asks", Integer, nullable=False),
    Column("leftovers", Integer, nullable=False),
)

# Indexes, by what they are on: a JSON list of field ids, and how (key, value). state: live, dropped. The row of a key
# index that was dropped stays, so that writers do not make it again. `secret` is never shown. `changes` rises with
# every change of its segments: readers keep what they know of them until then.
indexes = Table(
    "fm_indexes",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("table_id", String(36), nullable=False),
    Column("field_ids", String(500), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("encoder", Integer, nullable=False),
    Column("wide", Integer, nullable=False),
    Column("secret", String(32), nullable=False),
    Column("changes", BigInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    UniqueConstraint("table_id", "kind", "field_ids", name="fm_indexes_on"),
)

# Files of indexes, a row for each index that has a section in it; until the file is deleted. `retired_ms`: others cover
# its live files, or it has none. `broken`: it is damaged or gone, and covers nothing.
segments = Table(
    "fm_segments",
    metadata,
    Column("index_id", String(26), primary_key=True),
    Column("location", String(1000), primary_key=True),
    Column("table_id", String(36), nullable=False),
    Column("operation", String(26), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("tail_bytes", BigInteger, nullable=False),
    Column("digest", String(32), nullable=False),
    Column("entries", BigInteger, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("broken", Integer, nullable=False),
    Column("retired_ms", BigInteger),
)

# Sinks. `runner_process` and `runner_run` are the lease of the current run, if one exists.
sinks = Table(
    "fm_sinks",
    metadata,
    Column("name", String(300), primary_key=True),
    # Units, keys and objects carry this, not the name: a sink that is created again is another one.
    Column("id", String(26), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    # A JSON list of names: a table whose state is lost is reported as missing, not forgotten.
    Column("table_names", Text, nullable=False),
    Column("settings", Text, nullable=False),
    # active, paused
    Column("state", String(16), nullable=False),
    Column("runner_process", String(26)),
    Column("runner_run", String(26)),
    # The last failure, as JSON; None once a run succeeded.
    Column("error", Text),
    Column("error_ms", BigInteger),
    Column("created_ms", BigInteger, nullable=False),
    Column("updated_ms", BigInteger, nullable=False),
)

# The tables of a sink, by name, and the incarnations of table and lake that its marks belong to.
sink_tables = Table(
    "fm_sink_tables",
    metadata,
    Column("sink", String(26), primary_key=True),
    Column("table_name", String(255), primary_key=True),
    Column("table_id", String(36), nullable=False),
    Column("incarnation", String(26), nullable=False),
    # The destination's identity, as it reports it; another destination is refused.
    Column("destination", Text),
    Column("units", BigInteger, nullable=False),
    Column("rows_sent", BigInteger, nullable=False),
    Column("deletions_sent", BigInteger, nullable=False),
    Column("bytes_sent", BigInteger, nullable=False),
    Column("replays", BigInteger, nullable=False),
    Column("retries", BigInteger, nullable=False),
    # The unit that was settled last, as JSON.
    Column("last_unit", Text),
    # The newest epoch that the destination has of a lost state of this catalog; a replay opens a newer one.
    Column("epoch_seen", BigInteger),
)

# Intents: units that were opened, and the newest few that ended. state: open, settled, given_up.
units = Table(
    "fm_units",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("sink", String(26), nullable=False),
    Column("table_id", String(36), nullable=False),
    Column("lane", String(16), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("since", BigInteger, nullable=False),
    Column("until", BigInteger, nullable=False),
    Column("pin", String(26)),
    # All that decides the unit's rows, parts and bytes, as JSON.
    Column("record", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("rows_sent", BigInteger, nullable=False),
    Column("deletions_sent", BigInteger, nullable=False),
    Column("bytes_sent", BigInteger, nullable=False),
    Column("quarantined", BigInteger, nullable=False),
    Column("opened_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    # Rows that a receiving lake was asked to pass: its record has the unit by them, also if no row came.
    Column("passed", BigInteger),
)

# The parts of open units: boundaries and digests before they are sent. state: sealed, acknowledged, quarantined.
parts = Table(
    "fm_parts",
    metadata,
    Column("unit", String(26), primary_key=True),
    Column("first", BigInteger, primary_key=True),
    Column("last", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("detail", Text, nullable=False),
)

# Rows that a destination refused for good, one by one.
quarantine = Table(
    "fm_quarantine",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("sink", String(26), nullable=False),
    Column("table_id", String(36), nullable=False),
    Column("unit", String(26), nullable=False),
    Column("position", BigInteger, nullable=False),
    # The row as it was sent, one line of JSON.
    Column("line", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("tries", BigInteger, nullable=False),
    Column("first_ms", BigInteger, nullable=False),
    Column("last_ms", BigInteger, nullable=False),
    # The open unit of the lane `retry` that sends it again, and its place there.
    Column("retry_unit", String(26)),
    Column("retry_position", BigInteger),
)

# What other lakes' sinks sent: per sender the newest epoch, and in it the mark and the open unit's parts.
senders = Table(
    "fm_senders",
    metadata,
    Column("sender", String(200), primary_key=True),
    Column("table_id", String(36), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("mark", BigInteger, nullable=False),
    Column("since", BigInteger, nullable=False),
    Column("until", BigInteger, nullable=False),
    # The received rows of the open unit, as a JSON list of [first, last).
    Column("ranges", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("updated_ms", BigInteger, nullable=False),
    # Ranges that the sender gave up: their rows are not in the table, and never come under this unit.
    Column("skipped", Text),
    # The newest unit's identity; None if its sender did not report one.
    Column("unit", String(26)),
)

# What a sink learned or lost, as numbers (catalog/sink_state.py); of the whole sink where `table_id` is empty.
sink_notes = Table(
    "fm_sink_notes",
    metadata,
    Column("sink", String(26), primary_key=True),
    Column("table_id", String(36), primary_key=True),
    Column("note", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
    Column("updated_ms", BigInteger, nullable=False),
)

# One row for every branch that ever existed, except main. A name may be used again; an id never is.
lines = Table(
    "fm_lines",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("name", String(255), nullable=False, index=True),
    # The id of a lineage, or `main`.
    Column("parent", String(26), nullable=False),
    # Where it left its parent: the newest of the parent's versions in its lineage.
    Column("base_version", BigInteger, nullable=False),
    # The lake's version when it was created: its own commits are above this one.
    Column("born_version", BigInteger, nullable=False),
    # What its next merge with its parent compares with, which of its versions the parent has, and it of the
    # parent's.
    Column("common_version", BigInteger, nullable=False),
    Column("sent_version", BigInteger, nullable=False),
    Column("taken_version", BigInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    # The lake's version when it was deleted: its own commits are not above this one. None while it exists.
    Column("ended_version", BigInteger),
    Column("ended_ms", BigInteger),
    Column("actor", Text, nullable=False),
)

# The commits that are merges of branches: `version` in lineage `target` holds all that `source` had.
merges = Table(
    "fm_merges",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("source", String(26), nullable=False),
    Column("source_version", BigInteger, nullable=False),
    Column("target", String(26), nullable=False),
    # JSON: by table id, how a conflict of the table as a whole was settled (kept, replaced); empty if none was.
    Column("settled", Text, nullable=False),
)

# The sinks that follow another branch than main: by its lineage, since its name may be used again.
sink_lines = Table(
    "fm_sink_lines",
    metadata,
    Column("sink", String(26), primary_key=True),
    Column("line", String(26), nullable=False),
)

# Long work: what it does, how far it is, and by `owner_process` and `owner_run` the lease of the current run.
jobs = Table(
    "fm_jobs",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("name", String(300), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    # A JSON list.
    Column("table_names", Text, nullable=False),
    # JSON: `pinned` is what it was created with for good, `settings` those of the newest start.
    Column("spec", Text, nullable=False),
    # pending, running, done, failed, cancelled
    Column("state", String(16), nullable=False),
    # For people, at most once a second; rows_done, fm_chunks and the tables record what is done.
    Column("processed", BigInteger, nullable=False),
    Column("total", BigInteger),
    Column("unit", String(16), nullable=False),
    Column("resumed_from", BigInteger, nullable=False),
    # Exact: riders of the publishes.
    Column("rows_done", BigInteger, nullable=False),
    Column("unfilled", BigInteger, nullable=False),
    Column("publishes", BigInteger, nullable=False),
    # Why it failed, as JSON.
    Column("error", Text),
    Column("actor", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("started_ms", BigInteger),
    Column("updated_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    Column("acknowledged_ms", BigInteger),
    Column("cancel_ms", BigInteger),
    Column("owner_process", String(26)),
    Column("owner_run", String(26)),
)

# A chunk of history that a table has: once (I5). state: done, pruned.
chunks = Table(
    "fm_chunks",
    metadata,
    Column("job", String(26), primary_key=True),
    Column("chunk", BigInteger, primary_key=True, autoincrement=False),
    Column("table_name", String(255), primary_key=True),
    Column("table_id", String(36), nullable=False),
    Column("state", String(16), nullable=False),
    Column("rows_total", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("operation", String(26), nullable=False),
    Column("done_ms", BigInteger, nullable=False),
)

# One row per table that received rows over HTTP. It changes in the publish of the rows, and by no other step.
spools = Table(
    "fm_spools",
    metadata,
    Column("table_id", String(36), primary_key=True),
    Column("table_name", String(255), nullable=False),
    # The spool that the position belongs to: another one at its place is refused.
    Column("spool_id", String(26), nullable=False),
    # Its folder. A spool is on the local disk of one machine.
    Column("host", Text, nullable=False),
    Column("folder", Text, nullable=False),
    # The records below are in the table, or in quarantine.
    Column("position", BigInteger, nullable=False),
    # The version of the last feed; None before the first.
    Column("version", BigInteger),
    # Rows that feeds published, ever; and rows that are in quarantine now.
    Column("rows_fed", BigInteger, nullable=False),
    Column("quarantined", BigInteger, nullable=False),
    Column("registered_ms", BigInteger, nullable=False),
    Column("updated_ms", BigInteger, nullable=False),
)

# Rows that were accepted, and then did not fit their table: one object of JSON lines per group with such rows.
spool_quarantine = Table(
    "fm_spool_quarantine",
    metadata,
    Column("id", String(26), primary_key=True),
    Column("table_id", String(36), nullable=False, index=True),
    Column("table_name", String(255), nullable=False),
    Column("spool_id", String(26), nullable=False),
    # The first record that its rows belong to.
    Column("record", BigInteger, nullable=False),
    Column("rows_held", BigInteger, nullable=False),
    # JSON: the first error, in the form of every error.
    Column("reason", Text, nullable=False),
    Column("location", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    # held, retried, dropped
    Column("state", String(16), nullable=False),
    # The version in which a retry published them.
    Column("version", BigInteger),
)

# At most one row: the process that runs the lake's tasks, and their state. A lease like that of any process.
daemon = Table(
    "fm_daemon",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("process", String(26), nullable=False),
    Column("run", String(26), nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("address", Text),
    Column("started_ms", BigInteger, nullable=False),
    Column("updated_ms", BigInteger, nullable=False),
    # A JSON list: every task, as the daemon reports it.
    Column("tasks", Text, nullable=False),
)

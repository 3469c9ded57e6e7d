-- A catalog of format 5, as the migrations up to f0005 made it: a lake without tables, at @LOCATION@.
BEGIN TRANSACTION;
CREATE TABLE fm_audit (
    operation VARCHAR(26) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    found VARCHAR(16) NOT NULL,
    outcome VARCHAR(16) NOT NULL,
    detail TEXT NOT NULL,
    version BIGINT,
    at_ms BIGINT NOT NULL,
    PRIMARY KEY (operation)
);
CREATE TABLE fm_branches (
    name VARCHAR(255) NOT NULL,
    parent VARCHAR(255),
    base_version BIGINT NOT NULL,
    head_version BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    PRIMARY KEY (name)
);
INSERT INTO "fm_branches" VALUES('main',NULL,0,0,1700000000000);
CREATE TABLE fm_commit_tables (
    version BIGINT NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    table_name VARCHAR(255) NOT NULL,
    snapshot BIGINT,
    sequence BIGINT NOT NULL,
    schema_id INTEGER NOT NULL,
    spec_id INTEGER NOT NULL,
    manifest_list TEXT,
    metadata_location TEXT NOT NULL,
    rows_total BIGINT NOT NULL,
    files_total BIGINT NOT NULL,
    bytes_total BIGINT NOT NULL,
    rows_added BIGINT NOT NULL,
    rows_updated BIGINT NOT NULL,
    rows_deleted BIGINT NOT NULL,
    PRIMARY KEY (version, table_id)
);
CREATE TABLE fm_commits (
    version BIGINT NOT NULL,
    parent BIGINT NOT NULL,
    branch TEXT NOT NULL,
    operation VARCHAR(26) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    actor TEXT NOT NULL,
    message TEXT NOT NULL,
    committed_ms BIGINT NOT NULL,
    state VARCHAR(16) NOT NULL,
    PRIMARY KEY (version),
    UNIQUE (operation)
);
CREATE TABLE fm_consumers (
    name VARCHAR(300) NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    epoch INTEGER NOT NULL,
    mark BIGINT NOT NULL,
    protected INTEGER NOT NULL,
    updated_ms BIGINT NOT NULL,
    PRIMARY KEY (name, table_id)
);
CREATE TABLE fm_deletions (
    table_id VARCHAR(36) NOT NULL,
    sequence BIGINT NOT NULL,
    location VARCHAR(1000) NOT NULL,
    version BIGINT NOT NULL,
    rows_total BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL, below_ms BIGINT,
    PRIMARY KEY (table_id, sequence, location)
);
CREATE TABLE fm_expired (
    version BIGINT NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    expired_ms BIGINT NOT NULL,
    PRIMARY KEY (version, table_id)
);
CREATE TABLE fm_heads (
    branch VARCHAR(255) NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    table_name VARCHAR(255) NOT NULL,
    snapshot BIGINT,
    sequence BIGINT NOT NULL,
    schema_id INTEGER NOT NULL,
    spec_id INTEGER NOT NULL,
    manifest_list TEXT,
    metadata_location TEXT NOT NULL,
    rows_total BIGINT NOT NULL,
    files_total BIGINT NOT NULL,
    bytes_total BIGINT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (branch, table_id)
);
CREATE TABLE fm_lake (
    id INTEGER NOT NULL,
    format INTEGER NOT NULL,
    version BIGINT NOT NULL,
    incarnation VARCHAR(26) NOT NULL,
    location TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    PRIMARY KEY (id)
);
INSERT INTO "fm_lake" VALUES(1,5,0,'01HF7YAT000000000000000000','@LOCATION@',1700000000000);
CREATE TABLE fm_maintenance (
    id VARCHAR(26) NOT NULL,
    verb VARCHAR(16) NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    table_name VARCHAR(255) NOT NULL,
    outcome VARCHAR(24) NOT NULL,
    detail TEXT NOT NULL,
    actor TEXT NOT NULL,
    started_ms BIGINT NOT NULL,
    ended_ms BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE fm_migrations (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT fm_migrations_pkc PRIMARY KEY (version_num)
);
INSERT INTO "fm_migrations" VALUES('f0005');
CREATE TABLE fm_operations (
    id VARCHAR(26) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    state VARCHAR(16) NOT NULL,
    branch TEXT NOT NULL,
    actor TEXT NOT NULL,
    message TEXT NOT NULL,
    process VARCHAR(26) NOT NULL,
    base_version BIGINT NOT NULL,
    begun_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    folders TEXT NOT NULL,
    seal TEXT,
    seal_location TEXT,
    seal_hash VARCHAR(64),
    version BIGINT,
    cleaned INTEGER NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE fm_parts (
    unit VARCHAR(26) NOT NULL,
    first BIGINT NOT NULL,
    last BIGINT NOT NULL,
    digest VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    detail TEXT NOT NULL,
    PRIMARY KEY (unit, first)
);
CREATE TABLE fm_pins (
    id VARCHAR(26) NOT NULL,
    version BIGINT NOT NULL,
    holder TEXT NOT NULL,
    reason TEXT NOT NULL,
    taken_ms BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE fm_processes (
    id VARCHAR(26) NOT NULL,
    host TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    pid_namespace TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started TEXT NOT NULL,
    beat_ms BIGINT NOT NULL,
    lease_ms BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE fm_quarantine (
    id VARCHAR(26) NOT NULL,
    sink VARCHAR(26) NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    unit VARCHAR(26) NOT NULL,
    position BIGINT NOT NULL,
    line TEXT NOT NULL,
    reason TEXT NOT NULL,
    tries BIGINT NOT NULL,
    first_ms BIGINT NOT NULL,
    last_ms BIGINT NOT NULL,
    retry_unit VARCHAR(26),
    retry_position BIGINT,
    PRIMARY KEY (id)
);
CREATE TABLE fm_senders (
    sender VARCHAR(200) NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    epoch BIGINT NOT NULL,
    mark BIGINT NOT NULL,
    since BIGINT NOT NULL,
    until BIGINT NOT NULL,
    ranges TEXT NOT NULL,
    version BIGINT NOT NULL,
    updated_ms BIGINT NOT NULL,
    PRIMARY KEY (sender, table_id)
);
CREATE TABLE fm_sink_tables (
    sink VARCHAR(26) NOT NULL,
    table_name VARCHAR(255) NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    incarnation VARCHAR(26) NOT NULL,
    destination TEXT,
    units BIGINT NOT NULL,
    rows_sent BIGINT NOT NULL,
    deletions_sent BIGINT NOT NULL,
    bytes_sent BIGINT NOT NULL,
    replays BIGINT NOT NULL,
    retries BIGINT NOT NULL,
    last_unit TEXT,
    PRIMARY KEY (sink, table_name)
);
CREATE TABLE fm_sinks (
    name VARCHAR(300) NOT NULL,
    id VARCHAR(26) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    table_names TEXT NOT NULL,
    settings TEXT NOT NULL,
    state VARCHAR(16) NOT NULL,
    runner_process VARCHAR(26),
    runner_run VARCHAR(26),
    error TEXT,
    error_ms BIGINT,
    created_ms BIGINT NOT NULL,
    updated_ms BIGINT NOT NULL,
    PRIMARY KEY (name),
    UNIQUE (id)
);
CREATE TABLE fm_sources (
    scope VARCHAR(300) NOT NULL,
    id VARCHAR(512) NOT NULL,
    version BIGINT NOT NULL,
    operation VARCHAR(26) NOT NULL, position BIGINT,
    PRIMARY KEY (scope, id)
);
CREATE TABLE fm_turns (
    table_id VARCHAR(36) NOT NULL,
    operation VARCHAR(26) NOT NULL,
    until_ms BIGINT NOT NULL,
    PRIMARY KEY (table_id)
);
CREATE TABLE fm_units (
    id VARCHAR(26) NOT NULL,
    sink VARCHAR(26) NOT NULL,
    table_id VARCHAR(36) NOT NULL,
    lane VARCHAR(16) NOT NULL,
    epoch BIGINT NOT NULL,
    since BIGINT NOT NULL,
    until BIGINT NOT NULL,
    pin VARCHAR(26),
    record TEXT NOT NULL,
    state VARCHAR(16) NOT NULL,
    rows_sent BIGINT NOT NULL,
    deletions_sent BIGINT NOT NULL,
    bytes_sent BIGINT NOT NULL,
    quarantined BIGINT NOT NULL,
    opened_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    PRIMARY KEY (id)
);
CREATE TABLE fm_upkeep (
    table_id VARCHAR(36) NOT NULL,
    retention TEXT,
    retention_column TEXT,
    small_files BIGINT,
    deletions_floor BIGINT NOT NULL,
    PRIMARY KEY (table_id)
);
CREATE TABLE iceberg_namespace_properties (
    catalog_name VARCHAR(255) NOT NULL,
    namespace VARCHAR(255) NOT NULL,
    property_key VARCHAR(255) NOT NULL,
    property_value VARCHAR(1000) NOT NULL,
    PRIMARY KEY (catalog_name, namespace, property_key)
);
INSERT INTO "iceberg_namespace_properties" VALUES('floodmark','default','exists','true');
CREATE TABLE iceberg_tables (
    catalog_name VARCHAR(255) NOT NULL,
    table_namespace VARCHAR(255) NOT NULL,
    table_name VARCHAR(255) NOT NULL,
    metadata_location VARCHAR(1000),
    previous_metadata_location VARCHAR(1000),
    iceberg_type VARCHAR(5),
    PRIMARY KEY (catalog_name, table_namespace, table_name)
);
CREATE INDEX fm_operations_unfinished ON fm_operations (id) WHERE cleaned = 0;
CREATE INDEX ix_fm_commits_committed_ms ON fm_commits (committed_ms);
CREATE INDEX fm_commit_tables_newest ON fm_commit_tables (table_id, version);
CREATE INDEX fm_maintenance_newest ON fm_maintenance (table_id, verb, id);
CREATE UNIQUE INDEX fm_units_open ON fm_units (sink, table_id, lane) WHERE state = 'open';
CREATE INDEX fm_units_newest ON fm_units (sink, table_id, id);
CREATE UNIQUE INDEX fm_quarantine_place ON fm_quarantine (unit, position);
CREATE INDEX fm_quarantine_sink ON fm_quarantine (sink, table_id, id);
CREATE TRIGGER fm_marks_rise BEFORE UPDATE ON fm_consumers WHEN NEW.epoch < OLD.epoch OR (NEW.epoch = OLD.epoch AND NEW.mark < OLD.mark) BEGIN SELECT RAISE(ABORT, 'a mark never goes down within an epoch'); END;
COMMIT;

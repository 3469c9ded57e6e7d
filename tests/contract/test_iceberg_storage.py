"""An Iceberg destination is looked for where the lake's own storage settings say, unless its catalog says otherwise."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

import floodmark as fm
from floodmark.sinks.iceberg.table import IcebergPlace
from floodmark.sinks.settings import IcebergSettings
from floodmark.storage import Storage
from floodmark.storage.fileio import with_options
from floodmark.testing.s3 import S3Server
from tests.conftest import EVENTS, rows
from tests.contract.test_iceberg_sink import Elsewhere


def test_a_destination_inherits_endpoint_and_region_of_the_lake(tmp_path: Path, s3_server: S3Server) -> None:
    root = f"s3://{s3_server.make_bucket()}/files"
    catalog = {**Elsewhere(tmp_path).properties, "warehouse": root}
    with fm.open(tmp_path / "lake", create=True, storage_options=s3_server.options) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1, 2))
        lake.sinks.add("out", "iceberg", tables="events", catalog=catalog)
        assert lake.sinks.run("out").outcome == "shipped"
    said = {"s3.endpoint": s3_server.endpoint, "s3.region": "us-east-1"}
    with closing(load_catalog("default", **catalog, **said)) as theirs:
        table = theirs.load_table("default.events")
        assert sorted(table.scan().to_arrow()["id"].to_pylist()) == [1, 2]
        assert table.location().startswith(root)


def test_what_the_catalog_says_stands() -> None:
    inherited = {"endpoint": "http://lake:1", "region": "eu-1", "timeout_s": "5"}
    said = {"type": "sql", "s3.endpoint": "http://there:2", "client.region": "us-2"}
    found = with_options(said, inherited)
    assert found["s3.endpoint"] == "http://there:2"
    assert found["client.region"] == "us-2"
    assert "s3.region" not in found
    place = IcebergPlace(IcebergSettings(catalog={**said, "uri": "sqlite://"}), Storage(inherited))
    assert place.storage.options == {"endpoint": "http://there:2", "region": "us-2", "timeout_s": "5"}


@pytest.mark.parametrize("options", [{}, {"endpoint": "http://lake:1", "allow_http": "true", "retries": "1"}])
def test_a_destination_without_settings_of_its_own_uses_the_lakes_storage(options: dict[str, str]) -> None:
    storage = Storage(options)
    place = IcebergPlace(IcebergSettings(catalog={"type": "sql", "uri": "sqlite://"}), storage)
    assert place.storage is storage

"""Arrow buffers no data file by threads of its own: one of them may call into an interpreter that is ending."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from floodmark.rows.project import read_file, take_rows
from floodmark.rows.reading.row_fetch import fetch_rows
from floodmark.rows.schema import table_schema, user_fields
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import RangeReader, Storage, root_location

SCHEMA = table_schema("id long, name string")
ROWS = 1_000


class Watched(Storage):
    """Records which threads read."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def open_input(self, *given: Any, **named: Any) -> RangeReader:
        stream = super().open_input(*given, **named)
        read = stream.read

        def watched(size: int | None = -1) -> bytes:
            self.threads.add(threading.get_ident())
            return read(size)

        stream.read = watched  # type: ignore[method-assign]
        return stream


@pytest.fixture
def staged(tmp_path: Path) -> tuple[Watched, str, int]:
    storage = Watched()
    target = StageTarget(root_location(str(tmp_path)), SCHEMA.model_dump_json(), '{"spec-id": 0, "fields": []}')
    rows = pa.table({"id": np.arange(ROWS), "name": [f"name {number}" for number in range(ROWS)]})
    (record,) = stage_in_process(target, rows, storage)
    return storage, record.path, record.size_bytes


def test_a_small_file_and_single_rows_of_it_are_read_by_the_caller(staged: tuple[Watched, str, int]) -> None:
    storage, path, size_bytes = staged
    fields = user_fields(SCHEMA)
    assert sum(len(batch) for batch in read_file(storage, path, fields)) == ROWS
    assert take_rows(storage, path, fields, np.array([5, 700])).column(0).to_pylist() == [5, 700]
    assert storage.threads == {threading.get_ident()}
    found = list(fetch_rows(storage, path, size_bytes, fields, np.array([5, 700])))
    assert sum(len(one.rows) for one in found) == 2
    assert storage.threads == {threading.get_ident()}

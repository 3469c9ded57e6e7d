"""The rows of a unit: one order whatever the reading, the same rows from any number on, in pieces and in bodies."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema

from floodmark.commit.live_files import LiveFile
from floodmark.errors import Corrupt, Invalid
from floodmark.model import BEGINNING, DeletionsFile, FileRecord
from floodmark.rows.reading import texts as bodies_module
from floodmark.rows.reading.changes import deletions_batches, plan_changes
from floodmark.rows.reading.shipment import Body, Piece, Shipment, bodies, plan_shipment
from floodmark.rows.schema import table_schema, user_fields
from tests.unit.test_changes import Files, History, Row, delete, in_order, upsert

ANY = 1_000_000


def shipment(
    files: Files,
    live: Iterable[LiveFile],
    gone: Iterable[DeletionsFile] = (),
    *,
    since: int | None = None,
    until: int = ANY,
    columns: tuple[str, ...] | None = None,
    where: str | None = None,
) -> Shipment:
    return plan_shipment(plan_changes(files.schema, live, gone, since, until), columns, where)


def rows(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> list[Row]:
    found: list[Row] = []
    for batch in batches:
        assert batch.schema.equals(schema)
        assert len(batch)
        found += batch.to_pylist()
    return found


def shipped(files: Files, what: Shipment, first: int = 0) -> list[Row]:
    return rows(what.batches(files.storage, first), what.schema)


def opened(files: Files, reading: Iterable[Any]) -> int:
    """How many files it takes to read this."""
    before = files.storage.counters.snapshot()
    list(reading)
    return files.storage.counters.difference(before).calls.get("open_input", 0)


@pytest.fixture
def keyed() -> Files:
    return Files(table_schema("v string, id long not null, n int", ["id"]))


@pytest.fixture
def unkeyed() -> Files:
    return Files(table_schema("v string, id long, n int"))


def some_of_all(files: Files) -> tuple[list[LiveFile], list[DeletionsFile]]:
    """Fresh, settled and mixed files, and deletions, partly out of the range (2, 9]."""
    live = [
        files.settled(9, [{"id": 30, "n": 1, "_seq": 3}, {"id": 31, "n": 5, "_seq": 1}, {"id": 32, "_seq": 9}], "b"),
        files.fresh(4, [{"id": number, "n": number, "v": f"row {number}"} for number in range(5)]),
        files.settled(7, [{"id": 40, "n": 4, "_seq": None}, {"id": 41, "n": 2, "_seq": 2}], "c"),
        files.settled(8, [{"id": 20, "n": 9, "_seq": 5}, {"id": 21, "n": 0, "_seq": 4}], "a"),
        files.fresh(6, [{"id": 50, "n": 3}]),
    ]
    if not files.key:
        return live, []
    gone = [
        files.deletions(5, [{"id": 61}, {"id": 60}, {"id": 2}], "gone-y"),
        files.deletions(8, [{"id": 63}, {"id": 50}, {"id": 62}], "gone-z"),
        files.deletions(8, [{"id": 64}, {"id": 61}], "gone-a"),
    ]
    return live, gone


SHAPES: list[dict[str, Any]] = [
    {},
    {"columns": ("n",)},
    {"where": "n < 4"},
    {"where": "n < 4", "columns": ("v",)},
    {"where": "n is null"},
    {"where": "n < -1"},
]


# ── what ships ──


def test_the_columns_are_the_chosen_ones_with_the_key_in_the_tables_order(keyed: Files) -> None:
    assert shipment(keyed, []).schema.names == ["v", "id", "n", "_change", "_seq"]
    chosen = shipment(keyed, [keyed.fresh(3, [{"id": 1, "v": "a", "n": 2}])], columns=("n",))
    assert chosen.schema.names == ["id", "n", "_change", "_seq"]
    assert (chosen.key, chosen.rows_max) == (("id",), 1)
    assert shipped(keyed, chosen) == [upsert(3, id=1, n=2)]


def test_files_are_in_the_order_of_their_paths_then_deletions_newest_first(keyed: Files) -> None:
    live, gone = some_of_all(keyed)
    found = shipped(keyed, shipment(keyed, live, gone, since=2, until=9, columns=("id",)))
    by_path = {
        live[3].path: [upsert(5, id=20), upsert(4, id=21)],
        live[0].path: [upsert(3, id=30), upsert(9, id=32)],
        live[2].path: [upsert(7, id=40)],
        live[1].path: [upsert(4, id=number) for number in range(5)],
        live[4].path: [upsert(6, id=50)],
    }
    expected = [row for path in sorted(by_path) for row in by_path[path]]
    expected += [delete(8, id=64), delete(8, id=61), delete(8, id=63), delete(8, id=62), delete(5, id=60)]
    assert found == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_of_the_plan_does_not_matter(keyed: Files, shape: dict[str, Any]) -> None:
    live, gone = some_of_all(keyed)
    expected = shipped(keyed, shipment(keyed, live, gone, since=2, until=9, **shape))
    for seed in range(4):
        random.Random(seed).shuffle(live)
        random.Random(seed).shuffle(gone)
        assert shipped(keyed, shipment(keyed, live, gone, since=2, until=9, **shape)) == expected


def test_deletions_have_one_order_however_many_are_matched_at_once(keyed: Files) -> None:
    numbers = random.Random(3).sample(range(1000, 1200), 40)
    cuts = [0, 1, 9, 24, 40]
    gone = [
        keyed.deletions(5 + at % 2, [{"id": number} for number in [*numbers[start:stop], *numbers[:3]]])
        for at, (start, stop) in enumerate(pairwise(cuts))
    ]
    live = [keyed.fresh(7, [{"id": numbers[7]}, {"id": numbers[30]}])]
    plan = plan_changes(keyed.schema, live, gone, 1, 9)
    expected: dict[int, None] = {}
    for file in sorted(gone, key=lambda file: (-file.sequence, file.location)):
        start, stop = list(pairwise(cuts))[gone.index(file)]
        expected |= dict.fromkeys([*numbers[start:stop], *numbers[:3]])
    wanted = [number for number in expected if number not in (numbers[7], numbers[30])]
    for chunk_rows in (1, 3, 1000):
        found = [row["id"] for batch in deletions_batches(keyed.storage, plan, chunk_rows) for row in batch.to_pylist()]
        assert found == wanted


def test_a_row_that_does_not_pass_ships_as_a_deletion_of_its_key(keyed: Files) -> None:
    live = [
        keyed.fresh(4, [{"id": 1, "n": 1, "v": "in"}, {"id": 2, "n": 7, "v": "out"}, {"id": 3, "n": None, "v": "?"}]),
        keyed.settled(9, [{"id": 4, "n": 8, "v": "out", "_seq": 6}, {"id": 5, "n": 8, "_seq": 1}], "z"),
    ]
    gone = [keyed.deletions(3, [{"id": 2}, {"id": 9}])]
    found = shipped(keyed, shipment(keyed, live, gone, since=2, until=9, where="N < 5", columns=("v",)))
    assert in_order(found) == in_order(
        [upsert(4, v="in", id=1), *(delete(seq, v=None, id=key) for key, seq in [(2, 4), (3, 4), (4, 6), (9, 3)])]
    )


def test_without_a_key_a_row_that_does_not_pass_is_left_out(unkeyed: Files) -> None:
    live = [unkeyed.fresh(4, [{"n": 1, "v": "in"}, {"n": 7, "v": "out"}, {"n": None, "v": "?"}, {"n": 0, "v": "too"}])]
    assert shipped(unkeyed, shipment(unkeyed, live, where="n < 5", columns=("v",))) == [
        upsert(4, v="in"),
        upsert(4, v="too"),
    ]


def test_a_file_that_cannot_hold_a_passing_row_is_not_opened_and_changes_no_number(unkeyed: Files) -> None:
    live = [unkeyed.fresh(number, [{"id": number, "n": number * 10}, {"id": -number}]) for number in (1, 2, 3)]
    what = shipment(unkeyed, live, where="n = 20 or n = 30")
    assert [row["id"] for row in shipped(unkeyed, what)] == [2, 3]
    assert [row["id"] for row in shipped(unkeyed, what, first=1)] == [3]
    assert opened(unkeyed, what.batches(unkeyed.storage)) == 2
    pieces = [Piece.from_json(piece.to_json()) for piece in what.pieces(1)]
    assert len(pieces) == 3
    assert sum(opened(unkeyed, piece.batches(unkeyed.storage)) for piece in pieces) == 2


def test_with_a_key_every_file_of_a_filter_is_read_for_its_deletions(keyed: Files) -> None:
    live = [keyed.fresh(number, [{"id": number, "n": number * 10}]) for number in (1, 2, 3)]
    what = shipment(keyed, live, where="n = 20")
    assert [(row["id"], row["_change"]) for row in shipped(keyed, what)] == [
        (1, "delete"),
        (2, "upsert"),
        (3, "delete"),
    ]
    assert opened(keyed, what.batches(keyed.storage)) == 3


def test_nested_columns_of_a_row_that_does_not_pass_are_null() -> None:
    files = Files(table_schema("id long not null, s struct<a:int>, l array<int>, m map<string,int>", ["id"]))
    live = [files.fresh(2, [{"id": key, "s": {"a": 1}, "l": [1, 2], "m": {"k": 3}} for key in (1, 2)])]
    kept, left = shipped(files, shipment(files, live, where="id = 1"))
    assert kept == upsert(2, id=1, s={"a": 1}, l=[1, 2], m=[("k", 3)])
    assert left == delete(2, id=2, s=None, l=None, m=None)


def test_what_a_sink_cannot_take_is_invalid(keyed: Files) -> None:
    with pytest.raises(Invalid, match="no such column") as raised:
        shipment(keyed, [], columns=("V",))
    assert "Did you mean v?" in raised.value.advice
    with pytest.raises(Invalid, match="no such column"):
        shipment(keyed, [], where="nn = 1")
    with pytest.raises(Invalid, match="plain comparison"):
        shipment(keyed, [], where="length(v) = 1")


# ── from any row on ──


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["keyed", "unkeyed"])
def test_the_rows_from_any_number_on_are_the_end_of_all_rows(
    kind: str, shape: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    files: Files = request.getfixturevalue(kind)
    what = shipment(files, *some_of_all(files), since=2, until=9, **shape)
    whole = shipped(files, what)
    assert len(whole) <= what.rows_max
    for first in range(len(whole) + 3):
        assert shipped(files, what, first) == whole[first:]


def test_files_before_the_first_row_are_not_read(keyed: Files) -> None:
    live = [keyed.fresh(sequence, [{"id": 10 * sequence + at, "n": at} for at in range(3)]) for sequence in (3, 4, 5)]
    for where in (None, "n = 1"):
        what = shipment(keyed, live, where=where)
        counts = [opened(keyed, what.batches(keyed.storage, first)) for first in range(10)]
        assert counts == [3, 3, 3, 2, 2, 2, 1, 1, 1, 0]


def test_a_file_with_rows_that_do_not_ship_is_counted_not_guessed(unkeyed: Files) -> None:
    live = [unkeyed.settled(9, [{"n": at, "_seq": at} for at in range(6)], f"{name}") for name in "abc"]
    what = shipment(unkeyed, live, since=1, until=4, where="n <> 3")
    assert [row["n"] for row in shipped(unkeyed, what)] == [2, 4] * 3
    for first in range(8):
        assert [row["n"] for row in shipped(unkeyed, what, first)] == ([2, 4] * 3)[first:]


def test_a_file_with_other_rows_than_the_state_says_is_corrupt_not_renumbered() -> None:
    with_seq = table_schema("n int")
    files = Files(Schema(*user_fields(with_seq), schema_id=0))
    file = files.fresh(3, [{"n": 1}, {"n": 2}])
    lying = files._live(FileRecord(file.path, 3, file.size_bytes), 3)
    with pytest.raises(Corrupt, match="a different number of rows") as raised:
        shipped(files, shipment(files, [lying, files.fresh(4, [{"n": 5}])]))
    assert (raised.value.facts["rows"], raised.value.facts["rows_expected"]) == (2, 3)


def test_a_missing_file_is_an_error_not_fewer_rows(keyed: Files) -> None:
    live, gone = some_of_all(keyed)
    what = shipment(keyed, live, gone, since=2, until=9)
    for location in (gone[0].location, live[3].path):
        keyed.storage.delete(location)
        with pytest.raises(Corrupt, match=location.rpartition("/")[2]):
            shipped(keyed, what)


# ── pieces ──


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("files_in_one", [0, 2, 100])
def test_pieces_in_their_order_are_all_rows_also_after_a_journey(
    keyed: Files, shape: dict[str, Any], files_in_one: int
) -> None:
    live, gone = some_of_all(keyed)
    what = shipment(keyed, live, gone, since=2, until=9, **shape)
    pieces = what.pieces(max(1, files_in_one * max(file.size_bytes for file in live)))
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    assert len(pieces) - 1 == {0: 5, 2: 3, 100: 1}[files_in_one]
    assert [piece.has_deletions for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(piece.rows_max for piece in pieces) == what.rows_max
    assert sum(piece.size_bytes for piece in pieces) == what.plan.size_bytes
    found: list[Row] = []
    for piece in pieces:
        if not piece.has_deletions:
            travelled = Piece.from_json(piece.to_json())
            assert travelled == piece
            piece = travelled
        found += rows(piece.batches(keyed.storage), what.schema)
    assert found == shipped(keyed, what)


def test_a_piece_of_deletions_does_not_travel(keyed: Files) -> None:
    (piece,) = shipment(keyed, [], [keyed.deletions(3, [{"id": 1}])]).pieces(1)
    assert rows(piece.batches(keyed.storage), shipment(keyed, []).schema) == [delete(3, v=None, id=1, n=None)]
    with pytest.raises(ValueError, match="deletions"):
        piece.to_json()


def test_nothing_to_ship_has_no_pieces_and_no_bodies(keyed: Files) -> None:
    what = shipment(keyed, [])
    assert (what.pieces(1), shipped(keyed, what), list(bodies(what, keyed.storage, 1, 1))) == ([], [], [])


# ── bodies ──


def lines_of(found: Sequence[Body]) -> list[Row]:
    texts = b"".join(body.data for body in found).splitlines(keepends=True)
    assert all(text.endswith(b"\n") for text in texts)
    return [json.loads(text) for text in texts]


def ranges(found: Sequence[Body]) -> list[tuple[int, int]]:
    return [(body.first, body.last) for body in found]


@pytest.fixture
def everything(keyed: Files) -> Shipment:
    return shipment(keyed, *some_of_all(keyed), since=2, until=9, where="n < 4")


def test_bodies_hold_all_rows_in_parts_of_so_many(keyed: Files, everything: Shipment) -> None:
    whole = shipped(keyed, everything)
    for part_rows in (1, 2, 7, len(whole), 1000):
        found = list(bodies(everything, keyed.storage, part_rows, 10**9))
        assert lines_of(found) == whole
        sizes = [body.last - body.first for body in found]
        assert sizes[:-1] == [part_rows] * (len(sizes) - 1)
        for body in found:
            mine = whole[body.first : body.last]
            assert lines_of([body]) == mine
            assert body.deletions == sum(row["_change"] == "delete" for row in mine)
            assert body.digest == hashlib.sha256(body.data).hexdigest()


def test_bodies_are_as_large_as_may_be_and_a_larger_row_is_alone(unkeyed: Files) -> None:
    texts = ["a" * length for length in (1, 1, 1, 500, 1, 1, 600, 700, 1)]
    what = shipment(unkeyed, [unkeyed.fresh(3, [{"v": text} for text in texts])], columns=("v",))
    (line,) = {len(body.data) for body in list(bodies(what, unkeyed.storage, 1, 1))[:3]}
    assert ranges(list(bodies(what, unkeyed.storage, 100, 2 * line))) == [
        (0, 2), (2, 3), (3, 4), (4, 6), (6, 7), (7, 8), (8, 9),
    ]  # fmt: skip
    assert ranges(list(bodies(what, unkeyed.storage, 100, 2 * line - 1))) == [(at, at + 1) for at in range(9)]
    assert ranges(list(bodies(what, unkeyed.storage, 2, 10**9))) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]
    assert ranges(list(bodies(what, unkeyed.storage, 100, 10**9))) == [(0, 9)]


def test_known_parts_keep_their_bounds_and_bytes_when_the_rules_change(keyed: Files, everything: Shipment) -> None:
    before = list(bodies(everything, keyed.storage, 5, 10**9))
    known = ranges(before)[:2]
    for part_rows, part_bytes in ((1, 10**9), (3, 1), (1000, 10**9)):
        after = list(bodies(everything, keyed.storage, part_rows, part_bytes, known))
        assert after[:2] == before[:2]
        assert lines_of(after) == shipped(keyed, everything)
        assert after[2].first == 10
        if part_rows == 3:
            assert all(body.last - body.first == 1 for body in after[2:])
    assert list(bodies(everything, keyed.storage, 5, 10**9, known)) == before


def test_skipped_parts_are_left_out_and_the_others_stay_as_they_are(keyed: Files, everything: Shipment) -> None:
    whole = list(bodies(everything, keyed.storage, 2, 10**9))
    known = ranges(whole)
    for seed in range(12):
        skip = [part for part in known if random.Random(f"{seed} {part}").random() < 0.6]
        upto = known[: random.Random(seed).randint(0, len(known))]
        skip = [part for part in skip if part in upto]
        found = list(bodies(everything, keyed.storage, 2, 10**9, upto, skip))
        assert found == [body for body in whole if (body.first, body.last) not in skip]
    assert list(bodies(everything, keyed.storage, 2, 10**9, known, known)) == []


def test_files_of_skipped_parts_are_not_read(keyed: Files) -> None:
    live = [keyed.fresh(sequence, [{"id": 10 * sequence + at} for at in range(4)]) for sequence in (3, 4, 5)]
    what = shipment(keyed, live)
    known = [(at, at + 2) for at in range(0, 12, 2)]
    for skip, files in ((known, 0), (known[:2], 2), (known[2:4], 2), (known[1:5], 2), (known[1:3], 3)):
        assert opened(keyed, bodies(what, keyed.storage, 2, 10**9, known, skip)) == files


def test_parts_do_not_depend_on_how_rows_are_read(
    keyed: Files, everything: Shipment, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = max(len(body.data) for body in bodies(everything, keyed.storage, 1, 1))
    rules = [(3, 10**9), (1000, 2 * line), (4, 3 * line), (1000, 10**9)]
    whole = [list(bodies(everything, keyed.storage, *rule)) for rule in rules]
    for encode_bytes in (1, 100):
        monkeypatch.setattr(bodies_module, "ENCODE_BYTES", encode_bytes)
        assert [list(bodies(everything, keyed.storage, *rule)) for rule in rules] == whole


def test_parts_go_on_from_batch_to_batch_of_a_large_file(unkeyed: Files) -> None:
    what = shipment(unkeyed, [unkeyed.fresh(3, [{"n": at} for at in range(9_000)])], columns=("n",))
    assert sum(1 for _ in what.batches(unkeyed.storage)) > 1
    found = list(bodies(what, unkeyed.storage, 2_500, 10**9, [(0, 10), (10, 5_000)]))
    assert ranges(found) == [(0, 10), (10, 5_000), (5_000, 7_500), (7_500, 9_000)]
    assert [row["n"] for row in lines_of(found)] == list(range(9_000))


def test_fewer_rows_than_were_written_down_are_corrupt(keyed: Files, everything: Shipment) -> None:
    rows_all = len(shipped(keyed, everything))
    for known in ([(0, rows_all + 1)], [(0, rows_all), (rows_all, rows_all + 2)]):
        with pytest.raises(Corrupt, match="fewer rows"):
            list(bodies(everything, keyed.storage, 5, 10**9, known))
    skip = [(0, rows_all)]
    with pytest.raises(Corrupt, match="fewer rows"):
        list(bodies(everything, keyed.storage, 5, 10**9, [*skip, (rows_all, rows_all + 1)], skip))


@pytest.mark.parametrize("known", [[(1, 2)], [(0, 2), (3, 4)], [(0, 2), (1, 3)], [(0, 0)], [(2, 4), (0, 2)]])
def test_known_parts_with_a_gap_or_out_of_order_are_refused(
    keyed: Files, everything: Shipment, known: list[tuple[int, int]]
) -> None:
    with pytest.raises(Corrupt, match="gap"):
        list(bodies(everything, keyed.storage, 5, 10**9, known))


def test_a_skipped_part_that_is_not_known_is_refused(keyed: Files, everything: Shipment) -> None:
    with pytest.raises(Corrupt, match="none of the unit's parts"):
        list(bodies(everything, keyed.storage, 5, 10**9, [(0, 2)], [(0, 1)]))


# ── random histories ──


@pytest.mark.parametrize("seed", range(3))
def test_what_ships_of_any_range_is_what_changed(seed: int) -> None:
    history = History(seed)
    for _ in range(60):
        history.step()
    files = history.files
    for _ in range(6):
        since, until = sorted(history.chance.sample(range(BEGINNING, history.sequence + 1), 2))
        live = [file for file, _ in history.live.values()]
        what = shipment(files, live, history.gone, since=since, until=until)
        whole = shipped(files, what)
        assert in_order(whole) == history.expected(since, until)
        mixed = shipment(files, live[::-1], history.gone[::-1], since=since, until=until)
        assert shipped(files, mixed) == whole
        first = history.chance.randint(0, len(whole))
        assert shipped(files, what, first) == whole[first:]
        condition = f"id < {history.chance.randint(0, 60)}"
        passing = shipped(files, replace(what, where=condition))
        limit = int(condition.rpartition(" ")[2])
        assert passing == [row if row["id"] < limit else {**row, "v": None, "_change": "delete"} for row in whole]

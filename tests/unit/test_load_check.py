"""The judge of a load sees every way in which rows can be wrong: a check that cannot fail would prove nothing."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
import pyarrow.json
import pytest

from tests.load.check import judge
from tests.load.clients import APPENDED, KEYED, Load, Sent, body_of
from tests.load.daemon import Sample, between_kills, memory_of, share_of

ADDED = Load("", 0, "events", APPENDED, requests=4, per_s=1.0, rows=10, start_s=0.0)
MERGED = replace(ADDED, kind=KEYED, rows=400)
# Three are acknowledged, of the last nobody knows.
SENT = [*(Sent(number, "acknowledged", record=number) for number in range(3)), Sent(3, "forsaken")]


def lines(load: Load, *numbers: int) -> pa.Table:
    return pyarrow.json.read_json(io.BytesIO(b"".join(body_of(load, number) for number in numbers)))


def without(rows: pa.Table, *places: int) -> pa.Table:
    return rows.take([place for place in range(rows.num_rows) if place not in places])


@pytest.mark.parametrize("numbers", [(0, 1, 2), (2, 0, 1, 3)])
def test_what_was_acknowledged_is_in_and_what_nobody_knows_of_may_be(numbers: tuple[int, ...]) -> None:
    found = judge(lines(ADDED, *numbers), ADDED, SENT)
    assert found.clean
    assert (found.acknowledged, found.in_table, found.unknown_in) == (30, 10 * len(numbers), len(numbers) - 3)


def test_a_row_that_is_lost_doubled_or_strange_is_counted() -> None:
    whole = lines(ADDED, 0, 1, 2)
    assert judge(without(whole, 12, 13), ADDED, SENT).lost == 2
    assert judge(lines(ADDED, 0, 2), ADDED, SENT).lost == 10
    assert judge(pa.concat_tables([whole, whole.slice(5, 3)]), ADDED, SENT).doubled == 3
    assert judge(lines(ADDED, 0, 1, 2, 3, 3), ADDED, SENT).doubled == 10
    # A request by halves, one that was never sent, one that was refused, and a row with another's content.
    assert judge(without(lines(ADDED, 0, 1, 2, 3), 35), ADDED, SENT).strange == 9
    assert judge(lines(ADDED, 0, 1, 2, 7), ADDED, SENT).strange == 10
    assert not judge(whole, ADDED, [*SENT[:3], Sent(3, "refused", told="422")]).clean
    mixed = whole.set_column(4, "n", pa.array([96, *whole["n"].to_pylist()[1:]]))
    assert judge(mixed, ADDED, SENT).strange == 1


def test_answers_that_do_not_fit_together_are_told_of() -> None:
    rows = lines(ADDED, 0, 1, 2)
    again = replace(SENT[0], told_again="taken", record_again=5)
    assert not judge(rows, ADDED, [again, *SENT[1:]]).clean
    assert judge(rows, ADDED, [replace(again, told_again="already_taken", record_again=0), *SENT[1:]]).clean
    assert not judge(rows, ADDED, [replace(SENT[0], record=1), *SENT[1:]]).clean


def folded(numbers: Iterable[int]) -> pa.Table:
    """The rows of a keyed table after these requests, in this order."""
    found: dict[int, dict[str, object]] = {}
    for number in numbers:
        for row in lines(MERGED, number).to_pylist():
            found.pop(row["id"], None)
            if row["_change"] != "delete":
                found[row["id"]] = row
    return pa.Table.from_pylist(list(found.values()))


def test_of_every_key_the_last_arrival_counts() -> None:
    assert judge(folded([0, 1, 2]), MERGED, SENT).clean
    assert judge(folded([0, 3, 1, 2]), MERGED, SENT).clean
    assert judge(folded([0, 1, 2, 3]), MERGED, SENT).clean
    # The order is that of the records, whichever request was first.
    turned = [replace(SENT[0], record=2), SENT[1], replace(SENT[2], record=0), SENT[3]]
    assert judge(folded([2, 1, 0]), MERGED, turned).clean
    assert judge(folded([0, 1, 2]), MERGED, turned).strange > 0


def test_a_key_that_is_lost_old_or_doubled_is_counted() -> None:
    whole = folded([0, 1, 2])
    assert judge(without(whole, 0, 5), MERGED, SENT[:3]).lost == 2
    assert judge(folded([0, 1]), MERGED, SENT[:3]).lost + judge(folded([0, 1]), MERGED, SENT[:3]).strange > 0
    assert judge(pa.concat_tables([whole, whole.slice(0, 4)]), MERGED, SENT).doubled == 4
    assert judge(folded([0, 1, 2, 9]), MERGED, SENT[:3]).strange > 0


def test_only_what_did_not_meet_a_kill_is_timed() -> None:
    def sent(due_s: float, answered_s: float, **others: int) -> Sent:
        return replace(Sent(0, "acknowledged", tries=1, due_s=due_s, sent_s=due_s, answered_s=answered_s), **others)

    before, across, meanwhile, after = sent(0, 1), sent(1, 7), sent(3, 4), sent(6, 7)
    downs = [(2.0, 5.0)]
    assert between_kills([before, across, meanwhile, after], downs) == [before, after]
    assert between_kills([sent(6, 7, tries=2)], downs) == []
    assert [share_of(range(100), share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]


def test_memory_is_compared_within_one_life() -> None:
    samples = [Sample(float(at), 0, size, 0.0) for at, size in enumerate([9, 5, 7, 6, 8])]
    found = memory_of(samples, 1.0, 2.0, 4.0)
    assert (found.first_bytes, found.second_bytes) == (7, 8)
    with pytest.raises(ValueError, match="one life"):
        memory_of([*samples, Sample(3.0, 1, 5, 0.0)], 1.0, 2.0, 4.0)

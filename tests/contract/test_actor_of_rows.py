"""Rows over HTTP are committed under the name of their token: through the spool, the feed, a restart and the door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import zstandard

import floodmark as fm
from floodmark.ingest.feed_group import TURNS_MAX, same_kind
from floodmark.serve.http.access import AccessToken, new_token, token_hash
from floodmark.spool.frame import Draft, frame_head, name_of, pack, parse_head, unpack
from floodmark.spool.segments import Record
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, ids
from tests.contract.test_receive_http import served, two_tables
from tests.intake_world import QUICK, SLOW, intake_of, lines, table_id

NAMES = ("ada", "bo ü", "cy")
TOKENS = {name: new_token() for name in NAMES}
KNOWN = [AccessToken(name, token_hash(text), "write") for name, text in TOKENS.items()]


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with two_tables(new_place) as lake:
        yield lake


def send(client: httpx.Client, number: int, name: str, *, table: str = "events", wait: bool = False) -> httpx.Response:
    answer = client.post(
        f"/api/tables/{table}/rows{'?wait=committed' if wait else ''}",
        content=b'{"id": %d}' % number,
        headers={"Authorization": f"Bearer {TOKENS[name]}"},
    )
    assert answer.status_code in (200, 202), answer.text
    return answer


def actors(lake: fm.Lake, table: str = "events") -> list[str]:
    """Of the commits of rows, oldest first."""
    told = [one for one in lake.history() if one.kind in ("append", "merge")]
    return [one.actor for one in reversed(told) if any(part.table == table for part in one.tables)]


def by_actor(lake: fm.Lake, table: str = "events") -> dict[int, str]:
    """Who committed each row: by its sequence, which is that of its commit."""
    who = {part.sequence: one.actor for one in lake.history() for part in one.tables if part.table == table}
    found = lake.changes(table).arrow().read_all().to_pylist()
    return {row["id"]: who[row["_seq"]] for row in found}


def test_several_tokens_in_one_group_keep_their_actors(lake: fm.Lake) -> None:
    sent = ["ada", "ada", "bo ü", "ada", "cy", "cy"]
    with intake_of(lake, SLOW) as intake:
        with served(lake, tokens=KNOWN, intake=intake) as client:
            for number, name in enumerate(sent):
                send(client, number, name)
        assert intake.drain(20)
    assert by_actor(lake) == dict(enumerate(sent))
    assert actors(lake) == ["ada", "bo ü", "ada", "cy"]
    check_lake(lake.catalog)


def test_actors_that_take_turns_at_every_record_are_all_named_in_one_commit(lake: fm.Lake) -> None:
    count = TURNS_MAX + 2
    with intake_of(lake, SLOW) as intake:
        with served(lake, tokens=KNOWN, intake=intake) as client:
            for number in range(count):
                send(client, number, NAMES[number % 2], table="people")
        assert intake.drain(20)
    assert actors(lake, "people") == ["ada, bo ü"]
    assert ids(lake, "people") == list(range(count))


def test_the_actor_survives_a_restart_between_the_answer_and_the_table(lake: fm.Lake) -> None:
    with intake_of(lake, SLOW) as intake, served(lake, tokens=KNOWN, intake=intake) as client:
        send(client, 1, "cy")
    assert actors(lake) == []
    with intake_of(lake, QUICK) as intake:
        assert intake.drain(20)
    assert actors(lake) == ["cy"]


def test_rows_that_are_committed_before_the_answer_have_the_actor_too(lake: fm.Lake) -> None:
    with served(lake, tokens=KNOWN) as client:
        send(client, 1, "bo ü", wait=True)
        client.post(
            "/api/tables/events/rows",
            content=b'{"id": 2}',
            headers={
                "Authorization": f"Bearer {TOKENS['cy']}",
                "Floodmark-Sender": "another",
                "Floodmark-Epoch": "1",
                "Floodmark-Unit": "0..1",
                "Floodmark-Part": "0-1",
            },
        ).raise_for_status()
    assert by_actor(lake) == {1: "bo ü", 2: "cy"}


def test_without_tokens_rows_are_committed_as_the_lakes_own_actor(lake: fm.Lake) -> None:
    with intake_of(lake, QUICK) as intake, served(lake, intake=intake) as client:
        client.post("/api/tables/events/rows?wait=committed", content=b'{"id": 1}').raise_for_status()
    assert actors(lake) == ["test"]


def test_many_clients_at_once_each_have_their_own_rows(lake: fm.Lake) -> None:
    with intake_of(lake, SLOW) as intake:
        with served(lake, tokens=KNOWN, intake=intake) as client, ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda n: [send(client, n * 100 + k, NAMES[n]) for k in range(5)], range(3)))
        assert intake.drain(20)
    for number, actor in by_actor(lake).items():
        assert NAMES[number // 100] in actor.split(", ")
    assert len(ids(lake)) == 15


# ── frames ──


def test_a_frame_of_an_older_floodmark_is_read_and_fed_as_the_lakes_own_actor(lake: fm.Lake) -> None:
    """As it was written before names: byte for byte what a record without a name is."""
    draft = Draft(pack(b'{"id": 1}'), 1, 5)
    assert draft.payload.data == b'{"id": 1}'
    frame = parse_head(frame_head(draft, 0, synced=0, rows_before=0, salt=1), 1)
    assert frame is not None
    assert (frame.flags, unpack(frame, draft.payload.data), name_of(frame, draft.payload.data)) == (0, b'{"id": 1}', "")
    with intake_of(lake, SLOW) as intake:
        intake.take("events", table_id(lake, "events"), lines({"id": 1}), 1).result(20)
        intake.take("events", table_id(lake, "events"), lines({"id": 2}), 1, actor="ada").result(20)
        assert intake.drain(20)
    assert by_actor(lake) == {1: "test", 2: "ada"}


@pytest.mark.parametrize("text", [b'{"id": 1}', b'{"id": 1}\n' * 100, b""])
def test_a_reader_that_does_not_know_names_reads_the_same_rows(text: bytes) -> None:
    draft = Draft(pack(text, "bo ü"), 1, 5)
    frame = parse_head(frame_head(draft, 0, synced=0, rows_before=0, salt=1), 1)
    assert frame is not None
    assert (unpack(frame, draft.payload.data), name_of(frame, draft.payload.data)) == (text, "bo ü")
    # What such a reader does with a packed payload.
    assert frame.flags & 2
    old = zstandard.ZstdDecompressor().decompress(draft.payload.data, max_output_size=frame.text_bytes)
    assert (old, frame.text_bytes) == (text, len(text))


def test_a_publish_has_records_of_one_actor_and_of_one_kind() -> None:
    def records(*told: tuple[str, bool]) -> list[Record]:
        return [Record(n, 1, b"{}", evolve, 0, actor) for n, (actor, evolve) in enumerate(told)]

    assert same_kind([]) == []
    assert len(same_kind(records(("a", False), ("a", False), ("a", True)))) == 2
    assert len(same_kind(records(("a", False), ("", False)))) == 1
    taking_turns = [(("a", "b")[n % 2], False) for n in range(TURNS_MAX)]
    assert len(same_kind(records(*taking_turns))) == 1
    assert len(same_kind(records(*taking_turns, ("a", False), ("a", True)))) == TURNS_MAX + 1

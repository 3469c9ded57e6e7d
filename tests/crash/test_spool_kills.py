"""Kill writers of a spool at every failpoint and at random: what was acknowledged is there once, in order, and no more.

The killed process appends from several threads, feeds and forgets; it writes down what it was told, each before the
next step, in a file that outlives it. Whoever comes next finds all of it, and a retry of everything doubles nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from floodmark import failpoints
from floodmark.errors import Corrupt, Unavailable
from floodmark.failpoints import FAILPOINTS
from floodmark.spool.folder import Calls, read_about
from floodmark.spool.frame import frames
from floodmark.spool.segments import Record
from floodmark.spool.spool import IntakeLimits, Spool, Taken
from floodmark.spool.state import look
from floodmark.testing.children import Child, run_child, run_killed

LIMITS = IntakeLimits(segment_bytes=1_500)
ALL = {"rows_max": 10**9, "bytes_max": 10**9}
# However the threads meet, there are at least EACH / AT_ONCE groups.
THREADS, EACH, AT_ONCE = 4, 12, 2
WAIT_S = 30
# Passings at which it is killed: while the first are under way, and later ones.
KILLS = [
    "spool.made",
    *(f"spool.{step}:{passing}" for step in ("written", "synced") for passing in (1, 2, 3, 5)),
    *(f"spool.rolled:{passing}" for passing in (1, 3)),
    *(f"spool.keys_written:{passing}" for passing in (1, 3)),
    *(f"spool.keys_kept:{passing}" for passing in (1, 2)),
    *(f"spool.forgotten:{passing}" for passing in (1, 2)),
]


def _no_room(path: str, data: bytes) -> None:
    raise Unavailable("cannot write: the disk is full", location=path)


@dataclass(frozen=True)
class World:
    """Where the spool is, and what its processes were told. The position is the catalog's, in real life."""

    root: Path
    # Not a byte can be had for the file of keys: they go into the room that is kept for them.
    is_full: bool = False

    @property
    def folder(self) -> Path:
        return self.root / "spool" / "table"

    @property
    def told(self) -> Path:
        return self.root / "told"

    def open(self) -> Spool:
        calls = Calls(put=_no_room) if self.is_full else Calls()
        return Spool.open(self.folder, table_id="table", incarnation="one", limits=LIMITS, create=True, calls=calls)

    def tell(self, *what: object) -> None:
        """One write: whole or not there, whenever the process dies."""
        fd = os.open(self.told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(fd, (json.dumps(what) + "\n").encode())
        os.close(fd)


@dataclass
class Told:
    """What the processes so far were told: records by key, records that were fed, how far."""

    taken: dict[str, int] = field(default_factory=dict)
    fed: dict[int, str] = field(default_factory=dict)
    position: int = 0


def read_told(world: World) -> Told:
    told = Told()
    for line in world.told.read_text().splitlines() if world.told.exists() else ():
        what = json.loads(line)
        if what[0] == "taken":
            assert told.taken.setdefault(what[1], what[2]) == what[2]
        else:
            for number, key in what[1]:
                assert number == len(told.fed), "fed twice, or out of order"
                told.fed[number] = key
            told.position = len(told.fed)
    return told


# ── what the killed processes do ──


def text_of(key: str) -> bytes:
    """Rows that tell which key they are of; long and short ones, such that compress and such that do not."""
    seed = random.Random(key)
    return f"{key} ".encode() + (b"x" * seed.randrange(900) if seed.random() < 0.5 else seed.randbytes(400))


def key_of(record: Record) -> str:
    key = record.text.split(b" ", 1)[0].decode()
    assert record.text == text_of(key), "it is not whole"
    assert record.rows == int(key.split("-")[1]) + 1
    return key


def append(world: World, spool: Spool, thread: int, run: int) -> None:
    """Several are under way at once, as clients have it."""
    for start in range(0, EACH, AT_ONCE):
        keys = [f"{thread}-{number}-{run}" for number in range(start, start + AT_ONCE)]
        answers = [spool.append(text_of(key), start + n + 1, key=key, evolve=False) for n, key in enumerate(keys)]
        for key, answer in zip(keys, answers, strict=True):
            world.tell("taken", key, answer.result(WAIT_S).record)


def feed(world: World, spool: Spool, position: int) -> int:
    found = spool.read(position, rows_max=60, bytes_max=10**9)
    if found:
        world.tell("fed", [(record.number, key_of(record)) for record in found])
    spool.forget(position + len(found))
    return position + len(found)


def work(world: World, run: int) -> None:
    position = read_told(world).position
    spool = world.open()
    spool.forget(position)
    threads = [threading.Thread(target=append, args=(world, spool, thread, run)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or position < spool.end:
        position = feed(world, spool, position)
    spool.close()


# ── what must be there afterwards ──


def check(world: World, spool: Spool) -> Told:
    """Everything that somebody was told of is there once, in its place; the rest is whole or not there."""
    told = read_told(world)
    assert spool.first <= told.position <= spool.end
    there = {record.number: key_of(record) for record in spool.read(spool.first, **ALL)}
    assert list(there) == list(range(spool.first, spool.end))
    everything = {**told.fed, **there}
    assert all(told.fed.get(number, key) == key for number, key in there.items()), "a fed record has changed"
    assert sorted(everything) == list(range(spool.end))
    assert max(Counter(everything.values()).values(), default=1) == 1, "rows came in twice"
    for key, number in told.taken.items():
        assert everything[number] == key
    return told


def check_files(world: World, spool: Spool) -> None:
    names = sorted(path.name for path in world.folder.iterdir())
    segments = [name for name in names if name.endswith(".segment")]
    keys = ["keys"] if spool.first or "keys" in names else []
    reserve = ["reserve"] if len(segments) > 1 or "reserve" in names else []
    assert names == [*segments, *keys, "lock", *reserve, "spool.json"]
    assert int(segments[0].split(".")[0]) == spool.first
    # One that is fed to its end is still there only if it is the last.
    assert len(segments) == 1 or int(segments[1].split(".")[0]) > read_told(world).position


def settle(world: World, runs: int) -> None:
    """Open it twice, send everything again, feed the rest: each key is there once."""
    if world.folder.exists():
        assert look(world.folder, read_told(world).position).problem is None or not world.told.exists()
    spool = world.open()
    first = check(world, spool)
    ends = spool.end
    spool.close()
    spool = world.open()
    assert (check(world, spool), spool.end, spool.repaired) == (first, ends, 0), "a second opening changed something"
    spool.forget(first.position)
    check_files(world, spool)
    known = {**first.fed, **{one.number: key_of(one) for one in spool.read(spool.first, **ALL)}}
    places = {key: number for number, key in known.items()}
    for run in range(runs):
        for thread in range(THREADS):
            for number in range(EACH):
                key = f"{thread}-{number}-{run}"
                again = spool.append(text_of(key), number + 1, key=key, evolve=False).result(WAIT_S)
                if key in places:
                    assert again == Taken("already_taken", places[key], number + 1)
                else:
                    assert again.outcome == "taken"
                world.tell("taken", key, again.record)
    check(world, spool)
    position = read_told(world).position
    while position < spool.end:
        position = feed(world, spool, position)
    check(world, spool)
    check_files(world, spool)
    spool.close()
    assert len(read_told(world).fed) == runs * THREADS * EACH


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("point", KILLS)
def test_killed_at_any_step_nothing_acknowledged_is_lost_and_nothing_comes_twice(world: World, point: str) -> None:
    killed = replace(world, is_full="keys_written" in point)
    assert run_killed(work, killed, 0, failpoint=point), f"{point} was never passed"
    settle(world, 1)
    run_child(work, world, 1)
    settle(world, 2)


@pytest.mark.parametrize("passing", [1, 2, 3])
def test_a_reserve_that_was_cut_by_a_kill_still_empties_a_full_disk(world: World, passing: int) -> None:
    full = replace(world, is_full=True)
    assert run_killed(work, full, 0, failpoint=f"spool.keys_written:{passing}")
    spool, position = full.open(), read_told(full).position
    while position < spool.end:
        position = feed(full, spool, position)
    check(full, spool)
    spool.close()
    run_child(work, full, 1)
    settle(world, 2)


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_at_random_each_row_is_there_once(world: World, seed: int) -> None:
    chance = random.Random(seed)
    runs = 6
    for run in range(runs):
        if chance.random() < 0.5:
            killed = replace(world, is_full=chance.random() < 0.3)
            point = f"{chance.choice(KILLS[1:]).split(':')[0]}:{chance.randrange(1, 9)}"
            run_killed(work, killed, run, failpoint=point)
            continue
        child = Child(work, world, run)
        time.sleep(chance.random() * 0.05)
        if child.process.is_alive():
            child.process.kill()
        child.process.join()
        spool = world.open()
        check(world, spool)
        spool.close()
    settle(world, runs)


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_spool_whose_tail_is_damaged_has_whole_records_up_to_there_or_is_refused(
    world: World, seed: int
) -> None:
    chance = random.Random(seed)
    point = f"spool.{chance.choice(('written', 'synced'))}:{chance.randrange(3, 6)}"
    assert run_killed(append_only, world, failpoint=point)
    path = max(world.folder.glob("*.segment"))
    good, about = path.read_bytes(), read_about(world.folder)
    assert about is not None
    placed = list(frames(lambda at, length: good[at : at + length], len(good), int(path.stem), about.salt))
    ends = [one.end for one in placed if not one.frame.is_mark]
    spool = world.open()
    kept = spool.read(spool.first, **ALL)
    spool.close()
    path.write_bytes(good)
    for number in range(40):
        other = World(world.root / f"damaged{number}")
        shutil.copytree(world.folder, other.folder)
        begin = chance.randrange(len(good))
        junk = chance.choice((b"", bytes(chance.randrange(1, 300)), chance.randbytes(chance.randrange(1, 300))))
        broken = good[:begin] + junk + (good[begin + len(junk) :] if junk else b"")
        (other.folder / path.name).write_bytes(broken)
        check_damaged(other, path.name, broken, kept, int(path.stem) + sum(end <= begin for end in ends))


def check_damaged(world: World, name: str, broken: bytes, kept: list[Record], whole: int) -> None:
    """It is opened with all records before the damage, each as it was, and goes on; or refused, and kept."""
    try:
        spool = world.open()
    except Corrupt:
        assert (world.folder / name).read_bytes() == broken
        return
    found = spool.read(spool.first, **ALL)
    assert found == kept[: len(found)]
    assert whole <= spool.end == spool.first + len(found)
    again = spool.append(text_of("9-0-0"), 1, key=None, evolve=False).result(WAIT_S)
    assert again.record == spool.first + len(found)
    spool.close()
    spool = world.open()
    assert [key_of(one) for one in spool.read(spool.first, **ALL)] == [*map(key_of, found), "9-0-0"]
    spool.close()


def append_only(world: World) -> None:
    spool = world.open()
    threads = [threading.Thread(target=append, args=(world, spool, thread, 0)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def passed(world: World) -> set[str]:
    found: set[str] = set()
    failpoints.observer = found.add
    work(world, 0)
    return found


def test_every_failpoint_of_a_spool_is_passed_and_killed_here(world: World) -> None:
    known = {name for name, kind in FAILPOINTS.items() if kind == "spool"}
    full = replace(world, root=world.root / "full", is_full=True)
    full.root.mkdir()
    assert run_child(passed, world) | run_child(passed, full) == known == {point.split(":")[0] for point in KILLS}

"""A spool on a real disk: durable before the answer, in order, once per key; damage is cut off, or refused and kept."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from floodmark import failpoints
from floodmark.errors import (
    BelowRetention,
    Busy,
    Conflict,
    Corrupt,
    FloodmarkError,
    Invalid,
    NotFound,
    TooNew,
    Unavailable,
)
from floodmark.spool.folder import SYSTEM, Calls
from floodmark.spool.frame import FRAME_BYTES, HEADER_BYTES
from floodmark.spool.segments import Record, Waiting
from floodmark.spool.spool import IntakeLimits, Spool, Taken
from floodmark.spool.state import look
from floodmark.testing.children import Child, run_child

LIMITS = IntakeLimits()
ALL = {"rows_max": 10**9, "bytes_max": 10**9}
WAIT_S = 30


def open_spool(folder: Path, limits: IntakeLimits = LIMITS, calls: Calls = SYSTEM, **options: Any) -> Spool:
    about = {"table_id": "events-id", "incarnation": "first", "create": True, **options}
    return Spool.open(folder, limits=limits, calls=calls, **about)


def put(spool: Spool, text: bytes, key: str | None = None, rows: int = 1) -> Taken:
    return spool.append(text, rows, key=key, evolve=False).result(WAIT_S)


def texts(spool: Spool) -> list[bytes]:
    return [record.text for record in spool.read(spool.first, **ALL)]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def contents(folder: Path) -> dict[str, bytes]:
    """What is on disk, but for who holds it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def await_mark(folder: Path, payload_bytes: int) -> int:
    """The mark after the first record is written after its answer; the size of the file then."""
    size, until = HEADER_BYTES + 2 * FRAME_BYTES + payload_bytes, time.monotonic() + WAIT_S
    while segments(folder)[0].stat().st_size != size:
        assert time.monotonic() < until
        time.sleep(0.001)
    return size


def check_look(folder: Path, spool: Spool, position: int) -> None:
    """From outside it is the same as from inside, once nothing is being written: a mark comes after the last answer."""
    until = time.monotonic() + WAIT_S
    while (seen := look(folder, position).waiting) != (inside := spool.waiting(position)) and time.monotonic() < until:
        time.sleep(0.001)
    assert seen == inside


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "events-id"


@pytest.fixture
def spool(folder: Path) -> Iterator[Spool]:
    spool = open_spool(folder)
    yield spool
    spool.close()


# ── in and out ──


def test_records_come_out_as_they_came_in_also_after_an_opening(folder: Path, spool: Spool) -> None:
    sent = [b'{"id": %d}\n' % number * (number + 1) for number in range(20)]
    answers = [spool.append(text, number + 1, key=None, evolve=number % 2 == 1) for number, text in enumerate(sent)]
    assert [answer.result(WAIT_S) for answer in answers] == [Taken("taken", n, n + 1) for n in range(20)]
    for opened in (spool, None):
        if opened is None:
            spool.close()
            opened = open_spool(folder, create=False)
        assert (opened.id, opened.first, opened.end, opened.repaired) == (spool.id, 0, 20, 0)
        found = opened.read(0, **ALL)
        assert [(one.number, one.rows, one.text, one.evolve) for one in found] == [
            (number, number + 1, text, number % 2 == 1) for number, text in enumerate(sent)
        ]
        assert opened.read(20, **ALL) == []
        waiting = opened.waiting(5)
        assert (waiting.records, waiting.rows, waiting.oldest_ms) == (15, sum(range(6, 21)), found[5].received_ms)
        check_look(folder, opened, 5)
        assert opened.waiting(20) == Waiting(0, 0, 0, None)
        opened.close()


def test_a_read_is_bounded_and_has_at_least_one_record(spool: Spool) -> None:
    for _ in range(5):
        put(spool, b"x" * 1_000, rows=10)

    def numbers(found: list[Record]) -> list[int]:
        return [record.number for record in found]

    assert numbers(spool.read(1, rows_max=25, bytes_max=10**9)) == [1, 2]
    assert numbers(spool.read(1, rows_max=10**9, bytes_max=3_000)) == [1, 2, 3]
    assert numbers(spool.read(4, rows_max=1, bytes_max=1)) == [4]


def test_nothing_is_made_unless_it_is_asked_for(folder: Path) -> None:
    with pytest.raises(NotFound):
        open_spool(folder, create=False)
    assert not folder.exists()


def test_names_are_durable_before_anything_relies_on_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders above too: a process that was killed may have made them and synced nothing."""
    folder.parent.mkdir(parents=True)
    synced: list[tuple[Path, bool]] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")), (folder / "spool.json").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    spool = open_spool(folder, IntakeLimits(segment_bytes=10), Calls(fsync=record))
    assert sorted(contents(folder)) == ["00000000000000000000.segment", "spool.json"]
    before = {path for path, made in synced if not made}
    assert {segments(folder)[0], folder, *folder.parents} <= before
    assert (folder, True) in synced
    put(spool, b"first")
    synced.clear()
    put(spool, b"second")
    new = folder / f"{1:020d}.segment"
    assert [path for path, _ in synced] == [new, folder, new]
    synced.clear()
    spool.forget(1)
    kept, *rest = [path.name for path, _ in synced]
    assert kept.startswith(".tmp-")
    assert (folder.name in rest[:-1], rest[-1]) == (True, folder.name)
    spool.close()


def test_an_interrupted_making_is_made_again_and_records_without_a_header_are_refused(folder: Path) -> None:
    open_spool(folder).close()
    (folder / "spool.json").unlink()
    (folder / ".tmp-left").write_bytes(b"half")
    with pytest.raises(NotFound):
        open_spool(folder, create=False)
    spool = open_spool(folder)
    put(spool, b"kept")
    spool.close()
    assert sorted(contents(folder)) == ["00000000000000000000.segment", "spool.json"]
    (folder / "spool.json").unlink()
    before = contents(folder)
    for create in (True, False):
        with pytest.raises(Corrupt, match="no header"):
            open_spool(folder, create=create)
    assert contents(folder) == before


def test_an_answer_cannot_be_called_off(spool: Spool) -> None:
    future = spool.append(b"x", 1, key=None, evolve=False)
    assert not future.cancel()
    assert future.result(WAIT_S).record == 0


def test_a_closed_spool_takes_nothing_and_has_answered_everything(folder: Path) -> None:
    spool = open_spool(folder)
    answers = [spool.append(b"x", 1, key=None, evolve=False) for _ in range(50)]
    spool.close()
    spool.close()
    assert [answer.result(0).record for answer in answers] == list(range(50))
    with pytest.raises(Unavailable, match="closed"):
        spool.append(b"x", 1, key=None, evolve=False)


# ── groups ──


class Gate:
    """Syncs that wait until they are let through; writes and syncs are counted once it is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.done: list[str] = []

    def shut(self) -> None:
        self.open.clear()
        self.reached.clear()
        self.done.clear()

    def fsync(self, fd: int) -> None:
        self.reached.set()
        assert self.open.wait(WAIT_S)
        os.fsync(fd)
        self.done.append("sync")

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self.done.append(f"write {len(data)}")
        return os.pwrite(fd, data, offset)

    @property
    def calls(self) -> Calls:
        return Calls(pwrite=self.pwrite, fsync=self.fsync)


def test_who_waits_is_written_together_synced_once_and_answered_after_that(folder: Path) -> None:
    gate = Gate()
    spool = open_spool(folder, calls=gate.calls)
    gate.shut()
    first = spool.append(b"first", 1, key=None, evolve=False)
    assert gate.reached.wait(WAIT_S)
    rest = [spool.append(b"%03d" % number, 1, key=None, evolve=False) for number in range(100)]
    assert not any(answer.done() for answer in (first, *rest))
    assert spool.end == 0
    assert spool.read(0, **ALL) == []
    gate.open.set()
    assert [answer.result(WAIT_S).record for answer in (first, *rest)] == list(range(101))
    spool.close()
    one, mark = f"write {FRAME_BYTES + 5}", f"write {FRAME_BYTES}"
    assert gate.done == [one, "sync", f"write {100 * (FRAME_BYTES + 3)}", "sync", mark]


def test_more_than_memory_should_hold_is_refused_while_the_disk_is_slow(folder: Path) -> None:
    gate = Gate()
    spool = open_spool(folder, IntakeLimits(queued_bytes_max=2_000), gate.calls)
    gate.shut()
    answers = [spool.append(os.urandom(10_000), 1, key=None, evolve=False)]  # alone it may be larger
    assert gate.reached.wait(WAIT_S)
    answers += [spool.append(os.urandom(500), 1, key=f"{number}", evolve=False) for number in range(3)]
    with pytest.raises(Busy):
        spool.append(os.urandom(500), 1, key="3", evolve=False)
    gate.open.set()
    assert [answer.result(WAIT_S).record for answer in answers] == [0, 1, 2, 3]
    assert put(spool, b"now", "3").outcome == "taken"
    spool.close()


# ── keys ──


def test_a_key_brings_its_rows_in_once(folder: Path) -> None:
    spool = open_spool(folder)
    assert put(spool, b"a", "k", rows=3) == Taken("taken", 0, 3)
    for _ in range(2):
        assert put(spool, b"a", "k", rows=3) == Taken("already_taken", 0, 3)
        with pytest.raises(Invalid, match="used for other rows"):
            put(spool, b"b", "k")
        assert texts(spool) == [b"a"]
        spool.close()
        spool = open_spool(folder)
    spool.close()


def test_of_threads_with_one_key_one_brings_the_rows(folder: Path) -> None:
    gate = Gate()
    spool = open_spool(folder, calls=gate.calls)
    gate.shut()
    answers: list[Future[Taken]] = []

    def send(text: bytes) -> None:
        answers.append(spool.append(text, 1, key="k", evolve=False))

    send(b"a")
    threads = [threading.Thread(target=send, args=(text,)) for text in (b"a", b"a", b"b", b"a")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gate.open.set()
    ended = [answer.exception(WAIT_S) or answer.result() for answer in answers]
    assert ended[0] == Taken("taken", 0, 1)
    assert ended.count(Taken("already_taken", 0, 1)) == 3
    assert [type(one) for one in ended].count(Invalid) == 1
    assert texts(spool) == [b"a"]
    spool.close()


def test_the_window_of_keys_ends_by_number_and_by_time(folder: Path) -> None:
    spool = open_spool(folder, IntakeLimits(keys_max=3))
    for number in range(5):
        put(spool, b"x", f"{number}")
    assert [put(spool, b"x", f"{number}").outcome for number in (2, 3, 4)] == ["already_taken"] * 3
    assert put(spool, b"y", "1") == Taken("taken", 5, 1)
    spool.close()
    spool = open_spool(folder, IntakeLimits(key_window_ms=1))
    time.sleep(0.01)
    assert put(spool, b"other", "4").outcome == "taken"
    spool.close()


# ── forgetting ──

SMALL = IntakeLimits(segment_bytes=1_000)


def fill(spool: Spool, count: int) -> None:
    for _ in range(count):
        number = spool.end
        put(spool, b"%d" % number + os.urandom(300), f"{number}")


def test_fed_segments_go_in_order_and_their_keys_stay(folder: Path) -> None:
    spool = open_spool(folder, SMALL)
    fill(spool, 20)
    kept, files = spool.read(0, **ALL), [int(path.stem) for path in segments(folder)]
    assert len(files) > 4
    for position in range(21):
        spool.forget(position)
        begun = [first for first, after in zip(files, [*files[1:], 10**9], strict=True) if after > position]
        assert [int(path.stem) for path in segments(folder)] == begun
        assert spool.first == begun[0]
        assert spool.read(position, **ALL) == kept[position:]
        check_look(folder, spool, position)
    with pytest.raises(BelowRetention):
        spool.read(0, **ALL)
    assert spool.waiting(0) == spool.waiting(spool.first)
    with pytest.raises(Conflict):
        spool.forget(21)
    for _ in range(2):
        assert all(put(spool, one.text, f"{one.number}") == Taken("already_taken", one.number, 1) for one in kept)
        spool.close()
        spool = open_spool(folder, SMALL)
    assert (spool.end, spool.repaired) == (20, 0)
    fill(spool, 5)
    assert [one.number for one in spool.read(20, **ALL)] == list(range(20, 25))
    spool.close()
    assert sorted(contents(folder))[-3:] == ["keys", "reserve", "spool.json"]


# ── who may open it ──


def hold(folder: Path, ready: Path) -> None:
    spool = open_spool(folder)
    put(spool, b"x")
    ready.touch()
    time.sleep(WAIT_S)


def test_a_second_process_is_told_who_has_it_until_that_one_dies(folder: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = Child(hold, folder, ready)
    while not ready.exists():
        time.sleep(0.01)
    with pytest.raises(Busy) as told:
        open_spool(folder)
    assert told.value.facts["pid"] == child.pid
    found = look(folder, 0)
    assert (found.pid, found.end, found.problem) == (child.pid, 1, None)
    child.process.kill()
    child.process.join()
    spool = open_spool(folder)
    with pytest.raises(Busy) as told:
        open_spool(folder)
    assert told.value.facts["pid"] == os.getpid()
    spool.close()
    assert look(folder, 0).pid is None


def test_a_spool_of_another_table_or_incarnation_is_refused(folder: Path) -> None:
    spool = open_spool(folder)
    put(spool, b"x")
    spool.close()
    before = contents(folder)
    with pytest.raises(Conflict, match="another table"):
        open_spool(folder, table_id="notes-id")
    with pytest.raises(Conflict, match="another incarnation"):
        open_spool(folder, incarnation="second")
    assert contents(folder) == before
    spool = open_spool(folder)
    assert texts(spool) == [b"x"]
    spool.close()


# ── damage ──


def build(folder: Path, limits: IntakeLimits = LIMITS) -> list[tuple[int, int]]:
    """One record, then a group of three and its mark; where each of these records begins and ends."""
    gate = Gate()
    spool = open_spool(folder, limits, gate.calls)
    put(spool, b"0" * 40, "0")
    await_mark(folder, 40)
    gate.shut()
    # The first of them is on its way alone, whatever the others do.
    answers = [spool.append(b"1" * 40, 1, key="1", evolve=False)]
    assert gate.reached.wait(WAIT_S)
    answers += [spool.append(b"%d" % number * 40, 1, key=f"{number}", evolve=False) for number in (2, 3, 4)]
    gate.open.set()
    for answer in answers:
        answer.result(WAIT_S)
    spool.close()
    # record, mark, record, three records, mark
    sizes = [FRAME_BYTES + 40, FRAME_BYTES, *[FRAME_BYTES + 40] * 4, FRAME_BYTES]
    ends = [HEADER_BYTES + sum(sizes[: place + 1]) for place in range(len(sizes))]
    assert segments(folder)[-1].stat().st_size == ends[-1]
    return [(ends[place] - size, ends[place]) for place, size in enumerate(sizes) if place not in (1, 6)]


def sent(number: int) -> bytes:
    return b"%d" % number * 40


def damage(path: Path, begin: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(data)


def check_goes_on(folder: Path, records: int) -> None:
    """These records are there, whole; a retry of all brings in what is missing, and nothing twice."""
    spool = open_spool(folder)
    assert texts(spool) == [sent(number) for number in range(records)]
    outcomes = [put(spool, sent(number), f"{number}") for number in range(5)]
    assert outcomes == [Taken("already_taken" if n < records else "taken", n, 1) for n in range(5)]
    spool.close()
    spool = open_spool(folder)
    assert (texts(spool), spool.repaired) == ([sent(number) for number in range(5)], 0)
    spool.close()


def test_a_tail_that_is_torn_at_any_byte_is_cut_off_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    places = build(folder)
    path = segments(folder)[0]
    for size in range(places[2][0], path.stat().st_size):
        copy = shutil.copytree(folder, tmp_path / "copy")
        os.truncate(copy / path.name, size)
        whole = 2 + sum(end <= size for _, end in places[2:])
        if size % 16 == 0:
            check_goes_on(copy, whole)
        else:
            assert (seen := look(copy, 0)).end == whole, seen
            spool = open_spool(copy)
            cut = size - (places[whole - 1][1] if whole else HEADER_BYTES)
            assert (spool.end, spool.repaired) == (whole, cut)
            assert texts(spool) == [sent(number) for number in range(whole)]
            spool.close()
        shutil.rmtree(copy)


@pytest.mark.parametrize("junk", [bytes(4096), b"\xf5FM\x01" * 100, os.urandom(700)], ids=["zeros", "magic", "random"])
def test_junk_after_the_last_record_is_cut_off(folder: Path, junk: bytes) -> None:
    build(folder)
    path = segments(folder)[0]
    whole = path.read_bytes()
    path.write_bytes(whole + junk)
    assert look(folder, 0).problem is None
    spool = open_spool(folder)
    assert (spool.repaired, path.read_bytes()) == (len(junk), whole)
    spool.close()
    check_goes_on(folder, 5)


def test_zeros_among_bytes_that_nobody_was_told_of_are_cut_off_with_what_follows(folder: Path) -> None:
    places = build(folder)
    path = segments(folder)[0]
    os.truncate(path, places[4][1])  # without the mark: as if the sync of the last group never came back
    damage(path, places[3][0] + 20, bytes(60))
    assert look(folder, 0).problem is None
    check_goes_on(folder, 3)


@pytest.mark.parametrize("record", range(5))
def test_damage_of_an_acknowledged_record_is_refused_and_kept(folder: Path, record: int) -> None:
    begin, _ = build(folder)[record]
    path = segments(folder)[0]
    damage(path, begin + 20, bytes(60))
    before = contents(folder)
    with pytest.raises(Corrupt) as told:
        open_spool(folder)
    assert told.value.facts["file"] == path
    assert told.value.facts["record"] == record
    problem = look(folder, 0).problem
    assert isinstance(problem, Corrupt)
    assert contents(folder) == before


@pytest.mark.parametrize("what", ["first_segment", "middle_segment", "cut_middle", "header", "keys", "no_keys"])
def test_what_was_acknowledged_and_is_gone_or_damaged_is_refused(folder: Path, what: str) -> None:
    spool = open_spool(folder, SMALL)
    fill(spool, 20)
    spool.forget(7)
    spool.close()
    files = segments(folder)
    if what == "first_segment":
        files[0].unlink()
    elif what == "middle_segment":
        files[2].unlink()
    elif what == "cut_middle":
        os.truncate(files[1], files[1].stat().st_size - FRAME_BYTES - 1)
    elif what == "header":
        damage(files[-1], 3, b"\0\0")
    elif what == "keys":
        damage(folder / "keys", 60, b"\0\0\0\0")
    else:
        (folder / "keys").unlink()
    before = contents(folder)
    with pytest.raises(Corrupt):
        open_spool(folder, SMALL)
    assert contents(folder) == before


def test_a_header_that_is_damaged_or_newer_is_refused(folder: Path) -> None:
    open_spool(folder).close()
    path = folder / "spool.json"
    good = path.read_text()
    for text, kind in ((good.replace("events", "Events"), Corrupt), ("{", Corrupt), ('{"format": 2}', TooNew)):
        path.write_text(text)
        with pytest.raises(kind):
            open_spool(folder)
        assert isinstance(look(folder, 0).problem, kind)
        assert path.read_text() == text


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES])
def test_a_segment_whose_beginning_was_interrupted_is_begun_again(folder: Path, size: int) -> None:
    spool = open_spool(folder, SMALL)
    fill(spool, 3)
    kept = texts(spool)
    spool.close()
    (folder / f"{3:020d}.segment").write_bytes(bytes(size))
    assert look(folder, 0).end == 3
    spool = open_spool(folder, SMALL)
    assert texts(spool) == kept
    fill(spool, 2)
    spool.close()
    spool = open_spool(folder, SMALL)
    check_look(folder, spool, 1)
    assert spool.waiting(1).rows == 4
    spool.close()


def test_a_record_that_is_damaged_while_the_spool_is_open_is_refused_when_read(folder: Path, spool: Spool) -> None:
    put(spool, b"a" * 50)
    put(spool, b"b" * 50)
    path = segments(folder)[0]
    damage(path, path.read_bytes().index(b"b" * 50), b"c")
    assert [one.number for one in spool.read(0, rows_max=1, bytes_max=1)] == [0]
    with pytest.raises(Corrupt) as told:
        spool.read(1, **ALL)
    assert told.value.facts["record"] == 1


# ── disks that fail ──


class Fault:
    """System calls, one of which fails: from its Nth call after `arm` on, `times` times."""

    def __init__(self, name: str, code: int, *, partly: bool = False) -> None:
        self.name, self.code, self.partly = name, code, partly
        self.left = self.times = 0

    def arm(self, at: int = 1, times: int = 1) -> None:
        self.left, self.times = at, times

    def strikes(self, name: str) -> bool:
        if name != self.name or not self.times:
            return False
        self.left -= 1
        if self.left > 0:
            return False
        self.times -= 1
        return True

    def _call(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.strikes(name):
                if self.partly:
                    os.pwrite(arguments[0], arguments[1][: len(arguments[1]) * 2 // 3], arguments[2])
                raise OSError(self.code, os.strerror(self.code))
            return real(*arguments)

        return call

    @property
    def calls(self) -> Calls:
        names = ("pwrite", "fsync", "ftruncate")
        return Calls(**{name: self._call(name, getattr(os, name)) for name in names})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_rows_that_cannot_be_written_are_refused_cut_off_and_their_key_is_free(folder: Path, code: int) -> None:
    fault = Fault("pwrite", code, partly=True)
    spool = open_spool(folder, calls=fault.calls)
    put(spool, b"a" * 50, "a")
    size = await_mark(folder, 50)
    fault.arm()
    with pytest.raises(Unavailable):
        put(spool, b"b" * 500, "b")
    assert segments(folder)[0].stat().st_size == size
    assert spool.stopped is None
    assert put(spool, b"B" * 5, "b") == Taken("taken", 1, 1)
    spool.close()
    spool = open_spool(folder)
    assert (texts(spool), spool.repaired) == ([b"a" * 50, b"B" * 5], 0)
    spool.close()


def test_torn_bytes_that_cannot_be_cut_off_at_once_are_before_the_next_record(folder: Path) -> None:
    write, cut = Fault("pwrite", errno.ENOSPC, partly=True), Fault("ftruncate", errno.EIO)
    spool = open_spool(folder, calls=Calls(write.calls.pwrite, os.fsync, cut.calls.ftruncate))
    write.arm()
    cut.arm(times=2)
    for _ in range(2):
        with pytest.raises(Unavailable, match="cannot be removed"):
            put(spool, b"a" * 500, "a")
    assert put(spool, b"b", "a") == Taken("taken", 0, 1)
    spool.close()
    spool = open_spool(folder)
    assert (texts(spool), spool.repaired) == ([b"b"], 0)
    spool.close()


def test_after_a_failed_sync_it_takes_nothing_until_it_is_opened_again(folder: Path) -> None:
    fault = Fault("fsync", errno.EIO)
    spool = open_spool(folder, calls=fault.calls)
    put(spool, b"a", "a")
    fault.arm()
    with pytest.raises(Unavailable, match="stopped"):
        put(spool, b"b", "b")
    for _ in range(2):
        with pytest.raises(Unavailable, match="stopped"):
            put(spool, b"c")
    assert isinstance(spool.stopped, Unavailable)
    assert put(spool, b"a", "a").outcome == "already_taken"
    assert texts(spool) == [b"a"]
    spool.close()
    spool = open_spool(folder)
    assert texts(spool) == [b"a"]
    assert put(spool, b"b", "b") == Taken("taken", 1, 1)
    spool.close()


def test_bytes_that_nothing_proves_durable_are_written_again_when_it_is_opened(folder: Path) -> None:
    places = build(folder)
    os.truncate(segments(folder)[0], places[4][1])
    gate = Gate()
    spool = open_spool(folder, calls=gate.calls)
    last_group = places[4][1] - places[2][0]
    assert gate.done == ["sync", f"write {last_group}", "sync", f"write {FRAME_BYTES}"]
    spool.close()
    gate.done.clear()
    spool = open_spool(folder, calls=gate.calls)
    assert gate.done == ["sync", "sync"]
    spool.close()


@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize(("name", "code"), [("pwrite", errno.ENOSPC), ("fsync", errno.EIO)])
def test_a_segment_that_cannot_be_begun_leaves_the_old_one_in_use(
    folder: Path, name: str, code: int, call: int
) -> None:
    """The call that fails is each of those around a new segment in turn."""
    fault = Fault(name, code)
    spool = open_spool(folder, IntakeLimits(segment_bytes=300), fault.calls)
    put(spool, os.urandom(300), "0")
    await_mark(folder, 300)
    fault.arm(call)
    acknowledged = 1
    for number in range(1, 6):
        text = b"%d" % number * 300
        for _ in range(2):
            try:
                put(spool, text, f"{number}")
            except Unavailable:
                if spool.stopped is not None:
                    spool.close()
                    spool = open_spool(folder, IntakeLimits(segment_bytes=300), fault.calls)
            else:
                break
        acknowledged += 1
        assert spool.end == acknowledged
    assert fault.times == 0, "it never failed"
    spool.close()
    spool = open_spool(folder)
    assert spool.repaired == 0
    assert texts(spool)[1:] == [b"%d" % number * 300 for number in range(1, 6)]
    spool.close()


def full_disk(folder: Path) -> tuple[list[bytes], int]:
    """With files that may not grow: what is taken before and after, and how many were refused."""
    spool = open_spool(folder)
    put(spool, b"a" * 50)
    limit = segments(folder)[0].stat().st_size + 3_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    refused = 0
    for _ in range(2):
        try:
            put(spool, os.urandom(5_000))
        except Unavailable:
            refused += 1
    put(spool, b"b" * 50)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    put(spool, b"c" * 5_000)
    return texts(spool), refused


def test_a_file_that_really_cannot_grow_refuses_rows_and_goes_on(folder: Path) -> None:
    kept = [b"a" * 50, b"b" * 50, b"c" * 5_000]
    assert run_child(full_disk, folder) == (kept, 2)
    spool = open_spool(folder)
    assert (texts(spool), spool.repaired) == (kept, 0)
    spool.close()


def no_room(path: str, data: bytes) -> None:
    raise Unavailable("cannot write: the disk is full", location=path)


def test_fed_segments_go_from_a_disk_that_is_full_and_their_keys_stay(folder: Path) -> None:
    """Not a byte can be had: the keys are written into room that was kept for them."""
    spool = open_spool(folder, SMALL, Calls(put=no_room))
    fill(spool, 20)
    sent, left = spool.read(0, **ALL), len(segments(folder))
    assert left > 4
    for position in range(21):
        spool.forget(position)
        assert len(segments(folder)) <= left
        left = len(segments(folder))
    assert left == 1
    spool.close()
    spool = open_spool(folder, SMALL)
    assert all(put(spool, one.text, f"{one.number}") == Taken("already_taken", one.number, 1) for one in sent)
    spool.close()


def test_without_room_for_its_keys_a_segment_gets_no_successor(folder: Path) -> None:
    full = Fault("allocate", errno.ENOSPC)
    spool = open_spool(folder, SMALL, Calls(allocate=full._call("allocate", os.posix_fallocate)))
    fill(spool, 2)
    full.arm(times=100)
    with pytest.raises(Unavailable, match="full"):
        fill(spool, 5)
    assert len(segments(folder)) == 1
    end, full.times = spool.end, 0
    fill(spool, 5)
    assert len(segments(folder)) > 1
    assert spool.end == end + 5
    spool.close()


def test_room_for_keys_is_not_spent_while_a_segment_gets_its_successor(folder: Path) -> None:
    """Full disk: the writer finds the room, the feeder spends it and sees one segment, the writer adds a second."""
    spool = open_spool(folder, SMALL, Calls(put=no_room))
    feeders: list[threading.Thread] = []

    def observe(point: str) -> None:
        if point == "spool.rolled" and len(segments(folder)) == 3:
            fed = int(segments(folder)[1].name.split(".")[0])
            feeders.append(threading.Thread(target=spool.forget, args=(fed,)))
            feeders[0].start()
            feeders[0].join(0.3)  # it spends the room now, or waits until the segment is there

    failpoints.observer = observe
    try:
        while not feeders:
            fill(spool, 1)
    finally:
        failpoints.observer = None
    feeders[0].join(30)
    assert len(segments(folder)) == 2
    assert (folder / "reserve").exists()
    spool.forget(spool.end)
    assert len(segments(folder)) == 1
    spool.close()


# ── a look from outside ──


def test_a_look_beside_a_writer_sees_records_and_no_damage(folder: Path) -> None:
    spool = open_spool(folder, IntakeLimits(segment_bytes=20_000))
    done = threading.Event()

    def write() -> None:
        answers = [spool.append(os.urandom(1_500), 1, key=None, evolve=False) for _ in range(400)]
        for answer in answers[::20]:
            spool.forget(answer.result(WAIT_S).record)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen, looks = 0, 0
    while not done.is_set():
        found = look(folder, seen)
        if isinstance(found.problem, Conflict):  # forgotten meanwhile: the position is old
            seen = max(seen, found.first)
            continue
        assert found.problem is None, found.problem
        assert found.end >= seen
        seen, looks = found.end, looks + 1
    thread.join()
    assert looks > 3
    spool.close()
    assert look(folder, spool.end).waiting == Waiting(0, 0, 0, None)


def test_what_is_being_written_is_no_damage_to_a_look(folder: Path) -> None:
    problems: list[FloodmarkError | None] = []
    spool = open_spool(folder)

    def observe(name: str) -> None:
        if name == "spool.written":
            path = segments(folder)[-1]
            problems.append(look(folder, 0).problem)
            os.truncate(path, path.stat().st_size - 3)
            problems.append(look(folder, 0).problem)

    failpoints.observer = observe
    try:
        put(spool, b"x" * 100)
    finally:
        failpoints.observer = None
    assert problems == [None, None]
    spool.close()


def test_a_look_tells_of_a_position_that_the_spool_cannot_serve(folder: Path) -> None:
    assert isinstance(look(folder, 0).problem, NotFound)
    spool = open_spool(folder, SMALL)
    fill(spool, 10)
    spool.forget(9)
    assert isinstance(look(folder, 11).problem, Conflict)
    assert isinstance(look(folder, 0).problem, Conflict)
    assert (found := look(folder, 10)).problem is None
    assert (found.id, found.first, found.end) == (spool.id, spool.first, 10)
    spool.close()

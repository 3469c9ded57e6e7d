"""The contract of a storage, as a suite: derive from StorageContract and give the fixtures `storage` and `root`.

`storage` is a Storage, `root` the location of an empty folder in it. Every promise of floodmark/storage/store.py has a
test here, and every kind of store passes the same ones; promises of one kind only (fsyncs, temporary names, multipart
uploads) are tested beside it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from floodmark.clock import now_ms
from floodmark.errors import Corrupt, Invalid, NotFound, Unavailable
from floodmark.storage import Held, Storage, join
from floodmark.storage.held import BYTES_MAX, FILES_MAX, HeldFile

MEGABYTE = 1024 * 1024


def names(storage: Storage, prefix: str) -> list[str]:
    """What is listed below `prefix`, sorted, as names relative to it."""
    return sorted(entry.location.removeprefix(prefix + "/") for entry in storage.list(prefix))


class StorageContract:
    """What every storage promises."""

    def test_a_file_is_read_as_it_was_put(self, storage: Storage, root: str) -> None:
        location = join(root, "a/b/c.bin")
        storage.put(location, b"one")
        assert storage.read(location) == b"one"
        assert storage.size(location) == 3
        assert storage.exists(location)

    def test_put_replaces(self, storage: Storage, root: str) -> None:
        location = join(root, "x")
        storage.put(location, b"a longer text")
        storage.put(location, b"short")
        assert storage.read(location) == b"short"
        assert names(storage, root) == ["x"]

    def test_an_empty_file_is_a_file(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "put"), b"")
        assert storage.put_if_absent(join(root, "claimed"), b"")
        with storage.writer(join(root, "streamed")):
            pass
        assert names(storage, root) == ["claimed", "put", "streamed"]
        for name in names(storage, root):
            assert storage.read(join(root, name)) == b""
            assert storage.read_range(join(root, name), 0, 5) == b""
            with storage.open_input(join(root, name)) as reader:
                assert reader.read() == b""

    @pytest.mark.parametrize(
        "name", ["with space/a b.txt", "süß/日本語.parquet", "day=2026-11-15/x+y&z.avro", "a%20b/%"]
    )
    def test_names_are_taken_verbatim(self, storage: Storage, root: str, name: str) -> None:
        storage.put(join(root, name), name.encode())
        assert storage.read(join(root, name)) == name.encode()
        assert names(storage, root) == [name]
        storage.delete(join(root, name))
        assert not storage.exists(join(root, name))

    def test_what_is_absent_is_not_found(self, storage: Storage, root: str) -> None:
        location = join(root, "folder/absent")
        storage.put(join(root, "folder/present"), b"1")
        assert not storage.exists(location)
        for call in (
            lambda: storage.read(location),
            lambda: storage.size(location),
            lambda: storage.read_range(location, 0, 1),
            lambda: storage.read_range(location, 0, 0),
            lambda: storage.open_input(location),
            lambda: storage.open_input(location, 100),
        ):
            with pytest.raises(NotFound) as caught:
                call()
            assert "absent" in str(caught.value)

    def test_a_folder_is_not_a_file(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "folder/file"), b"1")
        folder = join(root, "folder")
        assert not storage.exists(folder)
        for call in (storage.read, storage.size, storage.open_input):
            with pytest.raises(NotFound):
                call(folder)
        storage.delete(folder)
        assert names(storage, root) == ["folder/file"]

    def test_ranges_stop_at_the_end_of_the_file(self, storage: Storage, root: str) -> None:
        location = join(root, "digits")
        storage.put(location, b"0123456789")
        ranges = {(0, 10): b"0123456789", (0, 1): b"0", (3, 4): b"3456", (9, 1): b"9", (8, 100): b"89"}
        ranges |= {(10, 1): b"", (11, 5): b"", (4, 0): b"", (0, 1 << 40): b"0123456789"}
        assert {key: storage.read_range(location, *key) for key in ranges} == ranges
        for offset, length in ((-1, 2), (0, -1)):
            with pytest.raises(Invalid):
                storage.read_range(location, offset, length)

    def test_one_of_racing_claims_wins(self, storage: Storage, root: str) -> None:
        rivals = 8
        for number in range(5):
            location = join(root, f"claims/{number}")
            start = threading.Barrier(rivals)

            def claim(rival: int, location: str = location, start: threading.Barrier = start) -> bool:
                start.wait()
                return storage.put_if_absent(location, b"rival %d" % rival)

            with ThreadPoolExecutor(rivals) as pool:
                won = list(pool.map(claim, range(rivals)))
            assert won.count(True) == 1
            assert storage.read(location) == b"rival %d" % won.index(True)
        assert names(storage, join(root, "claims")) == [str(number) for number in range(5)]

    def test_a_claim_never_replaces(self, storage: Storage, root: str) -> None:
        location = join(root, "name")
        storage.put(location, b"first")
        assert not storage.put_if_absent(location, b"second")
        assert storage.read(location) == b"first"
        storage.delete(location)
        assert storage.put_if_absent(location, b"third")
        assert storage.read(location) == b"third"

    def test_a_reader_beside_a_writer_sees_whole_files(self, storage: Storage, root: str) -> None:
        location = join(root, "busy")
        contents = [bytes([letter]) * (200_000 + letter) for letter in b"abcdefgh"]
        storage.put(location, contents[0])
        done = threading.Event()
        seen: list[bytes] = []

        def look() -> None:
            while not done.is_set():
                seen.append(storage.read(location))

        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            for content in contents * 3:
                storage.put(location, content)
                with storage.writer(location) as stream:
                    stream.write(content[:1000])
                    stream.write(content[1000:])
            done.set()
            looking.result()
        assert seen
        assert [len(data) for data in seen if data not in contents] == []

    def test_a_big_stream_arrives_whole(self, storage: Storage, root: str) -> None:
        location = join(root, "big")
        chunk = os.urandom(MEGABYTE)
        with storage.writer(location) as stream:
            for _ in range(12):
                assert stream.write(chunk) == MEGABYTE
            assert stream.tell() == 12 * MEGABYTE
            stream.write(memoryview(b"the end"))
            assert not storage.exists(location)
        assert stream.closed
        assert storage.size(location) == 12 * MEGABYTE + 7
        assert storage.read_range(location, 11 * MEGABYTE, MEGABYTE) == chunk
        assert storage.read(location) == chunk * 12 + b"the end"

    def test_one_big_buffer_arrives_whole(self, storage: Storage, root: str) -> None:
        data = os.urandom(20 * MEGABYTE + 1)
        with storage.writer(join(root, "big")) as stream:
            stream.write(data)
        assert storage.read(join(root, "big")) == data

    @pytest.mark.parametrize("size_bytes", [10, 12 * MEGABYTE])
    def test_a_failed_stream_leaves_nothing(self, storage: Storage, root: str, size_bytes: int) -> None:
        location = join(root, "folder/half")
        streams = []

        def fail() -> None:
            with storage.writer(location) as stream:
                streams.append(stream)
                stream.write(b"x" * size_bytes)
                # A library that closes its sink on an error must not make the file appear.
                stream.close()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert not storage.exists(location)
        assert list(storage.list(root)) == []
        assert list(storage.list(root, temporary=True)) == []
        with pytest.raises(ValueError, match="closed"):
            streams[0].write(b"more")

    def test_a_failed_stream_keeps_what_had_the_name(self, storage: Storage, root: str) -> None:
        location = join(root, "kept")
        storage.put(location, b"old")

        def fail() -> None:
            with storage.writer(location) as stream:
                stream.write(b"new")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert storage.read(location) == b"old"

    def test_a_listing_stays_in_its_folder(self, storage: Storage, root: str) -> None:
        for name in ("a/b/1", "a/b/c/2", "a/bc/3", "a/b.txt", "a/b-/4", "ab/5"):
            storage.put(join(root, name), name.encode())
        assert names(storage, join(root, "a/b")) == ["1", "c/2"]
        assert names(storage, join(root, "a")) == ["b-/4", "b.txt", "b/1", "b/c/2", "bc/3"]
        assert names(storage, join(root, "a/b/1")) == []
        assert names(storage, join(root, "nothing/here")) == []

    def test_a_listing_begins_after_a_name(self, storage: Storage, root: str) -> None:
        known = ["a/1", "b-/4", "b.txt", "b/1", "b/c/2", "bc/3"]
        for name in known:
            storage.put(join(root, "folder", name), b"")
        for after in ("", "a", "a/1", "b", "b-", "b-/4", "b/1", "b/c", "bc", "bc/3", "c"):
            found = sorted(
                entry.location.removeprefix(f"{root}/folder/")
                for entry in storage.list(join(root, "folder"), after=after)
            )
            assert found == [name for name in known if name > after], after

    def test_a_listing_tells_size_time_and_a_location_that_can_be_read(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "folder/x"), b"12345")
        for prefix in (root, root + "/", join(root, "folder")):
            (entry,) = storage.list(prefix)
            assert entry.location == join(root, "folder/x")
            assert entry.size_bytes == 5
            assert abs(entry.modified_ms - now_ms()) < 600_000
            assert storage.read(entry.location) == b"12345"

    def test_a_listing_is_complete_beyond_one_page(self, storage: Storage, root: str) -> None:
        with storage.batch(), ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: storage.put(join(root, f"many/{number:04}"), b""), range(1050)))
        assert names(storage, join(root, "many")) == [f"{number:04}" for number in range(1050)]
        assert storage.delete_prefix(join(root, "many")) == 1050
        assert names(storage, root) == []

    def test_deleting_twice_is_deleting_once(self, storage: Storage, root: str) -> None:
        location = join(root, "folder/x")
        storage.put(location, b"1")
        storage.delete(location)
        storage.delete(location)
        storage.delete(join(root, "never/was"))
        assert not storage.exists(location)

    def test_many_files_are_deleted_at_once_absent_ones_too(self, storage: Storage, root: str) -> None:
        names = [join(root, "heap", f"{number}") for number in range(5)]
        for name in names:
            storage.put(name, b"x")
        storage.delete_many([*names[:3], join(root, "heap", "never"), join(root, "nowhere", "never")])
        assert sorted(entry.location for entry in storage.list(join(root, "heap"))) == names[3:]
        storage.delete_many([])
        storage.drop_empty_folder(join(root, "heap"))
        assert storage.exists(names[4])
        storage.delete_many(names)
        storage.drop_empty_folder(join(root, "heap"))
        assert list(storage.list(join(root, "heap"))) == []

    def test_deleting_a_folder_leaves_its_siblings(self, storage: Storage, root: str) -> None:
        for name in ("a/b/1", "a/b/c/2", "a/bc/3", "a/b.txt"):
            storage.put(join(root, name), b"x")
        assert storage.delete_prefix(join(root, "a/b")) == 2
        assert names(storage, root) == ["a/b.txt", "a/bc/3"]
        assert storage.delete_prefix(join(root, "a/b")) == 0
        assert storage.delete_prefix(join(root, "never")) == 0
        storage.put(join(root, "a/b/again"), b"x")
        assert names(storage, join(root, "a/b")) == ["again"]

    def test_a_reader_seeks_and_reads_like_a_file(self, storage: Storage, root: str) -> None:
        data = os.urandom(700_000)
        storage.put(join(root, "x"), data)
        with storage.open_input(join(root, "x")) as reader:
            model = io.BytesIO(data)
            assert reader.size() == len(data)
            steps = [
                (0, 0, 4),
                (-8, 2, 8),
                (100, 0, 300_000),
                (5, 1, 7),
                (-3, 1, 90),
                (600_000, 0, -1),
                (900_000, 0, 5),
            ]
            for offset, whence, count in steps:
                assert reader.seek(offset, whence) == model.seek(offset, whence)
                assert reader.read(count) == model.read(count)
                assert reader.tell() == model.tell()
            reader.seek(10)
            buffer = bytearray(20)
            assert reader.readinto(buffer) == 20
            assert bytes(buffer) == data[10:30]
        assert reader.closed
        with pytest.raises(ValueError, match="closed"):
            reader.read(1)

    def test_small_reads_share_one_fetch(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "x"), b"0123456789" * 100_000)
        before = storage.counters.snapshot()
        with storage.open_input(join(root, "x")) as reader:
            assert b"".join(reader.read(10) for _ in range(100)) == b"0123456789" * 100
        spent = storage.counters.difference(before)
        assert spent.calls == {"open_input": 1, "read_range": 1}
        assert 1000 <= spent.bytes_read < MEGABYTE

    @pytest.mark.parametrize("size_bytes", [0, 1, 1000, 70_000, 20 * MEGABYTE])
    def test_a_file_of_a_known_size_reads_the_same(self, storage: Storage, root: str, size_bytes: int) -> None:
        data = os.urandom(size_bytes)
        storage.put(join(root, "x"), data)
        for known in (None, size_bytes):
            with storage.open_input(join(root, "x"), known) as reader:
                assert reader.size() == size_bytes
                for offset in (0, size_bytes // 2, max(0, size_bytes - 65_536), max(0, size_bytes - 8), size_bytes):
                    reader.seek(offset)
                    assert reader.read(100) == data[offset : offset + 100]
                reader.seek(0)
                assert reader.read() == data

    @pytest.mark.parametrize("size_bytes", [0, 100, 70_000, 3 * MEGABYTE])
    def test_as_much_of_the_end_as_the_caller_says_comes_with_opening(
        self, storage: Storage, root: str, size_bytes: int
    ) -> None:
        data = os.urandom(size_bytes)
        storage.put(join(root, "x"), data)
        for known in (None, size_bytes):
            for tail_bytes in (1, 1000, 2 * MEGABYTE, 5 * MEGABYTE):
                with storage.open_input(join(root, "x"), known, tail_bytes=tail_bytes) as reader:
                    before = storage.counters.snapshot()
                    reader.seek(max(0, size_bytes - tail_bytes))
                    assert reader.read(tail_bytes) == data[-tail_bytes:]
                    if reader.is_remote:
                        assert storage.counters.difference(before).total == 0
                    reader.seek(0)
                    assert reader.read() == data

    def test_a_file_of_another_size_than_the_known_one_is_corrupt(self, storage: Storage, root: str) -> None:
        location = join(root, "x")
        for size_bytes in (0, 1, 1000, 200_000):
            storage.put(location, b"x" * size_bytes)
            for known in {0, 1, 999, 1001, 70_000, 300_000, 50 * MEGABYTE} - {size_bytes}:
                with pytest.raises(Corrupt) as caught:
                    storage.open_input(location, known)
                facts = caught.value.facts
                assert (facts["size_bytes"], facts["size_bytes_expected"]) == (size_bytes, known)
                assert "x" in str(facts["file"])

    def test_a_file_that_is_replaced_while_it_is_read_is_whole_or_corrupt(self, storage: Storage, root: str) -> None:
        location = join(root, "x")
        data = os.urandom(2 * MEGABYTE)
        storage.put(location, data)
        with storage.open_input(location, len(data)) as reader:
            storage.put(location, b"short")
            for offset in (0, MEGABYTE, 2 * MEGABYTE - 300_000):
                reader.seek(offset)
                with contextlib.suppress(Corrupt):
                    assert reader.read(100_000) == data[offset : offset + 100_000]
            with contextlib.suppress(Corrupt):
                reader.prefetch([(MEGABYTE, 100)])
                reader.seek(MEGABYTE)
                assert reader.read(100) == data[MEGABYTE : MEGABYTE + 100]

    def test_prefetched_ranges_are_read_without_another_call(self, storage: Storage, root: str) -> None:
        data = os.urandom(12 * MEGABYTE)
        storage.put(join(root, "x"), data)
        wanted = [(5 * MEGABYTE, 1000), (100, 50), (5 * MEGABYTE + 1000, 500), (9 * MEGABYTE, MEGABYTE)]
        wanted.append((12 * MEGABYTE - 10, 10))
        with storage.open_input(join(root, "x"), len(data)) as reader:
            before = storage.counters.snapshot()
            reader.prefetch(wanted)
            fetched = storage.counters.snapshot()
            # Those that touch or are close together are one request; the end came with opening.
            assert fetched.difference(before).calls.get("read_range", 0) in ((3,) if reader.is_remote else (0,))
            for offset, length in [*wanted, (5 * MEGABYTE + 900, 600)]:
                reader.seek(offset)
                assert reader.read(length) == data[offset : offset + length]
            if reader.is_remote:
                assert storage.counters.difference(fetched).total == 0
            reader.prefetch([])
            reader.seek(100)
            assert reader.read(50) == data[100:150]

    def test_what_is_held_in_part_is_read_whole(self, storage: Storage, root: str) -> None:
        data = os.urandom(9 * MEGABYTE)
        storage.put(join(root, "x"), data)
        chance = random.Random(1)
        with storage.open_input(join(root, "x"), len(data)) as reader:
            for _ in range(20):
                reader.prefetch([(chance.randrange(9 * MEGABYTE), chance.randrange(MEGABYTE)) for _ in range(5)])
                for _ in range(20):
                    offset, length = chance.randrange(9 * MEGABYTE), chance.choice([1, 100, 70_000, MEGABYTE])
                    reader.seek(offset)
                    assert reader.read(length) == data[offset : offset + length]

    def test_calls_and_bytes_are_counted(self, storage: Storage, root: str) -> None:
        before = storage.counters.snapshot()
        storage.put(join(root, "a"), b"12345")
        storage.put_if_absent(join(root, "b"), b"123")
        storage.put_if_absent(join(root, "b"), b"123")
        with storage.writer(join(root, "c")) as stream:
            stream.write(b"12")
            stream.write(b"34")
        storage.read(join(root, "a"))
        storage.read_range(join(root, "a"), 3, 9)
        storage.size(join(root, "a"))
        storage.exists(join(root, "a"))
        list(storage.list(root))
        storage.delete(join(root, "a"))
        storage.delete_prefix(root)
        spent = storage.counters.difference(before)
        once = ("put", "writer", "read", "read_range", "size", "exists", "list", "delete", "delete_prefix")
        assert {verb: spent.calls[verb] for verb in once} == dict.fromkeys(once, 1)
        assert spent.calls["put_if_absent"] == 2
        assert spent.total == 11
        assert (spent.bytes_written, spent.bytes_read) == (5 + 3 + 4, 5 + 2)
        assert storage.counters.difference(storage.counters.snapshot()).total == 0

    def test_a_copy_from_a_pickle_works_and_counts_for_itself(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "x"), b"1")
        copy = pickle.loads(pickle.dumps(storage))
        assert copy.counters.total == 0
        assert copy.read(join(root, "x")) == b"1"
        copy.put(join(root, "y"), b"2")
        assert storage.read(join(root, "y")) == b"2"
        assert copy.options == storage.options

    def test_a_batch_makes_its_files_visible_at_once(self, storage: Storage, root: str) -> None:
        with storage.batch():
            storage.put(join(root, "a"), b"1")
            with storage.batch():
                assert storage.put_if_absent(join(root, "b"), b"2")
            assert storage.read(join(root, "a")) == b"1"
            assert storage.read(join(root, "b")) == b"2"
        assert names(storage, root) == ["a", "b"]

    def test_files_written_together_appear_at_the_end(self, storage: Storage, root: str) -> None:
        location = join(root, "put")
        storage.put(location, b"old")
        with storage.together():
            storage.put(location, b"new")
            assert storage.put_if_absent(join(root, "claimed"), b"2")
            with storage.writer(join(root, "streamed")) as stream:
                stream.write(b"x" * 3 * MEGABYTE)
            assert names(storage, root) == ["put"]
            assert storage.read(location) == b"old"
            with pytest.raises(NotFound):
                storage.read(join(root, "claimed"))
            with storage.together():
                storage.put(join(root, "inner"), b"")
            with storage.batch():
                storage.put(join(root, "batch"), b"")
                assert names(storage, root) == ["batch", "inner", "put"]
        assert names(storage, root) == ["batch", "claimed", "inner", "put", "streamed"]
        assert storage.read(location) == b"new"
        assert storage.read(join(root, "claimed")) == b"2"
        assert storage.read(join(root, "streamed")) == b"x" * 3 * MEGABYTE
        assert list(storage.list(root, temporary=True)) == []

    def test_after_an_error_no_file_written_together_appears(self, storage: Storage, root: str) -> None:
        def fail() -> None:
            with storage.together():
                self.write_three_ways(storage, root)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert names(storage, root) == []
        assert list(storage.list(root, temporary=True)) == []
        self.write_three_ways(storage, root)
        assert names(storage, root) == ["claimed", "put", "streamed"]

    def write_three_ways(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "put"), b"1")
        storage.put_if_absent(join(root, "claimed"), b"2")
        with storage.writer(join(root, "streamed")) as stream:
            stream.write(b"3")

    def test_a_name_that_is_taken_is_not_replaced_by_files_written_together(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "b"), b"first")

        def claim() -> None:
            with storage.together():
                for name in "abc":
                    storage.put_if_absent(join(root, name), b"second")

        with pytest.raises(FileExistsError, match="/b"):
            claim()
        assert [storage.read(join(root, name)) for name in "abc"] == [b"second", b"first", b"second"]
        assert list(storage.list(root, temporary=True)) == []

    def test_more_files_than_are_held_appear_earlier(self, storage: Storage, root: str) -> None:
        with storage.together():
            for number in range(FILES_MAX + 3):
                storage.put(join(root, f"{number:03}"), b"%d" % number)
            assert len(names(storage, root)) == FILES_MAX
            storage.put(join(root, "big"), bytes(BYTES_MAX))
            assert len(names(storage, root)) == FILES_MAX + 4
            storage.put(join(root, "last"), b"")
        assert len(names(storage, root)) == FILES_MAX + 5
        assert storage.read(join(root, f"{FILES_MAX + 2:03}")) == b"%d" % (FILES_MAX + 2)

    def test_several_threads_hold_files_for_one_end(self, storage: Storage, root: str) -> None:
        held = Held()

        def write(number: int) -> None:
            with storage.writer(join(root, f"{number}"), held) as stream:
                stream.write(b"x")
                if number == 3:
                    raise ZeroDivisionError

        with ThreadPoolExecutor(4) as pool:
            failed = [number for number, one in enumerate([pool.submit(write, n) for n in range(8)]) if one.exception()]
        assert failed == [3]
        assert names(storage, root) == []
        storage.end(held)
        assert names(storage, root) == [f"{number}" for number in range(8) if number != 3]
        storage.end(held)
        with storage.writer(join(root, "dropped"), held) as stream:
            stream.write(b"x")
        held.drop()
        storage.end(held)
        assert not storage.exists(join(root, "dropped"))
        assert list(storage.list(root, temporary=True)) == []

    def test_an_end_waits_for_files_that_another_thread_began_to_end(self, storage: Storage, root: str) -> None:
        held, began, may_go_on = Held(), threading.Event(), threading.Event()

        def wait() -> None:
            began.set()
            assert may_go_on.wait(30)

        held.add([HeldFile(0, wait, lambda: None)])
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(storage.end, held)
            assert began.wait(30)
            with storage.writer(join(root, "second"), held) as stream:
                stream.write(b"x")
            second = pool.submit(storage.end, held)
            with pytest.raises(TimeoutError):
                second.result(0.1)
            may_go_on.set()
            first.result()
            second.result()
        assert names(storage, root) == ["second"]

    def test_after_an_end_that_failed_no_later_one_succeeds(self, storage: Storage, root: str) -> None:
        """Another step's files may have been among those that were lost."""
        held = Held()
        with storage.writer(join(root, "first"), held) as stream:
            stream.write(b"x")

        def fail() -> None:
            raise ZeroDivisionError

        held.add([HeldFile(0, fail, lambda: None)])
        with pytest.raises(ZeroDivisionError):
            storage.end(held)
        with storage.writer(join(root, "second"), held) as stream:
            stream.write(b"x")
        for _ in range(2):
            with pytest.raises(Unavailable, match="ZeroDivisionError"):
                storage.end(held)
        held.drop()
        assert not storage.exists(join(root, "second"))
        assert list(storage.list(root, temporary=True)) == []

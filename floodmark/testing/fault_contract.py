"""The contract of a storage with a fault, as a suite: derive from FaultContract; give it `options` and `root`.

`options` are those of a Storage that reaches the store, `root` is the location of an empty folder in it. Each mode of
fault keeps its own promise, and none ever shows half a file.
"""

from __future__ import annotations

import pickle

import pytest

from floodmark.errors import Invalid, Unavailable
from floodmark.storage import Storage, join
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.storage_contract import names


class FaultContract:
    """What a storage with a fault promises."""

    def write_three_ways(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "put"), b"content")
        assert storage.put_if_absent(join(root, "claimed"), b"content")
        with storage.writer(join(root, "streamed")) as stream:
            stream.write(b"con")
            stream.write(b"tent")

    @pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full"])
    def test_every_call_can_fail_and_no_half_file_is_ever_visible(
        self, options: dict[str, str], root: str, mode: str
    ) -> None:
        plain = Storage(options)
        # Calls: put, put_if_absent, writer, finish. A lost reply of call N leaves N's own effect as well.
        visible_before = {1: [], 2: ["put"], 3: ["claimed", "put"], 4: ["claimed", "put"]}
        visible_after = {1: ["put"], 2: ["claimed", "put"], 3: ["claimed", "put"], 4: ["claimed", "put", "streamed"]}
        for number in range(1, 100):
            faulty = FaultyStorage(options, fail_at=number, mode=mode)
            folder = join(root, f"{mode}-{number}")
            if number > 4:
                self.write_three_ways(faulty, folder)
                assert not faulty.fired
                break
            with pytest.raises(Unavailable):
                self.write_three_ways(faulty, folder)
            assert faulty.fired
            assert faulty.calls_seen == number
            expected = visible_after if mode == "after" else visible_before
            assert names(plain, folder) == expected[number]
            for name in names(plain, folder):
                assert plain.read(join(folder, name)) == b"content"
        assert number == 5
        assert faulty.calls_seen == 4

    @pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full"])
    def test_every_call_of_files_written_together_can_fail(self, options: dict[str, str], root: str, mode: str) -> None:
        for number in range(1, 100):
            faulty = FaultyStorage(options, fail_at=number, mode=mode)
            folder = join(root, f"{mode}-{number}")
            if number > 5:
                break
            with pytest.raises(Unavailable), faulty.together():
                self.write_three_ways(faulty, folder)
            assert faulty.calls_seen == number
            # The end: none of them, all, or half of them.
            visible = {"after": ["claimed", "put", "streamed"], "torn": ["put"]}.get(mode, [])
            assert names(Storage(options), folder) == (visible if number == 5 else [])
            left = 1 if mode == "torn" and number < 5 and folder.startswith("file:") else 0
            assert len(list(faulty.list(folder, temporary=True))) == left
        with faulty.together():
            self.write_three_ways(faulty, folder)
        assert not faulty.fired
        assert faulty.calls_seen == 5

    @pytest.mark.parametrize("mode", ["before", "after", "torn"])
    @pytest.mark.parametrize("verb", ["read", "read_range", "size", "exists", "list", "open_input", "delete", "batch"])
    def test_every_other_verb_can_fail(self, options: dict[str, str], root: str, mode: str, verb: str) -> None:
        location = join(root, "x")
        # Large enough that opening it does not bring its start.
        Storage(options).put(location, b"0123456789" * 100_000)
        faulty = FaultyStorage(options, fail_at=1, mode=mode, verbs=[verb])

        def run() -> None:
            faulty.read(location)
            faulty.size(location)
            faulty.exists(location)
            list(faulty.list(root))
            with faulty.open_input(location) as reader:
                reader.read(4)
            with faulty.batch():
                faulty.put(join(root, "y"), b"1")
            faulty.delete(location)

        with pytest.raises(Unavailable, match="on purpose"):
            run()
        assert faulty.fired
        assert Storage(options).exists(location) == (verb != "delete" or mode != "after")

    def test_fetching_many_ranges_can_fail(self, options: dict[str, str], root: str) -> None:
        location = join(root, "x")
        Storage(options).put(location, b"0123456789" * 1_000_000)
        faulty = FaultyStorage(options, fail_at=1, verbs=["read_range"])
        with faulty.open_input(location, 10_000_000) as reader:

            def read() -> bytes:
                reader.prefetch([(0, 10), (5_000_000, 10)])
                return reader.read(10)

            with pytest.raises(Unavailable, match="on purpose"):
                read()
            assert read() == b"0123456789"
        assert faulty.fired

    def test_after_the_fault_everything_works_again(self, options: dict[str, str], root: str) -> None:
        faulty = FaultyStorage(options, fail_at=2)
        faulty.put(join(root, "a"), b"1")
        with pytest.raises(Unavailable):
            faulty.put(join(root, "b"), b"2")
        faulty.put(join(root, "b"), b"2")
        assert names(faulty, root) == ["a", "b"]

    def test_a_broken_storage_stays_broken_if_asked(self, options: dict[str, str], root: str) -> None:
        faulty = FaultyStorage(options, fail_at=2, stay_broken=True)
        faulty.put(join(root, "a"), b"1")
        for call in (faulty.read, faulty.delete, faulty.list):
            with pytest.raises(Unavailable):
                call(join(root, "a"))
        assert Storage(options).read(join(root, "a")) == b"1"

    def test_a_full_disk_says_so_and_leaves_nothing(self, options: dict[str, str], root: str) -> None:
        faulty = FaultyStorage(options, fail_at=1, mode="disk_full", stay_broken=True)
        with pytest.raises(Unavailable, match="disk is full"):
            faulty.put(join(root, "a"), b"1234")
        with pytest.raises(Unavailable, match="disk is full"), faulty.writer(join(root, "b")) as stream:
            stream.write(b"1234")
        # Reading still works: a full disk can be read.
        assert names(faulty, root) == []
        assert list(faulty.list(root, temporary=True)) == []

    def test_a_copy_of_a_faulty_storage_has_no_fault(self, options: dict[str, str], root: str) -> None:
        copy = pickle.loads(pickle.dumps(FaultyStorage(options, fail_at=1)))
        copy.put(join(root, "a"), b"1")
        assert copy.read(join(root, "a")) == b"1"

    def test_a_typo_in_a_fault_is_refused(self) -> None:
        with pytest.raises(Invalid):
            FaultyStorage(fail_at=1, mode="afterwards")
        with pytest.raises(Invalid):
            FaultyStorage(fail_at=1, verbs=["write"])

"""What only the local disk promises: fsyncs, temporary names, folders, and claims between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from floodmark.errors import Corrupt, Invalid, NotFound, Unavailable
from floodmark.storage import TEMPORARY_PREFIX, Storage, join, local_path, root_location
from floodmark.storage.counters import Counters
from floodmark.storage.local import LocalFiles
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.storage_contract import names


class TestLocal:
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return root_location(str(tmp_path))

    def test_a_batch_syncs_every_file_and_each_folder_once(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "table/first"), b"")
        before = storage.counters.snapshot()
        with storage.batch():
            for number in range(10):
                storage.put(join(root, f"table/new/{number}"), b"x")
            inside = storage.counters.difference(before)
            assert (inside.calls["fsync_file"], inside.calls.get("fsync_dir", 0)) == (10, 0)
        spent = storage.counters.difference(before)
        assert (spent.calls["fsync_file"], spent.calls["fsync_dir"]) == (10, 2)
        assert spent.total == 10

    @pytest.mark.parametrize("way", ["put", "put_if_absent", "writer"])
    def test_every_way_of_writing_syncs_file_folder_and_parent(self, storage: Storage, root: str, way: str) -> None:
        def write(name: str) -> None:
            if way == "writer":
                with storage.writer(join(root, name)) as stream:
                    stream.write(b"x")
            else:
                getattr(storage, way)(join(root, name), b"x")

        write("folder/a")
        before = storage.counters.snapshot()
        write("folder/b")
        spent = storage.counters.difference(before)
        assert (spent.calls["fsync_file"], spent.calls["fsync_dir"]) == (1, 2)

    def test_every_new_folder_is_synced_into_its_parent(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "a/b/c/x"), b"x")
        # The folders c, b, a and the root, which got a.
        assert storage.counters.calls["fsync_dir"] == 4

    def test_who_loses_a_claim_has_the_name_made_durable(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "a/x"), b"x")
        before = storage.counters.snapshot()
        assert not storage.put_if_absent(join(root, "a/x"), b"y")
        spent = storage.counters.difference(before)
        assert spent.calls["fsync_dir"] == 2
        assert "fsync_file" not in spent.calls

    def test_who_was_swept_while_writing_what_is_there_has_lost_the_claim(self, root: str) -> None:
        files, path = LocalFiles(Counters()), local_path(join(root, "a/x"))
        late, lost = files.upload(path), files.upload(local_path(join(root, "a/y")))
        for upload in (late, lost):
            upload.write(memoryview(b"x"))
        files.put(path, b"x")
        for name, _, _ in list(files.list(local_path(join(root, "a")), temporary=True)):
            files.delete(local_path(join(root, f"a/{name}")))
        assert late.claim() is False
        with pytest.raises(Unavailable, match="cannot write"):
            lost.claim()

    def test_a_failed_batch_syncs_no_folder_and_the_next_one_starts_anew(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "a/x"), b"x")
        before = storage.counters.snapshot()

        def fail() -> None:
            with storage.batch():
                storage.put(join(root, "a/y"), b"x")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert "fsync_dir" not in storage.counters.difference(before).calls
        storage.put(join(root, "a/z"), b"x")
        assert storage.counters.difference(before).calls["fsync_dir"] == 2

    def test_a_batch_inside_another_is_durable_at_its_own_end(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "a/x"), b"x")
        before = storage.counters.snapshot()
        with storage.batch():
            with storage.batch():
                storage.put(join(root, "a/y"), b"x")
            assert storage.counters.difference(before).calls["fsync_dir"] == 2
        assert storage.counters.difference(before).calls["fsync_dir"] == 2

    def test_files_written_together_are_synced_at_the_end_and_each_folder_once(
        self, storage: Storage, root: str
    ) -> None:
        storage.put(join(root, "table/first"), b"")
        before = storage.counters.snapshot()
        with storage.together():
            for number in range(10):
                storage.put(join(root, f"table/new/{number}"), b"x")
            assert "fsync_file" not in storage.counters.difference(before).calls
        spent = storage.counters.difference(before)
        assert (spent.calls["fsync_file"], spent.calls["fsync_dir"]) == (10, 2)

    def test_a_file_written_with_others_is_durable_before_its_name_appears(
        self, storage: Storage, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[tuple[str, int]] = []
        real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

        def fsync(fd: int) -> None:
            real["fsync"](fd)
            steps.append(("fsync", os.fstat(fd).st_ino))

        def named(name: str, source: str, target: str) -> None:
            real[name](source, target)
            steps.append(("named", os.stat(target).st_ino))

        monkeypatch.setattr(os, "fsync", fsync)
        for name in ("replace", "link"):
            monkeypatch.setattr(os, name, partial(named, name))
        with storage.together():
            for number in range(20):
                storage.put(join(root, f"table/put-{number}"), b"x")
                storage.put_if_absent(join(root, f"table/claimed-{number}"), b"x")
        files = [inode for step, inode in steps if step == "named"]
        assert len(files) == 40
        folders = {os.stat(local_path(one) or "").st_ino for one in (root, join(root, "table"))}
        for inode in files:
            place = steps.index(("named", inode))
            assert steps.index(("fsync", inode)) < place
            assert folders <= {other for step, other in steps[place:] if step == "fsync"}

    def test_what_a_crashed_write_left_is_listed_only_on_request(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "table/data/x"), b"x")
        left = join(root, f"table/data/{TEMPORARY_PREFIX}left")
        Path(local_path(left) or "").write_bytes(b"part")
        assert names(storage, root) == ["table/data/x"]
        (entry,) = storage.list(root, temporary=True)
        assert (entry.location, entry.size_bytes) == (left, 4)
        storage.delete(left)
        assert list(storage.list(root, temporary=True)) == []

    def test_a_torn_write_leaves_its_part_under_a_temporary_name(self, storage: Storage, root: str) -> None:
        faulty = FaultyStorage(fail_at=1, mode="torn")
        with pytest.raises(Unavailable):
            faulty.put(join(root, "data/x"), b"12345678")
        (entry,) = storage.list(root, temporary=True)
        assert storage.read(entry.location) == b"1234"
        assert names(storage, root) == []

    def test_deleting_a_folder_takes_leftovers_and_empty_folders_too(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "table/a/b/x"), b"x")
        storage.put(join(root, "kept/x"), b"x")
        folder = Path(local_path(join(root, "table")) or "")
        (folder / f"{TEMPORARY_PREFIX}left").write_bytes(b"part")
        (folder / "empty").mkdir()
        assert storage.delete_prefix(join(root, "table")) == 2
        assert not folder.exists()
        assert names(storage, root) == ["kept/x"]

    def test_a_link_to_a_folder_is_neither_followed_nor_emptied(
        self, storage: Storage, root: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        outside = tmp_path_factory.mktemp("outside")
        (outside / "precious").write_bytes(b"x")
        storage.put(join(root, "table/x"), b"x")
        os.symlink(outside, local_path(join(root, "table/link")) or "")
        assert "table/link/precious" not in names(storage, root)
        storage.delete_prefix(join(root, "table"))
        assert (outside / "precious").read_bytes() == b"x"

    def test_a_temporary_name_cannot_be_written(self, storage: Storage, root: str) -> None:
        with pytest.raises(Invalid):
            storage.put(join(root, f"{TEMPORARY_PREFIX}mine"), b"x")

    def test_a_path_through_a_file_fails_without_harm(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "file"), b"x")
        with pytest.raises(Unavailable):
            storage.put(join(root, "file/below"), b"y")
        with pytest.raises(NotFound):
            storage.read(join(root, "file/below"))
        assert not storage.exists(join(root, "file/below"))
        storage.delete(join(root, "file/below"))
        assert storage.read(join(root, "file")) == b"x"

    def test_an_open_reader_outlives_a_delete(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "x"), b"0123456789" * 20_000)
        with storage.open_input(join(root, "x")) as reader:
            storage.delete(join(root, "x"))
            assert reader.read() == b"0123456789" * 20_000

    def test_a_file_that_is_cut_while_it_is_read_is_corrupt(self, storage: Storage, root: str) -> None:
        storage.put(join(root, "x"), b"0123456789" * 20_000)
        with storage.open_input(join(root, "x"), 200_000) as reader:
            os.truncate(local_path(join(root, "x")) or "", 100_000)
            assert reader.read(10) == b"0123456789"
            reader.seek(99_990)
            with pytest.raises(Corrupt, match="shorter"):
                reader.read(20)

    def test_bare_paths_and_java_paths_are_the_same_file(self, storage: Storage, root: str) -> None:
        path = local_path(join(root, "x")) or ""
        storage.put(path, b"1")
        assert storage.read("file:" + path) == storage.read("file://" + path) == b"1"
        (entry,) = storage.list(os.path.dirname(path))
        assert entry.location == path

    def test_one_of_racing_processes_wins_each_name(self, root: str, tmp_path: Path) -> None:
        claims = 30
        script = (
            "import sys, os, time\n"
            "from floodmark.storage import Storage, join\n"
            "root, me, start, claims = sys.argv[1:]\n"
            "storage = Storage()\n"
            "open(start + me, 'w').close()\n"
            "while not os.path.exists(start): time.sleep(0.001)\n"
            "won = [n for n in range(int(claims)) if storage.put_if_absent(join(root, f'names/{n}'), me.encode())]\n"
            "print(*won)\n"
        )
        start = str(tmp_path / "start")
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", script, root, str(me), start, str(claims)], stdout=subprocess.PIPE, text=True
            )
            for me in range(4)
        ]
        while not all(os.path.exists(start + str(me)) for me in range(4)):
            assert all(racer.poll() is None for racer in racers)
        Path(start).touch()
        won = {me: [int(name) for name in racer.communicate(timeout=60)[0].split()] for me, racer in enumerate(racers)}
        assert [racer.returncode for racer in racers] == [0, 0, 0, 0]
        assert sorted(name for names_won in won.values() for name in names_won) == list(range(claims))
        for me, names_won in won.items():
            assert {Storage().read(join(root, f"names/{name}")) for name in names_won} <= {str(me).encode()}
        assert list(Storage().list(root, temporary=True)) == []

    def test_a_write_that_the_system_stops_in_the_middle_leaves_nothing(self, root: str) -> None:
        # A limit on the size of files is a real error in the middle of a write, as a full disk is.
        script = (
            "import resource, sys\n"
            "from floodmark.errors import Unavailable\n"
            "from floodmark.storage import Storage, join\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            "storage, root = Storage(), sys.argv[1]\n"
            "def stream():\n"
            "    with storage.writer(join(root, 'b')) as out:\n"
            "        for _ in range(1000): out.write(b'x' * 1000)\n"
            "for write in (lambda: storage.put(join(root, 'a'), b'x' * 1_000_000), stream,\n"
            "              lambda: storage.put_if_absent(join(root, 'c'), b'x' * 1_000_000)):\n"
            "    try: write()\n"
            "    except Unavailable as error: print('Unavailable', isinstance(error.__cause__, OSError))\n"
        )
        run = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, timeout=60)
        assert run.stdout.splitlines() == ["Unavailable True"] * 3, run.stderr
        assert list(Storage().list(root)) == []
        assert list(Storage().list(root, temporary=True)) == []

    def test_files_can_be_written_while_the_interpreter_ends(self, root: str) -> None:
        """Such as the last rows of a queue; or by threads that go on when the main thread has ended."""
        script = (
            "import atexit, sys\n"
            "from floodmark.storage import Storage, join\n"
            "storage, root = Storage(), sys.argv[1]\n"
            "def write():\n"
            "    storage.put(join(root, 'alone'), b'x')\n"
            "    with storage.together():\n"
            "        for name in 'abc':\n"
            "            storage.put(join(root, name), b'x')\n"
            "atexit.register(write)\n"
        )
        run = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stderr) == (0, "")
        assert names(Storage(), root) == ["a", "alone", "b", "c"]

    def test_a_process_with_only_storage_loads_nothing_heavy(self) -> None:
        script = (
            "import sys\n"
            "from floodmark.storage import Storage\n"
            "Storage()\n"
            "print([name for name in ('pyiceberg', 'pyarrow', 'pyspark', 'obstore') if name in sys.modules])\n"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert run.stdout.strip() == "[]", run.stderr

"""Which files of a table are worth compacting: pure planning, from records of live files alone.

Small files of one partition, in the order of their rows' sequences, form groups of bounded bytes: rows of about one age
stay together, so that readers of new rows need not open old files (decisions 0011 and 0015). Files that lack a column
which is still to be filled are never merged with files that have it (decision 0019). A file that is larger than all
that would join it is left out: so each row is rewritten O(log n) times however often small files arrive, and a table
whose files cannot be improved has no group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from floodmark.commit.live_files import LiveFile
from floodmark.json_form import Json
from floodmark.model import Scalar

# A table with a sort order is sorted within a group: larger groups, better order.
SORTED_GROUP_FILES = 4


@dataclass(frozen=True)
class FileGroup:
    """Files of one partition that become few; `fingerprint` identifies the group as long as it has these files."""

    files: tuple[LiveFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(file.path for file in self.files)

    @property
    def fingerprint(self) -> str:
        return sha256("\n".join(sorted(self.paths)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class CompactionPlan:
    """Groups to rewrite, and what was left out: small files of partitions with too few of them, groups that could not
    be improved before, small files in a partition layout that the table does not have any more.
    """

    groups: tuple[FileGroup, ...] = ()
    files: int = 0
    small_files: int = 0
    below_threshold: int = 0
    hopeless: tuple[str, ...] = ()
    other_layout: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(group.size_bytes for group in self.groups)

    @property
    def files_in(self) -> int:
        return sum(len(group.files) for group in self.groups)

    def as_dict(self) -> dict[str, Json]:
        return {
            "groups": len(self.groups),
            "files_in": self.files_in,
            "rows_in": sum(group.rows for group in self.groups),
            "bytes_in": self.size_bytes,
            "files": self.files,
            "small_files": self.small_files,
            "below_threshold": self.below_threshold,
            "could_not_improve": len(self.hopeless),
            "other_layout": self.other_layout,
        }


def plan_compaction(
    files: Iterable[LiveFile],
    *,
    spec_id: int,
    target_bytes: int,
    small_bytes: int,
    files_min: int,
    is_sorted: bool = False,
    hopeless: Collection[str] = (),
    absent: Callable[[LiveFile], tuple[int, ...]] | None = None,
) -> CompactionPlan:
    """The groups of partitions that have at least `files_min` small files.

    `hopeless`: fingerprints of groups that an earlier run could not improve. `absent`: the columns that a file lacks
    and that are still to be filled.
    """
    partitions: dict[tuple[Scalar | tuple[int, ...], ...], list[LiveFile]] = defaultdict(list)
    count = small = other_layout = 0
    for file in files:
        count += 1
        if file.size_bytes >= small_bytes:
            continue
        small += 1
        if file.spec_id != spec_id:
            other_layout += 1  # its partition is not one of the table's present ones
            continue
        partitions[*_partition(file), () if absent is None else absent(file)].append(file)
    group_bytes = target_bytes * (SORTED_GROUP_FILES if is_sorted else 1)
    groups: list[FileGroup] = []
    known: list[str] = []
    below = 0
    for members in partitions.values():
        useful = _groups(sorted(members, key=_age), group_bytes, target_bytes, small_bytes)
        if sum(len(group.files) for group in useful) < files_min:
            below += sum(len(group.files) for group in useful)
            continue
        for group in useful:
            if group.fingerprint in hopeless:
                known.append(group.fingerprint)
            else:
                groups.append(group)
    return CompactionPlan(tuple(groups), count, small, below, tuple(known), other_layout)


def _partition(file: LiveFile) -> tuple[Scalar, ...]:
    record = file.data_file.partition
    return tuple(record[place] for place in range(len(record)))


def _age(file: LiveFile) -> tuple[int, str]:
    """Files whose sequences are not known come first; then by their oldest row."""
    bounds = file.seq_bounds()
    return (-1 if bounds is None else bounds[0], file.path)


def _groups(files: Sequence[LiveFile], bytes_max: int, target_bytes: int, small_bytes: int) -> list[FileGroup]:
    """Cut files, oldest first, into groups of at most so many bytes, each at least halving its files.

    The last full group and the rest are cut into halves instead, so that tasks end together; not if the files of halves
    would be small again.
    """
    groups: list[FileGroup] = []
    start, left = 0, sum(file.size_bytes for file in files)
    while start < len(files):
        limits = [bytes_max]
        if bytes_max < left <= 2 * bytes_max and left >= 2 * small_bytes:
            limits.insert(0, -(-left // 2))
        cuts = (_up_to(files, start, limit, bytes_max) for limit in limits)
        group = next((group for group in cuts if _is_useful(group, target_bytes)), None)
        done = files[start : start + 1] if group is None else group.files
        if group is not None:
            groups.append(group)
        start += len(done)
        left -= sum(file.size_bytes for file in done)
    return groups


def _up_to(files: Sequence[LiveFile], start: int, size_bytes: int, bytes_max: int) -> FileGroup:
    """The files from there on, as close to so many bytes as whole files come; at least one."""
    end, size = start + 1, files[start].size_bytes
    while end < len(files):
        more = size + files[end].size_bytes
        if more > bytes_max or more - size_bytes > size_bytes - size:
            break
        size, end = more, end + 1
    return FileGroup(tuple(files[start:end]))


def _is_useful(group: FileGroup, target_bytes: int) -> bool:
    """Whether it halves its files, and no row of its oldest one is rewritten for little.

    A file that is larger than all that would join it, by bytes or by rows, is left as it is. By rows too, since a tiny
    file's bytes are mostly its frame.
    """
    oldest, size = group.files[0], group.size_bytes
    too_large = 2 * oldest.size_bytes > size or 2 * oldest.rows > group.rows
    return not too_large and 2 * -(-size // target_bytes) <= len(group.files)

"""Which small files are put together: pure planning over records of files."""

from __future__ import annotations

import random

import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record

from floodmark.commit.live_files import LiveFile
from floodmark.maintenance.plan import SORTED_GROUP_FILES, CompactionPlan, plan_compaction

TARGET = 1000


def file(
    name: str, size: int, sequence: int = 1, *, partition: object = "a", spec_id: int = 0, rows: int | None = None
) -> LiveFile:
    data_file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=name,
        file_format=FileFormat.PARQUET,
        partition=Record(partition),
        record_count=size if rows is None else rows,
        file_size_in_bytes=size,
        value_counts={1: size},
    )
    data_file.spec_id = spec_id
    return LiveFile(data_file, sequence, 99)


def plan(files: list[LiveFile], files_min: int = 2, **options: object) -> CompactionPlan:
    settings = {"spec_id": 0, "target_bytes": TARGET, "small_bytes": TARGET * 3 // 4, "files_min": files_min}
    return plan_compaction(files, **{**settings, **options})  # type: ignore[arg-type]


def names(found: CompactionPlan) -> list[list[str]]:
    return [[one.path for one in group.files] for group in found.groups]


def test_small_files_of_one_partition_make_a_group_oldest_first() -> None:
    found = plan([file("c", 10, 3), file("a", 10, 1), file("b", 10, 2), file("big", 800, 4)])
    assert names(found) == [["a", "b", "c"]]
    assert (found.files, found.small_files, found.below_threshold) == (4, 3, 0)


def test_partitions_are_never_mixed() -> None:
    files = [file(f"{day}{number}", 10, number, partition=day) for number in range(3) for day in ("mon", "tue", None)]
    found = plan(files)
    assert sorted(map(sorted, names(found))) == [
        ["None0", "None1", "None2"],
        ["mon0", "mon1", "mon2"],
        ["tue0", "tue1", "tue2"],
    ]


def test_files_that_lack_a_column_are_never_mixed_with_others() -> None:
    files = [file(f"{name}{number}", 10, number) for number in range(3) for name in ("has", "lacks", "lacks both ")]
    absent = {"has": (), "lacks": (7,), "lacks both ": (7, 9)}
    found = plan(files, absent=lambda one: absent[one.path[:-1]])
    assert sorted(map(sorted, names(found))) == [
        ["has0", "has1", "has2"],
        ["lacks both 0", "lacks both 1", "lacks both 2"],
        ["lacks0", "lacks1", "lacks2"],
    ]
    assert len(names(plan(files))) == 1, "without columns to be filled they are alike"


def test_a_group_holds_at_most_one_target_file_and_a_sorted_one_a_few() -> None:
    files = [file(f"{number:03d}", 90, number) for number in range(40)]
    assert all(group.size_bytes <= TARGET for group in plan(files).groups)
    assert sum(len(group.files) for group in plan(files).groups) == 40
    groups = plan(files, is_sorted=True).groups
    assert all(group.size_bytes <= TARGET * SORTED_GROUP_FILES for group in groups)
    assert len(groups) == 1


def sizes(found: CompactionPlan) -> list[int]:
    return [group.size_bytes for group in found.groups]


def test_the_last_full_group_and_the_rest_are_cut_evenly() -> None:
    files = [file(f"{number:03d}", 20, number) for number in range(500)]
    assert sizes(plan(files[:220], is_sorted=True)) == [2200, 2200], "a full one would be 4,000"
    assert sizes(plan(files[:400], is_sorted=True)) == [4000, 4000]
    assert sizes(plan(files, is_sorted=True)) == [4000, 3000, 3000]
    assert sizes(plan(files[:80])) == [800, 800]
    found = plan(files[:220], is_sorted=True)
    assert [path for group in names(found) for path in group] == [one.path for one in files[:220]], "oldest first"


def test_groups_are_not_cut_evenly_where_files_would_stay_small() -> None:
    files = [file(f"{number:03d}", 20, number) for number in range(60)]
    assert sizes(plan(files)) == [1000, 200], "halves of 600 are below 750"


def test_where_a_half_would_not_halve_its_files_a_full_group_does() -> None:
    files = [file(str(number), 500, number) for number in range(9)]
    assert sizes(plan(files, is_sorted=True)) == [4000], "five files of 500 would become three"


@pytest.mark.parametrize("tasks", [1, 2, 3, 8])
def test_even_groups_end_no_later_than_full_ones_and_a_rest(tasks: int) -> None:
    """The largest first, each by the task that is free first, as Spark starts them."""

    def ends(groups: list[int]) -> int:
        busy = [0] * tasks
        for size in sorted(groups, reverse=True):
            busy[busy.index(min(busy))] += size
        return max(busy)

    for count in range(1, 1300, 29):
        found = sizes(plan([file(str(number), 10, number) for number in range(count)], is_sorted=True))
        full, rest = divmod(count * 10, TARGET * SORTED_GROUP_FILES)
        assert ends(found or [0]) <= ends([*[TARGET * SORTED_GROUP_FILES] * full, rest]) + 10


def test_too_few_small_files_are_below_the_threshold() -> None:
    found = plan([file(str(number), 10, number) for number in range(7)], files_min=8)
    assert (found.groups, found.below_threshold) == ((), 7)
    found = plan([file(str(number), 10, number) for number in range(8)], files_min=8)
    assert len(found.groups) == 1


def test_files_that_do_not_fit_together_are_left_alone() -> None:
    files = [file(str(number), 600, number) for number in range(50)]
    found = plan(files)
    assert (found.groups, found.below_threshold, found.small_files) == ((), 0, 50)


def test_a_file_that_is_larger_than_what_would_join_it_is_passed_by() -> None:
    assert names(plan([file("old", 500, 1), file("b", 20, 2), file("c", 20, 3)])) == [["b", "c"]]
    assert names(plan([file("old", 40, 1), file("b", 20, 2), file("c", 20, 3)])) == [["old", "b", "c"]]
    assert names(plan([file("old", 500, 1), file("b", 20, 2)])) == []


def test_a_file_with_more_rows_than_those_that_would_join_it_is_passed_by() -> None:
    """Tiny files are mostly frame: by their bytes alone a table of them would be rewritten with every few that come."""
    tiny = [file("old", 20, 1, rows=30), file("b", 15, 2, rows=1), file("c", 15, 3, rows=1)]
    assert names(plan(tiny)) == [["b", "c"]]


def test_a_group_at_least_halves_its_files() -> None:
    files = [file(str(number), 700, number) for number in range(5)]
    assert plan(files, is_sorted=True).groups == ()  # 3,500 bytes make four files of five


def test_a_group_that_could_not_be_improved_is_not_tried_again_until_its_files_change() -> None:
    files = [file(str(number), 10, number) for number in range(5)]
    first = plan(files)
    again = plan(files, hopeless={first.groups[0].fingerprint})
    assert (again.groups, again.hopeless) == ((), (first.groups[0].fingerprint,))
    assert len(plan([*files, file("new", 10, 9)], hopeless={first.groups[0].fingerprint}).groups) == 1


def test_files_of_another_partition_layout_are_counted_and_left_alone() -> None:
    found = plan([file("a", 10, 1, spec_id=7), file("b", 10, 2, spec_id=7), file("c", 10, 3), file("d", 10, 4)])
    assert (names(found), found.other_layout) == ([["c", "d"]], 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_table_that_grows_bit_by_bit_is_rewritten_a_logarithm_of_times_and_stays_small(seed: int) -> None:
    """Append and compact in turns: every row is rewritten O(log n) times, and few small files are left."""
    chosen = random.Random(seed)
    live: list[LiveFile] = []
    rewritten = came = 0
    counts = []
    for sequence in range(1, 1025):
        size = chosen.randint(1, 3)
        came += size
        live.append(file(f"{sequence}", size, sequence))
        found = plan(live, files_min=2, target_bytes=10**9, small_bytes=10**9)
        for group in found.groups:
            rewritten += group.size_bytes
            oldest = group.files[0].sequence
            live = [one for one in live if one not in group.files]
            live.append(file(f"{sequence}-out", group.size_bytes, oldest or 0))
        counts.append(len(live))
    assert rewritten <= came * 12  # log2(1024) and a little
    assert max(counts) <= 24

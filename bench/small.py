"""Small commits in a warm process: 1,000 rows from memory, and as a DataFrame against a plain Spark write.

Flat means that commit 500 takes as long as commit 10. In memory, an old table and a young one take turns, so that what
the machine does meanwhile hits both; the two windows of one aged lake, minutes apart, are shown beside it. The
DataFrame's table is brought from one window to the other by in-memory commits, which leave the same state of the
table behind. Plain Spark writes run in turns with it in both windows and do not care about the table's age: their
drift is the machine's, and is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.measure import Goal, Line, Samples, in_turns, ratio, took
from bench.workshop import SCHEMA, TABLE, Workshop
from floodmark.lake import Lake

FLAT = Goal(1.2)
WARM_UP = 10


def run(shop: Workshop) -> Iterator[Line]:
    sizes = shop.sizes
    early, late = shop.aged.window(sizes.early), shop.aged.window(sizes.late)
    ages = f"commits {sizes.early.start + 1}–{sizes.early.stop} → {sizes.late.start + 1}–{sizes.late.stop}"
    yield took("in-memory batch, p50", early, goal=Goal(50), note=f"{sizes.batch_rows:,} rows")
    yield took("in-memory batch, p50, old table", late)
    yield ratio("in-memory batch, old against young", late, early, note=f"{ages}, the machine's drift with it")
    yield _in_turns(shop)
    yield from _frames(shop, ages)


def _in_turns(shop: Workshop) -> Line:
    """The old table against a young one of another lake, in turns: what the machine did meanwhile hits both."""
    with shop.new_lake("small-young") as lake:
        lake.create_table(TABLE, SCHEMA)
        _age(lake, shop, shop.sizes.early.start)
        young, old = in_turns(
            shop.sizes.window, lambda: lake.append(TABLE, shop.batch), lambda: shop.aged.lake.append(TABLE, shop.batch)
        )
    return ratio("in-memory batch, old against young, in turns", old, young, goal=FLAT, note="two tables, interleaved")


def _frames(shop: Workshop, ages: str) -> Iterator[Line]:
    sizes = shop.sizes
    frame = shop.frame(sizes.batch_rows, 1)
    plain_path = str(shop.new_path("small-plain"))
    lake = shop.new_lake("small")
    lake.create_table(TABLE, SCHEMA)

    def plain() -> None:
        frame.write.mode("append").parquet(plain_path)

    shop.say("small DataFrame commits, young table")
    warm = shop.new_lake("small-warm")
    warm.create_table(TABLE, SCHEMA)
    in_turns(WARM_UP, lambda: warm.append(TABLE, frame), plain)
    warm.close()
    _age(lake, shop, sizes.early.start)
    young, plain_young = _window(lake, frame, plain, sizes.window)
    _age(lake, shop, sizes.late.start)
    shop.say("small DataFrame commits, old table")
    old, plain_old = _window(lake, frame, plain, sizes.window)
    lake.close()
    yield took("DataFrame", young, note=f"{sizes.batch_rows:,} rows, one partition")
    yield took("plain Spark write", plain_young)
    yield ratio("DataFrame, lake against plain", young, plain_young, goal=Goal(1.5))
    yield ratio("DataFrame, lake against plain, old table", old, plain_old)
    yield ratio("DataFrame, old against young", old, young, goal=FLAT, note=ages)
    yield ratio("plain Spark write, late against early", plain_old, plain_young, note="the machine's own drift")


def _window(lake: Lake, frame: object, plain: Callable[[], None], commits: int) -> tuple[Samples, Samples]:
    ours, others = in_turns(commits, lambda: lake.append(TABLE, frame), plain)
    return ours, others


def _age(lake: Lake, shop: Workshop, commits: int) -> None:
    """In-memory commits until the table has seen this many."""
    while lake.catalog.history.head(TABLE).sequence < commits:
        lake.append(TABLE, shop.batch)

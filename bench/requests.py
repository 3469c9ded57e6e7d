"""Storage requests of one in-memory commit, young and old: what an object store would charge for.

Now and then a commit also merges manifests, so a window of commits is looked at: the median is the usual commit, the
mean carries the merges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median

from bench.measure import Line
from bench.workshop import Workshop
from floodmark.storage.counters import FSYNCS, Counters


def run(shop: Workshop) -> Iterator[Line]:
    for age, part in ((shop.sizes.early_at, shop.sizes.early), (shop.sizes.late_at, shop.sizes.late)):
        window = shop.aged.requests[part]
        calls = [one.total for one in window]
        yield _line(f"requests around commit {age}", "", calls, _by_verb(window, fsyncs=False))
        yield _line(f"fsyncs around commit {age}", "", [_fsyncs(one) for one in window], _by_verb(window, fsyncs=True))
        yield _line(f"bytes written around commit {age}", " kB", [one.bytes_written / 1000 for one in window])
        yield _line(f"bytes read around commit {age}", " kB", [one.bytes_read / 1000 for one in window])


def _line(name: str, unit: str, values: Sequence[float], note: str = "") -> Line:
    average = f"mean {mean(values):.3g}"
    return Line(
        name,
        unit,
        median(values),
        min(values),
        max(values),
        len(values),
        note=f"{average}; {note}" if note else average,
    )


def _fsyncs(counters: Counters) -> int:
    return sum(counters.calls.get(verb, 0) for verb in FSYNCS)


def _by_verb(window: Sequence[Counters], *, fsyncs: bool) -> str:
    verbs = sorted({verb for one in window for verb in one.calls if (verb in FSYNCS) is fsyncs})
    return ", ".join(f"{verb} {median(one.calls.get(verb, 0) for one in window):g}" for verb in verbs)

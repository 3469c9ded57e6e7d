"""Two walks through the code, traced in real runs: `make walks` writes them into docs/architecture.md.

The first is a row that a client sends over HTTP, until a sink has put it into a file. The second is the merge of a
Spark DataFrame. A profile function records which modules of the package are entered, in the order of their first call,
on every thread and in Spark's Python workers. Imports do not count, nor do functions that a dataclass generates. The
lake is open and took a row before the trace begins: opening and the first recovery belong to the process.

`make docs` does not write this page: a walk needs Java and takes half a minute. tests/unit/test_walks.py checks that
the page names modules that exist. The size of each room (docs/rooms.py) goes into the same page.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from docs import rooms

if TYPE_CHECKING:
    import floodmark as fm

ROOT = Path(__file__).parent.parent
PACKAGE = f"{ROOT / 'floodmark'}{os.sep}"
PAGE = ROOT / "docs" / "architecture.md"
# Where Spark's workers write what they passed.
VARIABLE = "FLOODMARK_WALK"

# Modules that every stage may use: a walk comes back to them by design.
GROUND = ("catalog/", "settings/", "storage/", "clock", "engine", "errors", "failpoints", "json_form", "log", "model")

# Traced in the same way at 1301853, before the rooms were made: all modules, those that hand it on, that only compute.
ROW_BEFORE = (106, 42, 38)
MERGE_BEFORE = (62, 27, 20)

# These threads work for all requests at once: they are no part of the way of a row.
BACKGROUND = ("floodmark-heartbeat", "floodmark-ask", "floodmark-spark-watch", "floodmark-progress")

# A thread begins in the stage of its name. A failpoint that it passes begins the next stage.
STAGE_OF_THREAD = {
    "walk-server": "request",
    "floodmark-serve": "request",
    "floodmark-wait": "request",
    "spool-writer": "spool",
    "floodmark-feed": "feed",
    "MainThread": "call",
}
STAGE_AFTER = {
    "begun": "stage",
    "staged": "plan",
    "rewritten": "plan",
    "sealed": "build",
    "built": "publish",
    "published": "clean",
    "fed": "feed",
    "held": "sink: plan",
    "opened": "sink: plan",
    "sealed part": "sink: send",
    "shipped": "sink: settle",
}


@dataclass(frozen=True)
class Entry:
    """A function of the package that was called from another module, for the first time in a stage."""

    at_s: float
    stage: str
    module: str
    function: str
    caller: str


class Recorder:
    """Notes entries while `recording` is set. `write`: gets each entry at once, for a process that may be killed."""

    def __init__(self, write: Callable[[Entry], None], stage: str | None = None) -> None:
        self.recording = False
        self._write = write
        self._stage = stage
        self._stages: dict[int, str] = {}
        self._seen: set[tuple[str, CodeType]] = set()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.recording or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        stage = self._stage_now()
        if stage == "" or (stage, frame.f_code) in self._seen:
            return
        caller = _caller(frame)
        if caller is None:
            return
        self._seen.add((stage, frame.f_code))
        self._write(Entry(time.time(), stage, _module(frame.f_code), frame.f_code.co_qualname, caller))

    def _stage_now(self) -> str:
        if self._stage is not None:
            return self._stage
        name = threading.current_thread().name
        if name.startswith(BACKGROUND):
            return ""
        found = self._stages.get(threading.get_ident())
        return found or next((stage for begin, stage in STAGE_OF_THREAD.items() if name.startswith(begin)), name)

    def pass_failpoint(self, name: str) -> None:
        operation, _, step = name.partition(".")
        key = "sealed part" if name == "unit.sealed" else step
        if self.recording and operation != "spool" and key in STAGE_AFTER:
            self._stages[threading.get_ident()] = STAGE_AFTER[key]


def _module(code: CodeType) -> str:
    return code.co_filename.removeprefix(PACKAGE).removesuffix(".py").removesuffix("/__init__")


def _caller(frame: FrameType) -> str | None:
    """The module of the package that calls this one, "" if none does; None for calls inside a module or an import."""
    module, caller, found = _module(frame.f_code), "", frame.f_back
    while found is not None:
        inside = found.f_code.co_filename.startswith(PACKAGE)
        if inside and found.f_code.co_name == "<module>":
            return None
        if inside and caller == "":
            caller = _module(found.f_code)
        found = found.f_back
    return None if caller == module or frame.f_code.co_name == "<module>" else caller


# ── the runs ──


@contextmanager
def traced() -> Iterator[tuple[Recorder, list[Entry]]]:
    from floodmark import failpoints

    entries: list[Entry] = []
    recorder = Recorder(entries.append)
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    failpoints.observer = recorder.pass_failpoint
    try:
        yield recorder, entries
    finally:
        recorder.recording = False
        failpoints.observer = None
        threading.setprofile(None)
        sys.setprofile(None)


def walk_of_a_row(folder: Path) -> list[Entry]:
    """A row over HTTP into a file: two are sent, the second one is traced."""
    import httpx

    import floodmark as fm

    with traced() as (recorder, entries), fm.open(str(folder / "lake"), create=True) as lake:
        lake.create_table("events", "id long not null, name string")
        lake.sinks.add("out", "files", tables=["events"], path=str(folder / "out"))
        with served(lake, folder / "spool") as address:
            for number in (1, 2):
                recorder.recording = number == 2
                answer = httpx.post(
                    f"{address}/api/tables/events/rows?wait=committed", content=json.dumps({"id": number}), timeout=60
                )
                answer.raise_for_status()
                lake.sinks.run("out")
            recorder.recording = False
    return entries


@contextmanager
def served(lake: fm.Lake, spool: Path) -> Iterator[str]:
    """The real app on a real socket, in a thread of this process."""
    import uvloop

    from floodmark.ingest.intake import Intake
    from floodmark.serve.app import create_app
    from floodmark.serve.http.server import Server, bound
    from floodmark.serve.http.service import Service

    intake = Intake(lake.engine, spool)
    intake.start()
    app = create_app(Service(lake, intake=intake))
    up, address = threading.Event(), []

    def announce(url: str) -> None:
        address.append(url)
        up.set()

    with bound("127.0.0.1:0") as listening:
        server = Server(app, listening, announce, 5)
        thread = threading.Thread(
            target=lambda: uvloop.run(server.serve(sockets=[listening])), name="walk-server", daemon=True
        )
        thread.start()
        try:
            if not up.wait(60):
                raise RuntimeError("the server did not start")
            yield address[0]
        finally:
            server.stop()
            thread.join(30)
            app.state.workers.close(5)
            intake.close()


def walk_of_a_merge(folder: Path) -> list[Entry]:
    """A DataFrame is merged into a table with a key: one row is replaced, one is new."""
    import floodmark as fm

    workers = folder / "workers"
    workers.mkdir()
    (folder / "sitecustomize.py").write_text("from docs.walks import record_worker\nrecord_worker()\n")
    os.environ[VARIABLE] = str(workers)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = '[spark]\nmaster = "local[1]"\n"spark.sql.shuffle.partitions" = "1"\n"spark.ui.enabled" = "false"\n'
    config = folder / "floodmark.toml"
    config.write_text(f'[lake]\npath = "{folder / "lake"}"\n{settings}')
    with traced() as (recorder, entries), fm.open(config, create=True) as lake:
        lake.create_table("users", "id long not null, name string", key=["id"])
        lake.append("users", [{"id": 1, "name": "Ada"}])
        frame = lake.spark.createDataFrame([(1, "Ada L."), (2, "Bo")], "id long, name string")
        recorder.recording = True
        lake.merge("users", frame)
        recorder.recording = False
        lake.spark.stop()
    for path in workers.iterdir():
        entries += [Entry(**json.loads(line)) for line in path.read_text().splitlines()]
    return sorted(entries, key=lambda entry: entry.at_s)


def record_worker() -> None:
    """In a Python worker of Spark: each entry is written at once, since a worker ends without a word."""
    folder = os.environ[VARIABLE]

    def write(entry: Entry) -> None:
        with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    recorder = Recorder(write, stage="executors")
    recorder.recording = True
    sys.setprofile(recorder.profile)
    threading.setprofile(recorder.profile)


# ── the page ──


@dataclass(frozen=True)
class Walk:
    """The modules of a walk, in the order of their first entry."""

    entries: Sequence[Entry]

    @property
    def first(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for entry in self.entries:
            found.setdefault(entry.module, entry)
        return found

    @property
    def come_back_to(self) -> dict[str, list[str]]:
        """Modules above the ground floor that more than one stage enters, with the stages."""
        stages: dict[str, list[str]] = {}
        for entry in self.entries:
            found = stages.setdefault(entry.module, [])
            if entry.stage not in found:
                found.append(entry.stage)
        return {module: found for module, found in stages.items() if len(found) > 1 and not module.startswith(GROUND)}

    @property
    def counts(self) -> tuple[int, int, int]:
        """All modules; of those above the ground floor: how many call another one, how many compute and return."""
        above = {module for module in self.first if not module.startswith(GROUND)}
        calling = above & {entry.caller for entry in self.entries if entry.module in above}
        return len(self.first), len(calling), len(above - calling)

    def stages(self) -> Iterator[tuple[str, list[Entry]]]:
        by_stage: dict[str, list[Entry]] = {}
        for entry in self.first.values():
            by_stage.setdefault(entry.stage, []).append(entry)
        yield from by_stage.items()

    def lines(self, before: tuple[int, int, int]) -> Iterator[str]:
        yield "| modules | now | before |"
        yield "|---|---|---|"
        names = ("that hand it on to another", "that compute and return", "of the ground floor")
        for name, one, other in zip(names, _split(self.counts), _split(before), strict=True):
            yield f"| {name} | {one} | {other} |"
        yield f"| **all** | **{self.counts[0]}** | **{before[0]}** |"
        yield ""
        yield "| stage | modules that it enters first, in order, and by which function |"
        yield "|---|---|"
        number = 0
        for stage, entries in self.stages():
            named = []
            for entry in entries:
                number += 1
                named.append(f"{number} `{entry.module}` ({_plain(entry.function)})")
            yield f"| {stage} | {' · '.join(named)} |"
        yield ""
        again = [f"`{module}` ({', '.join(stages)})" for module, stages in self.come_back_to.items()]
        yield f"Above the ground floor, entered in more than one stage: {'; '.join(again) or 'none'}."


def _split(counts: tuple[int, int, int]) -> tuple[int, int, int]:
    everything, calling, computing = counts
    return calling, computing, everything - calling - computing


def _plain(function: str) -> str:
    return function.replace(".<locals>", "").replace("<", "").replace(">", "").replace("_", "\\_")


def walks_section(row: Walk, merge: Walk) -> str:
    parts = ["### A row over HTTP to a file of a sink", "", *row.lines(ROW_BEFORE), ""]
    return "\n".join([*parts, "### A merge of a Spark DataFrame", "", *merge.lines(MERGE_BEFORE)])


def marks(name: str) -> tuple[str, str]:
    """The lines around a written section of the page."""
    return f"<!-- {name}: written by `make walks` -->", f"<!-- end of {name} -->"


def written(page: str, name: str, text: str) -> str:
    """The page with another text in one of its written sections."""
    begin, end = marks(name)
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page has no section {name}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def show_functions(walk: Walk) -> None:
    """Every function by which a module is entered: for a reader who looks for modules to merge."""
    for number, module in enumerate(walk.first, 1):
        sys.stdout.write(f"{number} {module}\n")
        for entry in walk.entries:
            if entry.module == module:
                sys.stdout.write(f"      {entry.stage}: {entry.function} by {entry.caller or 'no module of ours'}\n")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="floodmark-walk-") as name:
        folder = Path(name)
        for one in ("row", "merge"):
            (folder / one).mkdir()
        row, merge = Walk(walk_of_a_row(folder / "row")), Walk(walk_of_a_merge(folder / "merge"))
    if "--functions" in sys.argv:
        show_functions(row)
        show_functions(merge)
        return
    page = written(PAGE.read_text(), "walks", walks_section(row, merge))
    PAGE.write_text(written(page, "sizes", "\n".join(rooms.lines())))


if __name__ == "__main__":
    main()

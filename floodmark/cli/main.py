"""`floodmark [--lake PATH] [--json] COMMAND`: the entry, the exit codes, and errors as words.

Exit codes: 0 done (also "nothing to do"), 1 failed, 2 wrong usage or input, 3 conflict, 4 unavailable, 5 refused. If
the program that reads stdout closes it, as `head` does, the command ends without a word and with 141, as a shell
reports for programs that SIGPIPE has ended. The signal itself stays ignored: a closed connection must end no command.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer._completion_shared import get_completion_script

from floodmark import __version__
from floodmark.cli import (
    backfill,
    branch,
    column,
    demo,
    index,
    lifecycle,
    lookup,
    maintain,
    reading,
    recovery,
    run,
    schema,
    sink,
    spool,
    state,
    versions,
    writing,
)
from floodmark.cli.context import CommandContext
from floodmark.cli.output import Output
from floodmark.errors import FloodmarkError, cause_text, read_on_the_command_line

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# 128 and the number of SIGPIPE.
READER_LEFT = 141


class ReaderLeft(Exception):
    """The program that reads stdout has closed it."""


class _Stdout(io.FileIO):
    """Tells stdout's broken pipe from all others. Typer and Rich would end the process with 1 at a BrokenPipeError."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderLeft from error


app = typer.Typer(
    name="floodmark",
    help="A crash-safe, exactly-once lakehouse engine for Spark.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# In the order in which --help lists them.
_COMMANDS = (
    lifecycle.init,
    *(state.status, state.doctor, state.tables, state.show, state.history),
    *(reading.query, reading.scan, reading.head, lookup.get, lookup.lookup),
    *(reading.changes, reading.export, versions.diff),
    schema.plan,
    *(writing.load, writing.update, writing.delete, versions.rollback),
    lifecycle.adopt,
    *(schema.apply, schema.drop, schema.undrop, schema.rename),
    *(recovery.recover, recovery.repair),
    state.audit,
    *(lifecycle.backup, lifecycle.restore),
    demo.demo,
    run.run,
)
for command in _COMMANDS:
    app.command(command.__name__)(command)
app.add_typer(column.app, name="column")
app.add_typer(maintain.app, name="maintain")
app.add_typer(sink.app, name="sink")
app.add_typer(spool.app, name="spool")
app.add_typer(backfill.app, name="backfill")
app.add_typer(branch.app, name="branch")
app.add_typer(index.app, name="index")
CONFIG_HELP = "Settings file (default: ./floodmark.toml). If given, its [lake] section overrides the environment."
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
# No address of a database looks like this: it is a property of the catalog that a sink ships to.
_PROPERTY = re.compile(r"[\w.-]+=")


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"floodmark {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    lake: Annotated[str | None, typer.Option(help="Folder or s3:// address of the lake (or FLOODMARK_LAKE).")] = None,
    catalog: Annotated[str | None, typer.Option(help="Catalog database URL (or FLOODMARK_CATALOG).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP)] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    context.obj = CommandContext(lake, catalog, config, Output(json))


def main(arguments: list[str] | None = None) -> None:
    _open_streams()
    _hear_interrupts()
    _watch_stdout()
    try:
        with read_on_the_command_line():
            _run(_globals_first(sys.argv[1:] if arguments is None else arguments))
    except SystemExit as ended:
        # Of a command that failed, the code says more.
        if not _flushed() and not ended.code:
            sys.exit(READER_LEFT)
        raise
    if not _flushed():
        sys.exit(READER_LEFT)


def _run(given: list[str]) -> None:
    if given[:1] == ["--show-completion"] and given[1:] and given[1] in SHELLS:
        # Named, it need not be found out: under cron, make or an editor no shell may be above this process.
        script = get_completion_script(prog_name="floodmark", complete_var="_FLOODMARK_COMPLETE", shell=given[1])
        sys.stdout.write(script + "\n")
        return
    output = Output("--json" in given)
    try:
        app(given, standalone_mode=True)
    except FloodmarkError as error:
        with suppress(ReaderLeft):
            output.error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("floodmark: stopped\n")
        sys.exit(130)
    except ReaderLeft:
        sys.exit(READER_LEFT)
    except Exception as error:
        # The edge: a person gets a sentence, and the trace only if they ask for it.
        if os.environ.get("FLOODMARK_LOG", "").lower() == "debug":
            raise
        sys.stderr.write(f"floodmark: unexpected {cause_text(error)}\n(FLOODMARK_LOG=debug shows where)\n")
        sys.exit(1)


def _hear_interrupts() -> None:
    """cron, nohup and some runners start programs with SIGINT ignored: a run would go on as if it had not been asked to
    stop, while the programs below it stop."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams() -> None:
    """Open the standard streams that the parent process has closed: otherwise the next file that is opened becomes one
    of them, and gets the output of the command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            while (opened := os.open(os.devnull, os.O_RDWR)) < number:
                pass
            setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w"))


def _watch_stdout() -> None:
    """From here on a write to a closed stdout is ReaderLeft."""
    before = sys.stdout
    if before is sys.__stdout__ and isinstance(before, io.TextIOWrapper):
        before.flush()
        raw = _Stdout(before.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw, 1 if before.write_through else io.DEFAULT_BUFFER_SIZE),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )


def _flushed() -> bool:
    """Write what waits in stdout. Where it is closed, Python would try again at its exit, and warn: let it succeed."""
    try:
        sys.stdout.flush()
    except ReaderLeft:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _globals_first(arguments: list[str]) -> list[str]:
    """--lake, --catalog, --config and --json may stand anywhere: people write them behind the command too."""
    first: list[str] = []
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            rest.extend([argument, *waiting])
        elif argument == "--json" or argument.startswith(("--lake=", "--config=")):
            first.append(argument)
        elif argument.startswith("--catalog="):
            (rest if _PROPERTY.match(argument.removeprefix("--catalog=")) else first).append(argument)
        elif argument in ("--lake", "--catalog", "--config"):
            value = [found] if (found := next(waiting, None)) is not None else []
            is_property = argument == "--catalog" and value and _PROPERTY.match(value[0])
            (rest if is_property else first).extend([argument, *value])
        else:
            rest.append(argument)
    return first + rest


if __name__ == "__main__":
    main()

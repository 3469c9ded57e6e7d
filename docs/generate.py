"""Write docs/cli.md from the commands themselves: `make docs`, or `python -m docs.generate`.

Help texts, exit codes and settings are asked of the code, at a fixed width, so the page depends on nothing of the
machine. tests/unit/test_docs.py fails while the page on disk is not what this would write.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from typer.main import get_command

from floodmark import errors
from floodmark.cli.main import READER_LEFT, app
from floodmark.failpoints import VARIABLE as FAILPOINT_VARIABLE
from floodmark.settings.settings import (
    CATALOG_VARIABLE,
    FILE_NAME,
    LAKE_VARIABLE,
    OFF,
    SECTIONS,
    MaintainSettings,
    ServeSettings,
    Settings,
)
from floodmark.storage.options import KNOWN as STORAGE_OPTIONS

PAGE = Path(__file__).parent / "cli.md"
WIDTH = 100

INTRO = """\
# Command line

Written by `make docs` from the commands' own help; do not edit it.

Results go to stdout, progress and errors to stderr. With `--json` stdout gets one object and nothing else; an error
is `{"error": {"kind", "message", "facts", "advice"}}`. `--lake`, `--catalog`, `--config` and `--json` may stand before
the command or behind it; what follows `--` is left alone.
"""

ENVIRONMENT = {
    LAKE_VARIABLE: "the lake, where neither `--lake` nor `[lake] path` of a file that `--config` names says it",
    CATALOG_VARIABLE: "the catalog's URL, where neither `--catalog` nor `[lake] catalog` of such a file says it",
    "FLOODMARK_LOG": "`debug`, `info`, `warning` (default) or `error`; `debug` also shows traces",
    "FLOODMARK_LOG_FORMAT": "`json` for a JSON object per line instead of logfmt",
    FAILPOINT_VARIABLE: "`name[:N]`: die by SIGKILL at the Nth passing of a failpoint (tests and the demo)",
    "AWS_*": "credentials of object stores; they are never settings",
}

KEPT = MaintainSettings()
SERVED = ServeSettings()
SETTING_HELP = {
    "lake.path": "folder or s3:// address",
    "lake.catalog": "catalog database URL; without it SQLite in the lake's folder",
    "maintain.compact_files": f"small files of a partition that are worth a rewrite; {KEPT.compact_files}",
    "maintain.keep_versions": f"how long versions can be read; `{KEPT.keep_versions}`",
    "maintain.grace": f"how long files of expired versions stay for their readers; `{KEPT.grace}`",
    "maintain.every": f"how often `floodmark run` does all of it; `{KEPT.every}`, or `{OFF}`",
    "serve.bind": f"where `floodmark run` listens; `{SERVED.bind}`",
    "serve.token_sha256": "the hash of the token that writers must send; `floodmark run --new-token` makes both",
    "serve.spool": "folder on a local disk for rows that are taken and not committed yet; `spool` in a local lake",
    "serve.drain": f"how long what is under way may take after SIGTERM; `{SERVED.drain}`",
    "serve.tokens": "`[serve.tokens.NAME]`: `sha256` and `role` (`read`, `write` or `admin`) of a token",
    "jobs.resume": "whether `floodmark run` goes on with backfills that died, or failed for a passing reason; `true`",
    "jobs.give_up": "how long a backfill that follows its source, and `floodmark run`, try again; `1d`",
    "spark": "`master`; `stall`, how long a job may wait for a live executor: seconds, or a span like `5m` (the "
    "default); and any `spark.*` key as Spark spells it",
    "sources": "`[sources.NAME]`: a drop folder: `type`, `path`, `table`, `format`, `mode`, `every`, `settle`; "
    "[running.md](running.md)",
    "sinks": "`[sinks.NAME]`: `type`, `tables`, `every` and the settings of that kind, for `floodmark sink add NAME`",
    "tables": "`[tables.NAME]`: tables as code, for `floodmark plan` and `floodmark apply`; [schema.md](schema.md)",
    "storage": "for object stores: "
    + ", ".join(f"`{name}`" for name in STORAGE_OPTIONS)
    + "; a failed request is repeated for `retry_s` seconds (60), at most `retries` times (no limit)",
}


def error_kinds() -> list[type[errors.FloodmarkError]]:
    """The kinds that a caller may meet, in the order in which errors.py explains them."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    found = [kind for kind in kinds if issubclass(kind, errors.FloodmarkError) and kind is not errors.FloodmarkError]
    return sorted(found, key=lambda kind: inspect.getsourcelines(kind)[1])


def setting_names() -> list[str]:
    """The keys of the settings file, as far as they have names."""
    named = [f"{section}.{one.name}" for section, keys in SECTIONS.items() for one in fields(keys)]
    return [*named, *(one.name for one in fields(Settings) if one.name not in SECTIONS)]


def page() -> str:
    """The whole page, as it should be on disk."""
    group: Any = get_command(app)
    top = group.make_context("floodmark", [], resilient_parsing=True, terminal_width=WIDTH)
    parts = [INTRO, _section("floodmark", group.get_help(top)), *_commands(group, top)]
    parts += [_exit_codes(), _environment(), _settings()]
    return "\n".join(parts)


def _commands(group: Any, above: Any) -> Iterator[str]:
    """A section for each command of a group, and for each of theirs."""
    for name in group.list_commands(above):
        command = group.get_command(above, name)
        context = type(above)(command, info_name=name, parent=above, terminal_width=WIDTH)
        yield _section(context.command_path, command.get_help(context))
        if hasattr(command, "list_commands"):
            yield from _commands(command, context)


def _section(title: str, help_text: str) -> str:
    lines = "\n".join(line.rstrip() for line in help_text.strip().splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


def _exit_codes() -> str:
    rows = [
        (0, "", "Done; also when there was nothing to do."),
        (1, "", "Failed: a check, a key without a row (`get`), or something unexpected."),
    ]
    rows += [(kind.exit_code, f"`{kind.__name__}`", (kind.__doc__ or "").splitlines()[0]) for kind in error_kinds()]
    rows += [(READER_LEFT, "", "The program that reads the output has closed it, as `head` does. Not an error.")]
    rows.sort(key=lambda row: row[0])
    table = [f"| {code} | {kind} | {text} |" for code, kind, text in rows]
    return "\n".join(["## Exit codes and kinds of error", "", "| code | kind | means |", "|---|---|---|", *table, ""])


def _environment() -> str:
    table = [f"| `{name}` | {text} |" for name, text in ENVIRONMENT.items()]
    return "\n".join(["## Environment", "", "| variable | is |", "|---|---|", *table, ""])


def _settings() -> str:
    table = [f"| `{name}` | {SETTING_HELP[name]} |" for name in setting_names()]
    lead = f"`{FILE_NAME}` of the working folder, or the file that `--config` names. An unknown key is an error."
    order = (
        "Which lake is meant: `--lake`, else the file that `--config` names (in Python `config=`, or the file that is\n"
        f"opened), else `{LAKE_VARIABLE}`, else the `{FILE_NAME}` of the working folder. So it is for the catalog."
    )
    return "\n".join(["## Settings", "", lead, "", order, "", "| key | is |", "|---|---|", *table, ""])


if __name__ == "__main__":
    PAGE.write_text(page())

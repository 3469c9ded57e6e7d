"""`floodmark run`: the daemon. Serves the lake over HTTP and does its tasks on schedule, until SIGTERM or SIGINT.

Settings are checked as a whole before anything starts; `--check` ends there, after it tried the store and, on a
cluster, every executor of Spark.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.errors import Invalid, NotFound, Unavailable
from floodmark.json_form import Json

if TYPE_CHECKING:
    from floodmark.lake import Lake
    from floodmark.serve.daemon.declaration import Declaration

ROLES = ("read", "write", "admin")


def run(
    context: typer.Context,
    bind: Annotated[
        str | None,
        typer.Option(help="Address to listen on, like 127.0.0.1:8787 (the default); port 0 picks a free port."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the lake, declared tables and drop folders if they do not exist.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check the settings, the lake, its storage and the Spark cluster, then exit."),
    ] = False,
    new_token: Annotated[bool, typer.Option("--new-token", help="Print a new token and its hash, then exit.")] = False,
    role: Annotated[str, typer.Option(help="With --new-token: read, write or admin.")] = "write",
    name: Annotated[str | None, typer.Option(help="With --new-token: its name in the settings.")] = None,
) -> None:
    """Run the daemon: HTTP API and page; drop folders, sinks, maintenance and jobs on schedule."""
    if new_token:
        _print_token(context, role, name)
        return
    from floodmark.serve.daemon.declaration import check_apart, check_file, check_folders_exist
    from floodmark.serve.daemon.lifecycle import spool_folder, tokens_of
    from floodmark.serve.http.server import check_bind

    settings = context.obj.settings
    chosen = bind or settings.serve.bind
    declaration = check_file(settings)
    check_bind(chosen, bool(tokens_of(settings)))
    check_apart(declaration, context.obj.path, spool_folder(context.obj.path, settings))
    if check:
        if not create:
            check_folders_exist(declaration, create=False)
        _check_only(context, declaration, create)
        return
    check_folders_exist(declaration, create=create)
    _run(context, declaration, chosen, create)


def _run(context: typer.Context, declaration: Declaration, bind: str, create: bool) -> None:
    from floodmark.cli.backfill import find_functions_here
    from floodmark.serve.daemon.lifecycle import Daemon

    # Jobs are gone on with as `backfill resume` does from here.
    find_functions_here()
    with context.obj.open(read_only=False, create=create) as lake:
        differences: list[str] = []

        def announce(address: str) -> None:
            _announce(context, address, lake.location, differences)

        def note(difference: str) -> None:
            differences.append(difference)
            context.obj.output.note(f"floodmark: {difference}")

        Daemon(lake, context.obj.settings, declaration, bind, announce, note, create).run()


def _check_only(context: typer.Context, declaration: Declaration, create: bool) -> None:
    """Against the lake too, if there is one; it is opened read-only."""
    from floodmark.serve.daemon.declaration import check_lake

    _check_store(context)
    try:
        with context.obj.open() as lake:
            check_lake(declaration, {head.table for head in lake.heads()}, lake.catalog.sinks.all())
            _check_cluster(context, lake)
    except NotFound:
        if not create:
            raise
        check_lake(declaration, set())
    figures = {name: len(getattr(declaration, name)) for name in ("tables", "sources", "sinks")}
    said = ", ".join(f"{count} {name if count != 1 else name[:-1]}" for name, count in figures.items())
    data: dict[str, Json] = {"outcome": "checked", "file": declaration.text.file or None, **figures}
    context.obj.output.result(data, text=f"the settings are valid: {said}")


def _check_store(context: typer.Context) -> None:
    from floodmark.storage import root_location
    from floodmark.storage.probe import is_remote, probe_bucket

    root = root_location(context.obj.path)
    if is_remote(root):
        probe_bucket(context.obj.settings.storage, root)


def _check_cluster(context: typer.Context, lake: Lake) -> None:
    """A task on every executor. Not in local mode: there the executor is this machine, and this Python."""
    from floodmark import __version__
    from floodmark.repair.examine import examine_executors
    from floodmark.rows.session import is_local

    if is_local(context.obj.settings.spark):
        return
    found = examine_executors(lake.sessions, __version__, lake.location, lake.catalog.storage.options)
    bad = [check for check in found if not check.passed]
    if bad:
        raise Unavailable(
            "Spark executors cannot use this lake",
            problems="; ".join(f"{check.name}: {check.detail}" for check in bad),
            advice="`floodmark doctor --deep` lists every executor.",
        )
    context.obj.output.note(f"floodmark: {len(found)} of {len(found)} executors answered")


def _announce(context: typer.Context, address: str, lake: str, differences: list[str]) -> None:
    from floodmark.serve.daemon.lifecycle import spool_folder, tokens_of

    settings = context.obj.settings
    has_token = bool(tokens_of(settings))
    if context.obj.output.as_json:
        spool = spool_folder(lake, settings)
        found = {"address": address, "lake": lake, "token": has_token, "page": f"{address}/"}
        found |= {"spool": None if spool is None else str(spool), "differences": differences}
        context.obj.output.result(found)
        sys.stdout.flush()
    else:
        caller = "a token is required" if has_token else "anyone on this machine may write"
        context.obj.output.note(f"floodmark: serving {lake} at {address}; {caller}")


def _print_token(context: typer.Context, role: str, name: str | None) -> None:
    from floodmark.serve.http.access import new_token, token_hash

    if role not in ROLES:
        raise Invalid("unknown role", role=role, advice=f"Use {', '.join(ROLES)}.")
    if name is not None and not (name.isascii() and name.replace("-", "").replace("_", "").isalnum()):
        raise Invalid("invalid token name", name=repr(name)[:80], advice="Use letters, digits, - and _.")
    token = new_token()
    digest = token_hash(token)
    lines = [f"[serve.tokens.{name or role}]", f'sha256 = "{digest}"', f'role = "{role}"']
    text = f"{token}\n\nAdd its hash to floodmark.toml. The token itself is not stored:\n\n" + "\n".join(lines)
    data = {"token": token, "token_sha256": digest, "role": role, "name": name or role}
    context.obj.output.result(data, text=text)

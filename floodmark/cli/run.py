"""`floodmark run`: the daemon. Serves the lake over HTTP until SIGTERM or SIGINT."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def run(
    context: typer.Context,
    bind: Annotated[
        str | None, typer.Option(help="Address, like 127.0.0.1:8787 (the default); port 0 is any free one.")
    ] = None,
    new_token: Annotated[bool, typer.Option("--new-token", help="Print a new token and its hash, and end.")] = False,
) -> None:
    """Serve the lake over HTTP: rows come in, each once."""
    if new_token:
        _print_token(context)
        return
    from floodmark.serve.app import create_app
    from floodmark.serve.server import check_bind, serve

    settings = context.obj.settings.serve
    chosen = bind or settings.bind
    check_bind(chosen, settings.token_sha256)
    with context.obj.open(read_only=False) as lake:

        def announce(address: str) -> None:
            _announce(context, address, lake.location, settings.token_sha256 is not None)

        serve(create_app(lake, token_sha256=settings.token_sha256), chosen, announce)


def _announce(context: typer.Context, address: str, lake: str, has_token: bool) -> None:
    if context.obj.output.as_json:
        context.obj.output.result({"address": address, "lake": lake, "token": has_token})
        sys.stdout.flush()
    else:
        caller = "whoever has the token" if has_token else "anybody on this machine"
        context.obj.output.note(f"floodmark: serving {lake} at {address}; {caller} may write")


def _print_token(context: typer.Context) -> None:
    from floodmark.serve.tokens import new_token, token_hash

    token = new_token()
    setting = f'token_sha256 = "{token_hash(token)}"'
    text = f"{token}\n\nIts hash belongs into floodmark.toml; the token itself is kept nowhere:\n\n[serve]\n{setting}"
    context.obj.output.result({"token": token, "token_sha256": token_hash(token)}, text=text)

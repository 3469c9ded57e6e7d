"""A lake served by a process of its own, for tests that kill it; the daemon without its tasks and its lease."""

from __future__ import annotations

from pathlib import Path

import uvloop

import floodmark as fm
from floodmark.serve.app import create_app
from floodmark.serve.http.server import Server, bound
from floodmark.serve.http.service import Service

GRACE_S = 20


def serve_at(path: str, bind: str, address: str) -> None:
    """Serve until a signal comes; `address`: the file that gets the address, once requests are answered."""

    def announce(url: str) -> None:
        Path(f"{address}.new").write_text(url)
        Path(f"{address}.new").rename(address)

    with fm.open(path) as lake:
        app = create_app(Service(lake))
        with bound(bind) as listening:
            uvloop.run(Server(app, listening, announce, GRACE_S).serve(sockets=[listening]))
        app.state.workers.close(GRACE_S)

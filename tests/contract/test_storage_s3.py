"""What only S3 promises: multipart uploads dropped, claims that survive a lost reply, credentials that stay at home."""

from __future__ import annotations

import http.client
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from floodmark.errors import Invalid, Unavailable
from floodmark.storage import Storage
from floodmark.storage.fileio import LakeFileIO
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.s3 import ENVIRONMENT, S3Server
from floodmark.testing.storage_contract import names


class LosesFirstReply(ThreadingHTTPServer):
    """Passes every request on to a server, and loses the reply to the first PUT: by a 503, or by hanging up."""

    daemon_threads = True

    def __init__(self, behind: str, hang_up: bool) -> None:
        super().__init__(("127.0.0.1", 0), PassOn)
        self.behind = behind.removeprefix("http://")
        self.hang_up = hang_up
        self.statuses: list[tuple[str, int]] = []


class PassOn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LosesFirstReply

    def pass_on(self) -> None:
        connection = http.client.HTTPConnection(self.server.behind, timeout=30)
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        connection.request(self.command, self.path, body or None, dict(self.headers))
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        self.server.statuses.append((self.command, reply.status))
        lost = [command for command, _ in self.server.statuses] == ["PUT"]
        if lost and self.server.hang_up:
            self.close_connection = True
            return
        self.send_response_only(503 if lost else reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_GET = do_HEAD = do_POST = pass_on


@pytest.fixture(params=[False, True], ids=["503", "hang_up"])
def lossy(request: pytest.FixtureRequest, s3_server: S3Server) -> Iterator[LosesFirstReply]:
    server = LosesFirstReply(s3_server.endpoint, request.param)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class TestS3:
    @pytest.fixture
    def bucket(self, s3_server: S3Server) -> str:
        return s3_server.make_bucket()

    @pytest.fixture
    def storage(self, s3_server: S3Server) -> Storage:
        return Storage(s3_server.options)

    def test_a_failed_stream_drops_its_parts(self, storage: Storage, s3_server: S3Server, bucket: str) -> None:
        def fail() -> None:
            with storage.writer(f"s3://{bucket}/x") as stream:
                stream.write(b"x" * (20 << 20))
                assert s3_server.open_uploads(bucket) == ["x"]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert s3_server.open_uploads(bucket) == []

    def test_a_torn_write_leaves_an_upload_that_nobody_sees(self, s3_server: S3Server, bucket: str) -> None:
        faulty = FaultyStorage(s3_server.options, fail_at=1, mode="torn")
        with pytest.raises(Unavailable):
            faulty.put(f"s3://{bucket}/x", b"12345678")
        assert s3_server.open_uploads(bucket) == ["x"]
        assert not faulty.exists(f"s3://{bucket}/x")
        assert names(faulty, f"s3://{bucket}") == []

    def test_the_bucket_itself_can_be_listed_but_never_emptied(self, storage: Storage, bucket: str) -> None:
        storage.put(f"s3://{bucket}/a/x", b"1")
        assert names(storage, f"s3://{bucket}") == ["a/x"]
        with pytest.raises(Invalid):
            storage.delete_prefix(f"s3://{bucket}/")

    def test_a_missing_bucket_does_not_look_like_a_missing_file(self, storage: Storage) -> None:
        for call in (
            lambda: storage.read("s3://no-such-bucket/x"),
            lambda: storage.put("s3://no-such-bucket/x", b"1"),
            lambda: storage.put_if_absent("s3://no-such-bucket/x", b"1"),
            lambda: list(storage.list("s3://no-such-bucket/x")),
        ):
            with pytest.raises(Unavailable, match="no such bucket"):
                call()

    def test_an_endpoint_that_is_not_there_is_unavailable(self, s3_server: S3Server) -> None:
        storage = Storage({"endpoint": "http://127.0.0.1:9", "retries": "0"})
        with pytest.raises(Unavailable) as caught:
            storage.read("s3://bucket/x")
        assert caught.value.__cause__ is not None
        assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)

    def test_other_names_of_the_scheme_reach_the_same_file(self, storage: Storage, bucket: str) -> None:
        storage.put(f"s3://{bucket}/x", b"1")
        assert storage.read(f"s3a://{bucket}/x") == b"1"

    def test_no_credential_travels(self, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "visible-id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret")
        storage = Storage(s3_server.options)
        storage.put(f"s3://{bucket}/x", b"1")
        file_io = LakeFileIO({"uri": "postgresql://me:hidden-secret@host/db", "s3.endpoint": s3_server.endpoint})
        file_io.storage.read(f"s3://{bucket}/x")
        for thing in (storage, file_io):
            assert b"hidden-secret" not in pickle.dumps(thing)
            assert b"visible-id" not in pickle.dumps(thing)
            assert "hidden-secret" not in repr(thing)
        assert pickle.loads(pickle.dumps(file_io)).new_input(f"s3://{bucket}/x").exists()

    def test_a_claim_whose_reply_was_lost_is_still_known_as_won(
        self, s3_server: S3Server, bucket: str, lossy: LosesFirstReply
    ) -> None:
        storage = Storage({**s3_server.options, "endpoint": f"http://127.0.0.1:{lossy.server_port}"})
        assert storage.put_if_absent(f"s3://{bucket}/x", b"mine")
        # The client asked again by itself, and was told that somebody has the name.
        assert lossy.statuses[:2] == [("PUT", 200), ("PUT", 412)]
        assert not storage.put_if_absent(f"s3://{bucket}/x", b"mine")
        assert storage.read(f"s3://{bucket}/x") == b"mine"

"""Locations, options, counters and failures of storage: what needs no store."""

from __future__ import annotations

import errno
import os
from urllib.parse import urlparse

import pytest

from floodmark.errors import FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.storage import Counters, Storage, join, local_path, root_location
from floodmark.storage.failures import local_failure, object_failure


@pytest.mark.parametrize(
    ("written", "location"),
    [
        ("/data/lake", "file:///data/lake"),
        ("/data/lake/", "file:///data/lake"),
        ("//data/./x/../lake", "file:///data/lake"),
        ("file:///data/lake/", "file:///data/lake"),
        ("file:/data/lake", "file:///data/lake"),
        ("file://localhost/data/lake", "file:///data/lake"),
        ("/data/my lake", "file:///data/my lake"),
        ("/data/süß/日本", "file:///data/süß/日本"),
        ("/data/a:b,c+d=e@f~g", "file:///data/a:b,c+d=e@f~g"),
        ("s3://bucket/p/", "s3://bucket/p"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3a://bucket/a/b", "s3://bucket/a/b"),
        ("memory://name/lake", "memory://name/lake"),
    ],
)
def test_a_root_has_one_spelling(written: str, location: str) -> None:
    assert root_location(written) == location
    assert root_location(location) == location


def test_a_relative_folder_becomes_absolute() -> None:
    assert root_location("./lake") == root_location("lake") == f"file://{os.getcwd()}/lake"
    assert root_location("~/lake") == f"file://{os.path.expanduser('~')}/lake"


@pytest.mark.parametrize("character", [*"#?%*[]{}\\", "\n", "\0", "\x7f", "\udc80"])
@pytest.mark.parametrize("root", ["/data/la{}ke", "s3://bucket/la{}ke", "./la{}ke"])
def test_characters_that_readers_disagree_on_are_refused_by_name(root: str, character: str) -> None:
    with pytest.raises(Invalid) as caught:
        root_location(root.replace("{}", character))
    assert ascii(character) in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "written",
    [
        *("", "  ", "/", "file:///", "file://host/x", "file:relative", "gs://bucket/x", "http://host/x"),
        *("s3://", "s3:///x", "s3://b/a//c", "s3://b/../c", "s3://b/./c", "s3://user@bucket/x", "memory://"),
    ],
)
def test_what_cannot_work_is_refused(written: str) -> None:
    with pytest.raises(Invalid):
        root_location(written)


@pytest.mark.parametrize("root", ["/data/my lake", "/data/süß", "/data/a;b/c", "s3://bucket/a b"])
def test_what_is_accepted_survives_urlparse(root: str) -> None:
    location = join(root_location(root), "table/metadata/x.json")
    assert urlparse(location).path == "/" + location.split("://", 1)[1].partition("/")[2]


def test_join_puts_one_slash_between() -> None:
    assert join("file:///lake", "a", "b/c", "/d/") == "file:///lake/a/b/c/d"
    assert join("s3://bucket/", "a") == join("s3://bucket", "a") == "s3://bucket/a"
    assert join("/lake/", "x") == "/lake/x"


@pytest.mark.parametrize("part", ["", "/", "..", "a/../b", "a//b", "."])
def test_join_never_climbs(part: str) -> None:
    with pytest.raises(Invalid):
        join("file:///lake", part)


def test_only_local_locations_have_a_path() -> None:
    assert local_path("file:///a b/ü") == "/a b/ü"
    assert local_path("file:/a") == local_path("/a") == "/a"
    assert local_path("s3://bucket/a") is None
    assert local_path("memory://name/a") is None
    with pytest.raises(Invalid):
        local_path("relative/path")


@pytest.mark.parametrize("name", ["access_key_id", "secret_access_key", "session_token", "AWS_SECRET_ACCESS_KEY"])
def test_a_credential_is_not_an_option(name: str) -> None:
    with pytest.raises(Invalid) as caught:
        Storage({name: "hidden-secret"})
    assert "hidden-secret" not in str(caught.value)
    assert "environment" in str(caught.value)


def test_a_password_in_the_endpoint_is_refused_without_repeating_it() -> None:
    with pytest.raises(Invalid) as caught:
        Storage({"endpoint": "https://me:hidden-secret@host"})
    assert "hidden-secret" not in str(caught.value)


def test_a_wrong_option_names_the_nearest_right_one() -> None:
    with pytest.raises(Invalid, match="Did you mean endpoint"):
        Storage({"endpiont": "https://host"})
    for options in ({"endpoint": "host:9000"}, {"retries": "many"}):
        with pytest.raises(Invalid):
            Storage(options)


def test_counters_count_exactly_and_a_snapshot_stands_still() -> None:
    counters = Counters()
    counters.count("put", written=3)
    before = counters.snapshot()
    counters.count("read", read=5)
    counters.count("fsync_file")
    assert before.as_dict() == {"calls": {"put": 1}, "bytes_read": 0, "bytes_written": 3}
    spent = counters.difference(before)
    assert (spent.calls, spent.bytes_read, spent.bytes_written) == ({"read": 1, "fsync_file": 1}, 5, 0)
    assert (spent.total, counters.total) == (1, 2)


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.ENOSPC, Unavailable, "the disk is full"),
        (errno.EDQUOT, Unavailable, "the disk is full"),
        (errno.EACCES, Unavailable, "permission denied"),
        (errno.EROFS, Unavailable, "permission denied"),
        (errno.EIO, Unavailable, "Input/output error"),
        (errno.ENOENT, Unavailable, "No such file"),
        (errno.ENAMETOOLONG, Invalid, "shorter"),
    ],
)
def test_a_failed_write_says_why_and_what_to_do(code: int, kind: type[FloodmarkError], text: str) -> None:
    error = local_failure(OSError(code, os.strerror(code)), "write", "/lake/x")
    assert type(error) is kind
    assert text in str(error)
    assert error.advice
    assert error.facts["location"] == "/lake/x"


def test_only_reading_what_is_absent_is_not_found() -> None:
    for code in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        assert type(local_failure(OSError(code, "x"), "read", "/lake/x")) is NotFound
    assert type(local_failure(OSError(errno.EACCES, "x"), "read", "/lake/x")) is Unavailable


def test_the_failure_of_an_object_store_repeats_one_line_of_it() -> None:
    failure = object_failure(PermissionError("403 Forbidden\nDebug source: everything"), "read", "s3://bucket/x")
    assert type(failure) is Unavailable
    assert "permission denied" in str(failure)
    assert "Debug" not in str(failure)

"""Locations: the full addresses of files, as Iceberg writes them into metadata.

`file:///folder/name`, `memory://name/key`, `s3://bucket/key`. A location is used verbatim: nothing is decoded or
encoded, because PyIceberg (urlparse), Spark (Hadoop's Path) and DuckDB do not agree on that. Only the root of a lake is
checked, once, for every character on which they disagree; Floodmark makes all names below it. Measured with all three:
spaces and letters of any script are read alike, so they are allowed.
"""

from __future__ import annotations

import os
import re

from floodmark.errors import Invalid

# '#' and '?' end the path for urlparse; '*?[]{}' are patterns for Spark and DuckDB; Hadoop turns '\' into '/';
# '%' is decoded by some readers and not by others.
_REFUSED = frozenset("#?%*[]{}\\")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_S3_NAMES = frozenset({"s3", "s3a", "s3n"})
_SCHEMES = "file:///folder, s3://bucket/prefix or memory://name/prefix"


def split(location: str) -> tuple[str, str, str]:
    """Scheme (file, memory, s3), bucket and key of a location; a local file has its path as key and no bucket."""
    if location.startswith("/"):
        return "file", "", location
    scheme, separator, rest = location.partition(":")
    if separator and scheme == "file":
        # Java writes file:/path, all others file:///path.
        path = rest.removeprefix("//localhost") if rest.startswith("//localhost/") else rest.removeprefix("//")
        if path.startswith("/"):
            return "file", "", "/" + path.lstrip("/")
    elif rest.startswith("//") and (scheme in _S3_NAMES or scheme == "memory"):
        bucket, _, key = rest[2:].partition("/")
        if _BUCKET.fullmatch(bucket):
            return ("memory" if scheme == "memory" else "s3"), bucket, key
    raise Invalid("unsupported location", location=repr(location), advice=f"Use {_SCHEMES}.")


def root_location(path: str) -> str:
    """The location of a lake's root from what a person wrote: `./lake`, `s3://bucket/prefix/`, `file:///folder`."""
    if not path.strip():
        raise Invalid("the lake's path is empty", advice=f"Use a folder, {_SCHEMES}.")
    _refuse_characters(path)
    if "://" not in path and not path.startswith("file:"):
        return _local_root(os.path.expanduser(path))
    scheme, bucket, key = split(path)
    if scheme == "file":
        return _local_root(key)
    key = key.strip("/")
    if any(part in ("", ".", "..") for part in key.split("/")) and key:
        raise Invalid("a part of the path is empty, '.' or '..'", location=path, advice="Write the path without them.")
    return f"{scheme}://{bucket}/{key}" if key else f"{scheme}://{bucket}"


def join(location: str, *parts: str) -> str:
    """The location of `parts` below `location`; parts may hold slashes, but no `..`."""
    joined = location.rstrip("/")
    for part in parts:
        names = part.strip("/").split("/")
        if any(name in ("", ".", "..") for name in names):
            raise Invalid("a name below a location is empty, '.' or '..'", location=location, name=repr(part))
        joined += "/" + "/".join(names)
    return joined


def local_path(location: str) -> str | None:
    """The plain path of a local file; None if the location is not on the local disk."""
    scheme, _, key = split(location)
    return key if scheme == "file" else None


def _local_root(path: str) -> str:
    # abspath keeps two leading slashes, which POSIX allows and a location cannot say.
    absolute = "/" + os.path.abspath(path).lstrip("/")
    if absolute == "/":
        raise Invalid("the root of the file system cannot be a lake", advice="Name a folder.")
    # Again: the working directory may add characters that `path` did not have.
    _refuse_characters(absolute)
    return "file://" + absolute


def _refuse_characters(path: str) -> None:
    found = sorted({c for c in path if c in _REFUSED or ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF})
    if found:
        raise Invalid(
            "the lake's path has characters that some readers of its tables do not support",
            path=ascii(path),
            characters=" ".join(ascii(c) for c in found),
            advice="Choose a path without them; spaces and letters of any script are fine.",
        )

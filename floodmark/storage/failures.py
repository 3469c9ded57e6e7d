"""Failures of storage as Floodmark's errors: absent is NotFound, everything else is Unavailable.

The cause is kept. No message holds a credential (I18): requests are signed in headers, which object stores' errors do
not show, and only the first line of such an error is repeated.
"""

from __future__ import annotations

import errno
import re

from floodmark.errors import FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.storage.options import missing_credentials

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
_TEXT_LENGTH_MAX = 300
# The default; a caller that knows more about the location passes a better one.
TRY_AGAIN = "Try again."
# S3's error codes in the body; of all "404 Not Found" answers, only these codes mean an absent file.
_ANSWER = re.compile(r"<Code>(\w+)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_ABSENT_CODES = frozenset({"NoSuchKey", "NotFound"})
_DENIED_CODES = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "XAdminUserNotFound"})
# The paths that object_store requests from the machine when the environment has no credentials.
_METADATA_PATHS = ("latest/api/token", "meta-data/iam/security-credentials")


def not_found(location: str) -> NotFound:
    return NotFound("there is no such file", location=location)


def local_failure(error: OSError, doing: str, location: str) -> FloodmarkError:
    """The error to raise for a failed system call."""
    if error.errno in _FULL:
        return Unavailable(
            f"cannot {doing}: the disk is full",
            location=location,
            advice="Free space on that disk and try again; nothing was left half written.",
        )
    if error.errno in _REFUSED:
        return Unavailable(
            f"cannot {doing}: permission denied",
            location=location,
            reason=error.strerror,
            advice="Give this user the right to read and write that folder, then try again.",
        )
    if error.errno in _ABSENT and doing == "read":
        return not_found(location)
    if error.errno == errno.ENAMETOOLONG:
        return Invalid("the name is too long for this file system", location=location, advice="Use a shorter path.")
    return Unavailable(f"cannot {doing}", location=location, reason=error.strerror or str(error), advice=TRY_AGAIN)


def object_failure(error: Exception, doing: str, location: str) -> FloodmarkError:
    """The error to raise for a failed call of an object store."""
    full_text = str(error)
    answered = _ANSWER.search(full_text)
    code = answered[1] if answered else ""
    text = (full_text.splitlines() or [""])[0][:_TEXT_LENGTH_MAX]
    if answered:
        text = ": ".join(part for part in answered.groups() if part)[:_TEXT_LENGTH_MAX]
    # A missing bucket must not look like a missing file.
    if "NoSuchBucket" in full_text:
        return Unavailable(
            f"cannot {doing}: there is no such bucket",
            location=location,
            advice="Create the bucket, or correct its name.",
        )
    if any(path in full_text for path in _METADATA_PATHS):
        return missing_credentials(location)
    kind = type(error).__name__
    denied = isinstance(error, PermissionError) or kind in ("PermissionDeniedError", "UnauthenticatedError")
    # A write does not need an existing name: the server means its user, or an upload that it ended.
    if isinstance(error, FileNotFoundError) and doing != "write" and (not code or code in _ABSENT_CODES):
        return not_found(location)
    if denied or code in _DENIED_CODES:
        return Unavailable(
            f"cannot {doing}: permission denied",
            location=location,
            reason=text,
            advice="Check the AWS_* variables in the environment of this process, and the bucket's policy.",
        )
    if isinstance(error, ValueError):
        return Invalid(f"cannot {doing}", location=location, reason=text, advice="Fix the location.")
    return Unavailable(
        f"cannot {doing}: the object store did not answer as it should",
        location=location,
        reason=text,
        advice="Check that the endpoint is reachable, then try again.",
    )

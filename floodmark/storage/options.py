"""Settings of object stores. They are sent with a Storage into tasks and logs, so a credential is never one of them
(I18): credentials come from the AWS_* variables in the environment of each process.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from floodmark.errors import Invalid, Unavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

KNOWN = ("endpoint", "region", "allow_http", "virtual_hosted_style", "anonymous", "timeout_s", "retry_s", "retries")
_SECRETS = ("key", "secret", "token", "password", "credential", "profile")
# Bounded waiting (I14): one request ends within this time, and a failed one is repeated for so long: a restart of the
# store fails no job. The number of tries does not matter, unless `retries` bounds them too.
_TIMEOUT_S = "60"
_RETRY_S = "60"
_RETRIES_MAX = "1000000"
_RETRY_PAUSE_S_MAX = 2
# Where object_store, without credentials in the environment, asks the machine for those of its role.
_METADATA = "http://169.254.169.254"
_METADATA_WAIT_S = 1.0
CREDENTIALS_ADVICE = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of this process on that host."


def checked(options: Mapping[str, str] | None) -> dict[str, str]:
    """The options, or Invalid that names what is wrong with them (never a value that may be a secret)."""
    result = {name: str(value) for name, value in (options or {}).items()}
    for name in result:
        if name in KNOWN:
            continue
        if any(word in name.lower() for word in _SECRETS):
            raise Invalid(
                "credentials are not storage options",
                option=name,
                advice="Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN in the environment.",
            )
        nearest = difflib.get_close_matches(name, KNOWN, n=1)
        raise Invalid(
            "unknown storage option",
            option=name,
            advice=f"Did you mean {nearest[0]}?" if nearest else f"Known are {', '.join(KNOWN)}.",
        )
    for name in ("timeout_s", "retry_s", "retries"):
        if name in result and not result[name].isdecimal():
            raise Invalid("this option must be a whole number", option=name, value=result[name])
    _check_endpoint(result.get("endpoint"))
    return result


def s3_arguments(options: Mapping[str, str]) -> dict[str, str | bool | ClientConfig | RetryConfig]:
    """Keyword arguments of obstore's S3Store; the environment supplies all others."""
    timeout_s = int(options.get("timeout_s", _TIMEOUT_S))
    retry_s = int(options.get("retry_s", _RETRY_S))
    arguments: dict[str, str | bool | RetryConfig] = {
        "retry_config": {
            "max_retries": int(options.get("retries", _RETRIES_MAX)) if retry_s else 0,
            "retry_timeout": timedelta(seconds=retry_s),
            "backoff": {"max_backoff": timedelta(seconds=_RETRY_PAUSE_S_MAX)},
        }
    }
    client: ClientConfig = {"timeout": timedelta(seconds=timeout_s)}
    endpoint = options.get("endpoint", "")
    if endpoint:
        arguments["endpoint"] = endpoint
    if _is_true(options, "allow_http") or endpoint.startswith("http://"):
        client["allow_http"] = True
    if "region" in options:
        arguments["region"] = options["region"]
    if _is_true(options, "virtual_hosted_style"):
        arguments["virtual_hosted_style_request"] = True
    if _is_true(options, "anonymous"):
        arguments["skip_signature"] = True
    return {**arguments, "client_options": client}


def check_credentials(bucket: str, options: Mapping[str, str]) -> None:
    """`Unavailable` if this process has no credentials: the store would report it only after all its retries.

    The kinds that object_store supports: a key, a token file of a web identity or container, the machine's own role.
    """
    named = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    containers = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if _is_true(options, "anonymous") or any(os.environ.get(name) for name in (*named, *containers)):
        return
    url = urlsplit(os.environ.get("AWS_METADATA_ENDPOINT") or _METADATA)
    try:
        with socket.create_connection((url.hostname or "", url.port or 80), _METADATA_WAIT_S):
            return
    except OSError as error:
        raise missing_credentials(f"s3://{bucket}") from error


def missing_credentials(location: str) -> Unavailable:
    return Unavailable(
        "there are no credentials for the object store",
        location=location,
        host=socket.gethostname(),
        advice=CREDENTIALS_ADVICE,
    )


def _is_true(options: Mapping[str, str], name: str) -> bool:
    return options.get(name, "false").lower() in ("true", "1", "yes")


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        url = urlsplit(endpoint)
        plain = url.username is None and url.password is None
    except ValueError as error:
        raise Invalid("the endpoint is not a URL", advice="Write it like https://host:port.") from error
    if not plain:
        raise Invalid("an endpoint must not hold a user or password", advice="Set the AWS_* variables instead.")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise Invalid("the endpoint is not a URL", endpoint=endpoint, advice="Write it like https://host:port.")

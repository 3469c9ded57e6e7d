"""Settings of object stores. They travel with a Storage into tasks and logs, so a credential is never one of them
(I18): credentials come from the AWS_* variables in the environment of each process.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from floodmark.errors import Invalid

KNOWN = ("endpoint", "region", "allow_http", "virtual_hosted_style", "anonymous", "timeout_s", "retries")
_SECRETS = ("key", "secret", "token", "password", "credential", "profile")
# Bounded waiting (I14): a store that does not answer is reported within about a minute.
_TIMEOUT_S = "60"
_RETRIES = "4"


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
    for name in ("timeout_s", "retries"):
        if name in result and not result[name].isdecimal():
            raise Invalid("this option must be a whole number", option=name, value=result[name])
    _check_endpoint(result.get("endpoint"))
    return result


def s3_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of obstore's S3Store; what is not said here comes from the environment."""
    timeout_s = int(options.get("timeout_s", _TIMEOUT_S))
    arguments: dict[str, Any] = {
        "retry_config": {
            "max_retries": int(options.get("retries", _RETRIES)),
            "retry_timeout": timedelta(seconds=timeout_s),
        }
    }
    client: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
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

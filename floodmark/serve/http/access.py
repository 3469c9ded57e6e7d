"""Who may do what: bearer tokens with roles, and what a browser on this machine may not do in its user's name.

A role may do all that the roles before it may: read, write, admin. Only hashes of tokens are known (I18), and all are
compared in constant time. Without any token the lake is served on this machine only (server.py), and every caller on it
may do everything. But a page of another origin may not write, and a request whose Host is not a name of this machine is
refused: a page sent it whose DNS name was rebound to this address. A token comes in the Authorization header, or in the
cookie that the page's login sets. Browsers send cookies by themselves, so a write by cookie must come from a page of
this server.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

Role = Literal["read", "write", "admin"]
ROLES: tuple[Role, ...] = ("read", "write", "admin")
COOKIE = "floodmark_token"
# A header is short; a longer one is no token of ours and is not hashed.
TOKEN_CHARACTERS_MAX = 512
# 256 random bits: a plain SHA-256 of it reveals nothing, and needs no salt and no slow hash.
TOKEN_BYTES = 32
TOKEN_PREFIX = "fmt_"


class Refused(Exception):
    """Not heard: 401 who is unknown, 403 who may not, 421 who means another server, 400 and 431 by wrong headers."""

    def __init__(self, status: int, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = {400: "Invalid", 401: "Unauthorized", 431: "Invalid"}.get(status, "Forbidden")
        self.message = message
        self.advice = advice


@dataclass(frozen=True)
class AccessToken:
    """A token as settings know it: a name for people, its hash, and its role."""

    name: str
    sha256: str
    role: Role


@dataclass(frozen=True)
class Caller:
    """Who asks. `by_cookie`: a browser sent the token by itself."""

    name: str
    role: Role
    by_cookie: bool = False

    @property
    def actor(self) -> str:
        """The actor of the caller's commits: the token's name; empty without tokens: the lake's own actor."""
        return "" if self is LOCAL_CALLER else self.name

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)


LOCAL_CALLER = Caller("anyone on this machine", "admin")


class Access:
    def __init__(self, tokens: Sequence[AccessToken] = ()) -> None:
        self._tokens = tuple(tokens)

    @property
    def has_tokens(self) -> bool:
        return bool(self._tokens)

    def check(self, request: HTTPConnection, role: Role) -> Caller:
        """The caller, who may act in this role; `Refused` otherwise."""
        caller = self.caller(request)
        if caller is None:
            raise Refused(401, "a token of the lake is required", "Send it as `Authorization: Bearer TOKEN`.")
        if not caller.may(role):
            raise Refused(403, f"the token has the role {caller.role}, but {role} is required", "Use another token.")
        if role != "read":
            self._check_origin(request, caller)
        return caller

    def caller(self, request: HTTPConnection) -> Caller | None:
        """The caller; None if tokens are set and the request has no known one. Refuses no request."""
        if not self._tokens:
            return LOCAL_CALLER
        if "authorization" in request.headers:
            token = self.token_of(bearer_of(request.headers["authorization"]))
            return None if token is None else Caller(token.name, token.role)
        token = self.token_of(request.cookies.get(COOKIE))
        return None if token is None else Caller(token.name, token.role, by_cookie=True)

    def token_of(self, text: str | None) -> AccessToken | None:
        """The token that this text is; takes the same time for any wrong one, however many are known."""
        digest = token_hash((text or "")[:TOKEN_CHARACTERS_MAX])
        found = None
        for token in self._tokens:
            if hmac.compare_digest(digest, token.sha256.lower()):
                found = token
        return found if text else None

    def check_host(self, host: str | None) -> None:
        """Without tokens, only requests for this machine's own names are answered (see above)."""
        if self._tokens or is_own_name(host):
            return
        raise Refused(
            421,
            "a lake without tokens accepts only local host names",
            "Use localhost or 127.0.0.1 in the address, or set a token.",
        )

    def _check_origin(self, request: HTTPConnection, caller: Caller) -> None:
        origin = request.headers.get("origin")
        if origin is None and not caller.by_cookie:
            return
        if caller is not LOCAL_CALLER and not caller.by_cookie:
            return  # a page of another origin cannot know the token: the sender was given it
        if origin is None or not is_same_origin(origin, request.headers.get("host")):
            # A page in a browser could write here in its user's name.
            raise Refused(
                403, "a page of another origin may not write to this lake", "Send a token in the Authorization header."
            )


def is_own_name(host: str | None) -> bool:
    """Whether a Host header names this machine as seen from itself: localhost, or a loopback address."""
    if host is None or any(one in host for one in "@/\\?#"):
        return False
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_same_origin(origin: str, host: str | None) -> bool:
    """Whether a page of this origin came from the server that the request is for. The scheme is left to the proxy."""
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == (host or "").lower()
    except ValueError:
        return False


# ── tokens ──


def new_token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def bearer_of(authorization: str) -> str | None:
    """The token of an Authorization header; None if it holds none."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None

"""Bearer tokens: made here, known only by their hash (I18).

A token has 256 random bits, so a plain SHA-256 of it tells nobody anything, and needs no salt and no slow hash.
"""

from __future__ import annotations

import hashlib
import secrets

TOKEN_BYTES = 32
PREFIX = "fmt_"


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def bearer_of(authorization: str) -> str | None:
    """The token of an Authorization header; None if it holds none."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None

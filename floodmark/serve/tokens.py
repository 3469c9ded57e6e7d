"""Bearer tokens: made here, known only by their hash (I18).

A token has 256 random bits, so a plain SHA-256 of it tells nobody anything, and needs no salt and no slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

TOKEN_BYTES = 32
PREFIX = "fmt_"


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def is_authorized(authorization: str | None, token_sha256: str) -> bool:
    """Whether an Authorization header holds the token of this hash; takes as long for any wrong one."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    matches = hmac.compare_digest(token_hash(token.strip()), token_sha256.lower())
    return matches and scheme.lower() == "bearer"

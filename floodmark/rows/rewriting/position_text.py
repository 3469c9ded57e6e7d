"""Positions of rows in a file as a short text, to send between processes and to store in small objects."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np


def pack_positions(positions: np.ndarray[Any, Any]) -> str:
    """Ascending positions as a short text."""
    return base64.b85encode(zlib.compress(np.diff(positions, prepend=0).astype(np.int64).tobytes())).decode()


def unpack_positions(text: str) -> np.ndarray[Any, Any]:
    return np.cumsum(np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype=np.int64))

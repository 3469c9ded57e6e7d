"""The part of HTTP/1.1 that a receiver needs: requests from a stream, answers to it.

Hand-written, because a server that can drop a connection between two bytes, and does not slow down a benchmark, is
little code. A request that is not HTTP ends in a ValueError, one that stops in the middle in an IncompleteReadError.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import zstandard

BODY_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    status: int
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


async def read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
    """Method, path and headers; None if the other side closed the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    found = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        found += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return bytes(found)


async def write_answer(writer: asyncio.StreamWriter, answer: Answer) -> None:
    body = answer.text.encode()
    phrase = HTTPStatus(answer.status).phrase if answer.status in HTTPStatus._value2member_map_ else "Unknown"
    lines = [f"HTTP/1.1 {answer.status} {phrase}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    await writer.drain()


def decode(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    if encoding == "zstd":
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=BODY_BYTES_MAX)
    if encoding in ("", "identity"):
        return body
    raise ValueError(f"unknown encoding {encoding}")

"""SipHash-2-4 with 128 bits of output, of many values at once: a hash that nobody can aim at without its key.

Keys of rows come from strangers, and values with equal hashes cost a read of their rows: so the hash is keyed. The
result of a value is that of the reference implementation, low word first. Values of like length are computed together,
in numpy; a few of them in plain Python, where that is quicker. A long value is digested by keyed blake2b: its length
alone decides that, so the same value always has the same hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from floodmark.rows.arrays import Numbers
from floodmark.rows.mixing import BITS, TAILS, WORD_BYTES, Hashes, words_of

# Two words; a secret of one index.
SipKey = tuple[int, int]

LENGTH_MAX = 512
# State and one temporary array of a block stay in the processor's cache.
_BLOCK_ROWS = 8192
# So few values are computed one by one.
_FEW = 6
_START = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
# What marks an output of 128 bits, and its second half.
_WIDE, _SECOND = 0xEE, 0xDD
_ROUNDS, _FINAL_ROUNDS = 2, 4

_State = tuple[Hashes, Hashes, Hashes, Hashes]


def hash_texts(data: npt.NDArray[np.uint8], starts: Numbers, lengths: Numbers, key: SipKey) -> tuple[Hashes, Hashes]:
    """The two words of the hash of each value; values lie in `data`."""
    first, second = np.empty(len(starts), np.uint64), np.empty(len(starts), np.uint64)
    if len(starts) <= _FEW:
        for at, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            first[at], second[at] = _hash_text(data[start : start + length].tobytes(), key)
        return first, second
    long = np.flatnonzero(lengths > LENGTH_MAX)
    for at in long.tolist():
        first[at], second[at] = _hash_text(data[starts[at] : starts[at] + lengths[at]].tobytes(), key)
    some = np.flatnonzero(lengths <= LENGTH_MAX) if len(long) else None
    for begin in range(0, len(starts) - len(long), _BLOCK_ROWS):
        block = slice(begin, begin + _BLOCK_ROWS)
        chosen: Numbers | slice = block if some is None else some[block]
        first[chosen], second[chosen] = _hash_block(data, starts[chosen], lengths[chosen], key)
    return first, second


def hash_words(columns: Sequence[Hashes], key: SipKey) -> tuple[Hashes, Hashes]:
    """The two words of the hash of rows that are each as many words, as if their bytes were one value."""
    rows = len(columns[0])
    tail = len(columns) * WORD_BYTES << 56 & BITS
    first, second = np.empty(rows, np.uint64), np.empty(rows, np.uint64)
    if rows <= _FEW:
        for at in range(rows):
            first[at], second[at] = _hash_few([*(int(column[at]) for column in columns), tail], key)
        return first, second
    for begin in range(0, rows, _BLOCK_ROWS):
        block = slice(begin, begin + _BLOCK_ROWS)
        state, spare = _begin(len(first[block]), key)
        for column in columns:
            _add(state, column[block], spare)
        _add(state, np.full(len(spare), tail, np.uint64), spare)
        first[block], second[block] = _end(state, spare)
    return first, second


def _hash_block(data: npt.NDArray[np.uint8], starts: Numbers, lengths: Numbers, key: SipKey) -> tuple[Hashes, Hashes]:
    """Values by their number of words, the longest first: those that have another word are then the first ones."""
    low, high = int(starts.min()), int((starts + lengths).max())
    words, starts = words_of(data[low:high]), starts - low
    counts = lengths // WORD_BYTES
    longest, shortest = int(counts.max()), int(counts.min())
    order = None
    if longest > shortest:
        order = np.argsort(-counts, kind="stable")
        starts, lengths, counts = starts[order], lengths[order], counts[order]
    state, spare = _begin(len(starts), key)
    rows = len(starts)
    for place in range(longest):
        if place >= shortest:
            rows = int(np.searchsorted(-counts, -place, side="left"))
        _add(tuple(words[:rows] for words in state), words[starts[:rows] + place * WORD_BYTES], spare[:rows])  # type: ignore[arg-type]
    # The last word of a value is what is left of its bytes, and its length.
    last = words[starts + counts * WORD_BYTES]
    last &= TAILS[lengths & (WORD_BYTES - 1)]
    last |= lengths.astype(np.uint64) << np.uint64(56)
    _add(state, last, spare)
    first, second = _end(state, spare)
    if order is None:
        return first, second
    placed = np.empty_like(first), np.empty_like(second)
    placed[0][order], placed[1][order] = first, second
    return placed


def _begin(rows: int, key: SipKey) -> tuple[_State, Hashes]:
    starts = _started(key)
    state = tuple(np.full(rows, word, np.uint64) for word in starts)
    return (state[0], state[1], state[2], state[3]), np.empty(rows, np.uint64)


def _started(key: SipKey) -> list[int]:
    return [key[at % 2] ^ word ^ (_WIDE if at == 1 else 0) for at, word in enumerate(_START)]


def _add(state: _State, word: Hashes, spare: Hashes) -> None:
    np.bitwise_xor(state[3], word, out=state[3])
    _mix(state, spare, _ROUNDS)
    np.bitwise_xor(state[0], word, out=state[0])


def _end(state: _State, spare: Hashes) -> tuple[Hashes, Hashes]:
    np.bitwise_xor(state[2], np.uint64(_WIDE), out=state[2])
    _mix(state, spare, _FINAL_ROUNDS)
    first = state[0] ^ state[1] ^ state[2] ^ state[3]
    np.bitwise_xor(state[1], np.uint64(_SECOND), out=state[1])
    _mix(state, spare, _FINAL_ROUNDS)
    return first, state[0] ^ state[1] ^ state[2] ^ state[3]


def _mix(state: _State, spare: Hashes, rounds: int) -> None:
    a, b, c, d = state
    for _ in range(rounds):
        np.add(a, b, out=a)
        _rotate(b, 13, spare)
        np.bitwise_xor(b, a, out=b)
        _rotate(a, 32, spare)
        np.add(c, d, out=c)
        _rotate(d, 16, spare)
        np.bitwise_xor(d, c, out=d)
        np.add(a, d, out=a)
        _rotate(d, 21, spare)
        np.bitwise_xor(d, a, out=d)
        np.add(c, b, out=c)
        _rotate(b, 17, spare)
        np.bitwise_xor(b, c, out=b)
        _rotate(c, 32, spare)


def _rotate(words: Hashes, count: int, spare: Hashes) -> None:
    np.left_shift(words, count, out=spare)
    np.right_shift(words, 64 - count, out=words)
    np.bitwise_or(words, spare, out=words)


# ── one value ──


def _hash_text(text: bytes, key: SipKey) -> tuple[int, int]:
    if len(text) > LENGTH_MAX:
        secret = b"".join(word.to_bytes(WORD_BYTES, "little") for word in key)
        digest = blake2b(text, digest_size=2 * WORD_BYTES, key=secret).digest()
        return int.from_bytes(digest[:WORD_BYTES], "little"), int.from_bytes(digest[WORD_BYTES:], "little")
    whole = len(text) // WORD_BYTES * WORD_BYTES
    words = [int.from_bytes(text[at : at + WORD_BYTES], "little") for at in range(0, whole, WORD_BYTES)]
    return _hash_few([*words, int.from_bytes(text[whole:], "little") | (len(text) << 56 & BITS)], key)


def _hash_few(words: Sequence[int], key: SipKey) -> tuple[int, int]:
    a, b, c, d = _started(key)
    for word in words:
        a, b, c, d = _mix_one(a, b, c, d ^ word, _ROUNDS)
        a ^= word
    a, b, c, d = _mix_one(a, b, c ^ _WIDE, d, _FINAL_ROUNDS)
    first = a ^ b ^ c ^ d
    a, b, c, d = _mix_one(a, b ^ _SECOND, c, d, _FINAL_ROUNDS)
    return first, a ^ b ^ c ^ d


def _mix_one(a: int, b: int, c: int, d: int, rounds: int) -> tuple[int, int, int, int]:
    for _ in range(rounds):
        a = a + b & BITS
        b = (b << 13 & BITS | b >> 51) ^ a
        a = a << 32 & BITS | a >> 32
        c = c + d & BITS
        d = (d << 16 & BITS | d >> 48) ^ c
        a = a + d & BITS
        d = (d << 21 & BITS | d >> 43) ^ a
        c = c + b & BITS
        b = (b << 17 & BITS | b >> 47) ^ c
        c = c << 32 & BITS | c >> 32
    return a, b, c, d

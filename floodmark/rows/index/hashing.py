"""What an index stores instead of values: a hash of 64 or 128 bits, the same whatever way the value came.

A value counts as its widest type: int as long, float as double, a decimal as a number without a scale, times as
microseconds; chunks, slices, dictionaries and large text do not show. 0.0 and -0.0 are one value, and so is every NaN.
Null is a value. Numbers and UUIDs are mixed by a bijection: no two have the same hash, and neighbours lie far apart.
Text, bytes, decimals and values of several columns have 128 bits of SipHash under the index's secret.

A column of a type that no table holds is a bug of the caller and a TypeError, never a hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np
import pyarrow as pa
from pyarrow import types

from floodmark.errors import Invalid
from floodmark.rows.index.siphash import SipKey, hash_texts, hash_words
from floodmark.rows.index.values import is_text, is_uuid, numbers, plain, texts, valid, words
from floodmark.rows.mixing import BITS, Hashes, mix, salted

SECRET_BYTES = 16
# Any decimal that a table holds fits, whatever its scale.
_WIDEST = pa.decimal256(76, 38)


@dataclass(frozen=True)
class Secret:
    """What the hashes of an index depend on. Never shown."""

    text: str = field(repr=False)  # hexadecimal

    def __post_init__(self) -> None:
        try:
            size = len(bytes.fromhex(self.text))
        except ValueError:
            size = 0
        if size != SECRET_BYTES:
            raise Invalid("the secret of an index is not 16 bytes in hexadecimal", length=len(self.text))

    def word(self, purpose: str) -> int:
        """A number of 64 bits for one purpose."""
        digest = blake2b(purpose.encode(), digest_size=8, key=bytes.fromhex(self.text)).digest()
        return int.from_bytes(digest, "little")

    @cached_property
    def check(self) -> str:
        """What shows whether two secrets are the same, and not what they are."""
        return f"{self.word('check'):016x}"

    @cached_property
    def numbers(self) -> SipKey:
        return self.word("numbers"), self.word("numbers, second word")

    @cached_property
    def texts(self) -> SipKey:
        return self.word("texts"), self.word("texts, second word")

    @cached_property
    def rows(self) -> SipKey:
        return self.word("rows"), self.word("rows, second word")

    @cached_property
    def fingerprints(self) -> SipKey:
        """A salt, and a step between words, which is odd so that no two words of a value have the same salt."""
        return self.word("fingerprints"), self.word("fingerprints, step") | 1

    @cached_property
    def null(self) -> int:
        """What a null counts as, among numbers: some number that a stranger does not know."""
        return self.word("null")


@dataclass(frozen=True)
class Encoder:
    """A way to make hashes, known by its number. `bits`: only so many are kept, which forces collisions in tests."""

    number: int
    bits: int = 64

    def cut(self, hashes: Hashes) -> Hashes:
        """The highest bits of the only, or the first, word of each hash, or of fingerprints."""
        return hashes if self.bits == 64 else hashes & np.uint64(BITS << 64 - self.bits & BITS)


ENCODER = Encoder(1)
# Every way that this Floodmark knows, by its number.
ENCODERS = {ENCODER.number: ENCODER}


@dataclass(frozen=True)
class ValueHashes:
    """The hashes of values: `low` is the second word of those of 128 bits."""

    high: Hashes
    low: Hashes | None = None

    def __len__(self) -> int:
        return len(self.high)


def is_wide(kinds: Sequence[pa.DataType]) -> bool:
    """Whether the hashes of columns of these types have 128 bits."""
    if len(kinds) != 1:
        return True
    (kind,) = kinds
    if types.is_dictionary(kind):
        return is_wide([kind.value_type])
    return is_text(kind) or types.is_decimal(kind) or is_uuid(kind)


def hash_values(
    columns: Sequence[pa.Array | pa.ChunkedArray], secret: Secret, encoder: Encoder = ENCODER
) -> ValueHashes:
    """The hash of each row of these columns, which are the values of an index in its order."""
    if not columns:
        raise TypeError("an index has at least one column")
    pieces = _aligned(columns)
    parts = [_hash(piece, secret) for piece in pieces]
    wide = is_wide([column.type for column in columns])
    high = np.concatenate([np.empty(0, np.uint64), *(part.high for part in parts)])
    low = np.concatenate([np.empty(0, np.uint64), *(part.low for part in parts if part.low is not None)])
    if encoder.bits < 64:
        low = np.zeros_like(low)
    return ValueHashes(encoder.cut(high), low if wide else None)


def _aligned(columns: Sequence[pa.Array | pa.ChunkedArray]) -> list[list[pa.Array]]:
    """The same rows of every column, piece by piece."""
    if all(isinstance(column, pa.ChunkedArray) for column in columns) or len(columns) > 1:
        names = [str(at) for at in range(len(columns))]
        return [batch.columns for batch in pa.table(list(columns), names=names).to_batches()]
    return [[columns[0]]]


def _hash(columns: Sequence[pa.Array], secret: Secret) -> ValueHashes:
    if len(columns) == 1:
        return _hash_single(plain(columns[0]), secret)
    found: list[Hashes] = []
    # Which columns of a row are null is a word of its own: a null is no value of its column.
    nulls = np.zeros(len(columns[0]), np.uint64)
    for place, column in enumerate(map(plain, columns)):
        here = _words(column, secret)
        if column.null_count:
            absent = ~valid(column)
            nulls |= absent.astype(np.uint64) << np.uint64(place % 64)
            for word in here:
                word[absent] = 0
        found += here
    return ValueHashes(*hash_words([*found, nulls], secret.rows))


def _hash_single(column: pa.Array, secret: Secret) -> ValueHashes:
    first, second = secret.numbers
    high, *rest = _words(column, secret)
    low = rest[0] if rest else None
    if types.is_decimal(column.type):
        high, low = hash_words([high, *rest], secret.rows)
    elif is_uuid(column.type) and low is not None:
        # Two steps that can each be undone, so no two UUIDs have the same hash.
        low = salted(low, second)
        high = salted(high ^ low, first)
    elif low is None:
        high = salted(high, first)
    if column.null_count:
        absent = ~valid(column)
        high[absent] = mix(np.array([secret.null + first & BITS], np.uint64))[0]
        if low is not None:
            low[absent] = secret.null
    return ValueHashes(high, low)


def _words(column: pa.Array, secret: Secret) -> list[Hashes]:
    """The values of a column as words, as many for each; those of nulls mean nothing. Fresh arrays."""
    if is_text(column.type):
        return list(hash_texts(*texts(column), secret.texts))
    if types.is_decimal(column.type):
        return words(column.cast(_WIDEST))
    if is_uuid(column.type):
        # As UUIDs are written: the first word has the first bytes.
        return [word.byteswap() for word in words(column)]
    return [numbers(column, one_zero=True)]

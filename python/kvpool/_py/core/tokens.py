"""Encoded tokens: 4 bytes each, so that equal bytes are equal tokens.

A token is a little-endian int32: an id from 0, or a negative code for a digest that the manager knows (``DigestPool``).
In a :class:`Query`, digests that it does not know have codes of their own at the other end of the negative range,
which equal nothing in the tree.

Order of tokens, which decides ties and the order of children: ids ascending, then digests by their 32 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError

TOKEN_BYTES = 4
DIGEST_BYTES = 32
FIRST_UNKNOWN_CODE = -(2**31)
"""Code of the first digest of a query that the manager does not know; the next ones count up."""

Ids = npt.NDArray[np.int32]
DigestOf = Callable[[int], bytes]
"""The 32 bytes behind a negative code."""


@dataclass(frozen=True, slots=True)
class Query:
    """Tokens to look up."""

    tokens: bytes
    unknown: Mapping[int, bytes] = field(default_factory=dict)  # code -> digest

    @property
    def num_tokens(self) -> int:
        """Length."""
        return len(self.tokens) // TOKEN_BYTES

    def block(self, ordinal: int, tokens_per_block: int) -> bytes:
        """Block ``ordinal``; short or empty at the end."""
        size = tokens_per_block * TOKEN_BYTES
        return self.tokens[ordinal * size : (ordinal + 1) * size]


def check_ids(ids: Ids, num_digests: int, name: str) -> None:
    """ArgumentError unless every id is a token id or names one of the digests."""
    if not ids.size or int(ids.min()) >= -num_digests:
        return
    position = int((ids < -num_digests).argmax())
    raise ArgumentError(f"{name}[{position}]: token ids must be from 0 to 2147483647, not {int(ids[position])}")


def is_text(tokens: bytes) -> bool:
    """Whether there is no digest."""
    return tokens[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()  # no sign bit in the highest byte of any token


def codes_of(tokens: bytes) -> array[int]:
    """The tokens as integers."""
    codes = array("i")
    codes.frombytes(tokens)
    return codes


def common_prefix(a: bytes, b: bytes) -> int:
    """Number of leading tokens that are equal."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    equal_bytes = size - (difference.bit_length() + 7) // 8
    return equal_bytes // TOKEN_BYTES


def order_key(tokens: bytes, digest_of: DigestOf) -> bytes:
    """Bytes that compare as the tokens do.

    An id is 4 big-endian bytes, the first below 0x80; a digest is 4 bytes from 0x80 on, then its own bytes.
    """
    codes = codes_of(tokens)
    if is_text(tokens):
        codes.byteswap()
        return codes.tobytes()
    return b"".join(code.to_bytes(4, "big") if code >= 0 else b"\x80\0\0\0" + digest_of(code) for code in codes)


def plain_bytes(tokens: bytes, digest_of: DigestOf) -> bytes:
    """What block keys hash: ids as 4 little-endian bytes, digests as their 32 bytes."""
    if is_text(tokens):
        return tokens
    return b"".join(code.to_bytes(4, "little") if code >= 0 else digest_of(code) for code in codes_of(tokens))

"""Digests as small numbers: equal digests get equal codes, so that comparing codes is comparing digests."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvpool._py.core.journal import Journal
from kvpool._py.core.tokens import FIRST_UNKNOWN_CODE, DigestOf, Ids, Query, codes_of, is_text


class DigestPool:
    """Digests in use, counted; code ``-1 - index``, the lowest free index first.

    ``retain`` and ``release`` count every occurrence in a run of tokens; for tokens without digests they do nothing.
    """

    __slots__ = ("_digests", "_free", "_indices", "_journal", "_refs")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._digests: list[bytes] = []
        self._refs: list[int] = []
        self._indices: dict[bytes, int] = {}
        self._free: list[int] = []  # heap

    def __len__(self) -> int:
        return len(self._indices)

    def digest_of(self, code: int) -> bytes:
        """The 32 bytes behind a code."""
        return self._digests[-1 - code]

    def resolver(self, query: Query) -> DigestOf:
        """What is behind the codes of a query."""
        unknown = query.unknown
        if not unknown:
            return self.digest_of
        return lambda code: unknown[code] if code in unknown else self.digest_of(code)

    def query(self, ids: Ids, digests: Sequence[bytes]) -> Query:
        """Tokens to look up; changes nothing."""
        if not digests:
            return Query(ids.tobytes())
        codes = []
        unknown: dict[bytes, int] = {}
        for digest in digests:
            index = self._indices.get(digest)
            fresh = FIRST_UNKNOWN_CODE + len(unknown)
            codes.append(unknown.setdefault(digest, fresh) if index is None else -1 - index)
        return Query(_translate(ids, codes), {code: digest for digest, code in unknown.items()})

    def encode(self, ids: Ids, digests: Sequence[bytes]) -> bytes:
        """Tokens to keep: the caller owns a reference for every digest in them."""
        if not digests:
            return ids.tobytes()
        indices = [self._intern(digest) for digest in digests]
        tokens = _translate(ids, [-1 - index for index in indices])
        self.retain(tokens)
        for index in indices:
            self._add(index, -1)
        return tokens

    def retain(self, tokens: bytes) -> None:
        """One more owner of these tokens."""
        self._count(tokens, 1)

    def release(self, tokens: bytes) -> None:
        """One owner less."""
        self._count(tokens, -1)

    def references(self) -> dict[bytes, int]:
        """Owners per digest, for the audit."""
        return {digest: self._refs[index] for digest, index in self._indices.items()}

    def _count(self, tokens: bytes, sign: int) -> None:
        if is_text(tokens):
            return
        for code, times in Counter(codes_of(tokens)).items():
            if code < 0:
                self._add(-1 - code, sign * times)

    def _intern(self, digest: bytes) -> int:
        index = self._indices.get(digest)
        if index is None:
            index = self._occupy(digest)
            self._journal.on_undo(self._vacate, index)
        self._add(index, 1)
        return index

    def _add(self, index: int, change: int) -> None:
        self._journal.set_item(self._refs, index, self._refs[index] + change)
        if self._refs[index] == 0:
            digest = self._digests[index]
            self._vacate(index)
            self._journal.on_undo(self._occupy, digest, index)

    def _occupy(self, digest: bytes, index: int | None = None) -> int:
        if index is not None:  # an undo: exactly this place again
            self._free.remove(index)
            heapq.heapify(self._free)
        elif self._free:
            index = heapq.heappop(self._free)
        else:
            index = len(self._digests)
            self._digests.append(b"")
            self._refs.append(0)
        self._digests[index] = digest
        self._indices[digest] = index
        return index

    def _vacate(self, index: int) -> None:
        del self._indices[self._digests[index]]
        heapq.heappush(self._free, index)


def _translate(ids: Ids, codes: Sequence[int]) -> bytes:
    """``-1 - j`` becomes ``codes[j]``."""
    is_digest = ids < 0
    translated: Ids = ids.copy()
    translated[is_digest] = np.array(codes, np.int32)[-1 - ids[is_digest]]
    return translated.tobytes()

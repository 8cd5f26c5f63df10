"""Small families of texts that fork everywhere, also inside blocks, so that prefixes meet all the time."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvpool.v2 import ReuseScope

Token = int | bytes
SCOPES = [ReuseScope(), ReuseScope(0, None), ReuseScope(None, 0), ReuseScope(7, 11)]
DIGESTS = [bytes([9] * 31 + [last]) for last in (0, 1, 128, 255)] + [bytes(range(32))]


class Text(tuple[Token, ...]):
    """Tokens with a short name for messages."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Text({len(self)}:{zlib.crc32(repr(tuple(self)).encode()):08x})"


class Library:
    """Draws texts of one length: most of them follow an earlier one up to a fork."""

    KEPT = 8

    def __init__(self, rng: random.Random, tpb: int, length: int, *, digests: bool) -> None:
        self.rng, self.tpb, self.length = rng, tpb, length
        self.alphabet: list[Token] = list(range(rng.choice([2, 2, 3, 7])))
        if digests:
            self.alphabet += rng.sample(DIGESTS, 2)
        self.texts: list[Text] = []

    def tokens(self, count: int) -> list[Token]:
        return self.rng.choices(self.alphabet, k=count)

    def fork_point(self) -> int:
        """Early, on a block boundary or beside one, or anywhere."""
        block = self.rng.randint(0, min(6, self.length // self.tpb)) * self.tpb
        kind = self.rng.random()
        if kind < 0.3:
            return block
        if kind < 0.7:
            return min(self.length, block + self.rng.randint(1, self.tpb))
        return self.rng.randint(0, self.length)

    def text(self) -> Text:
        if self.texts and self.rng.random() < 0.35:
            return self.rng.choice(self.texts)  # the same once more
        if len(self.texts) < 2:
            made = Text(self.tokens(self.length))
        else:
            made = self.fork(self.rng.choice(self.texts), self.fork_point())
        if len(self.texts) < self.KEPT:
            self.texts.append(made)
        else:
            self.texts[self.rng.randrange(self.KEPT)] = made
        return made

    def known(self) -> Text:
        """One that was drawn before, if any."""
        return self.rng.choice(self.texts) if self.texts else self.text()

    def fork(self, text: Text, at: int) -> Text:
        return Text([*text[:at], *self.tokens(self.length - at)])


def as_argument(tokens: Iterable[Token], as_array: bool) -> Any:
    """What a caller passes: a list, or an int32 array where no digest forbids it."""
    plain = list(tokens)
    if as_array and not any(isinstance(token, bytes) for token in plain):
        return np.array(plain, np.int32)
    return plain

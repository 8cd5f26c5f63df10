"""The undo log: every kind of entry, savepoints, calls."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool._py.core.digest_pool import DigestPool
from kvpool._py.core.journal import Journal
from kvpool._py.core.tokens import check_ids, common_prefix, is_text, order_key
from kvpool.errors import ArgumentError
from tests.unit.py_reuse_cases import digest, encoded, undone


def test_every_kind_of_entry() -> None:
    journal = Journal()
    record = SimpleNamespace(a=1, b=[1, 2, 3], c={"x": 1})
    journal.set(record, "a", 2)
    journal.set_item(record.b, 1, 9)
    journal.append(record.b, 4)
    journal.set_slice(record.b, 0, 2, [])
    journal.set_slice(record.b, 1, 1, [7, 8])
    journal.put(record.c, "x", 2)
    journal.put(record.c, "y", 3)
    journal.remove(record.c, "x")
    seen: list[int] = []
    journal.on_undo(seen.append, 5)
    assert record == SimpleNamespace(a=2, b=[3, 7, 8, 4], c={"y": 3})
    assert len(journal) == 9
    journal.undo_to(0)
    assert record == SimpleNamespace(a=1, b=[1, 2, 3], c={"x": 1})
    assert seen == [5]


def test_calls_and_savepoints() -> None:
    journal = Journal()
    items: list[int] = []
    with journal.call():
        journal.append(items, 1)
        savepoint = journal.savepoint()
        journal.append(items, 2)
        journal.append(items, 3)
        journal.undo_to(savepoint)
        journal.append(items, 4)
    assert items == [1, 4]
    assert not len(journal)
    with undone(journal):
        journal.append(items, 5)
    assert items == [1, 4]
    assert not len(journal)


def test_undo_of_random_changes() -> None:
    rng = random.Random(1)
    journal = Journal()
    items: list[Any] = [0, 1, 2]
    states: list[tuple[int, list[Any]]] = []
    for _ in range(2000):
        if states and rng.random() < 0.1:
            savepoint, before = states.pop(rng.randrange(len(states)))
            states = [state for state in states if state[0] < savepoint]
            journal.undo_to(savepoint)
            assert items == before
        states.append((journal.savepoint(), list(items)))
        begin = rng.randint(0, len(items))
        end = rng.randint(begin, len(items))
        journal.set_slice(items, begin, end, [rng.random() for _ in range(rng.randint(0, 3))])
        if items:
            journal.set_item(items, rng.randrange(len(items)), rng.random())


def test_tokens() -> None:
    def text(*ids: int) -> bytes:
        return encoded(ids)[0].tobytes()

    assert common_prefix(text(1, 2, 3), text(1, 2, 4)) == 2
    assert common_prefix(text(1, 2), text(1, 2, 4)) == 2
    assert common_prefix(text(), text(1)) == 0
    assert common_prefix(text(5), text(1)) == 0
    assert common_prefix(text(256), text(256)) == 1
    assert common_prefix(text(1 << 24, 7), text(1 << 24, 7 + (1 << 24))) == 1
    assert is_text(text(0, 2**31 - 1))
    assert not is_text(text(1, -1))
    blocks = sorted(
        [text(1, 300), text(1), text(2), text(1, 5), text(1, -1), text(-2)], key=lambda t: order_key(t, key)
    )
    assert blocks == [text(1), text(1, 5), text(1, 300), text(1, -1), text(2), text(-2)]


def key(code: int) -> bytes:
    return digest(10 + code)


def test_check_ids() -> None:
    check_ids(encoded([1, digest(1), 2])[0], 1, "tokens")
    check_ids(encoded([])[0], 0, "tokens")
    with pytest.raises(ArgumentError, match=r"^tokens\[1\]: token ids must be from 0 to 2147483647, not -1$"):
        check_ids(encoded([1, digest(1)])[0], 0, "tokens")


def test_digest_pool() -> None:
    journal = Journal()
    pool = DigestPool(journal)
    a, b, c = digest(1), digest(2), digest(3)
    with journal.call():
        first = pool.encode(*encoded([5, a, b, a]))
    assert pool.references() == {a: 2, b: 1}
    assert first == encoded([5, a, b])[0].tobytes() + first[4:8]
    assert [pool.digest_of(code) for code in (-1, -2)] == [a, b]

    query = pool.query(*encoded([5, a, c, b, c]))
    assert query.num_tokens == 5
    assert query.tokens[:8] == first[:8]
    assert query.tokens[8:12] == query.tokens[16:20]
    (unknown,) = query.unknown
    assert pool.resolver(query)(unknown) == c
    assert pool.resolver(query)(-2) == b

    with undone(journal):
        pool.release(first)
        assert pool.references() == {}
        second = pool.encode(*encoded([c]))
        assert pool.digest_of(-1) == c  # the lowest free number again
        pool.retain(second)
        pool.encode(*encoded([b, a]))
    assert pool.references() == {a: 2, b: 1}
    assert [pool.digest_of(code) for code in (-1, -2)] == [a, b]
    with journal.call():
        third = pool.encode(*encoded([c]))
    assert pool.digest_of(-3) == c
    with journal.call():
        pool.release(first)
        pool.release(third)
    assert len(pool) == 0


def test_digests_that_no_token_names_leave_nothing() -> None:
    journal = Journal()
    pool = DigestPool(journal)
    with journal.call():
        tokens = pool.encode(encoded([1, 2])[0], [digest(1)])
    assert tokens == encoded([1, 2])[0].tobytes()
    assert len(pool) == 0

"""Golden vectors of chain keys."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvpool._py.reuse.keys import root_key, scope_bytes
from tests.unit.py_reuse_cases import NO_SCOPE, World, digest, encoded, full


@pytest.mark.parametrize(
    ("scope", "begin", "end"),
    [
        ((None, None), "6e340b9c", "fa01d"),
        ((0, None), "a536aa3c", "65dfb"),
        ((None, 0), "4322fd2b", "7fad3"),
        ((0, 0), "6ad36d3f", "bd436d"),
        ((7, 11), "9e22dbfe", "13d3a3"),
    ],
)
def test_roots(scope, begin: str, end: str) -> None:
    key = root_key(scope).hex()
    assert key.startswith(begin)
    assert key.endswith(end)


def test_scope_bytes() -> None:
    assert scope_bytes((7, 11)).hex() == "0307000000000000000b00000000000000"
    assert scope_bytes((None, 2**64 - 1)).hex() == "02" + "ff" * 8
    assert scope_bytes(NO_SCOPE) == b"\0"


@pytest.mark.parametrize(
    ("scope", "tpb", "tokens", "keys"),
    [
        (
            NO_SCOPE,
            4,
            list(range(8)),
            [
                "7b894451a88bc03088bd0c44f01139922b089a1ab691d157c273185c78ca83b2",
                "181684b4f09a9fc1689624a565bc5c9ed96cede3e0863cf373463b1a93c45369",
            ],
        ),
        (NO_SCOPE, 4, [0, 1, 2], ["56eed4fa2eec503f99466829bafed63846694c71a5cfaf3c836c4efcbd3019db"]),
        (
            NO_SCOPE,
            4,
            [0, bytes(range(32)), 1001, 1002],
            ["0a1bfd6dcecbe284b01933df8f0e6600aa220ad7dea7c26ac4519ffc274417aa"],
        ),
        ((7, 11), 2, [1, 2], ["8d400728573c8ff046b41442cda1eb96291533fc6017407b75980fd6b0bf30b8"]),
    ],
)
def test_blocks(scope, tpb: int, tokens, keys: list[str]) -> None:
    world = World([full()], tpb)
    path = world.insert(tokens, scope=scope)
    assert [world.cache.key(node).hex() for node in path] == keys
    assert world.cache.key(path[-1]) == path[-1].key  # remembered


def test_key_on_top_needs_no_tree() -> None:
    world = World([full()], 4)
    tokens = [0, digest(3), 2, 3, 4, 5, digest(200), 7]
    query = world.query(tokens)
    first = world.cache.key_on_top(NO_SCOPE, None, query, 0)
    path = world.insert(tokens)
    assert first == world.cache.key(path[0])
    query = world.query(tokens)
    assert world.cache.key_on_top(NO_SCOPE, path[0], query, 1) == world.cache.key(path[1])
    assert world.cache.key_on_top((1, None), None, query, 0) != first


@pytest.mark.parametrize("length", [1, 7, 32, 33, 257])
def test_runs_of_tokens(length: int) -> None:
    """Hashing a run at once equals hashing token by token."""
    rng = random.Random(length)
    tokens = [digest(rng.randrange(256)) if rng.random() < 0.2 else rng.randrange(2**31) for _ in range(length)]
    world = World([full()], length)
    (node,) = world.insert(tokens)
    expected = hashlib.sha256(root_key(NO_SCOPE))
    for token in tokens:
        expected.update(token if isinstance(token, bytes) else token.to_bytes(4, "little"))
    assert world.cache.key(node) == expected.digest()
    ids, digests = world.cache.decode(node.tokens)
    assert [digests[-1 - i] if i < 0 else i for i in ids.tolist()] == tokens
    assert len(set(digests)) == len(digests)
    assert encoded(tokens)[0].shape == ids.shape

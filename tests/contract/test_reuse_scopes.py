"""Field trials of what names a prefix (section D): tokens, digests, scopes. A look-up compares the tokens themselves."""

from __future__ import annotations

import itertools

import pytest

from kvpool.v2 import MmItemContext, ReuseScope, sequence_to_blockchain_keys
from tests.support.configs import MIB, attention, config
from tests.support.reuse import Lab, digest, ids, tokens


def lab_of(make, tpb: int = 8, device: str = "host", quota: int = 4 * MIB, **fields) -> Lab:
    return Lab(make, config([attention(0, 16 * tpb)], quota, tpb, **fields), device)


def key(tpb: int, scope: ReuseScope | None, sequence) -> bytes:
    return [key for _, key in sequence_to_blockchain_keys(tpb, scope, sequence)][-1]


def test_B074_equal_keys_of_unlike_tokens_are_no_hit(make) -> None:
    """Eight ids and the one digest of the same 32 bytes have the same chain key by its definition, yet are other tokens."""
    lab = lab_of(make)
    eight = [3, 1, 4, 1, 5, 9, 2, 6]
    same_bytes = b"".join(token.to_bytes(4, "little") for token in eight)
    assert key(8, None, eight) == key(8, None, [same_bytes])
    lab.run(eight)
    assert lab.reused([same_bytes]) == 0
    assert lab.reused([same_bytes, *eight[1:]]) == 0
    lab.run([same_bytes])
    assert lab.reused([same_bytes]) == 1
    assert lab.reused(eight) == 8
    assert lab.nodes() == 2


def test_B074_digests_are_not_the_ids_that_stand_for_them(make) -> None:
    """Inside, a digest is a number; it equals no id, and two queries may number the same digests differently."""
    lab = lab_of(make)
    a, b = digest("a"), digest("b")
    lab.run([a, b, a, b, 0, 1, 2, 3, 5])
    assert lab.reused([b, a, b, a, 0, 1, 2, 3]) == 0
    assert lab.reused([a, b, a, b, 0, 1, 2, 3, 5]) == 9
    assert lab.reused([a, b, b, a]) == 2
    for first in (0, 1, 2**31 - 1, 2**31 - 2):
        assert lab.reused([first, b, a, b, 0, 1, 2, 3]) == 0
    assert lab.reused([a[:31] + bytes([a[31] ^ 1]), b]) == 0
    assert lab.reused([bytes([a[0] ^ 1]) + a[1:], b]) == 0


def test_B074_extreme_ids(make) -> None:
    lab = lab_of(make)
    values = [0, 2**31 - 1, 1, 2**31 - 2, 2**30, 2**16, 255, 256]
    lab.run(values)
    for position, value in itertools.product(range(8), (0, 1, 2**31 - 1)):
        if values[position] != value:
            assert lab.reused([*values[:position], value, *values[position + 1 :]]) == position


def test_B076_names_and_salts(make) -> None:
    lab = lab_of(make)
    scopes = [(7, None), (None, 7), (0, None), (None, 0), (0, 0), (None, None), (1, 2), (2, 1), (2**64 - 1, None)]
    scopes += [(None, 2**64 - 1), (7, 7)]
    for number, scope in enumerate(scopes):
        for other, of in enumerate(scopes):
            assert lab.probe(ids(20), ReuseScope(*of)) == (20 if other < number else 0)
        lab.run(ids(20), scope=ReuseScope(*scope))
    assert len({key(8, ReuseScope(*scope), ids(8)) for scope in scopes}) == len(scopes)


def test_B077_adapters(make) -> None:
    """Base, two adapters, and adapter 1 registered again under a new id share nothing."""
    lab = lab_of(make)
    for number, lora in enumerate((None, 1, 2, 3)):
        assert lab.run(ids(64), scope=ReuseScope(lora)) == 0
        assert len([node for node in lab.manager.snapshot()["tree"] if node[2]]) == 8 * (number + 1)
    for lora in (None, 1, 2, 3):
        assert lab.reused(ids(64), ReuseScope(lora)) == 64


def test_B079_pictures_at_one_place(make) -> None:
    """70,000 digests have 70,000 keys, and none of those in the tree is taken for another."""
    prefix = [1, 2, 3]
    root = key(4, None, [])
    keys = {key(4, None, [*prefix, digest(number)]) for number in range(70_000)}
    assert len(keys) == 70_000
    assert root not in keys
    lab = lab_of(make, 4, "virtual", quota=16 * MIB)
    for number in range(400):
        assert lab.run([*prefix, digest(number)]) == (3 if number else 0)
    for number in range(0, 400, 7):
        assert lab.probe([*prefix, digest(number)]) == 4
        assert lab.probe([*prefix, digest(number + 1000)]) == 3


def test_B081_the_content_decides_not_its_name(make) -> None:
    lab = lab_of(make)
    first, second = MmItemContext(digest("A"), "u"), MmItemContext(digest("B"), "u")
    lab.run([1, first.digest, 3])
    assert lab.probe([1, first, 3]) == 3
    assert lab.probe([1, second, 3]) == 1
    assert lab.probe([1, MmItemContext(first.digest, "other"), 3]) == 3
    assert lab.probe([1, MmItemContext(first.digest), 3]) == 3


@pytest.mark.parametrize("length", [128, 100])
def test_B082_a_salt_covers_the_whole_chain(make, length) -> None:
    lab = lab_of(make, 32)
    first, second = ReuseScope(salt=1), ReuseScope(salt=2)
    lab.run(tokens(length), scope=first)
    assert lab.reused(tokens(length), second) == 0
    assert lab.reused(tokens(length)) == 0
    assert lab.reused(tokens(length), first) == length


def test_B084_the_parent_is_part_of_the_key(make) -> None:
    """Equal blocks at depth 2 behind different parents are different blocks."""
    lab = lab_of(make)
    child = ids(8, 9)
    lab.run(ids(8, 1) + child)
    lab.run(ids(8, 2))
    assert lab.reused(ids(8, 2) + child) == 8
    assert lab.reused(child) == 0
    lab.run(ids(8, 2) + child)
    assert lab.nodes() == 4
    assert lab.reused(ids(8, 1) + child) == lab.reused(ids(8, 2) + child) == 16
    chains = [[key for _, key in sequence_to_blockchain_keys(8, None, ids(8, seed) + child)] for seed in (1, 2)]
    assert chains[0][2] != chains[1][2]


def test_families_of_forks(make) -> None:
    """Every pair of 64 sequences over two tokens shares exactly its common prefix."""
    lab = lab_of(make, 4, "virtual", quota=16 * MIB)
    texts = [list(bits) for bits in itertools.product((5, 6), repeat=6)]
    stored: list[list[int]] = []
    for text in texts:
        common = max((_common(text, old) for old in stored), default=0)
        assert lab.run(text) == common
        stored.append(text)
    for text in texts:
        assert lab.probe(text) == 6
        assert lab.probe([*text, 5]) == 6


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))

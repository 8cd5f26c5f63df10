"""Block keys (v2_request §3.1) and the probes: numbers 101–104, 131–143."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvpool.v2 import MmItemContext, ReuseScope, gen_multimodal_cache_key_tokens, sequence_to_blockchain_keys
from kvpool.v2 import _introspection as introspection
from tests.support.configs import MIB, attention, config
from tests.support.reuse import Lab, digest, ids, tokens


def chain(tpb: int, scope: ReuseScope | None, sequence) -> list[bytes]:
    return [key for _, key in sequence_to_blockchain_keys(tpb, scope, sequence)]


def reference(parent: bytes, sequence) -> bytes:
    """Token by token."""
    state = hashlib.sha256(parent)
    for token in sequence:
        state.update(token if isinstance(token, bytes) else token.to_bytes(4, "little"))
    return state.digest()


SCOPE_BYTES = {
    ReuseScope(): "00",
    ReuseScope(lora_id=0): "010000000000000000",
    ReuseScope(salt=0): "020000000000000000",
    ReuseScope(0, 0): "03" + "00" * 16,
    ReuseScope(7, 11): "0307000000000000000b00000000000000",
    ReuseScope(2**64 - 1, None): "01" + "ff" * 8,
    ReuseScope(None, 2**64 - 1): "02" + "ff" * 8,
}


@pytest.mark.parametrize("scope", SCOPE_BYTES)
def test_scenario_103_roots(scope) -> None:
    (root,) = chain(4, scope, [])
    assert root == hashlib.sha256(bytes.fromhex(SCOPE_BYTES[scope])).digest()


def test_scenario_103_roots_are_distinct() -> None:
    assert len({tuple(chain(4, scope, [])) for scope in SCOPE_BYTES}) == len(SCOPE_BYTES)
    assert chain(4, None, []) == chain(4, ReuseScope(), [])


GOLDEN = [
    (4, None, list(range(4)), "7b894451a88bc03088bd0c44f01139922b089a1ab691d157c273185c78ca83b2"),
    (4, None, list(range(8)), "181684b4f09a9fc1689624a565bc5c9ed96cede3e0863cf373463b1a93c45369"),
    (4, None, [0, 1, 2], "56eed4fa2eec503f99466829bafed63846694c71a5cfaf3c836c4efcbd3019db"),
    (4, None, [0, bytes(range(32)), 1001, 1002], "0a1bfd6dcecbe284b01933df8f0e6600aa220ad7dea7c26ac4519ffc274417aa"),
    (2, ReuseScope(7, 11), [1, 2], "8d400728573c8ff046b41442cda1eb96291533fc6017407b75980fd6b0bf30b8"),
]


@pytest.mark.parametrize(("tpb", "scope", "sequence", "key"), GOLDEN)
def test_golden_keys(tpb, scope, sequence, key) -> None:
    assert chain(tpb, scope, sequence)[-1].hex() == key


@pytest.mark.parametrize("length", [0, 1, 7, 32, 33, 257])
@pytest.mark.parametrize("form", [list, tuple, lambda t: np.array(t, np.int32)])
def test_scenario_101_blocks_of_ids(length, form) -> None:
    sequence = [(i * 2_654_435_761) % 2**31 for i in range(length)]
    found = list(sequence_to_blockchain_keys(max(length, 1), None, form(sequence)))
    assert found[0] == ([], hashlib.sha256(b"\0").digest())
    assert [list(part) for part, _ in found[1:]] == ([sequence] if length else [])
    assert len(found) == 1 or found[1][1] == reference(found[0][1], sequence)


def test_scenario_101_mixed_blocks() -> None:
    sequence = [0, digest("a"), 2**31 - 1, digest("b"), digest("a"), 5, 6]
    keys = chain(3, None, sequence)
    assert keys[1] == reference(keys[0], sequence[:3])
    assert keys[2] == reference(keys[1], sequence[3:6])
    assert keys[3] == reference(keys[2], sequence[6:])  # a short last block is keyed too
    assert len(keys) == 4
    named = [MmItemContext(token, "uuid") if isinstance(token, bytes) else token for token in sequence]
    assert chain(3, None, named) == keys


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_scenario_101_a_digest_has_32_bytes(make, size) -> None:
    for call in (
        lambda: chain(4, None, [1, bytes(size)]),
        lambda: gen_multimodal_cache_key_tokens(1000, bytes(size), 3),
        lambda: Lab(make, config([attention(0, 64)], 2 * MIB, tpb=4)).probe([1, bytes(size)]),
    ):
        with pytest.raises(ValueError, match=rf"{size} bytes"):
            call()


def test_scenario_104_keys_differ_with_the_salt() -> None:
    sequence = tokens(64)
    scopes = [None, ReuseScope(salt=0), ReuseScope(salt=1), ReuseScope(lora_id=1), ReuseScope(1, 1)]
    columns = list(zip(*(chain(8, scope, sequence) for scope in scopes), strict=True))
    assert len(columns) == 9
    assert all(len(set(column)) == len(scopes) for column in columns)


def test_keys_of_a_cache_are_those_of_its_tokens(make) -> None:
    lab = Lab(make, config([attention(0, 64), attention(1, 64, 4)], 4 * MIB, tpb=4))
    scope = ReuseScope(3, None)
    sequence = tokens(210)
    turn = lab.open(sequence, scope=scope)
    turn.advance(207)
    want = chain(4, scope, sequence[:204])[1:]
    assert turn.cache.block_keys() == want
    other = lab.create(sequence[:102], scope=scope)
    assert other.cache.block_keys() == want[:25]


WINDOWS = [(None, None), (None, 4), (4, 4)]


def lab_of(make, windows, **fields) -> Lab:
    return Lab(make, config([attention(i, 4 * 16, w) for i, w in enumerate(windows)], 4 * MIB, tpb=4, **fields))


@pytest.mark.parametrize("windows", WINDOWS)
def test_scenario_131_the_first_new_block_is_the_first_stored(make, windows) -> None:
    lab = lab_of(make, windows)
    for length in (4, 5, 8, 30):
        sequence = ids(length, seed=length)
        key = lab.manager.probe_first_new_block_key(None, sequence)
        assert key == chain(4, None, sequence)[1]
        turn = lab.open(sequence)
        turn.advance(length)
        assert turn.cache.block_keys()[0] == key
        turn.close()


@pytest.mark.parametrize("windows", WINDOWS)
def test_the_key_moves_on_with_what_is_cached(make, windows) -> None:
    lab = lab_of(make, windows)
    sequence = ids(40)
    keys = chain(4, None, sequence)
    for length in range(1, 40):
        lab.run(sequence[:length])
        assert lab.probe(sequence) == length
        assert lab.manager.probe_first_new_block_key(None, sequence) == keys[length // 4 + 1]


@pytest.mark.parametrize("windows", WINDOWS)
def test_scenario_133_no_new_block(make, windows) -> None:
    lab = lab_of(make, windows)
    for length in range(4):
        assert lab.manager.probe_first_new_block_key(None, ids(length)) is None
    lab.run(ids(16))
    assert lab.manager.probe_first_new_block_key(None, ids(16)) is None
    assert lab.manager.probe_first_new_block_key(None, ids(19)) is None  # 16 cached, the rest is no whole block
    assert lab.manager.probe_first_new_block_key(None, ids(20)) == chain(4, None, ids(20))[5]
    assert lab.manager.probe_first_new_block_key(None, []) is None
    assert lab.manager.probe_first_new_block_key() is None


def test_scenario_134_prefixes_and_scopes_differ(make) -> None:
    lab = lab_of(make, (None,))
    probes = [(None, ids(8)), (None, ids(8, seed=1)), (ReuseScope(1), ids(8)), (ReuseScope(None, 1), ids(8))]
    keys = [lab.manager.probe_first_new_block_key(*probe) for probe in probes]
    assert len(set(keys)) == len(probes)
    assert None not in keys


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("backoff", [1, 4, 5, 16])
def test_scenario_136_back_off(make, windows, backoff) -> None:
    lab = lab_of(make, windows, reuse_match_backoff=backoff)
    lab.run(ids(16))
    assert lab.reused(ids(16)) == 16 - backoff
    blocks = (16 - backoff) // 4
    assert lab.manager.probe_first_new_block_key(None, ids(16)) == chain(4, None, ids(16))[blocks + 1]


@pytest.mark.parametrize("backoff", [17, 1000])
def test_back_off_beyond_the_match_is_no_match(make, backoff) -> None:
    lab = lab_of(make, (None, 4), reuse_match_backoff=backoff)
    lab.run(ids(16))
    assert lab.reused(ids(16)) == 0


@pytest.mark.parametrize("windows", WINDOWS)
def test_scenario_137_clearing_restores_the_cold_key(make, windows) -> None:
    lab = lab_of(make, windows)
    cold = lab.manager.probe_first_new_block_key(None, ids(32))
    lab.run(ids(20))
    assert lab.manager.probe_first_new_block_key(None, ids(32)) != cold
    lab.manager.clear_reusable_blocks()
    assert lab.manager.probe_first_new_block_key(None, ids(32)) == cold


@pytest.mark.parametrize("windows", WINDOWS)
def test_scenario_139_arrays_and_lists(make, windows) -> None:
    lab = lab_of(make, windows)
    lab.run(ids(18))
    for length in range(30):
        array = np.array(ids(40), np.int32)[:length]
        assert lab.probe(array) == lab.probe(ids(length)) == lab.probe(tuple(ids(length)))
        key = lab.manager.probe_first_new_block_key(None, array)
        assert key == lab.manager.probe_first_new_block_key(None, ids(length))


def test_scenario_140_a_block_without_its_window_page(make) -> None:
    lab = lab_of(make, (None, 4))
    sequence = ids(16)
    lab.run(sequence[:8])
    introspection.set_test_coverage(lab.manager, None, sequence[:8], 1, 0)
    assert lab.reused(sequence) == 4
    assert lab.manager.probe_first_new_block_key(None, sequence) == chain(4, None, sequence)[2]


def test_scenario_143_what_a_chain_of_keys_says(make) -> None:
    """A router that knows the keys and counts how many it has seen gets what a match of whole blocks gets."""
    lab = lab_of(make, (None,))
    sequence = tokens(130)
    turn = lab.open(sequence, scope=ReuseScope(5))
    turn.advance(130)
    known = set(turn.cache.block_keys())
    turn.close()

    def seen(scope, query) -> int:
        count = 0
        for part, key in list(sequence_to_blockchain_keys(4, scope, query))[1:]:
            if len(part) < 4 or key not in known:
                break
            count += 4
        return count

    for query in (
        sequence,
        sequence[:64],
        [],
        sequence[:40] + tokens(40, seed=4),
        [*sequence[:101], 7, *sequence[102:]],
    ):
        assert seen(ReuseScope(5), query) == lab.probe(query, ReuseScope(5)) // 4 * 4
    assert seen(None, sequence) == lab.probe(sequence) == 0


def test_multimodal_tokens() -> None:
    one = digest("one")
    assert gen_multimodal_cache_key_tokens(1000, one, 4) == [one, 1001, 1002, 1003]
    assert gen_multimodal_cache_key_tokens(1000, one, 2, token_offset=3) == [1003, 1004]
    assert gen_multimodal_cache_key_tokens(1000, one, 1, uuid="u") == [MmItemContext(one, "u")]
    halves = gen_multimodal_cache_key_tokens(9, one, 3) + gen_multimodal_cache_key_tokens(9, one, 4, token_offset=3)
    assert halves == gen_multimodal_cache_key_tokens(9, one, 7)
    for bad in ((9, one, 0), (9, one, -1), (9, one, 1, -1)):
        with pytest.raises(ValueError, match="token"):
            gen_multimodal_cache_key_tokens(*bad)

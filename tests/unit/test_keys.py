"""Block keys: golden vectors, laziness and what is refused (v2_request §3.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ArgumentError
from kvpool.v2 import MmItemContext, ReuseScope, gen_multimodal_cache_key_tokens, sequence_to_blockchain_keys
from kvpool.v2.keys import root_key

DIGEST = bytes(range(32))


def keys(tokens_per_block: int, tokens: Any, scope: ReuseScope | None = None) -> list[str]:
    """The keys after the root's, in hexadecimal."""
    return [key.hex() for _, key in sequence_to_blockchain_keys(tokens_per_block, scope, tokens)][1:]


# -- golden vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "beginning", "end"),
    [
        (ReuseScope(), "6e340b9c", "fa01d"),
        (ReuseScope(lora_id=0), "a536aa3c", "65dfb"),
        (ReuseScope(salt=0), "4322fd2b", "7fad3"),
        (ReuseScope(0, 0), "6ad36d3f", "bd436d"),
        (ReuseScope(7, 11), "9e22dbfe", "13d3a3"),
    ],
)
def test_root_keys(scope: ReuseScope, beginning: str, end: str) -> None:
    key = root_key(scope).hex()
    assert key.startswith(beginning)
    assert key.endswith(end)
    assert next(sequence_to_blockchain_keys(4, scope, [])) == ([], root_key(scope))


def test_scope_bytes() -> None:
    assert root_key(ReuseScope(7, 11)) == hashlib.sha256(bytes.fromhex("0307000000000000000b00000000000000")).digest()
    top = 2**64 - 1
    assert root_key(ReuseScope(top)) == hashlib.sha256(b"\x01" + b"\xff" * 8).digest()
    scopes = [
        ReuseScope(),
        ReuseScope(7),
        ReuseScope(None, 11),
        ReuseScope(7, 11),
        ReuseScope(7, 12),
        ReuseScope(top, top),
    ]
    assert len({root_key(scope) for scope in scopes}) == len(scopes)  # scenario 103


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda tokens: np.array(tokens, np.int32)], ids=["list", "tuple", "array"]
)
def test_block_keys(kind: Any) -> None:
    block0 = "7b894451a88bc03088bd0c44f01139922b089a1ab691d157c273185c78ca83b2"
    block1 = "181684b4f09a9fc1689624a565bc5c9ed96cede3e0863cf373463b1a93c45369"
    partial = "56eed4fa2eec503f99466829bafed63846694c71a5cfaf3c836c4efcbd3019db"
    assert keys(4, kind(range(8))) == [block0, block1]
    assert keys(4, kind(range(3))) == [partial]
    assert keys(4, kind(range(5)))[0] == block0
    salted = "8d400728573c8ff046b41442cda1eb96291533fc6017407b75980fd6b0bf30b8"
    assert keys(2, kind([1, 2]), ReuseScope(7, 11)) == [salted]


def test_digest_block() -> None:
    expected = "0a1bfd6dcecbe284b01933df8f0e6600aa220ad7dea7c26ac4519ffc274417aa"
    for digest in (DIGEST, MmItemContext(DIGEST, "image 1")):  # the uuid is never hashed
        assert keys(4, [0, digest, 1001, 1002]) == [expected]
    assert keys(4, [0, *gen_multimodal_cache_key_tokens(1000, DIGEST, 3)]) == [expected]


@pytest.mark.parametrize("length", [0, 1, 7, 32, 33, 257])
def test_against_hashing_token_by_token(length: int) -> None:  # scenario 101
    tokens: list[Any] = [(i * 2654435761) % 2**31 for i in range(length)]
    mixed = [bytes([i % 256]) * 32 if i % 5 == 3 else token for i, token in enumerate(tokens)]
    for wanted in (tokens, mixed):
        key, expected = root_key(ReuseScope()), []
        for beg in range(0, length, 32):
            block = wanted[beg : beg + 32]
            key = hashlib.sha256(
                key + b"".join(t if isinstance(t, bytes) else t.to_bytes(4, "little") for t in block)
            ).digest()
            expected.append((block, key))
        assert list(sequence_to_blockchain_keys(32, None, wanted))[1:] == expected
    assert keys(32, np.array(tokens, np.int32)) == keys(32, tokens)


# -- form --------------------------------------------------------------------------------------------------------------


def test_items_are_the_blocks_own_tokens() -> None:
    chain = sequence_to_blockchain_keys(3, None, (4, 5, 6, 7))
    assert isinstance(chain, Iterator)
    assert [block for block, _ in chain] == [[], [4, 5, 6], [7]]
    blocks = [block for block, _ in sequence_to_blockchain_keys(3, None, np.arange(4, 8, dtype=np.int32))]
    assert blocks == [[], [4, 5, 6], [7]]
    assert all(type(token) is int for block in blocks for token in block)
    item = MmItemContext(DIGEST, "u")
    assert [block for block, _ in sequence_to_blockchain_keys(2, None, [1, item])] == [[], [1, item]]
    assert list(sequence_to_blockchain_keys(8, None, np.zeros(0, np.int32)))[1:] == []


def test_blocks_are_hashed_when_asked_for() -> None:
    chain = sequence_to_blockchain_keys(2, None, [1, 2, 3, "x"])  # type: ignore[list-item]
    assert [len(block) for block, _ in (next(chain), next(chain))] == [0, 2]
    with pytest.raises(TypeError, match=r"tokens\[2:4\]\[1\] must be a token id or a digest, not str"):
        next(chain)


def test_keys_depend_on_what_comes_before() -> None:
    assert keys(2, [1, 2, 3, 4])[1] != keys(2, [9, 2, 3, 4])[1]
    assert keys(2, [1, 2, 3, 4])[1] != keys(2, [3, 4])[0]
    assert keys(2, [1, 2], ReuseScope(salt=1)) != keys(2, [1, 2])  # scenario 104
    assert keys(4, [1, 2, 3, 4])[0] != keys(2, [1, 2, 3, 4])[1]


@pytest.mark.parametrize(
    ("size", "scope", "tokens", "error", "text"),
    [
        (0, None, [1], ArgumentError, "tokens_per_block must be from 1"),
        (2.0, None, [1], TypeError, "tokens_per_block must be an integer"),
        (2, (7, 11), [1], TypeError, "reuse_scope must be a ReuseScope"),
        (2, ReuseScope(2**64), [1], ArgumentError, r"reuse_scope\.lora_id must be from 0 to 2\^64 - 1"),
        (2, None, None, TypeError, "tokens must be a list, a tuple or an int32 array, not NoneType"),
        (2, None, "text", TypeError, "tokens must be a list"),
        (2, None, np.arange(3), ArgumentError, "tokens must be a one-dimensional"),
        (2, None, np.array([1, 2, -3], np.int32), ArgumentError, r"tokens\[2\]: token ids must be from 0"),
        (2, None, [0, 1, 2, -3], ArgumentError, r"tokens\[2:4\]\[1\]: token ids must be from 0 to 2147483647, not -3"),
        (2, None, [0, -1], ArgumentError, r"tokens\[0:2\]\[1\]: token ids"),
        (2, None, [DIGEST, -1], ArgumentError, r"tokens\[0:2\]\[1\]: token ids"),
        (2, None, [2**31], ArgumentError, r"tokens\[0:2\]\[0\]: token ids"),
        (2, None, [True], TypeError, r"\[0\] must be a token id or a digest, not bool"),
        (2, None, [bytes(31)], ArgumentError, "31 bytes: a digest has 32"),
        (2, None, [bytes(33)], ArgumentError, "33 bytes"),
    ],
)
def test_refused(size: Any, scope: Any, tokens: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        list(sequence_to_blockchain_keys(size, scope, tokens))


# -- multimodal tokens -------------------------------------------------------------------------------------------------


def test_multimodal_tokens() -> None:
    assert gen_multimodal_cache_key_tokens(1000, DIGEST, 3) == [DIGEST, 1001, 1002]
    assert gen_multimodal_cache_key_tokens(1000, DIGEST, 2, token_offset=2) == [1002, 1003]
    whole = gen_multimodal_cache_key_tokens(1000, DIGEST, 7)
    parts = [gen_multimodal_cache_key_tokens(1000, DIGEST, n, token_offset=at) for at, n in ((0, 2), (2, 4), (6, 1))]
    assert [token for part in parts for token in part] == whole
    assert gen_multimodal_cache_key_tokens(5, DIGEST, 2, 0, "u") == [MmItemContext(DIGEST, "u"), 6]
    assert gen_multimodal_cache_key_tokens(5, DIGEST, 1, 3, "u") == [8]
    assert gen_multimodal_cache_key_tokens(np.int64(5), DIGEST, np.int32(2)) == [DIGEST, 6]  # type: ignore[arg-type]
    assert gen_multimodal_cache_key_tokens(2**31 - 2, DIGEST, 2) == [DIGEST, 2**31 - 1]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((10, bytes(31), 1), ArgumentError, "multi_modal_data_digest has 31 bytes"),
        ((10, bytes(33), 1), ArgumentError, "33 bytes"),
        ((10, "x" * 32, 1), TypeError, "multi_modal_data_digest must be bytes"),
        ((10, bytearray(32), 1), TypeError, "multi_modal_data_digest must be bytes"),
        ((10, DIGEST, 0), ArgumentError, "num_tokens must be from 1"),
        ((10, DIGEST, -1), ArgumentError, "num_tokens"),
        ((10, DIGEST, True), TypeError, "num_tokens must be an integer"),
        ((10, DIGEST, 1, -1), ArgumentError, "token_offset must be from 0"),
        ((-1, DIGEST, 1), ArgumentError, "id_offset must be from 0"),
        ((2**31 - 2, DIGEST, 3), ArgumentError, "must be at most 2147483647"),
        ((10, DIGEST, 1, 0, 7), TypeError, "uuid must be a string or None"),
    ],
)
def test_multimodal_arguments(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        gen_multimodal_cache_key_tokens(*arguments)

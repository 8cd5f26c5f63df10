"""Tokens and scopes on their way to a core: what is legal, what is refused, and that arrays are not copied."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ArgumentError
from kvpool.v2 import MmItemContext, ReuseScope
from kvpool.v2._tokens import check_reuse_scope, decode_tokens, encode_tokens

ONE, TWO = bytes(range(32)), bytes(32)


def encoded(tokens: Any) -> tuple[list[int], list[bytes]]:
    ids, digests = encode_tokens("tokens", tokens, False)
    assert (ids.dtype, ids.ndim, ids.flags.c_contiguous, ids.flags.aligned) == (np.int32, 1, True, True)
    return ids.tolist(), list(digests)


@pytest.mark.parametrize(
    ("tokens", "ids", "digests"),
    [
        ([], [], []),
        ((), [], []),
        ([0, 1, 2**31 - 1], [0, 1, 2**31 - 1], []),
        ((5, 6), [5, 6], []),
        ([np.int64(5), 6, np.uint8(7)], [5, 6, 7], []),
        ([1, ONE, 2], [1, -1, 2], [ONE]),
        ([TWO, ONE, TWO, 3], [-1, -2, -1, 3], [TWO, ONE]),
        ([MmItemContext(ONE, "u"), ONE, MmItemContext(TWO)], [-1, -1, -2], [ONE, TWO]),
        (np.zeros(0, np.int32), [], []),
        (np.arange(7, dtype=np.int32)[2:5], [2, 3, 4], []),
        ([-3, 4], [-3, 4], []),  # a list of ints goes through unread: the core refuses what names no digest
    ],
    ids=repr,
)
def test_encoding(tokens: Any, ids: list[int], digests: list[bytes]) -> None:
    assert encoded(tokens) == (ids, digests)


def test_arrays_are_passed_on() -> None:
    whole = np.arange(8, dtype=np.int32)
    fixed = whole[2:6]
    fixed.flags.writeable = False
    for given in (whole, fixed, whole[:0], np.frombuffer(bytes(12), np.int32)):
        assert encode_tokens("tokens", given, True)[0] is given

    class Labelled(np.ndarray):  # type: ignore[type-arg]
        pass

    for unusual in (whole.view(Labelled), whole.view(np.dtype(np.int32, metadata={"unit": "token"}))):
        ids, _ = encode_tokens("tokens", unusual, True)
        assert type(ids) is np.ndarray
        assert np.shares_memory(ids, whole)


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        (None, TypeError, "tokens must be a list, a tuple or an int32 array, not NoneType"),
        ("text", TypeError, "not str"),
        (b"bytes", TypeError, "not bytes"),
        (range(4), TypeError, "not range"),
        ({1, 2}, TypeError, "not set"),
        (array("i", [1]), TypeError, "not array"),
        (np.int32(7), TypeError, "not int32"),
        ([1, "x"], TypeError, r"tokens\[1\] must be a token id or a digest, not str"),
        ([None], TypeError, "not NoneType"),
        ([2.0], TypeError, "not float"),
        ([1, True], TypeError, r"tokens\[1\] must be a token id or a digest, not bool"),
        ([np.bool_(True)], TypeError, "not bool"),
        ([bytearray(32)], TypeError, "not bytearray"),
        ([MmItemContext("x" * 32)], TypeError, "not MmItemContext"),  # type: ignore[arg-type]
        ([1, 2**31], ArgumentError, r"tokens\[1\]: token ids must be from 0 to 2147483647, not 2147483648"),
        ([-(2**31) - 1], ArgumentError, r"tokens\[0\]"),
        ([ONE, -1], ArgumentError, r"tokens\[1\]: token ids must be from 0 to 2147483647, not -1"),
        ([np.int64(-1)], ArgumentError, r"tokens\[0\]"),
        ([bytes(31)], ArgumentError, r"tokens\[0\] has 31 bytes: a digest has 32"),
        ([MmItemContext(bytes(33))], ArgumentError, "33 bytes"),
        (np.arange(4), ArgumentError, r"one-dimensional, C-contiguous and aligned int32 array, not int64\[4\]"),
        (np.arange(4, dtype=np.uint32), ArgumentError, r"not uint32\[4\]"),
        (np.arange(4, dtype=">i4"), ArgumentError, r"not >i4\[4\]"),
        (np.zeros((2, 2), np.int32), ArgumentError, r"not int32\[2, 2\]"),
        (np.zeros((), np.int32), ArgumentError, r"not int32\[\]"),
        (np.arange(8, dtype=np.int32)[::2], ArgumentError, r"not int32\[4\] with strides \(8,\)"),
        (np.frombuffer(bytes(13), np.int32, count=3, offset=1), ArgumentError, "aligned"),
    ],
    ids=repr,
)
def test_refused(tokens: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        encode_tokens("tokens", tokens, False)


def test_text_only() -> None:
    for tokens in ([1, ONE], [MmItemContext(ONE), 1]):
        with pytest.raises(ArgumentError, match=r"tokens\[\d\] is a digest, but text_only was promised"):
            encode_tokens("tokens", tokens, True)


def test_decoding() -> None:
    for tokens in ([], [1, 2], [TWO, 3, ONE, TWO]):
        assert decode_tokens(*encode_tokens("tokens", tokens, False)) == tokens
    assert decode_tokens(*encode_tokens("tokens", [MmItemContext(ONE, "u"), 1], False)) == [ONE, 1]


def test_scopes() -> None:
    assert check_reuse_scope(None) == ReuseScope()
    scope = ReuseScope(2**64 - 1, 0)
    assert check_reuse_scope(scope) is scope
    plain = check_reuse_scope(ReuseScope(np.uint64(2**64 - 1), np.int8(3)))  # type: ignore[arg-type]
    assert plain == (2**64 - 1, 3)
    assert [type(value) for value in plain] == [int, int]
    for wrong, error in (
        (ReuseScope(-1), ArgumentError),
        (ReuseScope(None, 2**64), ArgumentError),
        (ReuseScope(True), TypeError),
        (ReuseScope(1.0), TypeError),  # type: ignore[arg-type]
        (ReuseScope("7"), TypeError),  # type: ignore[arg-type]
        ((None, None), TypeError),
        (3, TypeError),
    ):
        with pytest.raises(error, match="reuse_scope"):
            check_reuse_scope(wrong)

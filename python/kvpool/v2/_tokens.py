"""What names a prefix, as the cores take it: tokens as int32 ids with digests beside them, and the reuse scope."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.v2._backend import Ids
from kvpool.v2._checks import INT32_MAX, is_integer
from kvpool.v2.types import MmItemContext, ReuseScope, TokenIdExt

DIGEST_BYTES = 32
NO_DIGESTS: Sequence[bytes] = ()
DEFAULT_SCOPE = ReuseScope()

_UINT64_MAX = 2**64 - 1
_INT32 = np.dtype(np.int32)
_PLAIN = 0x101  # numpy's numbers for the flags C_CONTIGUOUS and ALIGNED; one attribute is cheaper than two


def check_reuse_scope(scope: Any) -> ReuseScope:
    """The scope with plain ints, the default one for None."""
    if scope is None:
        return DEFAULT_SCOPE
    if not isinstance(scope, ReuseScope):
        raise TypeError(f"reuse_scope must be a ReuseScope or None, not {type(scope).__name__}")
    lora_id, salt = scope
    if (lora_id is None or (type(lora_id) is int and 0 <= lora_id <= _UINT64_MAX)) and (
        salt is None or (type(salt) is int and 0 <= salt <= _UINT64_MAX)
    ):
        return scope
    return ReuseScope(_scope_value("lora_id", scope.lora_id), _scope_value("salt", scope.salt))


def _scope_value(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not is_integer(value):
        raise TypeError(f"reuse_scope.{name} must be an integer or None, not {type(value).__name__}")
    if not 0 <= value <= _UINT64_MAX:
        raise ArgumentError(f"reuse_scope.{name} must be from 0 to 2^64 - 1, not {value}")
    return int(value)


def encode_tokens(name: str, tokens: Any, text_only: bool) -> tuple[Ids, Sequence[bytes]]:
    """``tokens`` as (ids, digests): the j-th different digest, by first use, becomes the id ``-1 - j``.

    An int32 vector is passed on as it is; the core refuses a negative id that names no digest.  Raises TypeError and
    ArgumentError with ``name`` in them, the latter for a digest where ``text_only`` was promised too.
    """
    if type(tokens) is np.ndarray and tokens.dtype is _INT32 and tokens.ndim == 1:
        if tokens.flags.num & _PLAIN == _PLAIN:
            return tokens, NO_DIGESTS
    elif isinstance(tokens, (list, tuple)):
        return _encode_sequence(name, tokens, text_only)
    return _plain_array(name, tokens), NO_DIGESTS


def _plain_array(name: str, tokens: Any) -> Ids:
    """An array that is unusual, but legal; a view, never a copy."""
    if not isinstance(tokens, np.ndarray):
        raise TypeError(f"{name} must be a list, a tuple or an int32 array, not {type(tokens).__name__}")
    if tokens.dtype != _INT32 or tokens.ndim != 1 or tokens.flags.num & _PLAIN != _PLAIN:
        raise ArgumentError(
            f"{name} must be a one-dimensional, C-contiguous and aligned int32 array, not "
            f"{tokens.dtype}{list(tokens.shape)} with strides {tokens.strides}"
        )
    return np.asarray(tokens).view(_INT32)


def _encode_sequence(name: str, tokens: list[Any] | tuple[Any, ...], text_only: bool) -> tuple[Ids, Sequence[bytes]]:
    if set(map(type, tokens)) <= {int}:  # the usual case, without a Python loop over a long prompt
        try:
            return _as_ids(array("i", tokens)), NO_DIGESTS
        except OverflowError:
            pass  # the loop below says where
    ids = array("i")
    numbers: dict[bytes, int] = {}
    for position, token in enumerate(tokens):
        if is_integer(token):
            if not 0 <= token <= INT32_MAX:
                raise ArgumentError(f"{name}[{position}]: token ids must be from 0 to {INT32_MAX}, not {token}")
            ids.append(int(token))
            continue
        digest = token.digest if isinstance(token, MmItemContext) else token
        if not isinstance(digest, bytes):
            raise TypeError(f"{name}[{position}] must be a token id or a digest, not {type(token).__name__}")
        if len(digest) != DIGEST_BYTES:
            raise ArgumentError(f"{name}[{position}] has {len(digest)} bytes: a digest has {DIGEST_BYTES}")
        if text_only:
            raise ArgumentError(f"{name}[{position}] is a digest, but text_only was promised")
        ids.append(-1 - numbers.setdefault(bytes(digest), len(numbers)))
    return _as_ids(ids), list(numbers)


def _as_ids(ids: array[int]) -> Ids:
    return np.frombuffer(ids, _INT32) if ids else np.empty(0, _INT32)


def decode_tokens(ids: Ids, digests: Sequence[bytes]) -> list[TokenIdExt]:
    """What :func:`encode_tokens` was given, with plain ``bytes`` for digests."""
    plain: list[int] = ids.tolist()
    if not digests:
        return list(plain)
    return [token if token >= 0 else digests[-1 - token] for token in plain]

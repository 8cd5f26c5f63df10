"""Block keys: the SHA-256 chain that names a prefix outside the process. Inside, look-ups compare tokens.

The root key is the SHA-256 of the scope: a mask byte (bit 0: LoRA id present, bit 1: salt present), then each of the two
that is present as 8 bytes.  A block's key is the SHA-256 of the 32 bytes of the key before it and of the block's tokens:
4 bytes for an id, the 32 bytes themselves for a digest.  Numbers are little-endian and unsigned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.v2._backend import Ids
from kvpool.v2._checks import INT32_MAX, arg_int
from kvpool.v2._tokens import DIGEST_BYTES, check_reuse_scope, encode_tokens
from kvpool.v2.types import MmItemContext, ReuseScope, TokenIdExt

KEY_BYTES = 32


def gen_multimodal_cache_key_tokens(
    id_offset: int,
    multi_modal_data_digest: bytes,
    num_tokens: int,
    token_offset: int = 0,
    uuid: str | None = None,
) -> list[TokenIdExt]:
    """Tokens that stand for the embeddings ``[token_offset, token_offset + num_tokens)`` of one multimodal item.

    Embedding 0 is the item's digest (32 bytes; with ``uuid`` a :class:`MmItemContext`), embedding j > 0 the id
    ``id_offset + j``; ``id_offset`` is about the vocabulary's size.  Raises TypeError, ArgumentError: digest not 32
    bytes, ``num_tokens`` below 1, ``token_offset`` below 0, ids beyond 2^31 - 1.
    """
    if not isinstance(multi_modal_data_digest, bytes):
        raise TypeError(f"multi_modal_data_digest must be bytes, not {type(multi_modal_data_digest).__name__}")
    if len(multi_modal_data_digest) != DIGEST_BYTES:
        raise ArgumentError(
            f"multi_modal_data_digest has {len(multi_modal_data_digest)} bytes: a digest has {DIGEST_BYTES}"
        )
    if uuid is not None and not isinstance(uuid, str):
        raise TypeError(f"uuid must be a string or None, not {type(uuid).__name__}")
    offset = arg_int("id_offset", id_offset)
    beg = arg_int("token_offset", token_offset)
    end = beg + arg_int("num_tokens", num_tokens, 1)
    if offset + end - 1 > INT32_MAX:
        raise ArgumentError(f"id_offset + token_offset + num_tokens - 1 must be at most {INT32_MAX}")
    ids: list[TokenIdExt] = list(range(offset + beg, offset + end))
    if beg == 0:
        ids[0] = multi_modal_data_digest if uuid is None else MmItemContext(multi_modal_data_digest, uuid)
    return ids


def sequence_to_blockchain_keys(
    tokens_per_block: int, reuse_scope: ReuseScope | None, tokens: Sequence[TokenIdExt] | npt.NDArray[np.int32]
) -> Iterator[tuple[list[TokenIdExt], bytes]]:
    """``([], root key)``, then (tokens of the block, its key) block by block; the last block may be short.

    ``tokens``: a list or tuple of ids and digests, or a C-contiguous int32 array.  A block is hashed when it is asked
    for.  Raises TypeError and ArgumentError for the arguments at once, for a token of a list when its block's turn comes.
    """
    size = arg_int("tokens_per_block", tokens_per_block, 1)
    root = root_key(check_reuse_scope(reuse_scope))
    if isinstance(tokens, (list, tuple)):
        return _chain_of_list(size, root, tokens)
    ids, _ = encode_tokens("tokens", tokens, False)
    _refuse_negative("tokens", ids)
    return _chain_of_array(size, root, ids)


def _chain_of_array(size: int, key: bytes, ids: Ids) -> Iterator[tuple[list[TokenIdExt], bytes]]:
    yield [], key
    for beg in range(0, len(ids), size):
        block = ids[beg : beg + size]
        key = block_key(key, block, ())
        yield block.tolist(), key


def _chain_of_list(size: int, key: bytes, tokens: Sequence[TokenIdExt]) -> Iterator[tuple[list[TokenIdExt], bytes]]:
    yield [], key
    for beg in range(0, len(tokens), size):
        block = tokens[beg : beg + size]
        name = f"tokens[{beg}:{beg + size}]"
        ids, digests = encode_tokens(name, block, False)
        if not digests:  # where there are, the encoder has looked at each token
            _refuse_negative(name, ids)
        key = block_key(key, ids, digests)
        yield list(block), key


def _refuse_negative(name: str, ids: Ids) -> None:
    if ids.size and ids.min() < 0:
        position = int((ids < 0).argmax())
        raise ArgumentError(f"{name}[{position}]: token ids must be from 0 to {INT32_MAX}, not {ids[position]}")


def root_key(scope: ReuseScope) -> bytes:
    """The key that every chain of the scope begins with."""
    mask = (scope.lora_id is not None) | (scope.salt is not None) << 1
    values = b"".join(value.to_bytes(8, "little") for value in scope if value is not None)
    return hashlib.sha256(bytes([mask]) + values).digest()


def block_key(parent: bytes, ids: Ids, digests: Sequence[bytes]) -> bytes:
    """The key of a block on top of ``parent``; ``ids`` and ``digests`` as the cores take them."""
    if not digests:
        return hashlib.sha256(parent + ids.astype("<i4", copy=False).tobytes()).digest()
    encoded = (token.to_bytes(4, "little") if token >= 0 else digests[-1 - token] for token in ids.tolist())
    return hashlib.sha256(parent + b"".join(encoded)).digest()

"""Chain keys: the SHA-256 names of blocks that leave the process.

Key of a root: of the scope's bytes; key of a block: of the parent's key and the block's tokens.  Inside the manager
nothing rests on them: blocks are compared by their tokens.
"""

from __future__ import annotations

from hashlib import sha256

from kvpool._py.core.tokens import DigestOf, plain_bytes

KEY_BYTES = 32

Scope = tuple[int | None, int | None]
"""LoRA id and salt."""


def scope_bytes(scope: Scope) -> bytes:
    """A mask byte that says which fields are there, then those, 8 little-endian bytes each: None is not 0."""
    mask = sum(1 << bit for bit, field in enumerate(scope) if field is not None)
    return bytes([mask]) + b"".join(field.to_bytes(8, "little") for field in scope if field is not None)


def root_key(scope: Scope) -> bytes:
    """Key of a scope."""
    return sha256(scope_bytes(scope)).digest()


def block_key(parent_key: bytes, tokens: bytes, digest_of: DigestOf) -> bytes:
    """Key of a block of encoded tokens."""
    return sha256(parent_key + plain_bytes(tokens, digest_of)).digest()

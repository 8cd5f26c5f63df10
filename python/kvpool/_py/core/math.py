"""Exact integer arithmetic: block counts, rounding, and decimal limits without floating point."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

_MAX_DECIMALS = 18


def div_up(a: int, b: int) -> int:
    """Ceiling of ``a / b``, ``b > 0``."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of ``b`` that is at least ``a``."""
    return div_up(a, b) * b


def largest_that_fits(most: int, fits: Callable[[int], bool]) -> int:
    """Largest n in [0, most] with ``fits(n)``, for a predicate that holds up to some n; 0 when none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def decimal_fraction(x: float) -> tuple[int, int]:
    """What a user wrote as ``x``, as ``(numerator, 10**k)`` with the smallest k ≤ 18.

    The shortest decimal that reads back as ``x`` (0.95 is 95/100, not its binary neighbour), truncated to 18
    decimals; a positive value too small for that is 1/10**18.  Limits compared this way are equal in every language.
    """
    sign, digits, exponent = Decimal(repr(x)).as_tuple()
    assert isinstance(exponent, int), "limits are finite"
    assert not sign, "limits are not negative"
    mantissa = int("".join(map(str, digits)))
    if exponent >= 0:
        return mantissa * 10**exponent, 1
    if exponent < -_MAX_DECIMALS:
        mantissa //= 10 ** (-exponent - _MAX_DECIMALS)
        exponent = -_MAX_DECIMALS
    if mantissa == 0:
        return 1, 10**_MAX_DECIMALS
    while exponent < 0 and mantissa % 10 == 0:
        mantissa //= 10
        exponent += 1
    return mantissa, int(10**-exponent)


def div_up_by_limit(n: int, limit: tuple[int, int]) -> int:
    """Smallest m with ``m * limit >= n``; saturates at 2**62 as the native twin does."""
    numerator, denominator = limit
    return min(div_up(n * denominator, numerator), 1 << 62)

"""Checks of configs: each raises a ValueError that names the field and says what to use."""

import math
from numbers import Integral, Real


def require_at_least(config: object, least: float, *names: str) -> None:
    """Raise unless each named field of `config` is `least` or more; NaN is refused."""
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name}={getattr(config, name)}; use {least} or more")


def whole_number(name: str, value: object, least: float = -math.inf) -> int:
    """`value` as an int; raise unless it is a whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r}; use a whole number")
    if value < least:
        raise ValueError(f"{name}={value}; use {least} or more")
    return int(value)


def require_whole(config: object, least: int, *names: str) -> None:
    """Raise unless each named field of `config` is a whole number, `least` or more."""
    for name in names:  # NumPy's become int: files hold no others
        vars(config)[name] = whole_number(name, getattr(config, name), least)


def require_positive(config: object, *names: str) -> None:
    """Raise unless each named field of `config` is finite and above 0."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise ValueError(f"{name}={value}; use a finite number above 0")


def require_fraction(config: object, *names: str) -> None:
    """Raise unless each named field of `config` is from 0 to 1."""
    for name in names:
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ValueError(f"{name}={getattr(config, name)}; use a number from 0 to 1")

"""How often bytes went somewhere because an access wanted them there."""

import itertools

_counter = itertools.count(1)
_travels = 0


def travels() -> int:
    """A number that changes after an access of any memory has had bytes copied, zeroed or turned over."""
    return _travels


def travelled() -> None:
    """Have `travels` change."""
    global _travels
    _travels = next(_counter)

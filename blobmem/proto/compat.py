"""What differs between the protobuf runtimes from 4.21 to 7.x, in one place."""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory


def message_class(descriptor: Any, pool: Any) -> Any:
    """The class of the messages that `descriptor`, which lives in `pool`, describes."""
    # 4.22 brought GetMessageClass, 5.26 took GetPrototype away.
    get_class = getattr(message_factory, "GetMessageClass", None)
    if get_class is not None:
        return get_class(descriptor)
    factory: Any = message_factory.MessageFactory(pool)
    return factory.GetPrototype(descriptor)


def is_repeated(field: Any) -> bool:
    """Whether a field descriptor is of a repeated field."""
    # 6.31 brought is_repeated and is_required, 7.34 took `label` away.
    answer = getattr(field, "is_repeated", None)
    return field.label == field.LABEL_REPEATED if answer is None else bool(answer)


def is_required(field: Any) -> bool:
    """Whether a field descriptor is of a required field."""
    answer = getattr(field, "is_required", None)
    return field.label == field.LABEL_REQUIRED if answer is None else bool(answer)

"""What a record of a file holds, in words for people, and texts that can be used."""

from collections.abc import Mapping

from potluck.errors import BadInput

_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def checked_text(value: object, name: str, where: str) -> str:
    """The value, where it is a string of whole characters; ``name`` and ``where`` say in a message which it is.

    Raises:
        BadInput: it is none.
    """
    if not isinstance(value, str):
        raise BadInput(f"{where}: {name} must be a string, found {kind_of(value)}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise BadInput(f"{where}: {name} holds {half}, half of a surrogate pair, which is no character.") from None
    return value


def kind_of(value: object) -> str:
    """What kind of value this is, as JSON calls it."""
    return _JSON_NAMES.get(type(value), f"the number {value}")


def keys_of(record: Mapping[object, object]) -> str:
    """The keys of a record, for a message."""
    return ", ".join(f"{key} (null)" if value is None else str(key) for key, value in record.items()) or "none"

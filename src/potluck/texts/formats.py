"""One record of a file, of any format people use, as one of four kinds of row."""

from collections.abc import Mapping
from dataclasses import dataclass

from potluck.errors import BadInput
from potluck.job_sections import Format
from potluck.texts.values import checked_text, keys_of, kind_of


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str


@dataclass(frozen=True)
class Chat:
    """A conversation; the assistant's turns are the answers."""

    messages: tuple[Message, ...]
    where: str
    format: Format


@dataclass(frozen=True)
class Instruction:
    """A task, perhaps with material to work on, and its answer (Taori et al., 2023: Alpaca)."""

    instruction: str
    material: str
    output: str
    where: str
    format: Format


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it."""

    prompt: str
    completion: str
    where: str
    format: Format


@dataclass(frozen=True)
class Document:
    """Plain text, all of it to be learnt."""

    text: str
    where: str
    format: Format


Row = Chat | Instruction | Completion | Document

KEYS: Mapping[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "label": ("text", "label"),
    "text": ("text",),
}
"""The keys a record of each format must have, in the order in which ``auto`` tries them."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def parse_record(record: object, format: Format, where: str) -> Row:
    """Read one record.

    Args:
        record: what a line holds: an object for most formats, or a string, which is a whole text file.
        format: the format the person named, or ``auto``.
        where: the record's source for messages, as ``file:line``.

    Raises:
        BadInput: the record is not an object, lacks the format's keys, or a value has the wrong type.
    """
    if isinstance(record, str) and format in ("auto", "text"):
        return Document(checked_text(record, "the text", where), where, "text")
    if not isinstance(record, dict):
        raise BadInput(f"{where}: expected an object with named values, found {kind_of(record)}.{_choices()}")
    format = _format_of(record, format, where)
    match format:
        case "messages" | "conversations":
            return Chat(_messages(record[format], format, where), where, format)
        case "instruction":
            material = "" if record.get("input") is None else _string(record, "input", where)
            return Instruction(
                _string(record, "instruction", where), material, _string(record, "output", where), where, format
            )
        case "prompt":
            return Completion(_string(record, "prompt", where), _string(record, "completion", where), where, format)
        case "label":
            return Completion(_string(record, "text", where), _label(record["label"], where), where, format)
        case _:
            return Document(_string(record, "text", where), where, "text")


def _format_of(record: dict[object, object], named: Format, where: str) -> Format:
    present = {key for key, value in record.items() if value is not None}
    if named == "auto":
        for format, keys in KEYS.items():
            if present.issuperset(keys):
                return format
        raise BadInput(f"{where}: no known format has the keys found: {keys_of(record)}.{_choices()}")
    if not present.issuperset(KEYS[named]):
        needed = " and ".join(f"'{key}'" for key in KEYS[named])
        raise BadInput(f"{where}: format '{named}' needs {needed}; keys found: {keys_of(record)}.{_choices()}")
    return named


def _messages(turns: object, key: str, where: str) -> tuple[Message, ...]:
    if not isinstance(turns, list | tuple):
        raise BadInput(f"{where}: '{key}' must be a list of turns, found {kind_of(turns)}.")
    if not turns:
        raise BadInput(f"{where}: '{key}' is an empty list.")
    return tuple(_message(turn, f"turn {number} of '{key}'", where) for number, turn in enumerate(turns, 1))


def _message(turn: object, name: str, where: str) -> Message:
    if not isinstance(turn, dict):
        raise BadInput(f"{where}: {name} must be an object, found {kind_of(turn)}.")
    for role_key, content_key in (("role", "content"), ("from", "value")):
        if turn.get(role_key) is not None and content_key in turn:
            role = turn[role_key]
            if not isinstance(role, str) or role not in _ROLES:
                known = ", ".join(_ROLES)
                raise BadInput(f"{where}: {name} has the unknown {role_key} {role!r}; known are {known}.")
            return Message(_ROLES[role], _content(turn[content_key], f"'{content_key}' of {name}", where))
    raise BadInput(f"{where}: {name} needs 'role' and 'content', or 'from' and 'value'; keys found: {keys_of(turn)}.")


def _content(content: object, name: str, where: str) -> str:
    if isinstance(content, list):
        return "".join(_content_part(part, name, where) for part in content)
    return checked_text(content, name, where)


def _content_part(part: object, name: str, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return checked_text(part.get("text"), name, where)
    kind = part.get("type") if isinstance(part, dict) else kind_of(part)
    raise BadInput(f"{where}: {name} has a part that is not text ({kind}); only text can be learnt.")


def _label(label: object, where: str) -> str:
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, int):
        return str(label)
    if isinstance(label, str) and label.strip():
        return checked_text(label, "'label'", where)
    found = "an empty string" if isinstance(label, str) else kind_of(label)
    raise BadInput(f"{where}: 'label' must be a name or a whole number, found {found}.")


def _string(record: dict[object, object], key: str, where: str) -> str:
    return checked_text(record[key], f"'{key}'", where)


def _choices() -> str:
    return (
        " Accepted are: messages | conversations | instruction, output and perhaps input | prompt, completion |"
        " text, label | text."
    )

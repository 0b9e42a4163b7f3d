"""Examples out of JSONL: a prompt and its completion, or the messages of a chat.

Owns: which records are examples, what of each is learned, and what happens to bad ones. Does not
own: tokens, and how examples are packed (`language`).

A record is `{"prompt": "...", "completion": "..."}` or `{"messages": [{"role": "user", "content":
"..."}, ...]}`. Only completions, or the contents of the role `assistant`, count in the loss. A chat
is written as ChatML: `<|im_start|>ROLE`, a line break, the content, `<|im_end|>`, a line break.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardtrain.data.cache import Say
from shardtrain.errors import DataError

BadRecordPolicy = Literal["stop", "skip"]

_TEXT = ("text", "content")
_ROLES = ("system", "user", "assistant", "tool")
_FORMS = "prompt and completion, or messages"


@dataclass(frozen=True)
class Part:
    """Some text of an example."""

    text: bytes
    counts: bool
    """Whether it is learned."""


@dataclass(frozen=True)
class Example:
    """One document of a prompt and what is learned of it."""

    parts: tuple[Part, ...]
    where: str
    """File and line."""


@dataclass
class BadRecords:
    """What is done with records that cannot be learned from: the run stops, or they are counted."""

    policy: BadRecordPolicy
    faults: list[DataError] = field(default_factory=list)

    def meet(self, fault: DataError) -> None:
        """Meet one.

        Raises:
            DataError: the policy is to stop.
        """
        if self.policy == "stop":
            fault.cure = fault.cure or 'mend it, or set data.bad_records to "skip"'
            raise fault
        self.faults.append(fault)

    def tell(self, say: Say) -> None:
        """Say how many there were, and which was the first."""
        if self.faults:
            first = self.faults[0]
            say(f"skipped {len(self.faults)} bad records, first {first.where}: {first.message}")


def looks_like_examples(line: bytes) -> bool:
    """Tell by its first line whether a JSONL file holds examples and not plain text."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    if not isinstance(row, dict) or any(name in row for name in _TEXT):
        return False
    return any(name in row for name in ("prompt", "completion", "messages"))


def read_example(line: bytes, where: str) -> Example:
    """Read one record.

    Args:
        line: of JSON.
        where: file and line, for messages.

    Raises:
        DataError: it is no JSON object, a field is missing or of another type, or nothing in it
            would be learned.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"this line is not JSON: {error}", where=where) from None
    if not isinstance(row, dict):
        raise DataError("this line is not a JSON object", where=where, value=str(row)[:80])
    parts = _chat(row["messages"], where) if "messages" in row else _completion(row, where)
    if not any(part.counts and part.text.strip() for part in parts):
        raise DataError("the completion is empty: nothing would be learned", where=where)
    return Example(tuple(part for part in parts if part.text), where)


def _completion(row: Mapping[str, Any], where: str) -> list[Part]:
    for name in ("prompt", "completion"):
        if name not in row:
            raise DataError(
                f"the field {name} is missing",
                where=where,
                value=f"fields {', '.join(row) or 'none'}",
                allowed=_FORMS,
            )
        if not isinstance(row[name], str):
            raise DataError(f"the field {name} is no text", where=where, value=str(row[name])[:80])
    return [_part(row["prompt"], counts=False), _part(row["completion"], counts=True)]


def _chat(messages: Any, where: str) -> list[Part]:
    if not isinstance(messages, list) or not messages:
        raise DataError(
            "messages is no list of messages", where=where, value=str(messages)[:80], allowed=_FORMS
        )
    parts: list[Part] = []
    for number, message in enumerate(messages, 1):
        at = f"{where}, message {number}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise DataError(
                "a message has no known role", where=at, value=str(role), allowed=", ".join(_ROLES)
            )
        if not isinstance(message.get("content"), str):
            raise DataError("the field content is no text", where=at)
        learned = role == "assistant"
        content = message["content"]
        if learned and not content.strip():
            raise DataError("the completion is empty: nothing would be learned", where=at)
        parts.append(_part(f"<|im_start|>{role}\n", counts=False))
        parts.append(_part(f"{content}<|im_end|>", counts=learned))
        parts.append(_part("\n", counts=False))
    return parts


def _part(text: str, *, counts: bool) -> Part:
    return Part(text.encode(errors="replace"), counts)

"""Chats: how messages become a prompt, and a completion becomes a message."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from transformer_xl.apps.serve.schemas import Message
from transformer_xl.data import Vocab

log = logging.getLogger("transformer_xl.serve")


class ChatTemplate(NamedTuple):
    """A template of one message, with the placeholders ``{role}`` and ``{content}``.

    ``kind`` says where it is from: the ``setting`` of the server, or a plain one, with the
    ``roles`` of messages or their ``contents`` alone.
    """

    kind: Literal["setting", "roles", "contents"]
    source: str

    def prompt(self, messages: Sequence[Message], vocab: Vocab) -> str:
        """Return the prompt for the next message: all messages, then what begins an answer."""
        parts = []
        for message in messages:
            content = message.content
            if not isinstance(content, str):
                content = "\n".join(part.text for part in content)
            before, after = self._around(message.role)
            parts += [before, vocab.normalized(content)[0], after]
        return "".join([*parts, self._around("assistant")[0].rstrip(" ")])

    @property
    def stop(self) -> tuple[str, ...]:
        """The texts that end a message: what follows a content, or a line with a role."""
        if end := self.source.partition("{content}")[2].replace("{role}", "assistant").strip():
            return (end,)
        roles = ("user", "system", "developer", "assistant") if "{role}" in self.source else ()
        return tuple("\n" + self._around(role)[0].rstrip(" ") for role in roles)

    def _around(self, role: str) -> tuple[str, str]:
        """Return the texts before and after the content of a message."""
        before, _, after = self.source.partition("{content}")
        return before.replace("{role}", role), after.replace("{role}", role)


def chat_template(folder: Path, vocab: Vocab, setting: str | None) -> ChatTemplate:
    """Return the template of the settings, or a plain one whose characters the vocabulary has.

    Warns if the model folder has a template in Jinja, a program, which is not run.
    """
    if setting is not None:
        return ChatTemplate("setting", setting)
    if (folder / "chat_template.jinja").exists():
        log.warning(
            "%s has a chat template in Jinja, which is not run; the plain template is used: give "
            "what the model was trained with as --template, such as '<{role}>{content}</s>'",
            folder,
        )
    try:
        ids = vocab.encode("user: \nsystem: \nassistant:")
        can_write = vocab.unk_id is None or vocab.unk_id not in ids
    except ValueError:
        can_write = False
    if can_write:
        return ChatTemplate("roles", "{role}: {content}\n")
    return ChatTemplate("contents", "{content}\n")

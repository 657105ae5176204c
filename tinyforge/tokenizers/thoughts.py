"""What stands around a reply's thoughts, learned from the model's own chat template: `<think>` and `</think>`.

tags = learn(template, tokenizer)           None where the template knows of no thoughts
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NamedTuple

from tinyforge.errors import UserError
from tinyforge.tokenizers.chat_templates import AnyTemplate, ChatTemplate
from tinyforge.tokenizers.vocabulary import TextTokenizer, id_of

THOUGHT, REPLY = "\ue000", "\ue001"  # stand for a reply's parts
_TAG = r"(<[^<>\s/]+>|\[[^\[\]\s/]+\])"
_KNOWN = ("<think>", "[THINK]")


class Tags(NamedTuple):
    open: str
    close: str

    def begun(self, text: str) -> bool:
        """Whether a prompt's text ends within thoughts: some templates write the first tag themselves."""
        return text.rstrip().endswith(self.open)


def learn(template: AnyTemplate, tokenizer: TextTokenizer) -> Tags | None:
    """The tags that a template writes around a reply's `reasoning_content`; else those that its program mentions, or
    that the vocabulary has as a token."""
    if not isinstance(template, ChatTemplate):
        return None
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": REPLY, "reasoning_content": THOUGHT},
    ]
    with suppress(UserError):
        before, _, after = template.text(tokenizer, messages, False).partition(THOUGHT)
        opened = re.search(_TAG + r"\s*$", before)
        if opened is not None and after.lstrip().startswith(close := _closing(opened[1])):
            return Tags(opened[1], close)
    program = "".join(template.sources.values())
    for tag in _KNOWN:
        if (close := _closing(tag)) in program or id_of(tokenizer, close) is not None:
            return Tags(tag, close)
    return None


def _closing(tag: str) -> str:
    return f"{tag[0]}/{tag[1:]}"

"""Vocabularies that both kinds of export are tried on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tinyforge.errors import UserError
from tinyforge.tokenizers import Tokenizer, bpe

GPT2 = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gpt2"
ENGLISH = (
    """It was the best of times, it was the worst of times; don't you'll say I've  said it's 1859?
\tThe "period" was so far like the present period, that some of its noisiest authorities insisted...\r\n\r\n
naïve café — Übergröße, 中文和日本語, любовь, 👩‍👩‍👧‍👦 👍🏽 </s> <|endoftext|> <| end é |>
"""
    * 20
)


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    return Tokenizer.train([ENGLISH, "abc bca cab aab baa " * 5], 440, progress=False)


def gpt2_order(tokenizer: Tokenizer, specials: list[str]) -> Tokenizer:
    """The same merges over bytes numbered in GPT-2's order."""
    at = [bpe.BYTE_ORDERS["gpt2"].index(byte) for byte in range(256)]
    move = {id: at[id] if id < 256 else id for pair in tokenizer.merges for id in pair}
    return Tokenizer([(move[left], move[right]) for left, right in tokenizer.merges], specials, "gpt2")


KINDS = ["plain", "gpt2 order", "odd specials", "no merge", "edges", "single digits", "GPT-2"]


@pytest.fixture(scope="session", params=KINDS)
def vocabulary(request: pytest.FixtureRequest, trained: Tokenizer) -> Tokenizer:
    if request.param == "GPT-2":
        if not (GPT2 / "encoder.json").exists():
            pytest.skip("GPT-2's encoder.json and vocab.bpe are not on this machine")
        return Tokenizer.from_gpt2(GPT2 / "encoder.json", GPT2 / "vocab.bpe")
    return {
        "plain": trained,
        "gpt2 order": gpt2_order(trained, ["<|endoftext|>"]),
        "odd specials": Tokenizer(trained.merges, ["</s>", "<| end é |>", "été", "Ġ\n"]),
        "no merge": Tokenizer([], []),
        "single digits": Tokenizer.train([ENGLISH], 440, progress=False, exact=False, single_digits=True),
        # One token where a piece goes on with a character that is not ASCII, two where it is cut before it.
        "edges": Tokenizer([(left, right) for left in b"a1.' \n" for right in range(0x80, 0x100)], []),
    }[request.param]


def user_error(call: Callable[[], object]) -> str:
    """The message of the UserError that `call` raises: one line, and not a long one."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message

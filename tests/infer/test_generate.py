"""Generation: sessions keep their cache, batches give what prompts give alone, text streams clean."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.infer import session as session_module
from tinyforge.infer.decoder import Decoder, ReferenceDecoder, SampledBlock
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.infer.generation import generate, generate_batch
from tinyforge.infer.sampling import Sampling, choose
from tinyforge.infer.session import Session, Stats, Token
from tinyforge.infer.stream import stream_text
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.rng import Stream
from tinyforge.tokenizers import Tokenizer

TOKENIZER = Tokenizer([(104, 105)], ["<|endoftext|>", "</s>"])
CONFIG = Config(
    dim=16,
    heads=4,
    kv_heads=2,
    layers=2,
    context=150,
    vocab=TOKENIZER.vocab_size,
    mtp_heads=2,
    hidden=10,
    mtp_weights=(1, 0.5),
)
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def tiny(precision: str = "fp64", config: Config = CONFIG) -> NanoEuler:
    """A model with weights large enough that its choices differ from place to place."""
    model = NanoEuler(config, get_backend("numpy", precision, workers=1))
    model.initialise(0)
    model.buffer.values[: model.buffer.decay_end] *= 8
    return model


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


# --- one prompt


def test_greedy_takes_the_most_likely_token_of_head_0() -> None:
    model, ids = tiny(), prompt(120)
    tokens = list(generate(model, ids, GREEDY))
    assert len(set(tokens)) > 3  # not one token over and over, which would prove little
    for i, token in enumerate(tokens):
        logits = model.heads.logits(model.hidden(np.array([ids + tokens[:i]], np.int32)))
        assert token == logits[0, -1].argmax()


def test_the_same_seed_gives_the_same_text() -> None:
    model = tiny()

    def text(seed: int, temperature: float = 1.0) -> list[int]:
        return list(generate(model, prompt(5), Sampling(temperature, max_tokens=30, seed=seed)))

    assert text(1) == text(1) != text(2)
    assert text(1, 0.0) == text(2, 0.0)


@pytest.mark.parametrize("drafts", [0, 1])
def test_generation_ends_at_a_stop_token_at_max_tokens_and_at_a_full_context(drafts: int) -> None:
    model, greedy = tiny(), dataclasses.replace(GREEDY, drafts=drafts)
    tokens = list(generate(model, prompt(5), greedy))
    assert len(tokens) == 12
    stop = tokens[6]
    assert list(generate(model, prompt(5), greedy, frozenset({stop}))) == tokens[: tokens.index(stop)]
    assert len(list(generate(model, prompt(147), greedy))) == 3
    assert len(list(generate(model, prompt(149), greedy))) == 1


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "prompt is empty"),
        (prompt(150), "150 tokens, .* is 150; shorten"),
        ([3, 999], "token id 999 is outside the model's vocabulary of 259; use"),
        ([-1], "token id -1 is outside"),
    ],
    ids=["empty", "long", "large", "negative"],
)
def test_a_prompt_that_cannot_be_continued_is_refused(ids: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(generate(tiny(), ids, GREEDY))
    with pytest.raises(UserError, match=message):
        next(generate_batch(tiny(), [[1], ids], GREEDY))


# --- sessions


def continued(session: Session, sampling: Sampling = GREEDY) -> list[int]:
    return [token.id for token in session.generate(sampling)]


def test_a_session_goes_on_from_its_cache() -> None:
    """Three turns; each gives what a fresh model gives on the whole text, and computes only what is new."""
    model = tiny()
    session = Session(model)
    for turn in range(3):
        session.extend(prompt(10 + turn))
        text = list(session.tokens)
        session.stats = Stats()
        assert continued(session) == list(generate(model, text, GREEDY))
        assert session.tokens[: len(text)] == text and len(session.tokens) == len(text) + 12
        # The last token of a reply is not in the cache yet, and no pass of prefill takes the last one of a prompt.
        assert session.stats.reused == (0 if turn == 0 else len(text) - (10 + turn) - 1)
        assert session.stats.reused + session.stats.prefilled == len(text)


def test_a_changed_prompt_keeps_what_it_has_in_common() -> None:
    model = tiny()
    session = Session(model)
    session.extend(prompt(40))
    continued(session)
    edited = [*prompt(40)[:25], 7, 8, 9]
    assert edited[25] != prompt(40)[25]
    assert session.set_tokens(edited) == 25
    assert continued(session) == list(generate(model, edited, GREEDY))
    assert session.set_tokens(session.tokens) == len(edited) + 11
    assert session.set_tokens(edited[:10]) == 10  # all of it is cached: the last token is computed again
    assert continued(session) == list(generate(model, edited[:10], GREEDY))
    session.truncate(5)
    assert session.tokens == edited[:5] and continued(session) == list(generate(model, edited[:5], GREEDY))
    assert session.set_tokens([]) == 0


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("stopped_after", [1, 2, 3, 5])
def test_a_reply_that_is_broken_off_leaves_the_session_whole(stopped_after: int, drafts: int) -> None:
    model, greedy = tiny(), dataclasses.replace(GREEDY, drafts=drafts)
    session = Session(model)
    session.extend(prompt(30))
    reply = []
    with pytest.raises(KeyboardInterrupt):
        for token in session.generate(greedy):
            reply.append(token.id)
            if len(reply) == stopped_after:
                raise KeyboardInterrupt
    assert session.tokens == prompt(30) + reply
    text = list(session.tokens)
    assert continued(session, greedy) == list(generate(model, text, greedy))


@pytest.mark.parametrize("change", ["extend", "set", "again"])
def test_a_reply_that_is_left_open_leaves_no_draft_behind(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that keeps the generator, as an exception's traceback does. All drafts are right here."""
    model = tiny(config=CONFIG.override({"mtp_heads": 4}))
    truth = prompt(30) + list(generate(model, prompt(30), GREEDY))

    def propose(logits: np.ndarray, sampling: Sampling, numbers: Any, text: list[int], prompt: int) -> Any:
        return truth[len(text) :][: len(logits)], None

    for taken in range(1, 12):
        session = Session(model)
        session.extend(prompt(30))
        with monkeypatch.context() as patch:
            patch.setattr(session_module, "propose", propose)
            left_open = session.generate(GREEDY)
            for _ in range(taken):
                next(left_open)
        if change == "extend":
            session.extend([5, 6, 7])
        elif change == "set":
            session.set_tokens([*session.tokens, 8, 9])
        text = list(session.tokens)
        assert continued(session) == list(generate(model, text, GREEDY))
        left_open.close()
        assert session.tokens[: len(text)] == text


def test_an_interrupt_inside_of_a_pass_leaves_the_session_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    session = Session(model)
    session.extend(prompt(30))
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "propose", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            continued(session)
    assert continued(session) == list(generate(model, prompt(30), GREEDY))


def test_a_session_takes_one_row() -> None:
    with pytest.raises(ValueError, match="the decoder has 2 rows, expected 1"):
        Session(tiny(), NumpyDecoder(tiny(), 2))


# --- batches

SAMPLINGS = [
    GREEDY,
    Sampling(1.0, top_k=0, top_p=1.0, max_tokens=12, seed=3),
    Sampling(0.9, top_k=30, min_p=0.01, repetition_penalty=1.5, max_tokens=12, seed=3, logprobs=True),
]


@pytest.mark.parametrize("kind", [NumpyDecoder, ReferenceDecoder])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "cut"])
def test_a_batch_gives_what_its_prompts_give_alone(sampling: Sampling, kind: type[Decoder]) -> None:
    """Of unequal lengths: one runs into its context, one into a stop token, the others go on to max_tokens."""
    model = tiny()
    prompts = [prompt(n) for n in (7, 146, 1, 80, 33)]
    alone: list[list[Token]] = []
    for i, ids in enumerate(prompts):
        session = Session(model)
        session.extend(ids)
        alone.append(list(session.generate(dataclasses.replace(sampling, seed=sampling.seed + i, drafts=0))))
    stop = frozenset({alone[3][4].id})
    expected = [list(itertools.takewhile(lambda token: token.id not in stop, tokens)) for tokens in alone]
    found: list[list[Token]] = [[] for _ in prompts]
    for row, token in generate_batch(model, prompts, sampling, stop, kind(model, len(prompts))):
        found[row].append(token)
    assert [[t.id for t in tokens] for tokens in found] == [[t.id for t in tokens] for tokens in expected]
    assert len(found[1]) <= 4 and len(found[3]) <= 4 and max(map(len, found)) == 12
    for token, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert (token.logprob is None) == (not sampling.logprobs)
        assert token.logprob is None or token.logprob == pytest.approx(other.logprob, abs=1e-9)


def test_a_batch_streams_a_token_of_every_row_in_turn() -> None:
    tokens = generate_batch(tiny(), [prompt(4), prompt(9)], GREEDY)
    assert [next(tokens)[0] for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    with pytest.raises(ValueError, match="2 prompts for a decoder of 3 rows"):
        next(generate_batch(tiny(), [[1], [2]], GREEDY, decoder=NumpyDecoder(tiny(), 3)))


class Device(NumpyDecoder):
    """A decoder that draws tokens itself, five at a time, and so runs on after the last one that is expected."""

    def draws(self, sampling: Sampling) -> bool:
        return sampling.repetition_penalty == 1

    def stream(
        self, tokens: Sequence[Sequence[int]], samplings: Sequence[Sampling], streams: Sequence[Stream], count: int
    ) -> Iterator[SampledBlock]:
        for row, new in enumerate(tokens):
            self.prefill(row, new[:-1])
        texts = [[new[-1]] for new in tokens]
        uniforms = np.stack([stream.uniform((count,)) for stream in streams])
        for start in range(0, count, 5):
            part = uniforms[:, start : start + 5]
            block = np.empty(part.shape, np.int64)
            for t in range(part.shape[1]):
                logits = self.step([text[-1:] for text in texts])[:, 0, 0]
                for i, text in enumerate(texts):
                    z = logits[i].astype(np.float64)[None]
                    (token,) = choose(z, samplings[i], [part[i, t]])
                    block[i, t] = token
                    text.append(token)
            yield SampledBlock(block, None)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "cut"])
def test_a_decoder_may_draw_on_its_device(sampling: Sampling) -> None:
    """The contract of `Decoder.stream`: the same numbers, the same text, and a cache that is rewound to it."""
    model, sampling = tiny(), dataclasses.replace(sampling, drafts=0, max_tokens=8)
    plain, device = Session(model), Session(model, Device(model))
    for session in (plain, device):
        session.extend(prompt(20))
    for _ in range(2):
        assert continued(device, sampling) == continued(plain, sampling)
    assert device.decoder.lengths == plain.decoder.lengths == [35]
    prompts = [prompt(5), prompt(9)]
    rows = [
        [(i, t.id) for i, t in generate_batch(model, prompts, sampling, frozenset(), kind(model, 2))]
        for kind in (Device, NumpyDecoder)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 16


# --- text


def test_pieces_join_to_the_text_and_never_cut_a_character() -> None:
    """Also of bytes that are no text: a piece holds a replacement character only where the whole text does."""
    rng = np.random.default_rng(0)
    for text in ("naïve 小美 🦊👩‍🚀 end", "", "plain"):
        pieces = list(stream_text(list(text.encode()), TOKENIZER))
        assert "".join(pieces) == text and all(pieces)
        assert len(pieces) == len(text)
    for _ in range(50):
        ids = rng.integers(0, 257, 30).tolist()
        whole = TOKENIZER.decode(ids)
        assert "".join(stream_text(ids, TOKENIZER)) == whole
        for stop in (["a"], ["\ufffd\ufffd"], ["zz", whole[3:5]]):
            at = min((whole.find(s) for s in stop if s in whole), default=len(whole))
            assert "".join(stream_text(ids, TOKENIZER, stop)) == whole[:at]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\nUser: two", ["\nUser:"], ["o", "n", "e"]),
        ("one\nUse it", ["\nUser:"], ["o", "n", "e", "\nUse ", "i", "t"]),
        ("aaab", ["aab"], ["a"]),  # the beginning of a match inside of a failed one
        ("abcab", ["abd", "bcx"], ["a", "bc", "ab"]),
        ("one\nUs", ["\nUser:"], ["o", "n", "e", "\nUs"]),  # the end comes first: what was held is text
        ("xé🦊y", ["🦊"], ["x", "é"]),
        ("stop", ["stop"], []),
        ("hihi there", ["hi there"], ["hi"]),  # "hi" is one token, and begins both
    ],
)
def test_a_stop_string_is_found_across_tokens_and_never_shown(text: str, stop: list[str], expected: list[str]) -> None:
    asked = []

    def tokens() -> Iterator[int]:
        for token in TOKENIZER.encode(text):
            asked.append(token)
            yield token

    assert list(stream_text(tokens(), TOKENIZER, stop)) == expected
    at = min((text.find(s) + len(s) for s in stop if s in text), default=len(text))
    assert len(TOKENIZER.decode(asked)) == at  # no token after it was asked for


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="a stop string is empty; give at least one character"):
        list(stream_text([1], TOKENIZER, ["\n", ""]))

"""Decoding a batch on the GPU: every row's logits against the model's own forward, tokens, determinism, waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gpu.test_decode_single import BASE, CONFIG, TOLERANCE, WIDER, forward, most_likely_first, trained_like
from tinyforge.errors import UserError
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.generation import generate, generate_batch
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.rng import Stream

pytestmark = pytest.mark.gpu


def decoder_of(model: NanoEuler, batch: int, **options: int) -> Any:
    from tinyforge.infer.cuda.decode_batched import BatchDecoder

    return BatchDecoder(model, batch, **options)


def texts_of(config: Config, batch: int, new: int) -> list[np.ndarray]:
    """Texts of every length: from `new` tokens to the whole context."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, config.vocab, int(n)).astype(np.int32) for n in np.linspace(new, config.context, batch)]


def stepped(decoder: Any, texts: list[np.ndarray], new: int) -> np.ndarray:
    """Logits of the last `new` tokens of each text, (batch, new, outputs, vocab) in float64."""
    for row, text in enumerate(texts):
        decoder.prefill(row, text[:-new].tolist())
    return decoder.step([text[-new:] for text in texts], decoder.config.mtp_heads).astype(np.float64)


@pytest.mark.parametrize("batch", [2, 5, 64, 70])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_every_row_has_the_logits_of_the_model(precision: str, batch: int) -> None:
    model, texts = trained_like(CONFIG, precision), texts_of(CONFIG, batch, 3)
    decoder = decoder_of(model, batch)
    got = stepped(decoder, texts, 3)
    assert got.shape == (batch, 3, CONFIG.mtp_heads, CONFIG.vocab)
    assert decoder.lengths == [len(text) for text in texts] and decoder.lengths[-1] == CONFIG.context
    for row, text in enumerate(texts):
        expected = forward(model, text)[-3:]
        assert np.abs(got[row] - expected).max() <= TOLERANCE[precision] * np.abs(expected).max(), row


def test_no_position_is_missed_from_the_first_on() -> None:
    model, tokens = trained_like(CONFIG, "fp64"), np.random.default_rng(5).integers(0, CONFIG.vocab, (2, 160))
    got = decoder_of(model, 2).step(tokens, CONFIG.mtp_heads)
    for row in range(2):
        expected = forward(model, tokens[row].astype(np.int32))
        assert np.abs(got[row] - expected).max() <= 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize(
    ("config", "batch"), [(WIDER, 2), (WIDER, 70), (BASE, 5), (BASE, 64)], ids=["odd", "odd-70", "base", "base-64"]
)
def test_bf16_is_as_exact_as_the_model_in_bf16(config: Config, batch: int, resident: int) -> None:
    texts = texts_of(config, batch, 2)
    exact_model, model = trained_like(config, "fp64"), trained_like(config, "bf16")
    got = stepped(decoder_of(model, batch, resident=resident), texts, 2)
    ours, plain = [], []
    for row in {*range(0, batch, 7), batch - 1}:
        exact = forward(exact_model, texts[row])[-2:]
        ours.append(np.abs(got[row] - exact))
        plain.append(np.abs(forward(model, texts[row])[-2:] - exact))
    assert np.max(ours) <= 2 * np.max(plain) and np.mean(ours) <= 2 * np.mean(plain)


@pytest.mark.parametrize("tuning", [{"blocks": 2}, {"blocks": 9}, {"warps": 4}, {"depth": 16, "tiles": 2}])
def test_the_spread_over_the_device_does_not_change_the_answer(tuning: dict[str, int]) -> None:
    model, texts = trained_like(CONFIG, "fp64"), texts_of(CONFIG, 18, 2)
    got = stepped(decoder_of(model, 18, **tuning), texts, 2)
    for row in (0, 7, 17):
        expected = forward(model, texts[row])[-2:]
        assert np.abs(got[row] - expected).max() <= 1e-10 * np.abs(expected).max()


def test_what_the_launch_reads_before_it_is_written_shows(poisoned_memory: None) -> None:
    model = trained_like(WIDER, "bf16")
    decoder = decoder_of(model, 18)
    decoder.cache.keys[...] = decoder.cache.values[...] = np.nan
    assert np.isfinite(stepped(decoder, texts_of(WIDER, 18, 2), 2)).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_every_time(precision: str) -> None:
    model, texts = trained_like(BASE, precision), texts_of(BASE, 20, 2)
    sampling = Sampling(temperature=1, top_k=50, max_tokens=40, seed=1)
    runs = []
    for _ in range(3):
        decoder = decoder_of(model, 20)
        logits = stepped(decoder, texts, 2).tobytes()
        prompts = [text[:20].tolist() for text in texts]
        runs.append((logits, [(i, t.id) for i, t in generate_batch(model, prompts, sampling, decoder=decoder)]))
    assert runs[0] == runs[1] == runs[2]


PROMPTS = [[5], [7, 8, 9], list(range(100)), list(range(3, 158)), [1] * 40]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_greedy_text_is_that_of_each_prompt_alone(precision: str) -> None:
    """The text of 155 tokens leaves room for 5; the others go on next to it."""
    model, sampling = trained_like(CONFIG, precision), Sampling(temperature=0, max_tokens=50)
    decoder = decoder_of(model, len(PROMPTS))
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for i, token in generate_batch(model, PROMPTS, sampling, decoder=decoder):
        texts[i].append(token.id)
    assert [len(text) for text in texts] == [50, 50, 50, 5, 50]
    reference = ReferenceDecoder(model)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == list(generate(model, prompt, replace(sampling, max_tokens=len(text)), decoder=reference))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1, top_k=0, top_p=1),
        Sampling(temperature=0.7, top_k=40, top_p=0.95, seed=3),
        Sampling(temperature=3, top_k=0, top_p=1, min_p=0.2, seed=6),
    ],
)
def test_each_row_draws_from_its_own_stream(sampling: Sampling) -> None:
    model, prompts = trained_like(CONFIG, "fp32"), [[4], [1, 2, 3], list(range(60))]
    sampling = replace(sampling, max_tokens=60)
    texts: list[list[int]] = [[] for _ in prompts]
    for i, token in generate_batch(model, prompts, sampling):
        texts[i].append(token.id)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits = forward(model, np.array([*prompt, *text], np.int32))[len(prompt) - 1 :, 0]
        numbers = Stream(sampling.seed + row, "sample")
        for token, p in zip(text, probabilities(logits, sampling), strict=False):
            uniform = float(numbers.uniform())
            # float32 on the device: a number within 1e-5 of a border between two tokens may fall on either side.
            places = (max(uniform - 1e-5, 0), uniform, min(uniform + 1e-5, 1 - 1e-9))
            assert token in {most_likely_first(p, u) for u in places}
        assert len(text) == 60 and len(set(text)) > 10


def test_a_row_draws_what_it_would_alone() -> None:
    model, sampling = trained_like(CONFIG, "fp32"), Sampling(temperature=1, max_tokens=40, seed=2)
    decoder = decoder_of(model, 3)
    texts: list[list[int]] = [[] for _ in range(3)]
    for i, token in generate_batch(model, PROMPTS[:3], sampling, decoder=decoder):
        texts[i].append(token.id)
    for i, text in enumerate(texts):
        alone = generate_batch(model, [PROMPTS[i]] * 2, replace(sampling, seed=2 + i), decoder=decoder_of(model, 2))
        assert text == [token.id for row, token in alone if row == 0]


def test_rows_of_one_launch_draw_by_rules_of_their_own() -> None:
    """Greedy, cut and hot rows side by side: each has the ids that it has next to others of its kind."""
    model, batch = trained_like(CONFIG, "fp32"), 20
    rules = [
        Sampling(temperature=0),
        Sampling(0.7, top_k=5, top_p=1),
        Sampling(1.5, top_k=0, top_p=0.8),
        Sampling(temperature=3, top_k=0, top_p=1, min_p=0.1),
    ]
    samplings = [rules[row % len(rules)] for row in range(batch)]
    last = np.random.default_rng(0).integers(0, CONFIG.vocab, (batch, 1)).tolist()

    def drawn(of: list[Sampling]) -> np.ndarray:
        stream = decoder_of(model, batch).stream(last, of, [Stream(row, "sample") for row in range(batch)], 40)
        return np.concatenate([block.ids for block in stream], axis=1)

    together = drawn(samplings)
    for number, rule in enumerate(rules):
        alike = drawn([rule] * batch)
        assert (together[number :: len(rules)] == alike[number :: len(rules)]).all()
    assert len({row.tobytes() for row in together}) == batch


def test_a_full_row_stays_in_its_place() -> None:
    """A row at full capacity next to one that goes on; the cache of a third lies after its."""
    model = trained_like(CONFIG, "fp32")
    texts = [np.arange(30), np.arange(8, 39), np.arange(10)]
    decoder = decoder_of(model, 3, capacity=32)
    for row, text in enumerate(texts):
        decoder.prefill(row, text[:-1].tolist())
    before = decoder.cache.keys[:, 2, :, :9].copy()
    last = [[int(text[-1])] for text in texts]
    blocks = list(decoder.stream(last, [Sampling(temperature=0)] * 3, [Stream(i, "sample") for i in range(3)], 22))
    ids = np.concatenate([block.ids for block in blocks], axis=1)
    assert ids.shape == (3, 22) and decoder.lengths == [32, 32, 31]
    assert bool((decoder.cache.keys[:, 2, :, :9] == before).all())
    for row, count in ((0, 2), (1, 1), (2, 22)):
        alone = ReferenceDecoder(model, capacity=32)
        text = list(generate(model, texts[row].tolist(), Sampling(temperature=0, max_tokens=40), decoder=alone))
        assert text == ids[row, :count].tolist()


def test_the_host_waits_once_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(trained_like(CONFIG, "fp32"), 3)
    waits: list[Any] = []
    wait = decoder._wait
    monkeypatch.setattr(decoder, "_wait", lambda event: (waits.append(event), wait(event)))
    streams = [Stream(i, "sample") for i in range(3)]
    blocks = list(decoder.stream([[5], [6], [7]], [Sampling(temperature=0)] * 3, streams, 150))
    assert [block.ids.shape for block in blocks[:6]] == [(3, 1), (3, 2), (3, 4), (3, 8), (3, 16), (3, 16)]
    assert sum(block.ids.shape[1] for block in blocks) == 150 and len(waits) == len(blocks)


def test_what_is_forgotten_leaves_no_trace() -> None:
    model, texts = trained_like(CONFIG, "fp32"), texts_of(CONFIG, 3, 40)
    decoder = decoder_of(model, 3)
    stepped(decoder, texts, 2)
    decoder.rewind([20, 0, 30])
    decoder.prefill(1, texts[1][:9].tolist())
    streams = [Stream(i, "sample") for i in range(3)]
    stream = decoder.stream([[1], [2], [3]], [Sampling(temperature=0)] * 3, streams, 100)
    assert next(stream).ids.shape == (3, 1) and decoder.lengths == [21, 10, 31]
    stream.close()
    decoder.rewind([20, 9, 30])
    got = decoder.step([texts[0][20:22], texts[1][9:11], texts[2][30:32]], CONFIG.mtp_heads)
    for row, length in ((0, 22), (1, 11), (2, 32)):
        expected = forward(model, texts[row][:length])[-2:]
        assert np.abs(got[row] - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_it_is_for_and_what_not() -> None:
    model = trained_like(CONFIG, "fp32")
    decoder = make_decoder(model, 3)
    assert type(decoder).__name__ == "BatchDecoder" and decoder.batch == 3
    assert decoder.draws(Sampling()) and not decoder.draws(Sampling(repetition_penalty=1.1))
    assert not decoder.draws(Sampling(logprobs=True))
    spare = make_decoder(model, 3, spare_memory=True)
    assert isinstance(spare, ReferenceDecoder) and spare.steps is None
    # A head of 16 is too small for bf16's kernel: the model's own ops take over.
    assert isinstance(make_decoder(trained_like(CONFIG, "bf16"), 3), ReferenceDecoder)
    with pytest.raises(ValueError, match="row 1 holds 0 of 8 positions, no room for 9 more"):
        decoder_of(model, 2, capacity=8).prefill(1, list(range(9)))
    with pytest.raises(UserError, match="BatchDecoder: the model is on backend numpy, expected cupy"):
        decoder_of(trained_like(CONFIG, "fp32", "numpy"), 2)


FAST_LIKE = {
    **{"qk_scale": "learned", "mix_first": True, "embedding_norm": True, "smear": 12, "value_every": 2},
    **{"window": 20, "full_every": 2},
}
"""Options that no fused decoder has."""


@pytest.mark.parametrize("precision", [*TOLERANCE, "bf16"])
def test_a_model_without_fused_kernels_steps_all_rows_in_one_pass(precision: str) -> None:
    """Within rounding of the model row by row; and a row's bits do not depend on which others take part."""
    config = BASE.override({**FAST_LIKE, "layers": 3, "context": 256, "vocab": 300})
    model, exact = (trained_like(config, kind) for kind in (precision, "fp64"))
    decoder = make_decoder(model, 5)
    assert isinstance(decoder, ReferenceDecoder) and decoder.steps is not None
    texts = texts_of(config, 5, 4)
    got = stepped_one_by_one(decoder, texts, 4)
    expected = np.stack([forward(exact, text)[-4:] for text in texts])
    plain = np.stack([forward(model, text)[-4:] for text in texts])
    error, known = np.abs(got - expected), np.abs(plain - expected)
    if precision == "bf16":
        assert error.mean() <= 1.2 * known.mean() and error.max() <= 2 * known.max()
    else:
        assert error.max() <= TOLERANCE[precision] * np.abs(expected).max()
    for row, text in enumerate(texts):
        decoder.rewind_row(row, len(text) - 1)
    alone = decoder.step_rows([1, 3], [texts[1][-1:], texts[3][-1:]], config.mtp_heads)
    np.testing.assert_array_equal(alone[:, 0].astype(np.float64), got[[1, 3], -1])


def stepped_one_by_one(decoder: Any, texts: list[np.ndarray], new: int) -> np.ndarray:
    """As `stepped`, in steps of one token."""
    for row, text in enumerate(texts):
        decoder.prefill(row, text[:-new].tolist())
    heads = decoder.config.mtp_heads
    found = [decoder.step([text[[at]] for text in texts], heads).copy() for at in range(-new, 0)]
    return np.concatenate(found, axis=1).astype(np.float64)


def test_a_penalty_is_drawn_by_the_host() -> None:
    """Repetition penalties and log-probabilities take each step's logits, and rows that end start over."""
    model = trained_like(CONFIG, "fp32")
    sampling = Sampling(temperature=0, repetition_penalty=1.3, logprobs=True, max_tokens=12)
    texts: list[list[int]] = [[] for _ in range(3)]
    for i, token in generate_batch(model, [[4], list(range(155)), [9, 9]], sampling, decoder=decoder_of(model, 3)):
        texts[i].append(token.id)
        assert token.logprob is not None and token.logprob < 0
    assert [len(text) for text in texts] == [12, 5, 12]
    assert texts[0] == list(generate(model, [4], sampling, decoder=ReferenceDecoder(model)))

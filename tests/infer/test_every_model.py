"""Every registered causal model, in the shapes of its gradient-check cases: decoders, sessions and traces agree with
its plain forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.infer import Sampling, cache, generate, logits, make_decoder
from tinyforge.infer import decoder as decoder_module
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.trace import attention_ops, trace
from tinyforge.op import WithKeywords
from tinyforge.ops import SinkAttention
from tinyforge.registry import models


def small_models() -> Iterator[Any]:
    for name, spec in models().items():
        if hasattr(spec.build, "make_cache"):
            cases = spec.build.cases(get_backend("numpy", "fp64", workers=1), np.random.default_rng(0))
            for number, (model, _) in enumerate(cases):
                if not isinstance(model, WithKeywords):  # the same model, of packed documents
                    yield pytest.param(model, id=f"{name}-{number}")


MODELS = list(small_models())


@pytest.mark.parametrize("model", MODELS)
def test_decoders_continue_as_the_plain_forward_does(model: CausalLM) -> None:
    c = model.config
    ids = np.random.default_rng(1).integers(0, c.vocab, (2, c.context))
    expected = logits(model, ids)
    for decoder in (make_decoder(model, 2), ReferenceDecoder(model, 2)):
        cut = c.context // 3
        for row in range(2):
            decoder.prefill(row, ids[row, :cut].tolist())
        found = [decoder.step(ids[:, start : start + 2])[:, :, 0].copy() for start in range(cut, c.context, 2)]
        np.testing.assert_allclose(np.concatenate(found, axis=1), expected[:, cut:], rtol=0, atol=1e-9)
        assert decoder.lengths == [c.context] * 2
    for decoder in (make_decoder(model), ReferenceDecoder(model)):
        for start, end in ((0, cut), (cut, c.context)):
            if start < end:
                first = decoder.first(ids[0, start:end].tolist())
                np.testing.assert_allclose(first[0, 0, 0], expected[0, end - 1], rtol=0, atol=1e-9)


class Replays:
    """Stands in for a GPU's graphs."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


@pytest.mark.parametrize("by_graph", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_rows_of_unequal_lengths_in_one_pass_are_those_one_by_one(
    model: CausalLM, by_graph: bool, monkeypatch: Any
) -> None:
    """Four rows, one of which waits, one that is full, one that begins again; and a cache that grows."""
    monkeypatch.setattr(cache, "FIRST_POSITIONS", 2)
    monkeypatch.setattr(decoder_module, "BUCKET", 4)
    monkeypatch.setattr(type(model.backend), "graphs", lambda self: Replays())
    c, rng = model.config, np.random.default_rng(1)
    one_by_one, together = (ReferenceDecoder(model, 4, batched=how) for how in (False, True))
    assert (together.steps is not None) == isinstance(model.make_cache(1, 1), cache.KVCache)
    if together.steps is None:
        return
    together.steps.by_graph = by_graph
    text = rng.integers(0, c.vocab, c.context).tolist()
    decoders = one_by_one, together
    for decoder in decoders:
        decoder.prefill(1, text[: c.context // 2])
        decoder.prefill(3, text)
        decoder.prefill(2, text[: c.context // 3])
    for count in range(min(c.context - c.context // 2, 9)):
        if count == 3:
            for decoder in decoders:
                decoder.rewind_row(2, 0)
        rows = [0, 1] if count % 3 == 2 else [0, 1, 2]
        tokens = rng.integers(0, c.vocab, (len(rows), 1))
        expected, found = (decoder.step_rows(rows, tokens, c.prediction_heads).copy() for decoder in decoders)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
        assert one_by_one.lengths == together.lengths
    for decoder in decoders:
        decoder.rewind_row(3, c.context - 1)
    expected, found = (decoder.step_rows([3], [text[-1:]]) for decoder in decoders)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    if together.lengths[1] > 1:
        saved = together.saved(1, 1)
        together.rewind_row(1, 1)
        together.restore(1, saved, one_by_one.lengths[1])
        assert together.lengths == one_by_one.lengths
        larger, smaller = (ReferenceDecoder(model, 2, room, batched=True) for room in (None, c.context - 1))
        larger.prefill(1, text)
        with pytest.raises(ValueError, match="no room for"):
            smaller.restore(0, larger.saved(1, 0), c.context)
        assert smaller.lengths == [0, 0]


@pytest.mark.parametrize("model", MODELS)
def test_greedy_text_is_that_of_the_plain_forward(model: CausalLM) -> None:
    text, room = [0], min(12, model.config.context - 1)
    if room == 0:
        with pytest.raises(UserError, match="takes 1 tokens, the model's context is 1"):
            next(generate(model, text, Sampling()))
        return
    for token in generate(model, [0], Sampling(temperature=0, max_tokens=room)):
        assert token == logits(model, [text])[0, -1].argmax()
        text.append(token)
    assert len(text) == room + 1


@pytest.mark.parametrize("model", MODELS)
def test_a_trace_is_the_plain_forward_seen_inside(model: CausalLM) -> None:
    ids = np.random.default_rng(2).integers(0, model.config.vocab, model.config.context).tolist()
    found = trace(model, ids)
    z = logits(model, [ids])[0]
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(found.probabilities[:, 0], p / p.sum(axis=-1, keepdims=True), rtol=1e-9)
    assert found.probabilities.shape[1] == model.prediction_heads
    for op, weights in zip(attention_ops(model), found.attention, strict=True):
        if isinstance(op, SinkAttention):
            assert (weights.sum(axis=-1) < 1).all()
        else:
            np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-12)
        assert not np.triu(weights, 1).any()

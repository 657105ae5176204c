"""Generation from one prompt, and from several of unequal lengths side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import numpy as np

from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder, SampledBlock
from tinyforge.infer.sampling import Sampling, choose, log_probability, penalise
from tinyforge.infer.session import Session, Token, check_prompt, checked_ids
from tinyforge.rng import Stream


def generate(
    model: CausalLM,
    prompt: Sequence[int],
    sampling: Sampling,
    stop: frozenset[int] = frozenset(),
    decoder: Decoder | None = None,
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, until one in `stop` (not yielded), max_tokens, or the context is full.

    decoder: an existing one, which saves laying out the weights again.
    """
    session = Session(model, decoder)
    session.extend(prompt)
    for token in session.generate(sampling, stop):
        yield token.id


def generate_batch(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop: frozenset[int] = frozenset(),
    decoder: Decoder | None = None,
) -> Generator[tuple[int, Token]]:
    """Yield (i, token) for the tokens that follow each prompt, decoding all prompts together, whatever their lengths.

    Prompt i is sampled as it would be alone, with the seed sampling.seed + i. Drafts are not used: the rows
    of a batch already share each read of the weights.
    """
    decoder = decoder or make_decoder(model, len(prompts))
    if decoder.batch != len(prompts):
        raise ValueError(f"generate_batch: {len(prompts)} prompts for a decoder of {decoder.batch} rows")
    texts = [checked_ids(prompt, decoder.config.vocab) for prompt in prompts]
    budgets = []
    for text in texts:
        check_prompt(text, decoder.capacity)
        budgets.append(min(sampling.max_tokens, decoder.capacity - len(text)))
    decoder.rewind([0] * len(texts))
    for i, text in enumerate(texts):
        if not (i and text == texts[i - 1] and decoder.repeat(i, i - 1)):
            decoder.prefill(i, text[:-1])
    active = dict(enumerate(budgets))
    for ids, logprobs, _ in draw_blocks(decoder, texts, replace(sampling, drafts=0), max(budgets)):
        for column in range(ids.shape[1]):
            for i in list(active):
                token = Token(int(ids[i, column]), None if logprobs is None else float(logprobs[i, column]))
                if token.id in stop:
                    del active[i]
                    continue
                texts[i].append(token.id)
                yield i, token
                active[i] -= 1
                if not active[i]:
                    del active[i]
            if not active:
                return


def draw_blocks(
    decoder: Decoder, texts: Sequence[Sequence[int]], sampling: Sampling, count: int
) -> Iterator[SampledBlock]:
    """Up to `count` tokens per row, in blocks: from `Decoder.stream`, or sampled here from the logits of `step_rows`.

    texts: a row's tokens, all but the last cached. The caller appends what was sampled. A text that has not
    grown by the next block has ended, and from then on its row's tokens mean nothing; the blocks end when all have.
    """
    streams = [Stream(sampling.seed + i, "sample") for i in range(len(texts))]
    if decoder.draws(sampling):
        yield from decoder.stream([text[-1:] for text in texts], [sampling] * len(texts), streams, count)
        return
    numbers = np.stack([stream.uniform((count,)) for stream in streams])
    begins, rows = [len(text) for text in texts], list(range(len(texts)))
    for t in range(count):
        if not rows:
            return
        z = logits = decoder.step_rows(rows, [[texts[row][-1]] for row in rows])[:, 0, 0]
        if sampling.changes_logits:
            texts_so_far = [(texts[row], texts[row][begins[row] :]) for row in rows]
            z = np.stack([penalise(row, sampling, *text) for row, text in zip(logits, texts_so_far, strict=True)])
        ids, logprobs = np.zeros((len(texts), 1), np.int64), None
        ids[rows, 0] = choose(z, sampling, numbers[rows, t])
        if sampling.logprobs:
            logprobs = np.zeros((len(texts), 1))
            logprobs[rows, 0] = [log_probability(row, x) for row, x in zip(logits, ids[rows, 0], strict=True)]
        yield SampledBlock(ids, logprobs)
        for row in [row for row in rows if len(texts[row]) == begins[row] + t]:
            decoder.rewind_row(row, 0)  # so that it always has room
            rows.remove(row)

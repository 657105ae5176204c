"""The scheduler over the GPU's batch decoder: each row has the text that it has alone, drawn there and on the host."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.gpu.test_decode_single import BASE, CONFIG, TOLERANCE, trained_like
from tests.infer.test_scheduler import run, wishes
from tinyforge.infer.generation import generate_batch
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.scheduler import Scheduler
from tinyforge.models.nanoeuler import Config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", TOLERANCE)
def test_any_interleaving_gives_each_row_the_text_it_has_alone(precision: str) -> None:
    from tinyforge.infer.cuda.decode_batched import BatchDecoder

    model, rng = trained_like(CONFIG, precision), random.Random(0)
    asked = wishes(rng, CONFIG.vocab, CONFIG.context, 0)
    decoder = BatchDecoder(model, 20)
    decoder.piece = 16  # so that prompts of this length share some
    alone = [run(Scheduler(model, 20, decoder=decoder, prefix_bytes=0), [wish], None)[0] for wish in asked]
    scheduler = Scheduler(model, 20, decoder=decoder)
    assert run(scheduler, asked, rng) == alone
    assert len(scheduler.prefixes) > 0 and scheduler.free == list(range(20))


def test_rows_are_drawn_together_whatever_their_sampling() -> None:
    model = trained_like(CONFIG, "fp32")
    scheduler = Scheduler(model, 40)
    requests = [
        scheduler.submit([i, i + 1], Sampling(temperature=i / 20, top_k=i, seed=i, max_tokens=50)) for i in range(40)
    ]
    steps = 0
    while scheduler.busy:
        scheduler.step()
        steps += 1
    assert all(len(r.tokens) == 50 for r in requests) and steps < 10


LENGTHS = [1, 2, 31, 63, 64, 65, 255, 256, 257, 258, 300]
RULES = [
    Sampling(temperature=0),
    Sampling(temperature=1, top_k=0, top_p=1),
    Sampling(0.8),
    Sampling(2, min_p=0.1),
    Sampling(temperature=0, repetition_penalty=1.2),
]


@pytest.mark.parametrize(("config", "precision"), [(CONFIG, "fp32"), (BASE, "bf16")], ids=["fp32", "bf16"])
def test_a_text_is_the_same_alone_and_among_255_others(config: Config, precision: str) -> None:
    """To the last bit of the cache, as far as tokens show it: prompts that are fed, computed, shared, and left."""
    from tinyforge.infer.cuda.decode_batched import BatchDecoder

    model, rng = trained_like(replace(config, context=400), precision), random.Random(1)
    decoder = BatchDecoder(model, 256)

    def wish(length: int, rule: Sampling, seed: int) -> dict[str, object]:
        prompt = [rng.randrange(config.vocab) for _ in range(length)]
        return {"prompt": prompt, "sampling": replace(rule, seed=seed, max_tokens=40)}

    asked = [wish(n, rule, i) for i, (n, rule) in enumerate((n, rule) for n in LENGTHS for rule in RULES)]
    alone = [run(Scheduler(model, 256, decoder=decoder, prefix_bytes=0), [w], None)[0] for w in asked]
    scheduler = Scheduler(model, 256, decoder=decoder)
    requests = [scheduler.submit(**w) for w in asked]
    others = [scheduler.submit(**wish(rng.randrange(1, 360), RULES[i % 4], i)) for i in range(256 - len(asked) + 40)]
    for step in range(1, 200):
        scheduler.step()
        if step < 40:
            scheduler.cancel(others[4 * step])  # in its prompt, or later
            scheduler.submit(**wish(rng.randrange(1, 100), RULES[step % 4], step))
    while scheduler.busy:
        scheduler.step()
    assert [request.tokens for request in requests] == [[made.id for made in got] for got, _ in alone]
    assert len({tuple(request.tokens) for request in requests}) > len(requests) // 2
    assert scheduler.free == list(range(256)) and decoder.lengths == [0] * 256


def test_a_prompt_that_is_fed_gives_the_tokens_of_one_that_is_computed() -> None:
    """In float64, where the last bits decide nothing: greedy and drawn, the same numbers of the stream."""
    from tinyforge.infer.cuda.decode_batched import BatchDecoder

    model, rng = trained_like(CONFIG, "fp64"), random.Random(2)
    prompts = [[rng.randrange(CONFIG.vocab) for _ in range(n)] for n in (1, 2, 15, 16, 17, 18, 33, 100, 150)]
    for sampling in (Sampling(temperature=0, max_tokens=30), Sampling(temperature=1, top_k=50, max_tokens=30, seed=5)):
        decoder = BatchDecoder(model, len(prompts))
        expected: list[list[int]] = [[] for _ in prompts]
        for i, token in generate_batch(model, prompts, sampling, decoder=decoder):
            expected[i].append(token.id)
        scheduler = Scheduler(model, len(prompts), decoder=decoder)
        requests = [scheduler.submit(p, replace(sampling, seed=sampling.seed + i)) for i, p in enumerate(prompts)]
        while scheduler.busy:
            scheduler.step()
        assert [request.tokens for request in requests] == expected

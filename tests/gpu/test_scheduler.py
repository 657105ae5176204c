"""The scheduler over the GPU's batch decoder: each row has the text that it has alone, drawn there and on the host."""

from __future__ import annotations

import random

import pytest

from tests.gpu.test_decode_row import CONFIG, TOLERANCE, trained_like
from tests.infer.test_scheduler import run, wishes
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.scheduler import Scheduler

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", TOLERANCE)
def test_any_interleaving_gives_each_row_the_text_it_has_alone(precision: str) -> None:
    from tinyforge.infer.cuda.batch import BatchDecoder

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
    requests = [scheduler.submit([i, i + 1], Sampling(temperature=i / 20, top_k=i, seed=i, max_tokens=50))
                for i in range(40)]  # fmt: skip
    steps = 0
    while scheduler.busy:
        scheduler.step()
        steps += 1
    assert all(len(r.tokens) == 50 for r in requests) and steps < 10

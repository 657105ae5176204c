"""The scheduler over the GPU's batch decoder: each row has the text that it has alone, drawn there and on the host."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.test_decode_single import BASE, CONFIG, TOLERANCE, forward, most_likely_first, trained_like
from tests.infer.test_scheduler import run, wishes
from tinyforge.infer.generation import generate_batch
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.infer.scheduler import Request, Scheduler
from tinyforge.models.nanoeuler import Config
from tinyforge.rng import Stream
from tinyforge.tokenizers import load_tokenizer

pytestmark = pytest.mark.gpu

SMALL = Path(__file__).resolve().parents[2] / "models" / "nanoeuler" / "small"
STOP = frozenset([510, 511])


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


@pytest.fixture(scope="module")
def grammars() -> Any:
    """Of the shipped tokenizer's 512 tokens; none of the others may come in a text by a grammar."""
    grammar = pytest.importorskip("tinyforge.infer.grammar")
    pytest.importorskip("llguidance", reason="needs the extra [serve]")
    return grammar.Grammars(load_tokenizer(SMALL / "tokenizer.json"), STOP, 600)


def by_schemas(grammars: Any, scheduler: Scheduler, count: int, rule: Sampling) -> tuple[list[Any], list[Request]]:
    """Texts by `count` schemas, between texts without; they come and go."""
    from tests.infer.test_grammar import a_schema

    rng, schemas, bound = random.Random(3), [], []
    for seed in range(count):
        schemas.append(a_schema(rng))
        constraint = grammars.compile("json_schema", json.dumps(schemas[-1]))
        how = replace(rule, seed=seed, top_k=rule.top_k * (seed % 3))
        bound.append(scheduler.submit([seed], how, STOP, constraint=constraint))
        scheduler.submit([seed, 3], replace(how, max_tokens=1 + seed % 40), STOP)
        scheduler.step()
    while scheduler.busy:
        scheduler.step()
    return schemas, bound


VALID = replace(CONFIG, vocab=600, context=400), replace(BASE, vocab=600, context=400)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_greedy_texts_by_schemas_are_those_that_the_host_masks(precision: str, grammars: Any) -> None:
    from tinyforge.infer.cuda.decode_batched import BatchDecoder

    class OnHost(BatchDecoder):
        def draws(self, sampling: Sampling) -> bool:
            return False

    model = trained_like(VALID[precision == "bf16"], precision)
    rule = Sampling(temperature=0, max_tokens=120)
    found = []
    for kind in (BatchDecoder, OnHost):
        _, requests = by_schemas(grammars, Scheduler(model, 40, decoder=kind(model, 40)), 50, rule)
        found.append([(request.tokens, request.reason) for request in requests])
    assert found[0] == found[1] and len({tuple(tokens) for tokens, _ in found[0]}) > 25


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_text_by_a_schema_that_has_ended_is_valid(precision: str, grammars: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra [dev]")
    tokenizer, model = load_tokenizer(SMALL / "tokenizer.json"), trained_like(VALID[precision == "bf16"], precision)
    rule = Sampling(temperature=4, top_k=20, top_p=1, max_tokens=300)
    schemas, requests = by_schemas(grammars, Scheduler(model, 32), 50, rule)
    ended = 0
    for schema, request in zip(schemas, requests, strict=True):
        text = tokenizer.decode(request.tokens)
        assert request.reason in ("stop", "length"), (schema, text, request.reason)
        if request.reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert ended >= 30


def test_tokens_are_sampled_from_what_the_mask_leaves(grammars: Any) -> None:
    """By the model's probabilities and the row's own number; also where fewer tokens are allowed than top k."""
    config = VALID[0]
    model, constraint = trained_like(config, "fp32"), grammars.compile("regex", "[a-g]")
    z = np.zeros(config.vocab, np.float32)
    constraint.mask(z)
    for rule in (
        Sampling(1, 0, 1),
        Sampling(2, 40, 1),
        Sampling(3, 3, 1),
        Sampling(2, 40, 0.8),
        Sampling(2, 0, 1, 0.2),
    ):
        scheduler = Scheduler(model, 64)
        requests = [
            scheduler.submit([seed], replace(rule, seed=seed), STOP, constraint=constraint.copy()) for seed in range(64)
        ]
        while scheduler.busy:
            scheduler.step()
        for request in requests:
            assert request.reason == "stop" and len(request.tokens) == 1
            logits = forward(model, np.array(request.prompt, np.int32))[-1:, 0] + z
            p, uniform = probabilities(logits, rule)[0], float(Stream(request.sampling.seed, "sample").uniform())
            places = (max(uniform - 1e-5, 0), uniform, min(uniform + 1e-5, 1 - 1e-9))
            assert request.tokens[0] in {most_likely_first(p, u) for u in places}
        assert len({request.tokens[0] for request in requests}) > 1


def test_a_text_without_a_grammar_is_the_same_next_to_one_with(grammars: Any) -> None:
    """Whether its passes are queued in blocks or one by one, to the last bit of its numbers."""
    model, found = trained_like(VALID[1], "bf16"), []
    for bound in (0, 12):
        scheduler = Scheduler(model, 32)
        plain = [scheduler.submit([i, 9], Sampling(1, top_k=50, seed=i, max_tokens=90), STOP) for i in range(12)]
        for i in range(bound):
            scheduler.step()
            constraint = grammars.compile("json_schema", '{"type": "array", "items": {"type": "integer"}}')
            scheduler.submit([i, 7, 8], Sampling(1, seed=i, max_tokens=5 + i), STOP, constraint=constraint)
        while scheduler.busy:
            scheduler.step()
        found.append([request.tokens for request in plain])
    assert found[0] == found[1]

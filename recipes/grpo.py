"""Learn from rewards: sample replies, check them, and make the better ones of each group likelier (GRPO).

    python recipes/grpo.py                                  harder sums, from the newest fine-tuned run if there is one
    python recipes/grpo.py --base small                     from the model that comes with the repository
    python recipes/grpo.py --base runs/sft --task one-step --backend cupy
    python recipes/grpo.py --resume                         continue runs/grpo

Each step samples --num-generations replies to each of --batch-size questions, at temperature 1 without top-k or top-p,
so that the policy that is trained is the one that was sampled. A checker rewards each reply: 1 if it is right, and
--format-weight if it has the right format. The model is shown no reference solution. Exact match is printed for
held-out questions: no pair of numbers in them is ever rewarded. --task harder-sums: sums of the built-in world that
are harder than those of fine-tuning; one-step: word problems with numbers to 100, for a larger model; --data: Alpaca
records whose output ends in a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge import checkpoint
from tinyforge.data.answers import exact_match
from tinyforge.data.rewards import Asked, Questions, open_questions
from tinyforge.data.training import input_hashes
from tinyforge.data.world import KINDS, Instruction
from tinyforge.errors import UserError, run_command
from tinyforge.formats import Loaded, Opened
from tinyforge.formats.tokenizers import published_files
from tinyforge.infer import Sampling, make_decoder
from tinyforge.infer.evaluate import reply_to
from tinyforge.parallel import part_of
from tinyforge.registry import next_token_model
from tinyforge.rng import Stream
from tinyforge.train import tuning
from tinyforge.train.data_parallel import DataParallel, Worker
from tinyforge.train.metrics import save_scores
from tinyforge.train.objectives import Batch
from tinyforge.train.plan import print_plan
from tinyforge.train.policy import GRPO, advantages, policy_batch, reward_figures, worth_learning
from tinyforge.train.preferences import reply_rows
from tinyforge.train.run import Run, Task, running
from tinyforge.train.settings import EVERY_ACTION, GrpoSettings, parse

ROWS = 256  # replies that are decoded as one batch, at most
EQUAL = 20  # rollouts in a row without any difference between the rewards of a group, before the run stops


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, with_card = parse(GrpoSettings, __doc__ or "", argv, actions=EVERY_ACTION)
    if settings.data and settings.task != GrpoSettings.task and not resume:
        raise UserError("--task and --data both say what is asked; drop one of them")
    base = tuning.open_start(settings, resume)
    next_token_model(base.spec.name)
    if plan_only:
        print_plan(base.spec, base.config, settings, each=settings.num_generations)
        return 0
    with running(settings, resume):
        learn(settings, base, resume)
    tuning.print_next_steps(settings, with_card)
    return 0


def prompt_of(loaded: Loaded, question: Instruction) -> list[int]:
    """The ids of a question in the model's chat template."""
    before = (question.history, question.system) if isinstance(question, Asked) else ()
    return tuning.prompt_ids(loaded, question.instruction, question.input, *before)


def draw_replies(
    policy: DataParallel, prompts: Sequence[Sequence[int]], sampling: Sampling, end: int
) -> list[list[int]]:
    """The ids that follow each prompt, with `end` if it was sampled. All ranks sample. Prompt i uses the seed
    sampling.seed + i, so its reply does not depend on the batch."""
    drawn = policy.backend.to_numpy(policy.on_all_ranks(_draw, prompts, sampling, end))
    return [row[row >= 0].tolist() for row in drawn - 1]


def _draw(rank: Worker, prompts: Sequence[Sequence[int]], sampling: Sampling, end: int) -> np.ndarray:
    """(prompts, max_tokens + 1): the ids plus 1, padded with 0; each rank has sampled its part."""
    found = np.zeros((len(prompts), sampling.max_tokens + 1), np.int32)
    group, model = rank.group, rank.model
    own = part_of(group.rank, group.size, len(prompts))
    if part := prompts[own]:
        longest = max(map(len, prompts)) + sampling.max_tokens
        decoder = make_decoder(model, min(ROWS, len(part)), min(model.config.context, longest))
        # No drafts: those of a single row would draw other numbers than a batch does.
        seeded = replace(sampling, seed=sampling.seed + own.start, drafts=0)
        replies = reply_to(model, part, seeded, frozenset({end}), decoder)
        for row, (ids, ended) in enumerate(replies, own.start):
            whole = [*ids, end] if ended else ids
            found[row, : len(whole)] = np.array(whole) + 1
    group.all_reduce_(found)
    return found


def text_of(loaded: Loaded, reply: Sequence[int]) -> str:
    """The text of a reply. A truncated one ends with "...", which no checker accepts as an answer."""
    end = loaded.template.end_id(loaded.tokenizer)
    return loaded.tokenizer.decode(reply[:-1]) if reply and reply[-1] == end else loaded.tokenizer.decode(reply) + "..."


@dataclass
class Rollouts:
    """Groups of replies with their rewards. `batches(step)` is a function of the weights and the step alone. With
    several iterations per rollout, the checkpoint keeps what the next steps need of it."""

    settings: GrpoSettings
    loaded: Loaded
    questions: Questions
    policy: DataParallel
    reference: DataParallel | None
    held: dict[str, np.ndarray] = field(default_factory=dict)  # of the last rollout, for --iterations
    figures: dict[str, float] = field(default_factory=dict)
    shown: str = ""
    equal: int = 0

    def batches(self, step: int) -> list[Batch]:
        s = self.settings
        if step % s.iterations:
            h = self.held
            self.shown = bytes(h["shown"].astype(np.uint8)).decode() if "shown" in h else ""  # not in older versions
        else:
            h = self._draw(step)
            if s.iterations > 1:
                h["shown"] = np.frombuffer(self.shown.encode(), np.uint8)
                # Checkpoints hold floats; float64 represents every id exactly.
                self.held.update({name: np.asarray(array, np.float64) for name, array in h.items()})
        self.figures = reward_figures(h["rewards"], ("correct", "format"), h["lengths"], s.num_generations)
        ids, targets = (h[name].astype(np.int32) for name in ("ids", "targets"))
        whole = policy_batch(ids, targets, h["advantages"], (h["old"], h["reference"]))
        groups, parts = len(h["advantages"]), min(s.grad_accum, len(h["advantages"]))
        cuts = [s.num_generations * (groups * i // parts) for i in range(parts + 1)]
        return [whole[slice(*cut)] for cut in pairwise(cuts)]

    def _draw(self, step: int) -> dict[str, np.ndarray]:
        """Ask, check, and lay out what is worth learning."""
        s = self.settings
        asked = [self.questions.training[i] for i in self._numbers(step // s.iterations, s.batch_size * s.grad_accum)]
        prompts = [prompt_of(self.loaded, q) for q in asked for _ in range(s.num_generations)]
        seed = int(Stream(s.seed, f"rollout/{step // s.iterations}").bits(1)[0])
        sampling = Sampling(1.0, top_k=0, top_p=1.0, max_tokens=s.max_tokens, seed=seed)
        replies = draw_replies(self.policy, prompts, sampling, self.loaded.template.end_id(self.loaded.tokenizer))
        texts = [text_of(self.loaded, reply) for reply in replies]
        found = [self.questions.rewards(asked[row // s.num_generations], text) for row, text in enumerate(texts)]
        rewards = np.array([[r["correct"] + s.format_weight * r["format"], r["correct"], r["format"]] for r in found])
        self._note(step, asked, texts, rewards)
        learned = np.arange(len(prompts)) if self.reference else worth_learning(rewards[:, 0], s.num_generations)
        ids, targets = reply_rows(
            [(prompts[i] + replies[i], len(prompts[i])) for i in learned], self.loaded.model.config.prediction_heads
        )
        batch, none = Batch(ids, targets, group_size=s.num_generations), np.zeros((len(ids), 0))
        return {
            "ids": ids,
            "targets": targets,
            "rewards": rewards,
            "lengths": np.array([len(reply) for reply in replies]),
            "advantages": advantages(rewards[learned, 0].reshape(-1, s.num_generations), s.normalise != "dr_grpo"),
            "old": -self.policy.token_nll(batch) if s.iterations > 1 else none,
            "reference": -self.reference.token_nll(batch) if self.reference else none,
        }

    def _numbers(self, rollout: int, count: int) -> list[int]:
        """The questions of a rollout: each epoch goes through all of them in another order."""
        total, found = len(self.questions.training), []
        for number in range(rollout * count, (rollout + 1) * count):
            epoch, position = divmod(number, total)
            found.append(int(Stream(self.settings.seed, f"questions/{epoch}").permutation(total)[position]))
        return found

    def _note(self, step: int, asked: Sequence[Instruction], texts: Sequence[str], rewards: np.ndarray) -> None:
        """Keep a reply to show, and stop where rewards have been equal for too long: they have no gradient."""
        asks = f"{asked[0].instruction} {asked[0].input}".strip()
        self.shown = f"  {asks} -> {texts[0]} (reward {rewards[0, 0]:g})".replace("\n", "\n  ")
        groups = rewards[:, 0].reshape(-1, self.settings.num_generations)
        self.equal = self.equal + 1 if (np.ptp(groups, axis=1) == 0).all() else 0
        best = 1 + self.settings.format_weight
        if self.equal == EQUAL and rewards[0, 0] < best:
            raise UserError(
                f"step {step}: the rewards of each question's {self.settings.num_generations} replies have been equal "
                f"for {EQUAL} rollouts: none is better than another, so there is no gradient; ask easier questions, "
                "raise --num-generations, or start from a model that is right now and then"
            )


def learn(settings: GrpoSettings, base: Opened, resume: bool) -> None:
    template = tuning.training_template(settings, base)
    loaded, backend, settings, plan = tuning.build(settings, base, template, each=settings.num_generations)
    questions = open_questions(settings.task, settings.data, settings.encoding)
    longest = max(len(prompt_of(loaded, q)) for q in (*questions.training, *questions.held_out))
    if longest + settings.max_tokens > base.config.context:
        raise UserError(
            f"the longest question takes {longest} tokens and a reply up to {settings.max_tokens}, the model's context "
            f"is {base.config.context}; use a smaller --max-tokens, or shorter questions"
        )
    print(
        f"questions: {questions.name}, {len(questions.training):,} to learn from, {len(questions.held_out):,} held "
        f"out; {settings.num_generations} replies to each of {settings.batch_size * settings.grad_accum} a step"
    )
    model, tokenizer = loaded.model, loaded.tokenizer
    objective = GRPO(settings.beta, settings.clip_low, settings.clip_high, settings.normalise, settings.max_tokens)
    reference = DataParallel(base.build(backend, adapters=settings.adapters).model, backend) if settings.beta else None
    policy = DataParallel(model, backend)
    rollouts = Rollouts(settings, loaded, questions, policy, reference)

    def measured() -> dict[str, float]:
        """The shares of greedy replies to the held-out questions that are right, and that have the right format."""
        prompts = [prompt_of(loaded, q) for q in questions.held_out]
        greedy = Sampling(temperature=0.0, max_tokens=settings.max_tokens)
        replies = draw_replies(policy, prompts, greedy, loaded.template.end_id(tokenizer))
        texts = [text_of(loaded, ids) for ids in replies]
        found = [questions.rewards(q, text) for q, text in zip(questions.held_out, texts, strict=True)]
        return {name: float(np.mean([r[name] for r in found])) for name in ("correct", "format")}

    def evaluate(_: DataParallel) -> dict[str, float]:
        return {f"val_{name}": share for name, share in measured().items()}

    def say(when: str, shares: dict[str, float]) -> None:
        right, formatted = shares["correct"], shares["format"]
        line = f"{when}: {right:.1%} of the held-out questions right, {formatted:.1%} in the right format"
        if not settings.data:  # whether it has forgotten what it could do before
            line += f"; {exact_match(loaded, 20 * len(KINDS), 0)['all']:.1%} of those that recipes/sft.py asks"
        print(line)

    if not resume:
        say("before", measured())
    task = Task(
        model=model,
        tokenizer=tokenizer,
        objective=objective,
        batches=rollouts.batches,
        evaluate=evaluate,
        sample=lambda: rollouts.shown,
        meta={
            "kind": "grpo",
            "data_hash": questions.fingerprint(),
            "corpus": [questions.summary()],
            **tuning.run_metadata(loaded, base, backend, settings),
            **tuning.provenance(base, Path(settings.out), input_hashes(settings.data)),
        },
        curve="reward",
        figures=lambda: rollouts.figures,
        state=rollouts.held,
        plan=plan,
        published=published_files(base.published),
    )
    last = Run(task, settings, backend, resume).train()
    after = measured()
    say("after", after)
    save_scores(Path(settings.out), checkpoint.step_of(last), {f"exact match, {questions.name}": after["correct"]})


if __name__ == "__main__":
    run_command(main)

"""Preferences and rewards against TRL's own loss functions: the same loss, figures and gradients on an exported model.

TRL's trainers bring datasets, processes and loggers; their loss is a method. It is called on trainers that were never
initialised and hold what it reads, with TRL's own head on a model of transformers that was written by our export.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.formats.foreign import entries_of
from tinyforge.backends import get_backend
from tinyforge.formats.foreign import weights_of
from tinyforge.formats.huggingface import write_directory
from tinyforge.models.llama import Config, Llama
from tinyforge.op import Stash
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch
from tinyforge.train.policy import GRPO, advantages, policy_batch
from tinyforge.train.preferences import DPO, IPO, ORPO, Pairs, SimPO, reply_rows

torch = pytest.importorskip("torch", reason="the peer is TRL, on torch")
transformers = pytest.importorskip("transformers", reason="the peer is TRL, on transformers")
pytest.importorskip("trl", reason="the peer is TRL")

pytestmark = pytest.mark.slow
FP64 = get_backend("numpy", "fp64", workers=1)
CONFIG = Config(dim=24, heads=4, kv_heads=2, layers=2, context=24, vocab=37, hidden=20)
TOLERANCE = 1e-5  # TRL's head computes in float32


@dataclass(frozen=True)
class Peer:
    """A model of ours, the same one in transformers, and one that is the reference of both."""

    ours: Llama
    theirs: Any
    other: Llama
    reference: Any


def random_model(seed: int) -> Llama:
    model = Llama(CONFIG, FP64)
    model.initialise(seed)
    model.buffer.values *= 4
    model.buffer.values[...] = model.buffer.values.astype(np.float32)
    return model


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    from trl.trainer.utils import add_fused_lm_head

    made = []
    for seed in (1, 2):
        ours = random_model(seed)
        write_directory(tmp_path / str(seed), weights_of(ours), "f32")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(seed), dtype=torch.float32)
        add_fused_lm_head(theirs, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        made += [ours, theirs]
    return Peer(*made)


def backward(model: Llama, objective: Any, batch: Batch) -> dict[str, float]:
    """Our loss and figures; the gradients are in the model."""
    stash, counts = Stash(), objective.count(batch)
    sums, dnll = objective.weigh(model.forward(batch.ids, batch.targets, stash), batch, counts, FP64)
    model.backward(dnll, stash)
    return objective.figures(sums, counts)


def assert_same_gradients(peer: Peer) -> None:
    theirs = {name: p.grad.numpy() for name, p in peer.theirs.named_parameters()}
    ours = {p.name: p.grad for p in peer.ours.buffer.params}
    found = {entry.theirs: entry.take(ours[entry.ours]) for entry in entries_of(peer.ours)}
    assert found.keys() == theirs.keys()
    for name, gradient in found.items():
        assert np.abs(gradient - theirs[name]).max() <= TOLERANCE * max(1.0, np.abs(theirs[name]).max()), name
        assert np.abs(theirs[name]).max() > 1e-4, name


def trainer_of(kind: type, **attributes: Any) -> Any:
    """A trainer that nobody initialised."""
    alone = SimpleNamespace(
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        device=torch.device("cpu"),
        num_processes=1,
        is_main_process=False,
        autocast=torch.enable_grad,
        unwrap_model=lambda model: model,
    )
    made = object.__new__(kind)
    vars(made).update(
        {
            "accelerator": alone,
            "aux_loss_enabled": False,
            "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
            **attributes,
        }
    )
    return made


def random_pairs(seed: int) -> Pairs:
    rng, made = np.random.default_rng(seed), []
    for _ in range(5):
        prompt = rng.integers(0, 37, rng.integers(2, 6)).tolist()
        made.append((*(prompt + rng.integers(0, 37, rng.integers(1, 9)).tolist() for _ in "cr"), len(prompt)))
    return Pairs(made, 1, 0)


def in_their_order(batch: Batch) -> np.ndarray:
    """TRL has all chosen replies, then all rejected ones."""
    rows = np.arange(len(batch.ids))
    return np.concatenate([rows[::2], rows[1::2]])


@pytest.mark.parametrize(
    ("objective", "name"), [(DPO(0.1), "sigmoid"), (DPO(0.5), "sigmoid"), (IPO(0.3), "ipo")], ids=repr
)
def test_dpo(objective: DPO, name: str, peer: Peer) -> None:
    from trl import DPOTrainer

    pairs = random_pairs(0)
    pairs.reference = pairs.reference_logps(DataParallel(peer.other, FP64).token_nll, 2)
    batch = pairs.of(range(5))
    found = backward(peer.ours, objective, batch)
    trainer = trainer_of(
        DPOTrainer,
        model=peer.theirs,
        ref_model=peer.reference,
        beta=objective.beta,
        label_smoothing=0.0,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids, mask, learned = whole_rows(batch)
    order = torch.from_numpy(in_their_order(batch))
    inputs = {"input_ids": ids[order], "attention_mask": mask[order], "completion_mask": learned[order]}
    peer.theirs.train()
    loss = trainer._compute_loss(peer.theirs, inputs, return_outputs=False)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    theirs = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    names = ["rewards/accuracies", "logps/chosen", "logps/rejected"]
    # TRL logs IPO's rewards before they are divided by the length.
    names += ["rewards/chosen", "rewards/rejected", "rewards/margins"] if name == "sigmoid" else []
    for key in names if name == "sigmoid" else names[1:]:
        assert found[key] == pytest.approx(theirs[key], rel=TOLERANCE, abs=TOLERANCE), key
    assert_same_gradients(peer)


def whole_rows(batch: Batch) -> tuple[Any, Any, Any]:
    """Ids with the last token, which is only a target, what is no padding, and what is a reply: (B, T + 1) each."""
    targets = batch.targets[..., 0]
    ids = np.zeros((len(targets), targets.shape[1] + 1), np.int64)
    ids[:, :-1] = batch.ids
    learned = np.zeros_like(ids)
    learned[:, 1:] = targets >= 0
    ids[:, 1:] = np.where(targets >= 0, targets, ids[:, 1:])
    last = np.where(learned, np.arange(ids.shape[1]), 0).max(axis=1)
    mask = (np.arange(ids.shape[1]) <= last[:, None]).astype(np.int64)
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(learned)


def their_logps(peer: Peer, batch: Batch) -> tuple[Any, Any]:
    """Sums of transformers' log-probabilities over the replies, chosen and then rejected, and their lengths."""
    ids, mask, learned = whole_rows(batch)
    logits = peer.theirs(input_ids=ids, attention_mask=mask).logits[:, :-1].double()
    chosen = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None])[..., 0] * learned[:, 1:]
    order = torch.from_numpy(in_their_order(batch))
    return chosen.sum(-1)[order], learned.sum(-1)[order]


@pytest.mark.parametrize("objective", [SimPO(2.0, 0.0, 0.5), SimPO(1.0, 0.1, 0.8)], ids=repr)
def test_simpo(objective: SimPO, peer: Peer) -> None:
    from trl.experimental.cpo import CPOTrainer

    batch = random_pairs(1).of(range(5))
    found = backward(peer.ours, objective, batch)
    trainer = trainer_of(
        CPOTrainer,
        beta=objective.beta,
        simpo_gamma=objective.gamma,
        alpha=0.0,
        loss_type="simpo",
        label_smoothing=objective.label_smoothing,
    )
    logps, lengths = their_logps(peer, batch)
    losses, chosen, rejected = trainer.cpo_loss(*(logps / lengths).chunk(2))
    losses.mean().backward()
    assert found["loss"] == pytest.approx(losses.mean().item(), rel=TOLERANCE)
    assert found["rewards/margins"] == pytest.approx((chosen - rejected).mean().item(), rel=TOLERANCE)
    assert_same_gradients(peer)


def test_label_smoothing(peer: Peer) -> None:
    """DPO's, as TRL's CPO has it: on the difference of log-ratios."""
    from trl.experimental.cpo import CPOTrainer

    pairs = random_pairs(2)
    pairs.reference = pairs.reference_logps(DataParallel(peer.other, FP64).token_nll, 5)
    batch = pairs.of(range(5))
    found = backward(peer.ours, DPO(0.3, 0.2), batch)
    trainer = trainer_of(CPOTrainer, beta=0.3, alpha=0.0, loss_type="sigmoid", label_smoothing=0.2)
    logps, _ = their_logps(peer, batch)
    losses, *_ = trainer.cpo_loss(*(logps - torch.from_numpy(pairs.reference.T.reshape(-1))).chunk(2))
    losses.mean().backward()
    assert found["loss"] == pytest.approx(losses.mean().item(), rel=TOLERANCE)
    assert_same_gradients(peer)


def test_orpo(peer: Peer) -> None:
    from trl.experimental.orpo import ORPOTrainer

    batch = random_pairs(3).of(range(5))
    found = backward(peer.ours, ORPO(0.4), batch)
    logps, lengths = their_logps(peer, batch)
    losses, *_ = trainer_of(ORPOTrainer, beta=0.4).odds_ratio_loss(*(logps / lengths).chunk(2))
    loss = -logps[:5].sum() / lengths[:5].sum() - losses.mean()
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    assert_same_gradients(peer)


@pytest.mark.parametrize("normalise", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo(normalise: str, beta: float, peer: Peer) -> None:
    from trl import GRPOTrainer

    rng, prompt, longest = np.random.default_rng(4), 4, 7
    rows = [(rng.integers(0, 37, prompt + 1 + int(rng.integers(longest))).tolist(), prompt) for _ in range(8)]
    rows[0] = (rng.integers(0, 37, prompt + longest).tolist(), prompt)
    ids, targets = reply_rows(rows, 1)
    advantage = advantages(rng.random((2, 4)), normalise != "dr_grpo")
    logps = []
    for model in (peer.ours, peer.other):
        own = -DataParallel(model, FP64).token_nll(Batch(ids, targets))
        logps.append(np.where(targets[..., 0] >= 0, own + rng.choice([-0.5, -0.1, 0.1, 0.4], own.shape), 0))
    batch = policy_batch(ids, targets, advantage, logps)
    objective = GRPO(beta, 0.2, 0.3, normalise, longest)
    found = backward(peer.ours, objective, batch)
    trainer = trainer_of(
        GRPOTrainer,
        model=peer.theirs,
        beta=beta,
        loss_type=normalise,
        epsilon_low=0.2,
        epsilon_high=0.3,
        importance_sampling_level="token",
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        temperature=1.0,
        current_gradient_accumulation_steps=1,
        max_completion_length=longest,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    )
    tokens, mask, learned = whole_rows(batch)
    tail = slice(prompt - 1, prompt - 1 + longest)
    inputs = {
        "prompt_ids": tokens[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": tokens[:, prompt:],
        "completion_mask": learned[:, prompt:],
        "advantages": torch.from_numpy(advantage.reshape(-1)),
        "old_per_token_logps": torch.from_numpy(logps[0][:, tail]),
        "num_items_in_batch": learned.sum(),
        "ref_per_token_logps": torch.from_numpy(logps[1][:, tail]),
    }
    peer.theirs.train()
    loss = trainer._compute_loss(peer.theirs, inputs)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=TOLERANCE, abs=TOLERANCE)
    theirs = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    for key in ("clip_ratio/low_mean", "clip_ratio/high_mean", *(("kl",) if beta else ())):
        assert found[key] == pytest.approx(theirs[key], rel=1e-4, abs=TOLERANCE) and theirs[key] > 0, key
    assert_same_gradients(peer)

"""The divergence from a teacher is torch's KL divergence, on whole and on split vocabularies."""

from __future__ import annotations

import pytest
import torch
from core_cells import GPT2, LLAMA_GQA, batch
from distillation_reports import TEACHER, distil
from torch.nn import functional as F

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_core.layers.divergence import Prediction, linear_divergence
from mds_core.models import GPT, Distillation, DistilledGPT

TOKENS, VOCABULARY = 11, 29


def predictions(*, dtype=torch.float64) -> tuple[Prediction, Prediction]:
    torch.manual_seed(3)
    student = (torch.randn(TOKENS, 8, dtype=dtype), torch.randn(32, 8, dtype=dtype))
    teacher = (torch.randn(TOKENS, 12, dtype=dtype), torch.randn(32, 12, dtype=dtype))
    return Prediction(*(each.requires_grad_() for each in student)), Prediction(*teacher)


def expected(student: Prediction, teacher: Prediction, *, temperature, weights) -> torch.Tensor:
    """What the original computes from whole logits."""
    ours, theirs = (
        (each.hidden @ each.weight.T)[:, :VOCABULARY] / temperature for each in (student, teacher)
    )
    apart = F.kl_div(ours.log_softmax(1), theirs.softmax(1), reduction="none").sum(1)
    return temperature**2 * apart * weights


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_loss_and_gradients_are_those_of_whole_logits(temperature, chunk_size) -> None:
    student, teacher = predictions()
    weights = torch.rand(TOKENS, dtype=torch.float64)

    found = linear_divergence(
        student,
        teacher,
        temperature=temperature,
        loss_weights=weights,
        vocab_size=VOCABULARY,
        chunk_size=chunk_size,
    )
    got = torch.autograd.grad(3.0 * found.loss_sum, student)

    wanted = expected(student, teacher, temperature=temperature, weights=weights)
    torch.testing.assert_close(found.loss_sum, wanted.sum())
    torch.testing.assert_close(found.losses * weights, wanted.detach())
    for one, other in zip(got, torch.autograd.grad(3.0 * wanted.sum(), student), strict=True):
        torch.testing.assert_close(one, other)
    assert got[1][VOCABULARY:].abs().max() == 0.0


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    student, _ = predictions(dtype=torch.float32)

    found = linear_divergence(student, student, temperature=2.0)
    (gradient,) = torch.autograd.grad(found.loss_sum, student.hidden)

    assert found.losses.abs().max() < 1e-5
    assert gradient.abs().max() < 1e-5


def test_a_model_adds_the_divergence_to_its_loss_in_training_only() -> None:
    found = distil(ProcessGroups.single())

    student = DistilledGPT(LLAMA_GQA, ProcessGroups.single(), seed=7, dtype=torch.float64)
    teacher = GPT(TEACHER, ProcessGroups.single(), seed=9, dtype=torch.float64).eval()
    tokens, labels, mask = batch(LLAMA_GQA, 0)
    plain = student(tokens, labels, loss_mask=mask)
    ours, theirs = (model(tokens).detach() / 1.5 for model in (student, teacher))
    apart = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="none").sum(-1)

    torch.testing.assert_close(found["sums"][0], 0.5 * plain.loss_sum.detach())
    torch.testing.assert_close(found["divergences"], 0.7 * 1.5**2 * apart)
    torch.testing.assert_close(found["sums"][1], (found["divergences"] * mask).sum())
    student.set_teacher(teacher, Distillation())
    for model in (student.eval(), student.train()):
        model.teaching = False
        assert torch.equal(model(tokens, labels, loss_mask=mask).losses, plain.losses)
    assert not any("teacher" in name for name in student.state_dict())


@pytest.mark.parametrize("axis", ["tp", "ulysses"])
def test_ranks_that_share_a_model_learn_the_same(two_ranks, axis) -> None:
    alone = distil(ProcessGroups.single())

    for rank in two_ranks:
        for name, value in alone.items():
            torch.testing.assert_close(
                rank["distilled"][axis][name], value, rtol=1e-10, atol=1e-12, msg=name
            )


def test_another_vocabulary_is_refused() -> None:
    student = DistilledGPT(LLAMA_GQA, ProcessGroups.single())

    with pytest.raises(ValueError, match="the teacher has 96 words in 96 rows and the student 97"):
        student.set_teacher(GPT(GPT2, ProcessGroups.single()), Distillation())
    with pytest.raises(ValueError, match="temperature is 0"):
        Distillation(temperature=0.0)
    with pytest.raises(ValueError, match="beta is -1"):
        Distillation(beta=-1.0)


def test_a_teacher_whose_ranks_hold_other_positions_is_refused() -> None:
    shared = ProcessGroups(layout=Layout(ulysses_size=2), rank=0)
    ring = Execution(sequence_sharing="ring")
    student = DistilledGPT(GPT2, shared, device="meta", execution=ring)

    with pytest.raises(ValueError, match="each rank must hold the same positions of both"):
        student.set_teacher(GPT(GPT2, shared, device="meta"), Distillation())
    student.set_teacher(GPT(GPT2, shared, device="meta", execution=ring), Distillation())

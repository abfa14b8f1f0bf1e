"""The allowance behind a norm: one code, or one activation step of a rotated pair, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsafuse.check.cases import Case
from dsafuse.check.norms import _cancelled

STEP = torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("style", "partner"), [("neox", 32), ("interleaved", 1)])
def test_a_cancelled_rotation_may_move_by_an_activation_step_of_its_pair(style: str, partner: int) -> None:
    case = Case(op="indexer_qk_rope_quant_and_cache", index_rope_style=style)
    theirs = torch.zeros(1, 128)
    theirs[0, partner] = 100.0
    mine = theirs.clone()
    mine[0, 0] = 100.0 * STEP
    assert bool(_cancelled(case, mine, theirs)[0, 0])
    mine[0, 0] *= 1.01
    assert not bool(_cancelled(case, mine, theirs)[0, 0])
    assert not bool(_cancelled(replace(case, rounding="fp32"), mine / 2, theirs)[0, 0])


def test_what_is_not_rotated_has_no_such_allowance() -> None:
    theirs = torch.full((1, 128), 100.0)
    mine = theirs.clone()
    mine[0, 64:] += 1e-3
    near = _cancelled(Case(op="indexer_qk_rope_quant_and_cache"), mine, theirs)
    assert bool(near[:, :64].all())
    assert not bool(near[:, 64:].any())

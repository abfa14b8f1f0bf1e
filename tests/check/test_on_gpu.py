"""On a GPU: a sample of the quick set, replay included, and the timers. `dsafuse verify --cases full` is the whole."""

import pytest
import torch

from dsafuse.check import timing
from dsafuse.check.arms import arms_of
from dsafuse.check.bench import Yardsticks, bench_case, bench_cell
from dsafuse.check.cases import ROLES
from dsafuse.check.verify import plan, summarise, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine"),
]
GPU = torch.device("cuda")


@pytest.mark.parametrize("op", ROLES)
def test_some_of_the_quick_set_passes(op):
    results = list(verify(plan([op], "quick", GPU)[::5], None, 0, GPU))
    assert [result.call for result in results if result.status == "failed"] == []
    assert all(summary.ok for summary in summarise(results))
    assert {result.how for result in results} == {"eager", "graph"}


@pytest.mark.parametrize("op", ROLES)
def test_fused_is_faster_than_split_at_one_token(op):
    arms, _ = arms_of(op, ("fused", "split"))
    cell = bench_cell(bench_case(op, 1, (128, 64)), arms, ("cold", "warm"), 0, GPU, Yardsticks(4e12, 0.6))
    assert cell.unproven == []
    median = {(row.arm, row.l2): row.median_us for row in cell.rows}
    for state in ("cold", "warm"):
        assert 0 < median["fused", state] < median["split", state]


def test_an_empty_kernel_takes_less_than_any_work():
    assert 0 < timing.empty_kernel_us(GPU) < 5

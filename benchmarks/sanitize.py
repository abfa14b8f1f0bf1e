"""A few quick cases of every op on this GPU, proven as `dsafuse verify` does, for compute-sanitizer to look on.

docs/benchmarks.md has the commands. Exits 1 without a GPU, and if a case fails.
"""

import sys

import torch

from dsafuse.check.cases import ROLES
from dsafuse.check.environment import why_no_gpu
from dsafuse.check.verify import check_case, plan

CASES_OF_AN_OP = 3
"""Every case compiles kernels of its own, which is what takes the time."""


def main() -> int:
    """Run them eagerly: fused, and the unfused chain for its error."""
    if reason := why_no_gpu("sanitize"):
        sys.stderr.write(reason + "\n")
        return 1
    gpu, failed = torch.device("cuda"), 0
    for op in ROLES:
        cases = [case for case in plan([op], "quick", gpu) if case.tokens > 1]
        for case in cases[:: -(-len(cases) // CASES_OF_AN_OP)]:
            for result in check_case(case, ["triton"], 0, gpu):
                sys.stdout.write(" ".join([result.status, result.call, *result.reasons]) + "\n")
                failed += result.status != "passed"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

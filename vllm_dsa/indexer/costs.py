"""What one pass over a request's KV costs, by the query rows that it serves.

All tables are in one unit: a pass of DeepGEMM for a single row.
"""

from dataclasses import dataclass

import numpy as np

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.kernels.sm90_paged_mqa_logits import PASS_ROWS
from vllm_dsa.platform import HOPPER


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Cost of one group of `c` rows, relative to a single row's.

    Attributes
    ----------
    group_sizes : tuple of int
        Measured group sizes, ascending, starting at 1.
    costs : tuple of float
        Their costs. Between two points, and past the last two, the cost is linear.
    """

    group_sizes: tuple[int, ...]
    costs: tuple[float, ...]

    def group_cost(self, group_size: int) -> float:
        """Return the cost of one group of `group_size` rows."""
        if group_size <= self.group_sizes[-1]:
            return float(np.interp(group_size, self.group_sizes, self.costs))
        slope = (self.costs[-1] - self.costs[-2]) / (self.group_sizes[-1] - self.group_sizes[-2])
        return self.costs[-1] + slope * (group_size - self.group_sizes[-1])


# H200, 64 heads, batch 64, context 32768 and 131072, cold L2 by reading, DeepGEMM nv_dev: a pass of one row takes
# 75 and 253 us, of two 82 and 296 us (1.09x, 1.17x), of four 135 and 555 us (1.8x, 2.2x). Two rows ride on one KV
# read almost for free; four are bound by the tensor cores.
SM90_COSTS = StepCosts(group_sizes=(1, 2, 4), costs=(1.0, 1.226, 2.156))

# Query rows that one pass of our Hopper kernel serves.
SM90_ROWS_PER_PASS = PASS_ROWS

# Our kernel on an H200, 64 heads, batch 64, context 32768 and 131072, each depth against DeepGEMM's best form of it in
# the same run, at that form's cost in the table above: 1.005 of a single row, 1.03 of a pair, 0.83 and 0.995 of a four,
# and at depth 8 0.98 of two fours. 5 to 7 are not measured since the last version of the kernel.
SM90_KERNEL_COSTS = StepCosts(
    group_sizes=tuple(range(1, SM90_ROWS_PER_PASS + 1)), costs=(1.005, 1.265, 1.78, 2.145, 2.88, 3.32, 3.74, 4.22)
)

# Not measured: elsewhere a pass is taken as one KV read plus a tenth of it for each further row.
DEFAULT_COSTS = StepCosts(group_sizes=(1, 2), costs=(1.0, 1.1))


def default_costs(caps: PagedMQALogitsCapabilities) -> StepCosts:
    """Return the cost table for the capabilities' architecture."""
    return SM90_COSTS if caps.arch_family == HOPPER else DEFAULT_COSTS

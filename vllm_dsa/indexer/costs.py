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


# Both tables: H200, 64 heads, contexts 4096 to 131072, batches 1 and 64, cold L2 by reading, DeepGEMM nv_dev; by
# `vllm-dsa bench logits --costs` (docs/performance.md). Two rows ride on one KV read almost for free; four are bound by
# the tensor cores.
SM90_COSTS = StepCosts(group_sizes=(1, 2, 4), costs=(1.0, 1.141, 2.091))

# Query rows that one pass of our Hopper kernel serves.
SM90_ROWS_PER_PASS = PASS_ROWS

SM90_KERNEL_COSTS = StepCosts(
    group_sizes=tuple(range(1, SM90_ROWS_PER_PASS + 1)),
    costs=(1.017, 1.172, 1.67, 2.002, 2.857, 3.056, 4.135, 4.078),
)

# Not measured: elsewhere a pass is taken as one KV read plus a tenth of it for each further row.
DEFAULT_COSTS = StepCosts(group_sizes=(1, 2), costs=(1.0, 1.1))


def default_costs(caps: PagedMQALogitsCapabilities) -> StepCosts:
    """Return the cost table for the capabilities' architecture."""
    return SM90_COSTS if caps.arch_family == HOPPER else DEFAULT_COSTS

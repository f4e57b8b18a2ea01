"""How many bytes of the index-K cache a decode step reads."""

import numpy as np
import numpy.typing as npt

from vllm_dsa.indexer import DecodeForm, StepPlan
from vllm_dsa.indexer.costs import SM90_ROWS_PER_PASS
from vllm_dsa.ops import LogitsBackend
from vllm_dsa.reference import IndexKCacheLayout

IntArray = npt.NDArray[np.int64]


def kv_bytes(plan: StepPlan, depths: IntArray, seq_lens: IntArray, layout: IndexKCacheLayout) -> int:
    """Return the bytes of whole pages that the plan reads, over all its passes, for one layer.

    A pass reads up to the bound of the last row that it serves; in RAGGED, of the request's last row.

    Parameters
    ----------
    plan : StepPlan
        The plan of these depths.
    depths, seq_lens : ndarray of int64
        Of each request, as in a ``DecodeBatch``.
    layout : IndexKCacheLayout
        Page geometry.
    """
    if plan.form is DecodeForm.RAGGED:
        passes = -(-depths // SM90_ROWS_PER_PASS) if plan.backend is LogitsBackend.SM90 else (depths > 0).astype(int)
        return _page_bytes(np.repeat(seq_lens, passes), layout)
    return _grouped_bytes(plan.group_size, depths, seq_lens, layout)


def flattened_kv_bytes(depths: IntArray, seq_lens: IntArray, layout: IndexKCacheLayout) -> int:
    """Return what the step would read with one pass per query row."""
    return _grouped_bytes(1, depths, seq_lens, layout)


def _grouped_bytes(group_size: int, depths: IntArray, seq_lens: IntArray, layout: IndexKCacheLayout) -> int:
    groups = -(-depths // group_size)
    request = np.repeat(np.arange(len(depths)), groups)
    group_in_request = np.arange(groups.sum()) - np.repeat(groups.cumsum() - groups, groups)
    last_row = np.minimum((group_in_request + 1) * group_size, depths[request]) - 1
    bounds = np.maximum(seq_lens[request] - depths[request] + last_row + 1, 0)
    return _page_bytes(bounds, layout)


def _page_bytes(lengths: IntArray, layout: IndexKCacheLayout) -> int:
    return int((-(-lengths // layout.block_size)).sum()) * layout.page_bytes

"""Combine attention over parts of the tokens into attention over all of them."""

import torch
import triton
import triton.language as tl

_VALUE = 512
_SPLITS_AT_ONCE = 16
# With fewer rows than this a program does a quarter of a row, so that more of them wait for memory at a time.
_FEW_ROWS = 512


def launch_mla_combine(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, num_splits: int
) -> None:
    """Combine the parts of each row.

    Parameters
    ----------
    partial_out, partial_lse : torch.Tensor
        Contiguous float32, ``rows * num_splits * 512`` and ``rows * num_splits`` elements: the softmax of each part,
        and its log-sum-exp to base 2. An output whose log-sum-exp is -inf is not read.
    out, lse : torch.Tensor
        ``(..., 512)`` bfloat16 and ``(...)`` float32, contiguous, of `rows` rows: written, every element; 0 and -inf
        where all parts are empty. `lse` is natural.
    num_splits : int

    Notes
    -----
    One launch, no allocation, no host sync; graph safe once `warmup_mla_combine` has compiled it. Arguments are not
    checked here.
    """
    num_rows = lse.numel()
    dims = _VALUE // 4 if num_rows < _FEW_ROWS else _VALUE
    _combine_kernel[(num_rows, _VALUE // dims)](
        *(partial_out, partial_lse, out, lse, num_splits),
        DIMS=dims,
        SPLITS=_SPLITS_AT_ONCE,
    )


def warmup_mla_combine(device: torch.device) -> None:
    """Compile what any number of rows and parts needs. Allocates for a moment."""
    for num_rows in (1, _FEW_ROWS):
        lse = torch.full((num_rows,), float("-inf"), device=device)
        out = torch.empty((num_rows, _VALUE), device=device)
        launch_mla_combine(out, lse, out.bfloat16(), lse.clone(), 1)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["partial_lse_ptr", "lse_ptr"])
def _combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    lse_row_ptr = partial_lse_ptr + row * num_splits
    out_row_ptr = partial_out_ptr + row * num_splits * 512

    peak = tl.full((SPLITS,), float("-inf"), tl.float32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        peak = tl.maximum(peak, tl.load(lse_row_ptr + split, mask=split < num_splits, other=float("-inf")))
    highest = tl.max(peak, 0)
    finite_peak = tl.where(highest == float("-inf"), 0.0, highest)

    total = 0.0
    acc = tl.zeros((DIMS,), tl.float32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        lse = tl.load(lse_row_ptr + split, mask=split < num_splits, other=float("-inf"))
        # An output of weight 0 may never have been written: it is not read.
        is_live = (lse != float("-inf"))[:, None]
        weight = tl.exp2(lse - finite_peak)
        partial = tl.load(out_row_ptr + split[:, None] * 512 + dim[None, :], mask=is_live, other=0.0)
        total += tl.sum(weight, 0)
        acc += tl.sum(weight[:, None] * partial, 0)

    is_empty = total == 0
    divisor = tl.where(is_empty, 1.0, total)
    tl.store(out_ptr + row * 512 + dim, (acc / divisor).to(out_ptr.dtype.element_ty))
    lse = tl.where(is_empty, float("-inf"), (finite_peak + tl.log2(divisor)) * 0.6931471805599453)
    tl.store(lse_ptr + row, lse, mask=tl.program_id(1) == 0)

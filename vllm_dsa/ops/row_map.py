"""Between a step's tokens and the kernel rows that its plan makes of them."""

import torch


def rows_of_tokens(
    q: torch.Tensor, weights: torch.Tensor, row_to_token: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put queries into the plan's row order.

    Parameters
    ----------
    q : torch.Tensor
        ``(T, heads, head_dim)`` float8_e4m3fn.
    weights : torch.Tensor
        ``(T, heads)`` float32, folded.
    row_to_token : torch.Tensor or None
        ``(rows,)`` int32, -1 for a dummy row; ``None`` where rows are tokens, and the inputs are returned.

    Returns
    -------
    tuple of torch.Tensor
        ``(rows, heads, head_dim)`` and ``(rows, heads)``. A dummy row has zero weights, so its logits are 0. No host
        sync; allocates, so graph safe only under a graph pool.

    Raises
    ------
    ValueError
        If q and weights differ in tokens or heads.
    """
    if q.dim() != 3 or weights.shape != q.shape[:2]:
        raise ValueError(
            f"q must be (tokens, heads, head_dim) and weights (tokens, heads), got {tuple(q.shape)} and "
            f"{tuple(weights.shape)}"
        )
    if row_to_token is None:
        return q, weights
    token = row_to_token.clamp(min=0)
    # index_select has no float8 kernel: the bytes are moved.
    row_q = q.view(torch.uint8).index_select(0, token).view(q.dtype)
    row_weights = weights.index_select(0, token).masked_fill_(row_to_token[:, None] < 0, 0)
    return row_q, row_weights


def tokens_of_rows(rows: torch.Tensor, token_to_row: torch.Tensor | None) -> torch.Tensor:
    """Return per-token values from per-row ones: ``(T, ...)`` from ``(rows, ...)``; `rows` itself for ``None``."""
    return rows if token_to_row is None else rows.index_select(0, token_to_row)

"""The expansion of a decode step into kernel rows: groups of query rows, each with its own length."""

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_dsa.context_parallel.layout import DcpLayout


class ExpandedDecode(NamedTuple):
    """What :func:`expand_decode` returns; ``G`` groups of ``c`` rows, ``T`` tokens, ``R`` requests. All int32.

    Attributes
    ----------
    context_lens : torch.Tensor
        ``(G, c)`` cached tokens that each row sees, on this rank, compressed; at least 0.
    block_table : torch.Tensor
        ``(G, W)`` the request's pages where the group sees any, 0 elsewhere.
    row_to_token : torch.Tensor
        ``(G * c,)`` token of each row, -1 for a dummy row.
    token_to_row : torch.Tensor
        ``(T,)`` row of each token.
    request_of_group : torch.Tensor
        ``(G,)`` request of each group.
    decode_lens : torch.Tensor
        ``(R,)`` query rows of each request.
    """

    context_lens: torch.Tensor
    block_table: torch.Tensor
    row_to_token: torch.Tensor
    token_to_row: torch.Tensor
    request_of_group: torch.Tensor
    decode_lens: torch.Tensor


def expand_decode(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    group_size: int,
    num_groups: int,
    num_tokens: int,
    block_size: int,
    dcp: "DcpLayout",
    compress_ratio: int,
) -> ExpandedDecode:
    """Expand a decode step into groups of `group_size` query rows.

    A request with ``d`` rows becomes ``ceil(d / group_size)`` groups. Row ``j`` of its ``d`` sees the first
    ``max(seq_len - d + j + 1, 0)`` tokens: the bound is taken in global space, then localised to this DCP rank, then
    compressed, in this order (localising a request's length first and subtracting afterwards loses tokens). The rows
    that fill up a last group repeat the bound of the request's last row, because DeepGEMM schedules from a group's
    last length.

    Parameters
    ----------
    query_start_loc : torch.Tensor
        ``(R + 1,)`` int32, first token of each request.
    seq_lens : torch.Tensor
        ``(R,)`` int32 global lengths, this step's tokens included; 0 for a padding request.
    block_table : torch.Tensor
        ``(R, W)`` int32 page ids.
    group_size, num_groups, num_tokens : int
        From the step's plan, which must be of these depths (not checked).
    block_size : int
        Tokens per page.
    dcp : DcpLayout
        This rank's share.
    compress_ratio : int
        Tokens per cached state.

    Returns
    -------
    ExpandedDecode
        Fresh tensors on the inputs' device. Not graph safe (allocates, and repeat_interleave may sync).
    """
    depths = query_start_loc.diff()
    groups_of_request = (depths + group_size - 1) // group_size
    requests = torch.arange(len(depths), device=depths.device)
    request = requests.repeat_interleave(groups_of_request, output_size=num_groups)
    first_group = groups_of_request.cumsum(0) - groups_of_request
    group_in_request = torch.arange(num_groups, device=depths.device) - first_group[request]

    depth = depths[request, None]
    row = group_in_request[:, None] * group_size + torch.arange(group_size, device=depths.device)
    is_real = row < depth
    global_lens = (seq_lens[request, None] - depth + row.minimum(depth - 1) + 1).clamp(min=0)
    context_lens = (dcp.local_lens(global_lens) // compress_ratio).to(torch.int32)

    row_to_token = torch.where(is_real, query_start_loc[request, None] + row, -1).flatten().to(torch.int32)
    token_to_row = torch.empty(num_tokens, dtype=torch.int32, device=depths.device)
    real_rows = is_real.flatten().nonzero().flatten()
    token_to_row[row_to_token[real_rows].long()] = real_rows.to(torch.int32)

    live_columns = (context_lens.amax(dim=1, keepdim=True) + block_size - 1) // block_size
    columns = torch.arange(block_table.shape[1], device=depths.device)
    return ExpandedDecode(
        context_lens=context_lens,
        block_table=torch.where(columns < live_columns, block_table[request], 0),
        row_to_token=row_to_token,
        token_to_row=token_to_row,
        request_of_group=request.to(torch.int32),
        decode_lens=depths.to(torch.int32),
    )

"""Checks of arguments: each raises an exception that names the argument, its value and what is allowed."""

import enum

import torch

from vllm_dsa.reference import IndexKCacheLayout, RopeStyle

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int32, torch.int64)
FP8_DTYPES = (torch.float8_e4m3fn,)

Shape = tuple[int | None, ...]


def check_tensor(
    name: str,
    value: object,
    *,
    dtypes: tuple[torch.dtype, ...],
    shape: Shape,
    device: torch.device | None = None,
) -> None:
    """Check that `value` is a tensor of the given form whose last axis is dense.

    Parameters
    ----------
    name : str
        The argument's name.
    value : object
        The argument.
    dtypes : tuple of torch.dtype
        Allowed dtypes.
    shape : tuple of (int or None)
        Sizes; None allows any.
    device : torch.device, optional
        The device of the other arguments; None allows any.

    Raises
    ------
    TypeError
        If it is no tensor or has another dtype.
    ValueError
        If its shape, its last stride or its device is not allowed.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is of type {type(value).__name__}; allowed: torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: {', '.join(map(str, dtypes))}")
    matches = value.dim() == len(shape) and all(
        want is None or size == want for size, want in zip(value.shape, shape, strict=True)
    )
    if not matches:
        allowed = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed: ({allowed})")
    if value.numel() > 1 and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} has strides {value.stride()}; allowed: a last stride of 1")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}; allowed: {device}, the device of the other tensors")


def check_contiguous(**tensors: torch.Tensor) -> None:
    """Check that tensors, given by their arguments' names, are contiguous.

    Raises
    ------
    ValueError
        If one is not.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; allowed: a contiguous tensor")


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Check that `value` is an int (not a bool) of at least `at_least`.

    Raises
    ------
    TypeError
        If it is no int.
    ValueError
        If it is too small.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; allowed: an int of at least {at_least}")
    if value < at_least:
        raise ValueError(f"{name} is {value}; allowed: at least {at_least}")


def check_enum(name: str, value: object, kind: type[enum.Enum]) -> None:
    """Check that `value` is a member of `kind`.

    Raises
    ------
    TypeError
        If it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; allowed: {', '.join(map(str, kind))}")


def check_rope(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    style: RopeStyle | None,
) -> None:
    """Check the three RoPE arguments against `x` (T, ..., D).

    Raises
    ------
    TypeError
        If one has another type or dtype.
    ValueError
        If only some are given, or a shape or a device does not fit.
    """
    given = {"positions": positions, "cos_sin": cos_sin, "style": style}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        raise ValueError(f"{', '.join(missing)} is None; allowed: all of {', '.join(given)}, or none")
    check_tensor("positions", positions, dtypes=INTEGER_DTYPES, shape=(x.shape[0],), device=x.device)
    check_tensor("cos_sin", cos_sin, dtypes=(torch.float32,), shape=(None, None), device=x.device)
    check_enum("style", style, RopeStyle)
    rope_dim = cos_sin.shape[1] if cos_sin is not None else 0
    if rope_dim % 2 or not 0 < rope_dim <= x.shape[-1]:
        raise ValueError(f"cos_sin has {rope_dim} columns; allowed: an even number, 2 to {x.shape[-1]}")


def check_positions(positions: torch.Tensor | None, cos_sin: torch.Tensor | None) -> None:
    """Check values on the device (a host sync): every position has a row in the table.

    Raises
    ------
    ValueError
        If one has none.
    """
    if positions is not None and cos_sin is not None:
        wrong = (positions < 0) | (positions >= cos_sin.shape[0])
        check_values("positions", positions, wrong, f"0 to {cos_sin.shape[0] - 1}")


def check_cache(cache: torch.Tensor, *, head_dim: int, device: torch.device) -> int:
    """Check an index-K cache against the K or q that goes with it, and return its block size in tokens.

    Raises
    ------
    TypeError, ValueError
        As `IndexKCacheLayout.of`, or its head_dim or device is another.
    """
    layout = IndexKCacheLayout.of(cache)
    if layout.head_dim != head_dim:
        raise ValueError(f"cache has a head_dim of {layout.head_dim}; allowed: {head_dim}, that of q or k")
    if cache.device != device:
        raise ValueError(f"cache is on {cache.device}; allowed: {device}, the device of the other tensors")
    return layout.block_size


def check_hadamard(head_dim: int, hadamard: bool) -> None:
    """Check that rows of `head_dim` can be rotated, if they are to be.

    Raises
    ------
    ValueError
        If `hadamard` is set and `head_dim` is not a power of two.
    """
    if hadamard and (head_dim < 1 or head_dim & (head_dim - 1)):
        raise ValueError(f"hadamard is set for a head_dim of {head_dim}; allowed: powers of two")


def check_lengths(context_lens: torch.Tensor, max_context_len: int, capacity: int) -> None:
    """Check lengths on the device (a host sync): each fits the result and the `capacity` tokens of a block table's row.

    Raises
    ------
    ValueError
        If one does not.
    """
    upper = min(max_context_len, capacity)
    wrong = (context_lens < 0) | (context_lens > upper)
    allowed = f"0 to {upper} (max_context_len is {max_context_len}, block_table holds {capacity} tokens)"
    check_values("context_lens", context_lens, wrong, allowed)


def check_pages(block_table: torch.Tensor, longest: torch.Tensor, block_size: int, num_blocks: int) -> None:
    """Check page ids on the device (a host sync): those that rows of up to `longest` (R,) tokens read exist.

    Raises
    ------
    ValueError
        If one does not.
    """
    column = torch.arange(block_table.shape[1], device=block_table.device)
    wrong = (column * block_size < longest[:, None]) & ((block_table < 0) | (block_table >= num_blocks))
    check_values("block_table", block_table, wrong, f"0 to {num_blocks - 1}")


def check_values(name: str, values: torch.Tensor, wrong: torch.Tensor, allowed: str) -> None:
    """Check values on the device (a host sync): the mask `wrong` marks none of them.

    Raises
    ------
    ValueError
        If one is marked.
    """
    marked = wrong.nonzero()
    if marked.numel():
        where = tuple(marked[0].tolist())
        raise ValueError(f"{name}{list(where)} is {values[where].item()}; allowed: {allowed}")

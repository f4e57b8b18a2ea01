"""Hadamard rotation of index q and k rows."""

import torch


def hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """Multiply each row (last dimension) by the orthonormal Hadamard matrix.

    The matrix is Sylvester's (natural order) times ``D ** -0.5``: symmetric, and its own inverse. Rotating
    both q and k leaves their dot products as they were and spreads outliers before quantisation.

    Parameters
    ----------
    x : torch.Tensor
        (..., D) floating point, any device, D a power of two.

    Returns
    -------
    torch.Tensor
        Same shape and dtype as `x`, computed in float32 (float64 for a float64 `x`) and rounded once.

    Raises
    ------
    ValueError
        If D is not a power of two.

    Notes
    -----
    No host sync. A K cache written with the rotation needs a q folded with it: SGLang rotates, vLLM does
    not, so their caches differ.
    """
    dim = x.shape[-1]
    if dim == 0 or dim & (dim - 1):
        raise ValueError(f"x has a last dimension of {dim}; the Hadamard transform needs a power of two")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rotated = x.to(dtype)
    half = 1
    while half < dim:
        low, high = rotated.view(*x.shape[:-1], dim // (2 * half), 2, half).unbind(dim=-2)
        rotated = torch.stack([low + high, low - high], dim=-2)
        half *= 2
    return rotated.reshape(x.shape).mul(dim**-0.5).to(x.dtype)

"""The check of a tensor's form that the calls share."""

import torch


def check_form(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise ``TypeError`` or ``ValueError``, naming the argument, unless dtype, shape and device are these."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {tensor.device}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError``, naming the argument, unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")

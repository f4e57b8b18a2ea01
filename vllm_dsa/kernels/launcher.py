"""Launching a Triton kernel without Triton's per-call specialisation, which takes longer than the kernel."""

from typing import Any

import torch
import triton


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`, which is at least 1."""
    # Triton's own (and its cdiv) is a device function too, and takes 6 us of a launch on the host.
    return 1 << (n - 1).bit_length()


class Launcher:
    """Launches one Triton kernel, compiled once per device and set of constexprs.

    The kernel must be declared with ``do_not_specialize`` for every integer and ``do_not_specialize_on_alignment`` for
    every pointer: then nothing but its constexprs can ask for another variant, and no call can compile while serving
    that a warm-up has made.

    Parameters
    ----------
    kernel : triton.JITFunction
        Its constexprs are its last parameters.

    Notes
    -----
    Launches on the current stream of the current device, which must be the tensors'.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_compiled = isinstance(kernel, triton.JITFunction)
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], arguments: tuple[object, ...], constexprs: tuple[object, ...]
    ) -> None:
        """Enqueue the kernel.

        Parameters
        ----------
        grid : (int, int, int)
            Programs in each dimension.
        arguments, constexprs : tuple
            In the kernel's order.
        """
        if not self._is_compiled:  # TRITON_INTERPRET=1
            self._kernel[grid](*arguments, *constexprs)
            return
        key = (torch.cuda.current_device(), *constexprs)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*arguments, *constexprs)
        else:
            compiled[grid](*arguments, *constexprs)

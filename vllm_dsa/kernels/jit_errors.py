"""What can go wrong between a CUDA source and a kernel on the device."""


class JitError(RuntimeError):
    """Base of the errors of run-time compilation."""


class JitUnavailableError(JitError):
    """Something that compiling or inspecting needs is not installed; the message says how to get it."""


class JitDisabledError(JitError):
    """``VDSA_DISABLE_JIT=1`` and the cache has no entry; the message names the command that makes one."""


class KernelCompileError(JitError):
    """The compiler refused a source; the message ends with its log."""


class KernelLoadError(JitError):
    """The driver refused a cubin or its shared memory, or there is no CUDA device."""

"""Bad input ends a command with one line and an exit code, never with a traceback."""

import functools
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

import typer

from vllm_dsa.deep_gemm_wrapper import DeepGemmUnavailableError
from vllm_dsa.kernels.jit_errors import JitError

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_P = ParamSpec("_P")
_R = TypeVar("_R")


def friendly_errors(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turn the package's documented exceptions into ``error: ...`` on stderr and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except FileNotFoundError as error:
            fail(str(error) if error.filename is None else f"no such file: {error.filename}")
        except (ValueError, TypeError, NotImplementedError, OSError, DeepGemmUnavailableError, JitError) as error:
            fail(str(error))
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return wrapped


def fail(message: str) -> NoReturn:
    """Print one line to stderr and exit with the code for bad input."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(EXIT_BAD_INPUT)

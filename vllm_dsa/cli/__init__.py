"""The ``vllm-dsa`` command.

Exit codes: 0 done, 1 a check of the command failed (mismatches), 2 bad input or a missing optional library,
130 interrupted.
"""

import sys

_EXTRA_MODULES = ("typer", "click", "rich")


def main() -> None:
    """Run the command line; says which extra to install when its libraries are absent."""
    try:
        from vllm_dsa.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA_MODULES:
            raise
        sys.stderr.write(f"vllm-dsa: {error.name} is not installed: pip install 'vllm-dsa[cli]'\n")
        raise SystemExit(2) from None
    app()

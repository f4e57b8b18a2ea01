"""The metadata build of a decode step: ``vllm-dsa bench build``, with the same options."""

import sys

from vllm_dsa.cli.app import app

if __name__ == "__main__":
    app(["bench", "build", *sys.argv[1:]])

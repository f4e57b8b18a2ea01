"""One layer's whole decode indexer: ``vllm-dsa bench indexer``, with the same options."""

import sys

from vllm_dsa.cli.app import app

if __name__ == "__main__":
    app(["bench", "indexer", *sys.argv[1:]])

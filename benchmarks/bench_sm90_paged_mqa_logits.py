"""Our Hopper kernel beside every DeepGEMM form, over the depths and contexts of docs/performance.md."""

import sys

from vllm_dsa.cli.app import app

GRID = ["--contexts", "4096,32768,131072", "--batches", "1,64"]

if __name__ == "__main__":
    app(["bench", "logits", *GRID, *sys.argv[1:]])

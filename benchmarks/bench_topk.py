"""Our top-k beside torch.topk, over the shapes of docs/performance.md."""

import sys

from vllm_dsa.cli.app import app

if __name__ == "__main__":
    app(["bench", "topk", *sys.argv[1:]])

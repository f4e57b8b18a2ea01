"""The paged logits in every legal form: ``vllm-dsa bench logits``, with the same options."""

import sys

from vllm_dsa.cli.app import app

if __name__ == "__main__":
    app(["bench", "logits", *sys.argv[1:]])

"""DeepSeek Sparse Attention (DSA) decode for inference engines.

Importing this package creates no CUDA context, no folder and no log handler.
"""

import logging

from vllm_dsa._version import __version__

logging.getLogger("vllm_dsa").addHandler(logging.NullHandler())

__all__ = ["__version__"]

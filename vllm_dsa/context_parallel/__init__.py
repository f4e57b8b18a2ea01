"""Decode context parallelism (DCP): which rank holds which token."""

from vllm_dsa.context_parallel.layout import DcpLayout

__all__ = ["DcpLayout"]

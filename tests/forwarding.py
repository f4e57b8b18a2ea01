"""The law of a wrapper around a decode kernel: it drops no argument and changes none."""

import torch

# What decode kernels of FlashInfer, FlashMLA and SGLang take beside their tensors; and one that no wrapper can know.
KEYWORDS = (
    *("return_lse", "causal_seqs", "row_lens", "cp_world", "cp_rank", "max_seq_len", "max_seq_len_k", "bmm1_scale"),
    *("softmax_scale", "causal", "enable_pdl", "workspace_buffer", "multi_ctas_kv_counter_buffer", "out", "backend"),
    *("tile_scheduler_metadata", "num_splits", "indices", "is_fp8_kvcache", "an_argument_of_next_year"),
)


def assert_forwards_everything(wrap, query, **special):
    """Check `wrap(kernel)` with every keyword at once, with none, and with positional arguments.

    Parameters
    ----------
    wrap : callable
        Makes the wrapper of a kernel.
    query : torch.Tensor
        Its first argument.
    **special
        Keywords that the wrapper reads, with values that it does not refuse.
    """
    result = object()
    for sent in (special, {**{name: object() for name in KEYWORDS}, **special}):
        for args in ((), (torch.zeros(2), "layer", None)):
            calls = []

            def kernel(*got, _calls=calls, **keywords):
                _calls.append((got, keywords))
                return result

            assert wrap(kernel)(query, *args, **sent) is result
            ((got, keywords),) = calls
            assert len(got) == 1 + len(args)
            assert all(have is want for have, want in zip(got, (query, *args), strict=True))
            assert keywords.keys() == sent.keys(), f"dropped {sent.keys() - keywords.keys()}"
            assert all(keywords[name] is sent[name] for name in sent), "changed"

from hypothesis import given
from hypothesis import strategies as st

from vllm_dsa.indexer import logits_width


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 10))
def test_it_holds_the_step_in_few_widths(max_context_len, spare):
    table_len = max(max_context_len, 1) + spare
    width = logits_width(max_context_len, table_len)
    assert max_context_len <= width <= table_len
    assert width == table_len or width.bit_count() == 1
    assert width <= max(2 * max_context_len, 1024)


def test_growing_batches_meet_few_widths():
    assert {logits_width(n, 163_840) for n in range(1, 163_840, 97)} == {1024 << i for i in range(8)} | {163_840}

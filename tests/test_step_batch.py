import numpy as np
import torch

from vllm_dsa.runner.request import Request
from vllm_dsa.runner.scheduled_step import ScheduledDecode, ScheduledPrefill
from vllm_dsa.runner.step_batch import BlockTable, decode_batch, prefill_batch
from vllm_dsa.runner.trace import TraceRequest

CPU = torch.device("cpu")


def request(index, pages):
    made = Request(TraceRequest(index, 0.0, 200, 10, (index,)))
    made.block_ids = list(pages)
    return made


def test_rows_follow_their_requests_as_they_grow_shrink_and_leave():
    table = BlockTable(2, 4)
    first, second = request(0, [7, 8]), request(1, [3])
    table.update(first)
    table.update(second)
    first.block_ids.append(9)
    table.update(first)
    assert table.rows([second, first])[:, :1].tolist() == [[3], [7]]
    assert table.rows([first])[0, :3].tolist() == [7, 8, 9]
    table.remove(first)
    third = request(2, [5, 6])
    table.update(third)  # takes the free row, and none of the old pages count as its own
    assert table.rows([third])[0, :2].tolist() == [5, 6]
    first.block_ids = [1]
    table.remove(second)
    table.update(first)
    assert table.rows([first])[0, 0] == 1


def test_removing_an_unknown_request_is_fine():
    BlockTable(1, 1).remove(request(0, []))


def test_slots_cross_pages():
    table = BlockTable(1, 4)
    owner = request(0, [7, 2])
    table.update(owner)
    assert table.slots(owner, 62, 66).tolist() == [7 * 64 + 62, 7 * 64 + 63, 2 * 64, 2 * 64 + 1]


def test_batches():
    table = BlockTable(2, 4)
    first, second = request(0, [7, 8]), request(1, [3, 4, 5])
    table.update(first)
    table.update(second)
    batch = decode_batch([ScheduledDecode(second, 4, 150), ScheduledDecode(first, 1, 99)], table, CPU)
    assert batch.query_start_loc.tolist() == batch.query_start_loc_cpu.tolist() == [0, 4, 5]
    assert batch.seq_lens.tolist() == [154, 100]
    assert batch.max_seq_len == 154
    assert batch.block_table[:, 0].tolist() == [3, 7]
    prefills = prefill_batch([ScheduledPrefill(second, 64, 150, is_last=False)], table, CPU)
    assert prefills.query_start_loc_cpu.tolist() == [0, 86]
    assert prefills.seq_lens_cpu.tolist() == [150]
    assert np.array_equal(prefills.block_table[0, :3], [3, 4, 5])

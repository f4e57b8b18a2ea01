"""Real processes, one per rank, over gloo: the merges against one rank that holds all tokens."""

import dcp_ranks
import pytest
import torch.multiprocessing


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_agree_with_one_that_holds_everything(size, tmp_path, monkeypatch):
    # Children decorate kernels anew, on machines with a GPU too.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.multiprocessing.spawn(dcp_ranks.run_on_cpu, (size, tmp_path / "store"), nprocs=size)

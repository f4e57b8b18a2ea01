"""Real processes, one per GPU, over NCCL: the merges eager and out of CUDA graphs, against one rank that has it all."""

import dcp_ranks
import pytest
import torch.multiprocessing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_agree_with_one_that_holds_everything(size, tmp_path):
    found = torch.cuda.device_count()
    if found < size:
        pytest.skip(f"needs {size} GPUs, one for each rank of NCCL; this machine has {found}")
    torch.multiprocessing.spawn(dcp_ranks.run_on_gpu, (size, tmp_path / "store"), nprocs=size)

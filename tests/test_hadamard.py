import pytest
import torch

from vllm_dsa.reference import hadamard_transform


def sylvester(dim):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while matrix.shape[0] < dim:
        matrix = torch.kron(step, matrix)
    return matrix


@pytest.mark.parametrize("dim", [1, 2, 8, 128])
def test_equals_the_matrix(dim, generator):
    x = torch.randn(2, 3, dim, generator=generator, dtype=torch.float64)
    expected = x @ sylvester(dim) * dim**-0.5
    assert torch.allclose(hadamard_transform(x), expected, atol=1e-12)


def test_is_its_own_inverse_and_keeps_dot_products(generator):
    q, k = torch.randn(2, 5, 128, generator=generator, dtype=torch.float64)
    rotated_q, rotated_k = hadamard_transform(q), hadamard_transform(k)
    assert torch.allclose(hadamard_transform(rotated_q), q, atol=1e-12)
    assert torch.allclose(rotated_q @ rotated_k.T, q @ k.T, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_the_dtype_and_rounds_once(dtype, generator):
    x = torch.randn(5, 128, generator=generator).to(dtype)
    before = x.clone()
    out = hadamard_transform(x)
    exact = hadamard_transform(x.double())
    assert out.dtype == dtype
    assert torch.equal(x, before)
    assert torch.allclose(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_takes_rows_that_are_not_contiguous_and_no_rows(generator):
    x = torch.randn(64, 6, generator=generator).T
    assert torch.equal(hadamard_transform(x), hadamard_transform(x.contiguous()))
    assert hadamard_transform(torch.empty(0, 64)).shape == (0, 64)


@pytest.mark.parametrize("dim", [0, 3, 96])
def test_refuses_other_sizes(dim):
    with pytest.raises(ValueError, match=f"{dim}.*power of two"):
        hadamard_transform(torch.zeros(2, dim))

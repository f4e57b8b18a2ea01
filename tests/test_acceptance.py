import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dsa.runner.acceptance import AcceptanceModel

WORDS = st.integers(0, 2**31)
RATES = st.floats(0, 1)


@given(rate=RATES, seed=st.integers(), request=WORDS, step=WORDS, limit=st.integers(0, 8))
def test_draws_are_in_range_and_a_smaller_limit_cuts_them(
    rate: float, seed: int, request: int, step: int, limit: int
) -> None:
    model = AcceptanceModel(rate, seed)
    assert model.draw(request, step, limit) == min(limit, model.draw(request, step, 8))
    length = model.draft_length(request, step, limit)
    assert length == min(limit, model.draft_length(request, step, 8))
    assert length >= min(limit, 1)


@given(rates=st.tuples(RATES, RATES), seed=st.integers(), request=WORDS, step=WORDS)
def test_a_better_drafter_never_gets_less(rates: tuple[float, float], seed: int, request: int, step: int) -> None:
    worse, better = (AcceptanceModel(rate, seed) for rate in sorted(rates))
    assert worse.draw(request, step, 5) <= better.draw(request, step, 5)
    assert worse.draft_length(request, step, 5) <= better.draft_length(request, step, 5)


def test_the_extreme_rates_are_exact() -> None:
    never, always = AcceptanceModel(0.0, 3), AcceptanceModel(1.0, 3)
    for request, step in itertools.product(range(40), range(40)):
        assert never.draw(request, step, 4) == 0
        assert always.draw(request, step, 4) == 4
        assert always.draft_length(request, step, 4) == 4


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
def test_the_frequencies_are_those_documented(rate: float, seed: int) -> None:
    model = AcceptanceModel(rate, seed)
    pairs = list(itertools.product(range(200), range(200)))
    draws = [model.draw(request, step, 3) for request, step in pairs]
    lengths = [model.draft_length(request, step, 3) for request, step in pairs]
    go_on = 1 - (1 - rate) * 0.1
    # 0.0125 is five standard deviations of the worst case, p = 1/2, over 40,000 draws.
    for n in (1, 2, 3):
        assert sum(draw >= n for draw in draws) / len(pairs) == pytest.approx(rate**n, abs=0.0125)
        assert sum(length >= n for length in lengths) / len(pairs) == pytest.approx(go_on ** (n - 1), abs=0.0125)
    both = sum(draw >= 1 and length >= 3 for draw, length in zip(draws, lengths, strict=True))
    assert both / len(pairs) == pytest.approx(rate * go_on**2, abs=0.0125)


def test_seeds_requests_and_steps_differ() -> None:
    def row(seed: int, request: int, first_step: int) -> list[int]:
        model = AcceptanceModel(0.7, seed)
        return [model.draw(request, first_step + step, 8) for step in range(64)]

    rows = [row(0, 0, 0), row(1, 0, 0), row(0, 1, 0), row(0, 0, 64)]
    assert all(left != right for left, right in itertools.combinations(rows, 2))


def test_the_draws_are_the_same_in_every_process() -> None:
    model = AcceptanceModel(0.7, 0)
    assert [model.draw(5, step, 3) for step in range(16)] == [0, 0, 3, 1, 3, 0, 2, 0, 1, 0, 2, 0, 0, 3, 1, 0]


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_rate_outside_0_to_1_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\], got"):
        AcceptanceModel(rate, 0)


def test_a_negative_count_is_refused() -> None:
    model = AcceptanceModel(0.5, 0)
    with pytest.raises(ValueError, match="num_drafts must be at least 0, got -1"):
        model.draw(0, 0, -1)
    with pytest.raises(ValueError, match="max_drafts must be at least 0, got -1"):
        model.draft_length(0, 0, -1)

import dataclasses

import pytest

from vllm_dsa.deep_gemm_wrapper import (
    DeepGemmBuild,
    PrefillSignature,
    check_num_sms,
    native_next_n_supported,
    paged_mqa_logits_schedule_slots,
    planned_capabilities,
    resolve_capabilities,
    static_capabilities,
)
from vllm_dsa.deep_gemm_wrapper import capabilities as capabilities_module
from vllm_dsa.deep_gemm_wrapper.capabilities import prefill_signature
from vllm_dsa.deep_gemm_wrapper.probe import ProbedNextN
from vllm_dsa.platform import CPU, DeviceInfo

NV_DEV = DeepGemmBuild("deep_gemm", "tokenspeed-deepgemm", "2.5.0.post20260629", "/x")
ANY = frozenset(range(1, 9))


@pytest.fixture(autouse=True)
def probed(mocker):
    """What the loaded kernel would accept; asking needs a GPU."""
    answer = ProbedNextN(native=frozenset({1, 2, 4}), paired=frozenset({4}))
    mocker.patch.object(capabilities_module.torch.cuda, "current_device", return_value=0)
    return mocker.patch.object(capabilities_module, "probe_next_n", return_value=answer)


def device(family: int | None, num_sms: int = 132) -> DeviceInfo:
    return CPU if family is None else DeviceInfo(family, 0, num_sms, "test")


@pytest.mark.parametrize("next_n", range(1, 9))
@pytest.mark.parametrize("has_deep_gemm", [True, False])
@pytest.mark.parametrize("family", [9, 10, 12, None])
def test_gate_matrix_of_the_loaded_build(mocker, family, has_deep_gemm, next_n):
    loaded = mocker.Mock(build=NV_DEV)
    loaded.module.get_num_sms.return_value = 132
    loaded.function.return_value = lambda q, kv, weights, ks, ke, clean_logits=True: None
    mocker.patch.object(capabilities_module, "current_device", return_value=device(family))
    mocker.patch.object(capabilities_module, "has_deep_gemm", return_value=has_deep_gemm)
    mocker.patch.object(capabilities_module, "load_deep_gemm", return_value=loaded)
    native = {9: {1, 2, 4}, 10: ANY}.get(family, {1, 2}) if has_deep_gemm else {1, 2}
    assert native_next_n_supported(next_n) is (next_n in native)


@pytest.mark.parametrize("num_sms", [78, 114, 132])
@pytest.mark.parametrize("next_n", range(1, 9))
@pytest.mark.parametrize("family", [9, 10, 12, None])
def test_slots_halve_only_for_next_n_4_on_sm90(family, next_n, num_sms):
    caps = static_capabilities(device(family, num_sms), NV_DEV)
    halved = family == 9 and next_n == 4
    assert paged_mqa_logits_schedule_slots(num_sms, next_n, caps) == (num_sms // 2 if halved else num_sms)


def test_odd_sm_count_refuses_next_n_4_instead_of_rounding():
    caps = static_capabilities(device(9, 131), NV_DEV)
    assert [n for n in range(1, 9) if native_next_n_supported(n, caps)] == [1, 2]
    with pytest.raises(ValueError, match=r"num_sms must be even for next_n 4.*got 131"):
        paged_mqa_logits_schedule_slots(131, 4, caps)
    assert paged_mqa_logits_schedule_slots(131, 2, caps) == 131


@pytest.mark.parametrize(
    ("distribution", "version", "native"),
    [
        ("tokenspeed-deepgemm", "2.5.0.post20260424", {1, 2}),
        ("tokenspeed-deepgemm", "2.5.0.post20260604", {1, 2, 4}),
        ("tokenspeed-deepgemm", "2.6.1.post20260827", {1, 2, 4}),
        ("tokenspeed-deepgemm", "2.6.1.post20260827+cu130", {1, 2, 4}),
        ("tokenspeed-deepgemm", "2.8.2.post20261020", {1, 2}),
        ("sgl-deep-gemm", "0.2.5", {1, 2}),
        ("vllm", "0.33.0", {1, 2, 4}),
        (None, None, {1, 2, 4}),
    ],
)
def test_known_builds_on_sm90(distribution, version, native):
    caps = static_capabilities(device(9), DeepGemmBuild("deep_gemm", distribution, version, None))
    assert {n for n in range(1, 9) if native_next_n_supported(n, caps)} == native
    # A build without next_n 4 has no pairs of SMs either: its schedule always has one slot an SM.
    assert paged_mqa_logits_schedule_slots(132, 4, caps) == (66 if 4 in native else 132)


def test_num_sms_is_what_the_library_counts(mocker):
    loaded = mocker.Mock(build=NV_DEV)
    loaded.module.get_num_sms.return_value = 130
    loaded.function.return_value = lambda q, max_seqlen_k: None
    mocker.patch.object(capabilities_module, "current_device", return_value=device(9))
    mocker.patch.object(capabilities_module, "has_deep_gemm", return_value=True)
    mocker.patch.object(capabilities_module, "load_deep_gemm", return_value=loaded)
    caps = resolve_capabilities()
    assert caps.num_sms == 130
    assert caps.prefill_signature is PrefillSignature.MAX_SEQLEN_K


def test_the_probe_corrects_the_table(mocker, probed):
    loaded = mocker.Mock(build=NV_DEV)
    loaded.module.get_num_sms.return_value = 132
    mocker.patch.object(capabilities_module, "current_device", return_value=device(9))
    mocker.patch.object(capabilities_module, "has_deep_gemm", return_value=True)
    mocker.patch.object(capabilities_module, "load_deep_gemm", return_value=loaded)
    probed.return_value = ProbedNextN(native=frozenset({1, 2}), paired=frozenset())
    caps = resolve_capabilities()
    assert (caps.native_next_n, caps.paired_next_n) == ({1, 2}, frozenset())
    probed.assert_called_once_with(0, 132)


def test_a_changed_sm_count_is_an_error(mocker):
    loaded = mocker.Mock(build=NV_DEV)
    loaded.module.get_num_sms.return_value = 132
    mocker.patch.object(capabilities_module, "load_deep_gemm", return_value=loaded)
    caps = static_capabilities(device(9), NV_DEV)
    check_num_sms(caps)
    loaded.module.get_num_sms.return_value = 100
    with pytest.raises(RuntimeError, match="schedules for 100 SMs now, the capabilities say num_sms=132"):
        check_num_sms(caps)


def test_without_cuda_no_build_is_imported(mocker):
    mocker.patch.object(capabilities_module, "current_device", return_value=CPU)
    load = mocker.patch.object(capabilities_module, "load_deep_gemm")
    assert resolve_capabilities().provider is None
    load.assert_not_called()


@pytest.mark.parametrize("next_n", [0, -1, True, 1.0, "2", None])
def test_next_n_must_be_a_positive_whole_number(next_n):
    caps = planned_capabilities("sm90")
    with pytest.raises(ValueError, match="next_n must be a positive whole number"):
        native_next_n_supported(next_n, caps)
    with pytest.raises(ValueError, match="next_n must be a positive whole number"):
        paged_mqa_logits_schedule_slots(132, next_n, caps)


@pytest.mark.parametrize("num_sms", [0, -2, True, 66.0])
def test_num_sms_must_be_a_positive_whole_number(num_sms):
    with pytest.raises(ValueError, match="num_sms must be a positive whole number"):
        paged_mqa_logits_schedule_slots(num_sms, 1, planned_capabilities("sm90"))


def test_capabilities_are_frozen():
    caps = planned_capabilities("sm90")
    with pytest.raises(dataclasses.FrozenInstanceError):
        caps.num_sms = 1
    assert hash(caps) == hash(planned_capabilities("sm90"))


def test_planned_native_set_replaces_the_table():
    caps = planned_capabilities("sm90", frozenset({1, 2}))
    assert caps.native_next_n == {1, 2}
    assert paged_mqa_logits_schedule_slots(132, 4, caps) == 132
    with pytest.raises(ValueError, match="native_next_n must name"):
        planned_capabilities("sm90", frozenset())
    with pytest.raises(ValueError, match="arch must be one of sm90, sm100, cpu, got 'sm80'"):
        planned_capabilities("sm80")


class Schema:
    def __init__(self, text):
        self._schema = text


def pybind_like(*args):
    """fp8_mqa_logits(q: torch.Tensor, kv: tuple, clean_logits: bool = True, max_seqlen_k: int = 0) -> torch.Tensor"""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Schema("fp8_mqa_logits(Tensor q, int max_seqlen_k, Tensor? schedule_meta) -> Tensor"), "MAX_SEQLEN_K"),
        (pybind_like, "CLEAN_LOGITS"),
        (lambda q, clean_logits=True, max_seqlen_k=0: None, "CLEAN_LOGITS"),
        (lambda q, max_seqlen_k: None, "MAX_SEQLEN_K"),
        (lambda *args, **kwargs: None, None),
        (print, None),
    ],
)
def test_prefill_signature_is_read_from_the_function(function, expected):
    found = prefill_signature(function)
    assert (found and found.name) == expected

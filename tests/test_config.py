import importlib.resources
import json

import pytest

from vllm_dsa.config import PRESETS, DsaConfig


def raw(preset="deepseek-v3.2", **changes):
    text = importlib.resources.files("vllm_dsa").joinpath(f"data/configs/{preset}.json").read_text()
    merged = {**json.loads(text), **changes}
    return {key: value for key, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("preset", "heads", "layers", "interleaved", "theta"),
    [("deepseek-v3.2", 64, 61, False, 10_000.0), ("glm-5", 32, 78, True, 1_000_000.0)],
)
def test_presets(preset, heads, layers, interleaved, theta):
    config = DsaConfig.from_name_or_path(preset)
    assert preset in PRESETS
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (heads, 128, 2048)
    assert (config.num_index_layers, config.rope_interleaved, config.rope_theta) == (layers, interleaved, theta)


def test_reads_a_folder_and_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    expected = DsaConfig.from_name_or_path("deepseek-v3.2")
    assert DsaConfig.from_name_or_path(tmp_path) == expected
    assert DsaConfig.from_name_or_path(tmp_path / "config.json") == expected


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_reads_what_transformers_writes(tmp_path, name):
    auto = pytest.importorskip("transformers").AutoConfig
    config = auto.for_model(name)
    config.save_pretrained(tmp_path)
    read = DsaConfig.from_path(tmp_path)
    assert read.model_type == name
    assert read.index_topk == config.index_topk
    assert read.num_index_layers == config.num_hidden_layers


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"]}, (False, True, False, True)),
        ({"index_topk_pattern": "FSSF"}, (False, True, True, False)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, (False, False, True, False)),
        ({}, (False,) * 4),
    ],
)
def test_shared_indexer_layers(changes, shared):
    assert DsaConfig.from_dict(raw("glm-5", num_hidden_layers=4, **changes)).index_shared == shared


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type must be one of deepseek_v32, glm_moe_dsa, got 'llama'"),
        ({"model_type": None}, "model_type"),
        ({"index_topk": None}, "index_topk must be a positive whole number, got None"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_n_heads": True}, "index_n_heads"),
        ({"index_head_dim": "128"}, "index_head_dim"),
        ({"qk_rope_head_dim": 256}, "must not exceed"),
        ({"rope_theta": None}, "rope_theta"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"num_hidden_layers": 2, "indexer_types": ["shared", "full"]}, r"indexer_types\[0\]"),
        ({"num_hidden_layers": 2, "index_topk_pattern": "FX"}, "indexer_types must name"),
    ],
)
def test_bad_configs_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        DsaConfig.from_dict(raw(**changes))


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="JSON"):
        DsaConfig.from_path(tmp_path)


def test_missing_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a preset"):
        DsaConfig.from_name_or_path("deepseek-v9")
    with pytest.raises(FileNotFoundError):
        DsaConfig.from_path(tmp_path)

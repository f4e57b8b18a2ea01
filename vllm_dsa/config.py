"""The DSA part of a model's configuration, read from a Hugging Face ``config.json``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

PRESETS = ("deepseek-v3.2", "glm-5")

# The indexer of DeepSeek-V3.2 rotates half-split pairs, that of GLM-5 interleaved ones. Neither is in config.json:
# the model type decides.
_ROPE_INTERLEAVED = {"deepseek_v32": False, "glm_moe_dsa": True}

_POSITIVE_INT_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_topk",
    "index_head_dim",
    "index_n_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class DsaConfig:
    """What this package needs to know about a DSA model.

    Field names are those of ``config.json``; all sizes are element counts.

    Attributes
    ----------
    model_type : str
        ``deepseek_v32`` or ``glm_moe_dsa``.
    rope_interleaved : bool
        Whether the indexer's RoPE pairs neighbours (GLM-5) rather than the two halves (DeepSeek-V3.2).
    rope_theta : float
        Base of the rotary frequencies.
    num_nextn_predict_layers : int
        MTP layers of the checkpoint; 0 when the config does not say.
    index_shared : tuple of bool
        Per layer: True when it reuses the indices of the layer before it (GLM-5's "shared" layers).
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_head_dim: int
    index_n_heads: int
    max_position_embeddings: int
    rope_theta: float
    rope_interleaved: bool
    num_nextn_predict_layers: int
    index_shared: tuple[bool, ...]

    @property
    def num_index_layers(self) -> int:
        """Layers that run their own indexer."""
        return self.index_shared.count(False)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DsaConfig":
        """Build from the contents of a ``config.json``.

        Raises
        ------
        ValueError
            If the model type is not a DSA model's, or a field is missing, not a positive whole number, or inconsistent.
        """
        model_type = raw.get("model_type")
        if model_type not in _ROPE_INTERLEAVED:
            allowed = ", ".join(_ROPE_INTERLEAVED)
            raise ValueError(f"model_type must be one of {allowed}, got {model_type!r}")
        sizes = {name: _positive_int(raw, name) for name in _POSITIVE_INT_FIELDS}
        if sizes["qk_rope_head_dim"] > sizes["index_head_dim"]:
            raise ValueError(
                f"qk_rope_head_dim ({sizes['qk_rope_head_dim']}) must not exceed "
                f"index_head_dim ({sizes['index_head_dim']}): the indexer rotates a part of its head"
            )
        return cls(
            model_type=model_type,
            **sizes,
            rope_theta=_rope_theta(raw),
            rope_interleaved=_ROPE_INTERLEAVED[model_type],
            num_nextn_predict_layers=_num_mtp_layers(raw),
            index_shared=_index_shared(raw, sizes["num_hidden_layers"]),
        )

    @classmethod
    def from_path(cls, path: str | Path) -> "DsaConfig":
        """Read a model folder (its ``config.json``) or a config file.

        Raises
        ------
        FileNotFoundError
            If there is no such file, or no ``config.json`` in the folder.
        ValueError
            If the file is not a JSON object or its contents are refused by :meth:`from_dict`.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ValueError(f"{file} must hold a JSON object, got {type(raw).__name__}")
        return cls.from_dict(raw)

    @classmethod
    def from_name_or_path(cls, model: str | Path) -> "DsaConfig":
        """Return a bundled preset (``deepseek-v3.2``, ``glm-5``), or read a folder or file.

        Raises
        ------
        FileNotFoundError
            If `model` is neither a preset nor an existing path.
        ValueError
            See :meth:`from_path`.
        """
        if model in PRESETS:
            text = resources.files("vllm_dsa").joinpath(f"data/configs/{model}.json").read_text(encoding="utf-8")
            return cls.from_dict(json.loads(text))
        if not Path(model).exists():
            raise FileNotFoundError(
                f"model {str(model)!r} is neither a preset ({', '.join(PRESETS)}) nor an existing folder or file"
            )
        return cls.from_path(model)


def _positive_int(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return value


def _num_mtp_layers(raw: Mapping[str, Any]) -> int:
    value = raw.get("num_nextn_predict_layers") or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"num_nextn_predict_layers must be a whole number of at least 0, got {value!r}")
    return value


def _rope_theta(raw: Mapping[str, Any]) -> float:
    # transformers 5 moved the key into rope_parameters; older configs keep it at the top.
    value = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta"))
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"rope_theta must be a positive number, got {value!r}")
    return float(value)


def _index_shared(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    kinds = _indexer_types(raw, num_layers)
    if len(kinds) != num_layers or not set(kinds) <= {"full", "shared"}:
        raise ValueError(f"indexer_types must name 'full' or 'shared' for each of {num_layers} layers, got {kinds!r}")
    if kinds[0] == "shared":
        raise ValueError("indexer_types[0] must be 'full': the first layer has no layer before it to share with")
    return tuple(kind == "shared" for kind in kinds)


def _indexer_types(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """Resolve GLM's three spellings, in the order transformers' GlmMoeDsaConfig does."""
    if (types := raw.get("indexer_types")) is not None:
        return list(types)
    if (pattern := raw.get("index_topk_pattern")) is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    frequency = max(raw.get("index_topk_freq", 1), 1)
    offset = raw.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % frequency == 0 else "shared" for i in range(num_layers)]

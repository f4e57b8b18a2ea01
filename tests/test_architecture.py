"""The rooms of docs/architecture.md: who may import whom, how large a file may be, what an import may do."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_dsa"

# Each room and the rooms that it may import besides itself. A room that is missing here fails the test.
ROOMS = {
    "__init__": {"_version"},
    "_version": set(),
    "platform": set(),
    "envs": set(),
    "config": set(),
    "attn_result": set(),
    "deep_gemm_wrapper": {"platform", "envs"},
    "reference": {"attn_result"},
    "kernels": {"_version", "platform", "envs", "attn_result"},
    "ops": {"platform", "envs", "attn_result", "kernels", "reference", "deep_gemm_wrapper"},
    "context_parallel": {"platform", "envs", "attn_result", "kernels", "reference", "ops"},
    "indexer": {"platform", "envs", "deep_gemm_wrapper", "context_parallel", "kernels", "reference", "ops"},
    "runner": {
        *("platform", "envs", "config", "attn_result", "deep_gemm_wrapper", "context_parallel", "reference", "ops"),
        "indexer",
    },
    "bench": {
        *("platform", "envs", "config", "attn_result", "deep_gemm_wrapper", "context_parallel", "reference", "ops"),
        *("indexer", "runner"),
    },
    "cli": {"_version", "platform", "envs", "config", "deep_gemm_wrapper", "kernels", "indexer", "runner", "bench"},
}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports_at_run_time(node: ast.AST) -> list[ast.AST]:
    """Every import statement, also within functions, but not what only a type checker runs."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [node]
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children = node.orelse
    else:
        children = list(ast.iter_child_nodes(node))
    return [found for child in children for found in imports_at_run_time(child)]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in imports_at_run_time(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("vllm_dsa.")}
    return rooms


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_downwards(path):
    room = room_of(path)
    assert imported_rooms(path) <= ROOMS[room] | {room} | {"__version__"}


def test_no_arrow_leads_back():
    TopologicalSorter(ROOMS).prepare()


def test_only_imports_for_the_type_checker_are_left_out(tmp_path):
    path = tmp_path / "example.py"
    path.write_text("""
import typing
if typing.TYPE_CHECKING:
    from vllm_dsa.indexer import StepPlan
else:
    from vllm_dsa.ops import fold_q
if not typing.TYPE_CHECKING:
    import vllm_dsa.envs
def late():
    from vllm_dsa import config
""")
    assert imported_rooms(path) == {"ops", "envs", "config"}


def test_files_are_small():
    for root in (PACKAGE, PACKAGE.parent / "tests"):
        sizes = {path: len(path.read_text().splitlines()) for path in root.rglob("*.py")}
        assert max(sizes.values()) < 500, max(sizes, key=sizes.get)
        assert median(sizes.values()) < 150


def test_import_does_nothing():
    """No CUDA context, no folder, no log handler but the null one, no heavy optional library."""
    program = """
import logging, os, sys, pathlib, tempfile
os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = home = tempfile.mkdtemp()
before = logging.getLogger().handlers[:]
import torch
by_torch = set(sys.modules)  # with cuda.bindings, where they are installed
import vllm_dsa, vllm_dsa.indexer, vllm_dsa.ops, vllm_dsa.reference, vllm_dsa.deep_gemm_wrapper, vllm_dsa.runner
import vllm_dsa.kernels.variants
assert not torch.cuda.is_initialized()
assert logging.getLogger().handlers == before
assert [type(h) for h in logging.getLogger("vllm_dsa").handlers] == [logging.NullHandler]
assert not list(pathlib.Path(home).iterdir()), list(pathlib.Path(home).iterdir())
loaded = {"typer", "rich", "matplotlib", "deep_gemm", "vllm", "transformers"} & set(sys.modules)
loaded |= {name for name in set(sys.modules) - by_torch if name.partition(".")[0] == "cuda"}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)

"""Check a built wheel: small, pure, complete, and nothing of the repository's other folders in it."""

import sys
import zipfile
from pathlib import Path

MAX_BYTES = 1_000_000
REQUIRED = (
    "vllm_dsa/__init__.py",
    "vllm_dsa/py.typed",
    "vllm_dsa/csrc/README.md",
    "vllm_dsa/data/configs/deepseek-v3.2.json",
    "vllm_dsa/data/configs/glm-5.json",
    "vllm_dsa/data/mooncake_sample.jsonl",
)
FORBIDDEN_PARTS = ("tests", "benchmarks", "docs", "tools", "__pycache__")
FORBIDDEN_SUFFIXES = (".cubin", ".so", ".pyc")


def required() -> list[str]:
    """Return what every wheel must hold: the fixed files and all device code of this repository."""
    repository = Path(__file__).parents[1]
    sources = [path.relative_to(repository) for path in (repository / "csrc").rglob("*") if path.is_file()]
    return [*REQUIRED, *(f"vllm_dsa/{source}" for source in sources if f"vllm_dsa/{source}" not in REQUIRED)]


def faults(wheel: Path) -> list[str]:
    """Return what is wrong with the wheel, one sentence each."""
    found = []
    if not wheel.name.endswith("-py3-none-any.whl"):
        found.append(f"{wheel.name} is not py3-none-any")
    if wheel.stat().st_size >= MAX_BYTES:
        found.append(f"{wheel.stat().st_size} bytes, allowed: under {MAX_BYTES}")
    names = zipfile.ZipFile(wheel).namelist()
    found += [f"{name} is missing" for name in required() if name not in names]
    for name in names:
        path = Path(name)
        if set(path.parts) & set(FORBIDDEN_PARTS) or path.suffix in FORBIDDEN_SUFFIXES:
            found.append(f"{name} does not belong in a wheel")
    return found


def main() -> None:
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    problems = faults(wheel)
    for problem in problems:
        print(f"{wheel.name}: {problem}", file=sys.stderr)
    if problems:
        raise SystemExit(1)
    print(f"{wheel.name}: {wheel.stat().st_size} bytes, ok")


if __name__ == "__main__":
    main()

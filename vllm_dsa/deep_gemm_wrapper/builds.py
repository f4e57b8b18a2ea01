"""Which DeepGEMM builds this process could import, and the one it did."""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# An engine that ships its own copy must not shadow the build that the user installed.
CANDIDATE_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")

_HOW_TO_GET_ONE = (
    "Install a build whose capabilities docs/deepgemm_builds.md lists (for example `pip install tokenspeed-deepgemm` "
    "in a version that matches your torch), or vLLM 0.26 and later, which carries one."
)


class DeepGemmUnavailableError(RuntimeError):
    """No DeepGEMM build can be imported; the message says what was tried and how to get one."""


@dataclass(frozen=True, slots=True)
class DeepGemmBuild:
    """One DeepGEMM build.

    Attributes
    ----------
    provider : str
        The module that is imported, for example ``deep_gemm``.
    distribution : str or None
        The installed distribution that owns the module; ``None`` when no installed one claims it.
    version : str or None
        The distribution's version, or the module's own where no distribution claims it.
    path : str or None
        Where the module lies.
    """

    provider: str
    distribution: str | None
    version: str | None
    path: str | None


@dataclass(frozen=True, slots=True)
class LoadedDeepGemm:
    """An imported build."""

    build: DeepGemmBuild
    module: ModuleType

    def function(self, name: str) -> Callable[..., object]:
        """Return a function of the build.

        Raises
        ------
        DeepGemmUnavailableError
            If this build lacks it (some builds drop the ``fp8_*`` aliases, old ones lack the metadata call).
        """
        found = getattr(self.module, name, None)
        if found is None:
            raise DeepGemmUnavailableError(
                f"{self.build.provider} {self.build.version} has no function {name!r}. {_HOW_TO_GET_ONE}"
            )
        return found  # type: ignore[no-any-return]


def find_builds() -> list[DeepGemmBuild]:
    """List the builds on this machine, in the order of preference, without importing any of them."""
    return [build for name in CANDIDATE_MODULES if (build := _find_build(name)) is not None]


def has_deep_gemm() -> bool:
    """Whether some DeepGEMM build can be imported here. Imports it on the first call."""
    try:
        load_deep_gemm()
    except DeepGemmUnavailableError:
        return False
    return True


def load_deep_gemm() -> LoadedDeepGemm:
    """Import the preferred DeepGEMM build, once per process.

    Raises
    ------
    DeepGemmUnavailableError
        If none can be imported. The reason for each candidate is in the message.
    """
    loaded, failures = _load_first_importable()
    if loaded is None:
        tried = "; ".join(failures)
        raise DeepGemmUnavailableError(f"no DeepGEMM build can be imported: {tried}. {_HOW_TO_GET_ONE}")
    return loaded


@functools.cache
def _load_first_importable() -> tuple[LoadedDeepGemm | None, tuple[str, ...]]:
    failures = []
    for name in CANDIDATE_MODULES:
        build = _find_build(name)
        if build is None:
            failures.append(f"{name}: not installed")
            continue
        try:
            module = importlib.import_module(name)
        # An extension built for another torch or Python raises anything from ImportError to OSError
        # and RuntimeError; the next candidate may still work.
        except Exception as error:
            failures.append(f"{name} ({build.version}): {type(error).__name__}: {error}")
            continue
        return LoadedDeepGemm(build=_with_module_version(build, module), module=module), tuple(failures)
    return None, tuple(failures)


def _find_build(name: str) -> DeepGemmBuild | None:
    path = _module_path(name)
    if path is None:
        return None
    distribution, version = _owning_distribution(name.partition(".")[0])
    return DeepGemmBuild(provider=name, distribution=distribution, version=version, path=path)


def _module_path(name: str) -> str | None:
    """Locate a module without importing it or its parents (importing vLLM takes seconds)."""
    root, *children = name.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None:
        return None
    if not children:
        return spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    for location in spec.submodule_search_locations or ():
        path = Path(location, *children)
        if (path / "__init__.py").exists():
            return str(path / "__init__.py")
    return None


def _owning_distribution(root: str) -> tuple[str | None, str | None]:
    names = importlib.metadata.packages_distributions().get(root, [])
    if not names:
        return None, None
    return names[0], importlib.metadata.version(names[0])


def _with_module_version(build: DeepGemmBuild, module: ModuleType) -> DeepGemmBuild:
    # A vendored copy is owned by the engine's distribution, whose version says nothing about DeepGEMM's.
    vendored = "." in build.provider
    own = getattr(module, "__version__", None)
    version = own if own is not None and (vendored or build.version is None) else build.version
    return DeepGemmBuild(build.provider, build.distribution, version, build.path)

"""Stand-in: lets modules that name image transforms be imported; none is ever called.

The real one does not exist for every build of torch. Loading weights needs no image.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

__version__ = "0.28.0"


class _Named(type):
    """A class of which every attribute is another such class."""

    def __getattr__(cls, name: str) -> "_Named":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> _Named:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> _Named:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})

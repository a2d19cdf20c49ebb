"""Hatchling's hook: a wheel that is built where there is a compiler brings the decoder compiled."""

import importlib.util
import platform
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeDecoder(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or platform.machine() != "x86_64":
            return
        # By its path: the package that it is in imports torch, which a build has not got.
        spec = importlib.util.spec_from_file_location("compile", Path(self.root) / "engine" / "native" / "compile.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if module.compiler() is None:
            self.app.display_warning("No C++ compiler: the wheel's users will need one at the engine's first start.")
            return
        for bf16 in (False, True):
            library = module.build(module.FOLDER, bf16)
            build_data["force_include"][str(library)] = f"engine/native/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

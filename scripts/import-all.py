"""Import every module of the installed farpool; one may fail only for want of a package that another extra brings.

Run by scripts/check-install in an environment that holds ``farpool[demo]`` and nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import farpool

# Import names of what the extras manager and testing bring, and of engines that bring farpool's connectors to life.
OTHER_EXTRAS = {
    "fastapi",
    "hypothesis",
    "lmcache",
    "pytest",
    "sglang",
    "starlette",
    "uvicorn",
    "vllm",
}


def main() -> int:
    """Print what was left out and what failed; the exit code is the number of failures."""
    failed = imported = 0
    for module in pkgutil.walk_packages(farpool.__path__, "farpool."):
        try:
            importlib.import_module(module.name)
            imported += 1
        except ModuleNotFoundError as error:
            wanted = (error.name or "").partition(".")[0]
            if wanted in OTHER_EXTRAS:
                print(f"needs another extra, for {wanted}: {module.name}")
                continue
            failed += 1
            print(f"FAILED  {module.name}: {error}")
        except Exception as error:
            failed += 1
            print(f"FAILED  {module.name}: {type(error).__name__}: {error}")
    print(f"{imported} modules imported from {farpool.__path__[0]}")
    return failed


if __name__ == "__main__":
    sys.exit(main())

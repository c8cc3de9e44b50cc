"""Only the room native/ knows llvmlite, the inner parts of Numba, C's way to call functions, and torch's trees."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "sipp"
OURS = ("llvmlite", "numba.core", "numba.extending", "ctypes", "torch.utils._pytree")


def modules(path: Path) -> set[str]:
    """What a file imports, at its top and inside of functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def private(path: Path) -> set[str]:
    return {name for name in modules(path) if any(name == one or name.startswith(f"{one}.") for one in OURS)}


@pytest.mark.parametrize("room", sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
def test_only_native_touches_the_compilers(room: str) -> None:
    found = {path.name: private(path) for path in (SOURCE / room).rglob("*.py") if private(path)}
    assert bool(found) is (room == "native"), found

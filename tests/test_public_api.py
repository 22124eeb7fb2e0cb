from __future__ import annotations

import subprocess
import sys

import pytest

import takifugu as tk

NAMES = [
    "FactorReport",
    "Problem",
    "Structure",
    "TakifuguError",
    "WarmStart",
    "__version__",
    "apply_",
    "choose",
    "densify_",
    "everything",
    "factorize_",
    "load",
    "ranks",
    "save",
    "solve",
    "structure_of",
    "zoo",
]


def test_the_public_names_are_these() -> None:
    assert sorted(tk.__all__) == NAMES
    for name in NAMES:
        assert getattr(tk, name) is not None
    assert set(NAMES) <= set(dir(tk))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'factorise'"):
        tk.factorise  # noqa: B018


def test_every_error_is_a_takifugu_error() -> None:
    from takifugu import errors

    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) >= 7
    # A mistake in Takifugu itself is not the user's, and must not be caught as one.
    own = (Warning, errors.InternalError)
    assert all(issubclass(k, tk.TakifuguError) for k in kinds if not issubclass(k, own))


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, takifugu, takifugu.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_rooms_keep_to_themselves() -> None:
    """plan never imports torch or the other rooms; lowrank and zoo do not import upwards."""
    import ast
    from pathlib import Path

    source = Path(tk.__file__).parent
    upwards = {"cli", "report", "engine", "train"}
    peers = {"lowrank", "comm", "plan", "measure", "zoo"}
    allowed = {("measure", "plan"), ("lowrank", "zoo")}  # load() builds zoo networks by name
    for room in peers:
        for path in (source / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module == "takifugu":
                    modules += [f"takifugu.{alias.name}" for alias in node.names]
                for module in modules:
                    first, _, rest = module.partition(".")
                    target = rest.partition(".")[0]
                    assert not (room == "plan" and first == "torch"), path
                    if first == "takifugu" and target != room:
                        assert target not in upwards, f"{path} imports {module}"
                        assert target not in peers or (room, target) in allowed, f"{path} imports {module}"

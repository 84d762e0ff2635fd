"""Imports run one way: experiments → gdn_jax → {pallas_kernels, checkpoints} → libraries; read from the sources."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
OURS = ("gdn_jax", "pallas_kernels", "checkpoints", "experiments", "tests")
MAY_IMPORT = {
    "checkpoints": {"checkpoints"},
    "pallas_kernels": {"pallas_kernels"},
    "gdn_jax": {"gdn_jax", "pallas_kernels", "checkpoints"},
    "experiments": {"experiments", "gdn_jax", "pallas_kernels"},
}
# What a leaf may not see of the outside world either: files come in as numpy, kernels as plain JAX.
MAY_NOT_IMPORT = {"checkpoints": {"jax", "jaxlib", "flax", "chex"}, "pallas_kernels": {"flax", "chex", "numpy.random"}}
EVIDENCE_CLIENTS = {"gdn_jax/cli.py", "gdn_jax/bench/gate.py", "gdn_jax/bench/session.py"}


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def imports(path):
    """Every module that a file imports anywhere, absolute, with the names of `from` imports resolved one level down."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module, package):
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module in imports(path)
        if module.split(".")[0] in OURS and module.split(".")[0] not in MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", MAY_NOT_IMPORT)
def test_leaves_stay_leaves(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module in imports(path)
        if any(within(module, banned) for banned in MAY_NOT_IMPORT[package])
    ]
    assert wrong == []


def test_only_ops_imports_the_kernels():
    users = {
        str(path.relative_to(ROOT))
        for path in sources("gdn_jax")
        if any(within(module, "pallas_kernels") for module in imports(path))
    }
    assert users <= {"gdn_jax/ops.py"}


def test_evidence_is_imported_by_commands_only():
    users = {
        str(path.relative_to(ROOT))
        for path in sources("gdn_jax")
        if "evidence" not in path.parts and any(within(module, "gdn_jax.evidence") for module in imports(path))
    }
    assert users <= EVIDENCE_CLIENTS


def test_every_package_is_found_in_this_repository():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {"gdn_jax", "pallas_kernels", "checkpoints"}


def test_importing_the_package_loads_nothing_heavy():
    heavy = ("jax", "orbax", "tokenizers", "chex", "gguf")
    program = f"import sys, gdn_jax; print([m for m in {heavy!r} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_text_speaks_of_the_project_alone():
    banned = ("/work/", "/tmp/oracle", "pypi.org", "files.pythonhosted", "issue #", "helper agent")
    files = [
        path
        for path in ROOT.rglob("*")
        if path.suffix in {".py", ".md", ".toml", ".json", ".txt"} and path.is_file() and not hidden(path)
    ]
    found = [(str(path.relative_to(ROOT)), word) for path in files for word in banned if word in path.read_text()]
    assert [hit for hit in found if hit[0] != "tests/test_architecture.py"] == []


def hidden(path):
    return any(part.startswith(".") for part in path.relative_to(ROOT).parts)

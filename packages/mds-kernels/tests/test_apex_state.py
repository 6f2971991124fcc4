"""Six states of apex, told apart without importing it into this process."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from mds_kernels import BackendError, layer_norm, rms_norm, why
from mds_kernels.apex_state import EXTENSIONS, inspect_apex
from mds_kernels.backends.apex import adamw, norm
from mds_kernels.dispatch import _choose


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder first on the path, with a stand-in for torch, whose import takes seconds."""
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    forget()


def forget():
    inspect_apex.cache_clear()
    _choose.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def install(site, *extensions, init=""):
    folder = site / "apex" / "normalization"
    folder.mkdir(parents=True)
    (site / "apex" / "__init__.py").write_text(init)
    (folder / "__init__.py").touch()
    (folder / "fused_layer_norm.py").write_text(
        "import torch.nn.functional as F\n"
        "def fused_layer_norm_affine(x, weight, bias, shape, eps):\n"
        "    return F.layer_norm(x, shape, weight, bias, eps)\n"
        "def fused_rms_norm_affine(x, weight, shape, eps):\n"
        "    return F.rms_norm(x, shape, weight, eps)\n"
    )
    for name in extensions:
        (site / f"{name}.py").touch()


def test_absent(site):
    assert inspect_apex().state == "absent"


def test_the_unrelated_package_is_told_by_what_it_lacks(site):
    (site / "apex").mkdir()
    (site / "apex" / "__init__.py").write_text("__version__ = '0.9.10.dev'")

    report = inspect_apex()

    assert report.state == "wrong-package"
    assert report.reason.startswith(f"apex found at {site / 'apex'} is not NVIDIA apex")


def test_the_web_toolkit_is_told_by_its_requirements_though_its_import_fails(site, monkeypatch):
    (site / "apex").mkdir()
    (site / "apex" / "__init__.py").write_text("raise ImportError('UnencryptedCookieSession')")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["pyramid>1.1.2", "wtforms"])

    assert inspect_apex().state == "wrong-package"


def test_nvidias_without_compiled_parts_is_python_only(site):
    install(site)

    report = inspect_apex()

    assert report.state == "python-only"
    assert report.missing == EXTENSIONS
    assert "built without its CUDA parts" in report.reason


def test_some_compiled_parts_are_partial_and_the_others_named(site):
    install(site, "amp_C")

    report = inspect_apex()

    assert report.state == "partial"
    assert "fused_layer_norm_cuda, fused_weight_gradient_mlp_cuda" in report.reason
    assert norm.why_not("cuda", {}) == report.reason


def test_parts_for_another_torch_are_broken_and_the_error_shown(site):
    install(site, *EXTENSIONS)
    (site / "amp_C.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")

    report = inspect_apex()

    assert report.state == "abi-broken"
    assert "ImportError: undefined symbol: _ZN3c10" in report.reason


def test_a_whole_apex_is_ok(site):
    install(site, *EXTENSIONS)

    assert inspect_apex().state == "ok"
    assert norm.why_not("cuda", {}) is None
    assert "apex" not in sys.modules
    # It runs on CUDA only, and behind torch's own there.
    assert why("layer_norm", device="cuda").backend == "torch"
    assert why("layer_norm", device="cuda", backend="apex").backend == "apex"
    with pytest.raises(BackendError, match="it runs on cuda, not on cpu"):
        why("layer_norm", backend="apex")
    with pytest.raises(BackendError, match="does not take float64"):
        why("layer_norm", device="cuda", dtype=torch.float64, backend="apex")


def test_the_norms_of_apex_are_called_with_their_arguments_in_place(site):
    install(site, *EXTENSIONS)
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)

    assert torch.equal(norm.layer_norm(x, weight, bias, eps=1e-5), layer_norm(x, weight, bias))
    assert torch.equal(norm.layer_norm(x, weight, None, eps=1e-5), layer_norm(x, weight))
    assert torch.equal(norm.rms_norm(x, weight, eps=1e-5), rms_norm(x, weight))


@pytest.mark.parametrize(
    ("stand_in", "state", "told"),
    [
        ("fake_unrelated", "wrong-package", "is not NVIDIA apex"),
        ("fake_python_only", "python-only", "built without its CUDA parts"),
        ("fake_broken", "abi-broken", "built against another torch: undefined symbol"),
    ],
)
def test_the_stand_ins_of_the_case(cases_folder, monkeypatch, stand_in, state, told):
    monkeypatch.syspath_prepend(cases_folder / "D01" / stand_in)
    forget()

    report = inspect_apex()
    choice = why("layer_norm", device="cuda")
    forget()

    assert report.state == state
    assert told in report.reason
    assert choice.backend == "torch"
    assert told in str(choice)


def test_the_optimizer_of_apex_is_one_with_decoupled_weight_decay(site):
    install(site, *EXTENSIONS)
    (site / "apex" / "optimizers").mkdir()
    (site / "apex" / "optimizers" / "__init__.py").write_text(
        "import torch\n"
        "def FusedAdam(parameters, adam_w_mode, **options):\n"
        "    assert adam_w_mode\n"
        "    return torch.optim.AdamW(parameters, **options)\n"
    )
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}

    optimizer = adamw.adamw([torch.ones(2)], **options)

    assert {name: optimizer.defaults[name] for name in options} == options
    assert why("adamw", device="cuda", backend="apex").backend == "apex"
    assert ("apex", "usable, on request only") in why("adamw", device="cuda").others


def test_importing_the_package_loads_no_backend_and_no_compiler():
    program = (
        "import sys, mds_kernels, mds_kernels.cli\n"
        "unwanted = {'triton', 'apex', 'deepspeed', 'torch._dynamo', 'numba'}\n"
        "loaded = [name for name in sys.modules if name.startswith('mds_kernels.backends')]\n"
        "print(sorted(unwanted & set(sys.modules)), loaded)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )

    assert done.stdout == "[] []\n"


def test_no_text_of_the_package_advises_to_install_apex_by_that_name():
    metadata = importlib.metadata.distribution("mds-kernels").read_text("METADATA")
    requirements = importlib.metadata.requires("mds-kernels") or []

    assert not [line for line in requirements if line.lower().startswith("apex")]
    assert "install apex" not in metadata.lower()

"""What `mds-train launch` writes for Kubernetes follows Kubernetes' own schemas."""

from __future__ import annotations

from pathlib import Path

import pytest

from mds_train.cli import main

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")


OPTIONS = ("--launcher", "k8s", "--run-dir", "/data/run", "--mount", "disk:/data")


@pytest.fixture(autouse=True)
def config(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration in the working folder."""
    home = tmp_path_factory.mktemp("home")
    (home / "run.toml").write_text("[model]\nnum_layers = 2\n")
    monkeypatch.chdir(home)


@pytest.mark.parametrize("more", [[], ["--cpu"], ["--queue", "research"]])
def test_a_kubernetes_job_is_valid(tmp_path: Path, more: list[str]) -> None:
    secret = ["--nodes", "2", "--processes", "8", "--secret", "WANDB_API_KEY"]

    code = main(["launch", "run.toml", *OPTIONS, *secret, *more, "--output", str(tmp_path)])

    assert code == 0
    documents = list(yaml.safe_load_all((tmp_path / "mds-train.yaml").read_text("utf-8")))
    assert [document["kind"] for document in documents] == ["ConfigMap", "Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_the_schema_refuses_what_is_wrong(tmp_path: Path) -> None:
    assert main(["launch", "run.toml", *OPTIONS, "--output", str(tmp_path)]) == 0
    *_, job = yaml.safe_load_all((tmp_path / "mds-train.yaml").read_text("utf-8"))
    job["spec"]["completions"] = "four"

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)

"""Job files of clouds: Kubernetes, Azure ML, and scale sets of Azure's virtual machines."""

from __future__ import annotations

import shlex
from typing import Any

from mds_train.jobs.job import Job
from mds_train.jobs.yaml_text import to_yaml

__all__ = ["azure_vm", "azureml", "k8s"]

_MODULE = ("-m", "mds_train")


def _torchrun(job: Job, *, rank: str, head: str) -> str:
    """Torchrun with ranks that the cluster hands out; the variables are the shell's."""
    program = (
        "torchrun",
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.processes}",
        "--node-rank=@RANK@",
        "--master-addr=@HEAD@",
        f"--master-port={job.port}",
        *_MODULE,
    )
    return job.command(program).replace("@RANK@", rank).replace("@HEAD@", head)


def k8s(job: Job) -> dict[str, str]:
    """A plain Indexed Job and a headless service; no operator is needed.

    One failed pod ends the job's others and all start again, at most ``restarts`` times.
    """
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": {"app": job.name}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [{"name": "rendezvous", "port": job.port}],
        },
    }
    body: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "labels": {"app": job.name}},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": job.restarts * job.nodes,
            "activeDeadlineSeconds": job.minutes * 60,
            "template": {"metadata": {"labels": {"app": job.name}}, "spec": _pod(job)},
        },
    }
    if job.queue:
        for each in (service, body):
            each["metadata"]["namespace"] = job.queue  # type: ignore[index]
    note = (
        f"# kubectl apply -f {job.name}.yaml\n"
        f"# Secrets: kubectl create secret generic {job.name} --from-literal=NAME=...\n"
    )
    return {f"{job.name}.yaml": f"{note}{to_yaml(service)}---\n{to_yaml(body)}"}


def _pod(job: Job) -> dict[str, Any]:
    command = _torchrun(job, rank='"$JOB_COMPLETION_INDEX"', head=f"{job.name}-0.{job.name}")
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    ]
    places: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(job.mounts):
        claim = {"claimName": mount.source}
        volumes.append({"name": f"storage-{number}", "persistentVolumeClaim": claim})
        places.append({"name": f"storage-{number}", "mountPath": mount.path})
    environment: list[dict[str, Any]] = [
        {"name": name, "value": text} for name, text in job.variables.items()
    ]
    environment += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}}
        for name in job.secrets
    ]
    cores = job.cpus * job.processes
    count = job.processes if job.use_gpu else cores
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        "command": ["bash", "-c"],
        "args": [f"exec {command}\n"],
        "ports": [{"containerPort": job.port}],
        "resources": {
            "requests": {"cpu": str(cores)},
            "limits": {"nvidia.com/gpu" if job.use_gpu else "cpu": str(count)},
        },
        "volumeMounts": places,
    }
    if environment:
        container["env"] = environment
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 180,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }


def azureml(job: Job) -> dict[str, str]:
    """A command job of Azure ML: it starts the ranks itself and sets torch's variables."""
    inputs = {
        f"storage_{number}": {"type": "uri_folder", "path": mount.source, "mode": "rw_mount"}
        for number, mount in enumerate(job.mounts)
    }
    command = job.command()
    links = "".join(
        f"ln -sfn ${{{{outputs.{name}}}}} {shlex.quote(mount.path)}\n"
        for name, mount in zip(inputs, job.mounts, strict=True)
    )
    body: dict[str, Any] = {
        "$schema": "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json",
        "type": "command",
        "display_name": job.name,
        "experiment_name": job.name,
        "command": f"{_vault(job)}{links}{command}\n",
        "environment": {"image": job.image},
        "compute": f"azureml:{job.queue or 'gpu-cluster'}",
        "distribution": {"type": "pytorch", "process_count_per_instance": job.processes},
        "resources": {"instance_count": job.nodes, "shm_size": "16g"},
        "limits": {"timeout": job.minutes * 60},
        "environment_variables": dict(job.variables),
    }
    if inputs:
        body["outputs"] = inputs
    if job.secrets:
        body["identity"] = {"type": "managed"}
    vault = "".join(
        f"#   az keyvault secret set --vault-name VAULT --name {_vault_name(name)} --value ...\n"
        for name in job.secrets
    )
    note = f"# az ml job create --file {job.name}.azureml.yaml" + (
        f" --resource-group {job.account}\n" if job.account else "\n"
    )
    if vault:
        note += (
            f"# Secrets stay in the key vault that the variable VAULT names, where the job's\n"
            f"# identity reads them (the image needs the Azure CLI):\n{vault}"
        )
    return {f"{job.name}.azureml.yaml": note + to_yaml(body)}


def azure_vm(job: Job) -> dict[str, str]:
    """A script that makes a scale set with the Azure CLI, and the cloud-init of its machines."""
    size = "Standard_ND96isr_H100_v5" if job.use_gpu else "Standard_HB120rs_v3"
    options = [
        f"--resource-group {shlex.quote(job.account or f'{job.name}-group')}",
        f"--name {job.name}",
        f"--instance-count {job.nodes}",
        f"--vm-sku {size}",
        "--image microsoft-dsvm:ubuntu-hpc:2204:latest",
        "--orchestration-mode Uniform",
        "--single-placement-group true",
        "--disable-overprovision",
        f"--computer-name-prefix {job.name}",
        "--assign-identity",
        f"--custom-data {job.name}.cloud-init.yaml",
    ]
    lines = " \\\n  ".join(options)
    create = f"""#!/usr/bin/env bash
# {job.name}: {job.nodes} machines of {size} in one placement group, on one fast network.
# They start the job themselves. It ends, and its costs with it, by:
#   az vmss delete {" ".join(options[:2])}
set -euo pipefail
az vmss create {lines}
"""
    cloud_init = {
        "write_files": [
            {"path": f"/opt/{job.name}.sh", "permissions": "0755", "content": _machine(job)}
        ],
        "runcmd": [*_mounts(job), _service(job)],
    }
    note = "#cloud-config\n# What each machine does when it starts. No secret stands here.\n"
    return {f"{job.name}.sh": create, f"{job.name}.cloud-init.yaml": note + to_yaml(cloud_init)}


def _machine(job: Job) -> str:
    """The script of one machine: which one it is, the secrets, torchrun."""
    command = _torchrun(job, rank='"$rank"', head='"$head"')
    about = (
        "http://169.254.169.254/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    )
    return f"""#!/usr/bin/env bash
set -euo pipefail
# The machine's name in the scale set ends in its number.
name="$(curl -fsS --noproxy '*' -H Metadata:true '{about}')"
rank="${{name##*_}}"
head="${{HEAD:-{job.name}000000}}"
{_vault(job)}{job.exports()}exec {command}
"""


def _mounts(job: Job) -> list[list[str]]:
    """Shares of Azure Files by NFS."""
    share = "vers=4,minorversion=1,sec=sys"
    made = [["mkdir", "-p", mount.path] for mount in job.mounts]
    return made + [
        ["mount", "-t", "nfs", "-o", share, mount.source, mount.path] for mount in job.mounts
    ]


def _service(job: Job) -> list[str]:
    """Start the script as a service that is restarted when it fails."""
    properties = ["Restart=on-failure", "RestartSec=30", f"StartLimitBurst={job.restarts + 1}"]
    words = [word for each in properties for word in ("--property", each)]
    return ["systemd-run", f"--unit={job.name}", *words, f"/opt/{job.name}.sh"]


def _vault_name(variable: str) -> str:
    """Key vaults allow no underscores."""
    return variable.replace("_", "-")


def _vault(job: Job) -> str:
    if not job.secrets:
        return ""
    lines = ["az login --identity --output none"]
    lines += [
        f'{name}="$(az keyvault secret show --vault-name "$VAULT" --name '
        f'{_vault_name(name)} --query value --output tsv)"\nexport {name}'
        for name in job.secrets
    ]
    return "\n".join(lines) + "\n"

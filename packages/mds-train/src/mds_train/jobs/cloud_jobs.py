"""Job files of clouds: Kubernetes, Azure ML, and scale sets of Azure's virtual machines."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import PurePosixPath
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
    """A plain Indexed Job, a headless service and the configuration; no operator is needed.

    One failed pod ends the job's others and all start again, at most ``restarts`` times.
    """
    parts = [*_config_map(job), _service_of(job), _indexed_job(job)]
    for each in parts:
        each["metadata"] |= {"labels": {"app": job.name}}
        if job.queue:
            each["metadata"]["namespace"] = job.queue
    note = f"# kubectl apply -f {job.name}.yaml\n"
    if job.secrets:
        space = f" --namespace {job.queue}" if job.queue else ""
        values = "".join(f" --from-literal={name}=..." for name in job.secrets)
        note += f"# Before: kubectl create secret generic {job.name}{space}{values}\n"
    return {f"{job.name}.yaml": note + "---\n".join(map(to_yaml, parts))}


def _config_map(job: Job) -> list[dict[str, Any]]:
    if job.config_text is None:
        return []
    name = PurePosixPath(job.config).name
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": job.name},
            "data": {name: job.config_text},
        }
    ]


def _service_of(job: Job) -> dict[str, Any]:
    """Gives the pods names by which they find the first one."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [{"name": "rendezvous", "port": job.port}],
        },
    }


def _indexed_job(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": job.restarts * job.nodes,
            "activeDeadlineSeconds": job.minutes * 60,
            "template": {"metadata": {"labels": {"app": job.name}}, "spec": _pod(job)},
        },
    }


def _pod(job: Job) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    ]
    places: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if job.config_text is not None:
        folder = str(PurePosixPath(job.config).parent)
        volumes.append({"name": "configuration", "configMap": {"name": job.name}})
        places.append({"name": "configuration", "mountPath": folder, "readOnly": True})
    for number, mount in enumerate(job.mounts):
        claim = {"claimName": mount.source}
        volumes.append({"name": f"storage-{number}", "persistentVolumeClaim": claim})
        places.append({"name": f"storage-{number}", "mountPath": mount.path})
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 180,
        "automountServiceAccountToken": False,
        # The image runs as this user, who else may not write to fresh storage.
        "securityContext": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [_container(job, places)],
        "volumes": volumes,
    }


def _container(job: Job, places: list[dict[str, Any]]) -> dict[str, Any]:
    command = _torchrun(job, rank='"$JOB_COMPLETION_INDEX"', head=f"{job.name}-0.{job.name}")
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
    return container | ({"env": environment} if environment else {})


def azureml(job: Job) -> dict[str, str]:
    """A command job of Azure ML: it starts the ranks itself and sets torch's variables."""
    storage = {
        f"storage_{number}": {"type": "uri_folder", "path": mount.source, "mode": "rw_mount"}
        for number, mount in enumerate(job.mounts)
    }
    links = "".join(
        # All ranks of a machine run this; the first one makes the link.
        f"ln -s ${{{{outputs.{name}}}}} {shlex.quote(mount.path)} 2> /dev/null || "
        f"test -e {shlex.quote(mount.path)}\n"
        for name, mount in zip(storage, job.mounts, strict=True)
    )
    carried = job.config_text is not None
    command = (replace(job, config=_INPUT) if carried else job).command()
    command = command.replace(shlex.quote(_INPUT), _INPUT)
    body: dict[str, Any] = {
        "$schema": "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json",
        "type": "command",
        "display_name": job.name,
        "experiment_name": job.name,
        "command": f"set -eu\n{_vault(job)}{links}{command}\n",
        "environment": {"image": job.image},
        "compute": f"azureml:{job.queue or 'gpu-cluster'}",
        "distribution": {"type": "pytorch", "process_count_per_instance": job.processes},
        "resources": {"instance_count": job.nodes, "shm_size": "16g"},
        "limits": {"timeout": job.minutes * 60},
        "environment_variables": dict(job.variables),
    }
    if carried:
        body["inputs"] = {"config": {"type": "uri_file", "path": f"./{job.name}.toml"}}
    if storage:
        body["outputs"] = storage
    if job.secrets:
        body["identity"] = {"type": "managed"}
    files = {f"{job.name}.azureml.yaml": _azureml_note(job) + to_yaml(body)}
    return files | ({f"{job.name}.toml": job.config_text or ""} if carried else {})


_INPUT = "${{inputs.config}}"


def _azureml_note(job: Job) -> str:
    note = f"# az ml job create --file {job.name}.azureml.yaml" + (
        f" --resource-group {job.account}\n" if job.account else "\n"
    )
    vault = "".join(
        f"#   az keyvault secret set --vault-name VAULT --name {_vault_name(name)} --value ...\n"
        for name in job.secrets
    )
    if vault:
        note += (
            f"# Secrets stay in the key vault that the variable VAULT names (--env VAULT=...),\n"
            f"# where the job's identity reads them (the image needs the Azure CLI):\n{vault}"
        )
    return note


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
    files = [{"path": f"/opt/{job.name}.sh", "permissions": "0755", "content": _machine(job)}]
    if job.config_text is not None:
        files.append({"path": job.config, "permissions": "0644", "content": job.config_text})
    cloud_init = {
        "write_files": files,
        "runcmd": [*_mounts(job), _service(job)],
    }
    note = "#cloud-config\n# What each machine does when it starts. No secret stands here.\n"
    return {f"{job.name}.sh": create, f"{job.name}.cloud-init.yaml": note + to_yaml(cloud_init)}


def _machine(job: Job) -> str:
    """The script of one machine: which one it is, the secrets, torchrun in the container."""
    command = _torchrun(job, rank='"$rank"', head='"$head"')
    folders = [mount.path for mount in job.mounts]
    places = [f"{shlex.quote(f'{path}:{path}')}" for path in folders]
    if job.config_text is not None:
        places.append(shlex.quote(f"{job.config}:{job.config}:ro"))
    options = [
        *(["--gpus all"] if job.use_gpu else []),
        "--network host --ipc host --ulimit memlock=-1",
        *(f"--volume {place}" for place in places),
        *(f"--env {name}" for name in (*job.variables, *job.secrets)),
        shlex.quote(job.image),
    ]
    container = " \\\n  ".join(["docker run --rm", *options])
    about = (
        "http://169.254.169.254/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    )
    return f"""#!/usr/bin/env bash
set -euo pipefail
# The machine's name in the scale set ends in its number.
name="$(curl -fsS --noproxy '*' -H Metadata:true '{about}')"
rank="${{name##*_}}"
head="${{HEAD:-{job.name}000000}}"
{_vault(job)}{job.exports()}exec {container} \\
  {command}
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
    properties = [
        *("Restart=on-failure", "RestartSec=30"),
        # Counted over the whole job: in systemd's ten seconds there is no second start.
        *(f"StartLimitBurst={job.restarts + 1}", f"StartLimitIntervalSec={job.minutes}min"),
    ]
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

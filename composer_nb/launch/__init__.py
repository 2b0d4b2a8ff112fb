"""Starting replicas: what every launcher promises, what runs inside a replica, launchers for this machine, for clusters of Slurm, Ray and Kubernetes, and for rented machines."""

from importlib import import_module
from typing import Any

_PLACES = {
    "HFJobsError": "hf_jobs",
    "HFJobsExecutor": "hf_jobs",
    "HFJobsOptions": "hf_jobs",
    "JobSpec": "job",
    "KubernetesError": "kubernetes",
    "KubernetesExecutor": "kubernetes",
    "KubernetesOptions": "kubernetes_job",
    "LocalProcessExecutor": "local",
    "ModalError": "modal",
    "ModalExecutor": "modal",
    "ModalOptions": "modal",
    "Program": "job",
    "QueueError": "queue_jobs",
    "RayError": "ray",
    "RayExecutor": "ray",
    "RayOptions": "ray",
    "ReplicaHandle": "job",
    "ReplicaResult": "job",
    "SageMakerError": "sagemaker",
    "SageMakerExecutor": "sagemaker",
    "SageMakerOptions": "sagemaker",
    "ServerlessExecutor": "job",
    "SlurmError": "slurm_commands",
    "SlurmExecutor": "slurm",
    "SlurmOptions": "slurm_commands",
    "Status": "job",
    "beat": "entrypoint",
    "replica_rank": "entrypoint",
    "report": "entrypoint",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])

"""What crosses between the connector's two roles, as vLLM wants it; pickled where they are two processes."""

from dataclasses import dataclass
from typing import cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hybridkv.service.messages import StepPlan, WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the workers, every step.

    Attributes:
        plan: of the service.
        refused: requests whose load is to be reported as failed, whatever a worker knows of it.
    """

    plan: StepPlan
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: what each rank reports."""

    reports: tuple[WorkerReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Return the reports of both."""
        return WorkerMetadata(reports=self.reports + cast("WorkerMetadata", other).reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, once: how its blocks lie in memory.

    Attributes:
        memory: a digest; workers with equal digests can exchange bytes.
    """

    memory: str

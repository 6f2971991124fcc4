"""What one preprocessing run is asked to do, as the facts by which an interrupted one is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mds_data.preprocess.inputs import InputFile
from mds_data.preprocess.report import InputRecord, PreprocessReport, ProblemLog
from mds_data.preprocess.source import Mark, check_unchanged
from mds_data.preprocess.task import Task
from mds_data.privacy.documents import RedactionTally
from mds_data.store.folder import is_store, read_manifest
from mds_data.store.lock import StoreLock
from mds_data.store.resume import finished_folder, give_finished_name
from mds_data.store.schema import Manifest, package_version

__all__ = [
    "Job",
    "RestartPoint",
    "finished_report",
    "kept_state",
    "restart_point",
    "settle_finished",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Inputs, arguments and tokenizer; two runs with the same ones write the same bytes."""

    files: Sequence[InputFile]
    arguments: Mapping[str, Any]
    tokenizer: str
    """SHA-256 of the tokenizer's file."""
    task: Task | None = None
    """Which part of a job array this is."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What is known of each input beside its bytes: licence, URL, terms, where it comes from."""

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        inputs = [self._input(file) for file in self.files]
        return {
            "inputs": inputs,
            **self.arguments,
            "tokenizer_sha256": self.tokenizer,
            "version": package_version(),
        }

    def _input(self, file: InputFile) -> dict[str, Any]:
        path = file.path.as_posix()
        return {"path": path, "size": file.size, **self.facts.get(path, {})}

    def provenance(
        self, done: Sequence[InputRecord], *, log: ProblemLog, redacted: RedactionTally
    ) -> dict[str, Any]:
        """What the manifest keeps of it."""
        transform = {
            "name": "preprocess",
            "version": package_version(),
            "arguments": dict(self.arguments),
            "report": log.as_json(),
        }
        if self.arguments.get("redact"):
            transform["redaction"] = redacted.as_json()
        if self.task is not None:
            transform["task"] = str(self.task)
        inputs = [asdict(record) | dict(self.facts.get(record.path, {})) for record in done]
        return {"inputs": inputs, "transforms": [transform]}

    def is_done_by(self, manifest: Manifest) -> bool:
        """Whether a finished store is this job's."""
        transforms = manifest.provenance.get("transforms") or [{}]
        inputs = manifest.provenance.get("inputs") or []
        return (
            len(transforms) == 1
            and transforms[0].get("name") == "preprocess"
            and transforms[0].get("arguments") == dict(self.arguments)
            and [{key: each[key] for key in each if key != "sha256"} for each in inputs]
            == [self._input(file) for file in self.files]
            and manifest.tokenizer is not None
            and manifest.tokenizer.sha256 == self.tokenizer
        )

    def kept(self, done: Sequence[InputRecord]) -> list[dict[str, Any]]:
        """Records of files that were read to their end, with their dates."""
        return [
            asdict(record) | {"modified": file.path.stat().st_mtime_ns}
            for record, file in zip(done, self.files, strict=False)
        ]

    def checked(self, kept: Sequence[Mapping[str, Any]]) -> list[InputRecord]:
        """Records of files that an earlier run has read, after a check that they are the same."""
        return [
            check_unchanged(file, record) for record, file in zip(kept, self.files, strict=False)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPoint:
    """Where a run begins."""

    mark: Mark | None
    done: Sequence[Mapping[str, Any]]
    log: ProblemLog
    redacted: RedactionTally
    problem_bytes: int


def kept_state(
    mark: Mark,
    done: Sequence[Mapping[str, Any]],
    *,
    log: ProblemLog,
    redacted: RedactionTally,
    problem_bytes: int,
) -> dict[str, Any]:
    """What a checkpoint keeps of how far a run is."""
    return {
        "mark": asdict(mark),
        "done": list(done),
        "problems": log.as_json(),
        "redacted": redacted.as_json(),
        "problem_bytes": problem_bytes,
    }


def restart_point(states: Sequence[Mapping[str, Any] | None]) -> RestartPoint:
    """Return where the least advanced of several writers was; the beginning if one has no state."""
    known = [state for state in states if state is not None]
    if len(known) < len(states) or not known:
        return RestartPoint(
            mark=None, done=(), log=ProblemLog(), redacted=RedactionTally(), problem_bytes=0
        )
    state = min(known, key=lambda each: Mark(**each["mark"]))
    return RestartPoint(
        mark=Mark(**state["mark"]),
        done=state["done"],
        log=ProblemLog.from_json(state["problems"]),
        redacted=RedactionTally.from_json(state["redacted"]),
        problem_bytes=state["problem_bytes"],
    )


def settle_finished(path: Path, target: Path, *, job: Job) -> bool:
    """Return whether an earlier run has finished a store, after its last steps if it died there.

    Args:
        path: The output.
        target: Where the store is written; differs from ``path`` if that is to be replaced.
        job: What the store must come from.
    """
    if target.parent.is_dir():
        with StoreLock(target):
            found = finished_folder(target)
            if found is not None and not target.exists() and job.is_done_by(found[1]):
                give_finished_name(target, found[0])
    return any(is_store(each) and job.is_done_by(read_manifest(each)[0]) for each in {path, target})


def finished_report(outputs: Mapping[str, Path]) -> PreprocessReport:
    """Return the report of finished stores, as their manifests tell it."""
    manifests = {key: read_manifest(path)[0] for key, path in outputs.items()}
    provenance = next(iter(manifests.values())).provenance
    transform = provenance["transforms"][0]
    redaction = transform.get("redaction")
    return PreprocessReport(
        outputs=dict(outputs),
        documents={key: manifest.counts.documents for key, manifest in manifests.items()},
        tokens={key: manifest.counts.tokens for key, manifest in manifests.items()},
        inputs=tuple(
            InputRecord(path=each["path"], size=each["size"], sha256=each["sha256"])
            for each in provenance["inputs"]
        ),
        problems=ProblemLog.from_json(transform["report"]),
        redacted=None if redaction is None else RedactionTally.from_json(redaction),
    )

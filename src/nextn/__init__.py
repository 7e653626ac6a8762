"""nextn: Multi-Token Prediction heads for PyTorch. Public names are resolved on first use, so importing is cheap."""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "Acceptance": "stats.acceptance",
    "AcceptanceFigures": "evaluate.acceptance_curve",
    "AuditReport": "audit_rules.findings",
    "CheckResult": "engines.check_result",
    "Corpus": "data.corpus",
    "CotrainLoss": "train.cotrain",
    "DetachedTrunk": "train.cotrain",
    "Diagnosis": "evaluate.diagnose",
    "Estimate": "stats.intervals",
    "Finding": "audit_rules.findings",
    "Head": "model.head",
    "HeadSettings": "train.cotrain",
    "JointTask": "train.joint_task",
    "KeepHead": "edit.save_hook",
    "KnownFamilies": "family_table.search",
    "Model": "model.model",
    "NextnError": "errors",
    "ReferencePlan": "evaluate.workload",
    "ReferenceReport": "evaluate.reference_report",
    "Result": "decoding.generate",
    "Sampling": "settings",
    "Settings": "settings",
    "StandaloneHead": "model.standalone_head",
    "Targets": "losses.mtp_loss",
    "TrainConfig": "train.config",
    "Trainer": "train.loop",
    "VerifyReport": "verify_checks",
    "VerifySettings": "verify_checks.session",
    "audit": "audit_rules",
    "convert": "edit.convert",
    "diagnose": "evaluate.diagnose_engine",
    "eos_tokens": "decoding.generate",
    "extract": "edit.convert",
    "families": "family_table.search",
    "generate": "decoding.generate",
    "keep_head": "edit.save_hook",
    "load": "model.model",
    "load_head": "model.model",
    "measure": "evaluate.reference",
    "mtp_loss": "losses.mtp_loss",
    "new_head": "train.init_head",
    "quantize": "edit.quantize",
    "restore": "edit.restore",
    "rounds": "decoding.rounds",
    "save_head": "train.trainer_hook",
    "stream": "decoding.generate",
    "targets_of": "train.cotrain",
    "trace": "decoding.trace",
    "train_head": "train.trainer_hook",
    "verify": "verify_checks",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'nextn' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"nextn.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

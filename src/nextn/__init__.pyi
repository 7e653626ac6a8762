"""Types of the public names. `make docs` writes this file."""

from nextn.audit_rules import audit as audit
from nextn.audit_rules.findings import AuditReport as AuditReport
from nextn.audit_rules.findings import Finding as Finding
from nextn.data.corpus import Corpus as Corpus
from nextn.decoding.generate import Result as Result
from nextn.decoding.generate import eos_tokens as eos_tokens
from nextn.decoding.generate import generate as generate
from nextn.decoding.generate import stream as stream
from nextn.decoding.rounds import rounds as rounds
from nextn.decoding.trace import trace as trace
from nextn.edit.convert import convert as convert
from nextn.edit.convert import extract as extract
from nextn.edit.quantize import quantize as quantize
from nextn.edit.restore import restore as restore
from nextn.edit.save_hook import KeepHead as KeepHead
from nextn.edit.save_hook import keep_head as keep_head
from nextn.engines.check_result import CheckResult as CheckResult
from nextn.errors import NextnError as NextnError
from nextn.evaluate.acceptance_curve import AcceptanceFigures as AcceptanceFigures
from nextn.evaluate.diagnose import Diagnosis as Diagnosis
from nextn.evaluate.diagnose_engine import diagnose as diagnose
from nextn.evaluate.reference import measure as measure
from nextn.evaluate.reference_report import ReferenceReport as ReferenceReport
from nextn.evaluate.workload import ReferencePlan as ReferencePlan
from nextn.family_table.search import KnownFamilies as KnownFamilies
from nextn.family_table.search import families as families
from nextn.losses.mtp_loss import Targets as Targets
from nextn.losses.mtp_loss import mtp_loss as mtp_loss
from nextn.model.head import Head as Head
from nextn.model.model import Model as Model
from nextn.model.model import load as load
from nextn.model.model import load_head as load_head
from nextn.model.standalone_head import StandaloneHead as StandaloneHead
from nextn.settings import Sampling as Sampling
from nextn.settings import Settings as Settings
from nextn.stats.acceptance import Acceptance as Acceptance
from nextn.stats.intervals import Estimate as Estimate
from nextn.train.config import TrainConfig as TrainConfig
from nextn.train.cotrain import CotrainLoss as CotrainLoss
from nextn.train.cotrain import DetachedTrunk as DetachedTrunk
from nextn.train.cotrain import HeadSettings as HeadSettings
from nextn.train.cotrain import targets_of as targets_of
from nextn.train.init_head import new_head as new_head
from nextn.train.joint_task import JointTask as JointTask
from nextn.train.loop import Trainer as Trainer
from nextn.train.trainer_hook import save_head as save_head
from nextn.train.trainer_hook import train_head as train_head
from nextn.verify_checks import VerifyReport as VerifyReport
from nextn.verify_checks import verify as verify
from nextn.verify_checks.session import VerifySettings as VerifySettings

__version__: str
__all__: list[str]
_HOME: dict[str, str]

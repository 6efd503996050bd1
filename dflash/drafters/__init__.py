"""Drafters: every way to propose tokens, one file each, behind one protocol (:mod:`.protocol`)."""

from .checkpoints.checkpoint import load_drafter as load_drafter
from .checkpoints.checkpoint import save_drafter as save_drafter
from .dflare import QwenDFlareDraftModel as QwenDFlareDraftModel
from .dflash import DFlashDraftModel as DFlashDraftModel  # importing a module registers its kind
from .dflash2 import DFlash2DraftModel as DFlash2DraftModel
from .domino import DominoDraftModel as DominoDraftModel
from .dspark import DSparkDraftModel as DSparkDraftModel
from .mtp import MTPDrafter as MTPDrafter
from .ngram import NgramDrafter as NgramDrafter

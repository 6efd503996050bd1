"""Every way to propose tokens, one file each, after one protocol (:mod:`.protocol`)."""

from .checkpoints.checkpoint import load_drafter as load_drafter
from .checkpoints.checkpoint import save_drafter as save_drafter
from .dflare import QwenDFlareDraftModel as QwenDFlareDraftModel
from .dflash import DFlashDraftModel as DFlashDraftModel  # registers its kind, the one of published files
from .dflash2 import DFlash2DraftModel as DFlash2DraftModel
from .dspark import DSparkDraftModel as DSparkDraftModel

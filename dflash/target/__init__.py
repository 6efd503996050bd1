"""The verified model and its caches: loaded, called for logits and features, rewound after each block."""

from .load import load_target, load_target_model
from .model import LoadedTargetModel
from .rewind import TargetCache

__all__ = ["LoadedTargetModel", "TargetCache", "load_target", "load_target_model"]

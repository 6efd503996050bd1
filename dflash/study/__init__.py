"""Studies: what makes drafts survive, by varying one thing and comparing in pairs.

``settings`` reads a study and makes its cells, ``plan`` finds what is there of them, ``ablation`` carries out the rest.
``cache`` keeps what is finished, under keys that name it by content. ``results`` makes rows of it, ``effects`` says
what each factor does, ``files`` and ``plots`` write both. ``compare`` sets runs of ``dflash train`` next to each other.
Traces live in :mod:`dflash.evaluation` and can be read from here too.
"""

from ..evaluation.trace_report import report as report
from ..evaluation.traces import Traces as Traces
from ..evaluation.traces import acceptance_counts as acceptance_counts
from ..evaluation.traces import acceptance_length as acceptance_length
from ..evaluation.traces import calibration as calibration
from ..evaluation.traces import calibration_error as calibration_error
from ..evaluation.traces import read_traces as read_traces
from ..evaluation.traces import summary as summary
from ..evaluation.traces import survival as survival
from ..evaluation.traces import time_by_part as time_by_part
from ..evaluation.traces import tokens_per_second as tokens_per_second
from .ablation import ablate as ablate
from .effects import effects as effects
from .files import write_results as write_results
from .plan import Plan as Plan
from .results import collect as collect
from .settings import Study as Study
from .settings import load_study as load_study

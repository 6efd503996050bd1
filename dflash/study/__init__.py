"""Studies: what makes drafts survive, by varying one thing and comparing in pairs.

``settings`` reads a study and makes its cells, ``plan`` finds what is there, ``ablation`` carries out the rest,
``results`` and ``bootstrap`` say what came of it, ``files`` and ``plots`` write it down; ``expected`` knows how long
it takes. ``identity`` and ``answers`` keep finished cells apart and on disk. ``traces`` reads what
``decoding/trace.py`` wrote, into tables with the standard quantities, and ``report`` shows it as a page.
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
from .files import write_results as write_results
from .plan import Plan as Plan
from .results import collect as collect
from .results import effects as effects
from .settings import Study as Study
from .settings import load_study as load_study

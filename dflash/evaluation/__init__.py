"""Measurements: speed next to plain mlx_lm, acceptance by decoding or on finished texts, traces as tables and a page.

``runs`` times answers, ``identity`` compares their tokens, ``checks`` judges them, ``statistics`` summarises,
``speedup`` finds the arithmetic limit, ``report`` shows the result; ``batch_speed`` times batches. ``acceptance``
scores a drafter without plain decoding, on ``suites``, the papers' prompts, among others. ``texts`` keeps the target's
greedy answers and ``features`` what it makes of them; on these ``replay`` scores drafters without decoding, and
``anchors`` says more of them. ``traces`` reads traces into tables, ``served`` the records of servers, and
``trace_report`` and ``trace_plots`` show them.
``demo`` and ``doctor`` are the commands of these names; ``prediction`` says what acceptance would bring elsewhere.
"""

from ..generate import PAIR
from .checks import check_answers as check_answers
from .checks import register_check as register_check
from .identity import Difference as Difference
from .identity import find_difference as find_difference
from .identity import first_difference as first_difference
from .identity import logit_margin as logit_margin
from .runs import DFLASH as DFLASH
from .runs import PLAIN as PLAIN
from .runs import BenchPrompt as BenchPrompt
from .runs import PromptResult as PromptResult
from .runs import Run as Run
from .runs import Side as Side
from .runs import Step as Step
from .runs import compare as compare
from .runs import dflash_side as dflash_side
from .runs import plain_side as plain_side
from .runs import time_side as time_side
from .statistics import acceptance_length as acceptance_length
from .statistics import judge as judge
from .statistics import overall_tps as overall_tps
from .statistics import spread as spread
from .statistics import summarize as summarize

HELDOUT = PAIR / "heldout.jsonl"
"""Held-out requests of the bundled models, one JSON object a line: ``prompt`` and ``check``."""

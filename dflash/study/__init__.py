"""Studies: what makes drafts survive, by varying one thing and comparing in pairs.

``settings`` reads a study and makes its cells, ``plan`` finds what is there, ``ablation`` carries out the rest,
``results`` and ``bootstrap`` say what came of it, ``files`` and ``plots`` write it down; ``expected`` knows how long
it takes. ``identity`` and ``answers`` keep finished cells apart and on disk.
"""

from .ablation import ablate as ablate
from .files import write_results as write_results
from .plan import Plan as Plan
from .results import collect as collect
from .results import effects as effects
from .settings import Study as Study
from .settings import load_study as load_study

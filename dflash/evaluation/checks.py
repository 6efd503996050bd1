"""Whether an answer is right: checks, registered by the kind of request that they judge.

A request's row may hold ``"check": {"kind": ..., ...}``, the plain data by which its answer is judged. The check of the
bundled held-out requests is announced as the entry point ``toy`` of the group ``dflash.checks``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..core.errors import DFlashError
from ..core.registry import Registry

Check = Callable[[Sequence[tuple[str, dict[str, Any]]]], list[bool]]
"""Judges answers, each given as its text and the ``check`` of its request: whether each is right, in order."""

checks: Registry[Check] = Registry("kind of check", "dflash.checks")


def register_check(*kinds: str) -> Callable[[Check], Check]:
    """Decorator: this function judges answers to requests whose ``check`` is of one of ``kinds``."""
    return checks.register(*kinds)


def check_answers(pairs: Iterable[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Whether each answer is right, for pairs of an answer's text and the ``check`` of its request, in order.

    Each registered function is called once, with all the answers that it judges. Raises ``DFlashError`` for a check of
    an unknown kind, or without the data that its kind needs.
    """
    answers = list(pairs)
    judged: dict[Check, list[int]] = {}
    for i, (_, check) in enumerate(answers):
        judged.setdefault(_check_for(check), []).append(i)
    verdicts: dict[int, bool] = {}
    for judge, places in judged.items():
        try:
            verdicts |= zip(places, judge([answers[i] for i in places]), strict=True)
        except (KeyError, TypeError) as error:
            raise DFlashError(f'A "check" in the prompts lacks what its kind needs: {error!r}.') from error
    return [verdicts[i] for i in range(len(answers))]


def _check_for(check: dict[str, Any]) -> Check:
    kind = check.get("kind")
    found = checks.find(kind) if isinstance(kind, str) else None
    if found is None:
        raise DFlashError(f'A "check" in the prompts is of no known kind, {kind!r}; {checks.advice(str(kind))}')
    return found

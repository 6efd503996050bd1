"""The record of a server as tables, with the columns that traces have.

It holds how many drafts each block verified and accepted, but not the drafts, their probabilities and times.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import DataError
from ..core.files import read_json
from ..serving.record import MANIFEST, recorded, recorded_path, shard_numbers


def read_served(name: str, folder: Path) -> tuple[Any, Any, Any]:
    """Tables of requests, blocks and drafts. The trace is called ``name``; several drafters make one each.

    A block commits its accepted drafts and one token, as in the usage of a response: what the end of an answer cuts off
    counts. Requests have their ``date`` too. Raises ``DataError`` for other folders, and where no draft was verified.
    """
    import pandas

    manifest = folder / MANIFEST
    if not manifest.exists() or not read_json(manifest).get("recorded"):
        raise DataError(f"{folder} is no record of dflash serve; expected one, or files of --trace.")
    lines = [line for number in shard_numbers(folder) for line in recorded(recorded_path(folder, number))]
    rows = [
        (request, block, verified, accepted)
        for request, line in enumerate(lines)
        for block, (verified, accepted) in enumerate(line.get("blocks", ()), 1)
    ]
    if not rows:
        raise DataError(f"The record {folder} holds no block with drafts, so there is no acceptance to report.")
    requests = pandas.DataFrame({"drafter": [line.get("drafter", "unknown") for line in lines]})
    requests.insert(0, "trace", f"{name}, " + requests.drafter if requests.drafter.nunique() > 1 else name)
    requests = requests.assign(
        request=range(len(lines)),
        prompt_length=[len(line["prompt_tokens"]) for line in lines],
        tokens=[len(line["answer_tokens"]) for line in lines],
        blocks=[len(line.get("blocks", ())) for line in lines],
        seconds=np.nan,
        tokens_per_second=np.nan,
        date=[line.get("date", "-") for line in lines],
    )
    blocks = pandas.DataFrame(rows, columns=["request", "block", "verified", "accepted"])
    blocks = blocks.assign(trace=requests.trace.to_numpy()[blocks.request], asleep=False, committed=blocks.accepted + 1)
    drafts = blocks.loc[blocks.index.repeat(blocks.verified), ["trace", "request", "block", "accepted"]]
    position = drafts.groupby(level=0).cumcount() + 1
    reached, accepted = position <= drafts.accepted + 1, position <= drafts.accepted
    return requests, blocks, drafts.assign(position=position, verified=True, reached=reached, accepted=accepted)

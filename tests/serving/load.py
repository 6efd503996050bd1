"""Mixed load on a server: ``python -m tests.serving.load --seconds 600``; a slow test runs a minute of it.

Clients ask for answers whose texts are known, streamed or not, alone and at once, some leave at any time, some send
nonsense. It fails if a request is lost, a text is wrong, or memory still grows after a third of the time.
"""

import argparse
import random
import subprocess
import threading
import time
from collections import Counter

import dflash

from .conftest import QUESTIONS, Server, process, until

CLIENTS = 8
KINDS = [
    ({}, {}),
    ({"stop": ["."]}, {"stop_strings": ["."]}),
    ({"logit_bias": {"30": -100}}, {"logit_bias": {30: -100.0}}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ({"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "seed": 7}),
    ({"logprobs": True}, {}),
]


class Load:
    """Clients that ask until ``end``, and what became of their requests."""

    def __init__(self, server: Server, known: dict[tuple[int, int], str], end: float):
        self.server, self.known, self.end = server, known, end
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def client(self, number: int) -> None:
        random_ = random.Random(number)
        while time.monotonic() < self.end:
            kind, question = random_.randrange(len(KINDS)), random_.randrange(len(QUESTIONS))
            act = random_.choices([self.whole, self.streamed, self.leaves, self.new, self.nonsense], [4, 4, 3, 2, 1])[0]
            try:
                act(kind, question, random_)
                self.counts[act.__name__] += 1
            except Exception as error:
                self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}")

    def whole(self, kind: int, question: int, _: random.Random) -> None:
        self.check(self.server.text(QUESTIONS[question], max_tokens=48, **KINDS[kind][0]), kind, question)

    def streamed(self, kind: int, question: int, _: random.Random) -> None:
        kind %= len(KINDS) - 1  # a stream has no log-probabilities, the last kind
        pieces = self.server.chat(QUESTIONS[question], max_tokens=48, stream=True, **KINDS[kind][0])
        self.check("".join(piece.choices[0].delta.content or "" for piece in pieces), kind, question)

    def leaves(self, kind: int, question: int, random_: random.Random) -> None:
        asked = {"prompt": QUESTIONS[question] * 20, "max_tokens": 200, "stream": bool(kind % 2)}
        with self.server.open(asked):
            time.sleep(random_.random() / 2)

    def new(self, kind: int, _question: int, random_: random.Random) -> None:
        """A prompt that no cache has, so that caches are dropped too."""
        usage = self.server.complete(f"{random_.random()} " * (1 + 5 * kind), max_tokens=16).usage
        assert usage.completion_tokens

    def nonsense(self, kind: int, _question: int, _: random.Random) -> None:
        assert self.server.post([b"{", b"\xff" * 100, {"messages": kind}, {}, {"messages": []}, 7][kind])[0] == 400

    def check(self, text: str, kind: int, question: int) -> None:
        if text != self.known[kind, question]:
            self.wrong.append(f"{KINDS[kind][0]}, {QUESTIONS[question]!r}: {text!r}")


def resident(server: Server) -> int:
    """Memory of the server's process, in kilobytes."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(server.process.pid)]))


def run(seconds: float) -> tuple[Counter[str], list[str], list[int]]:
    """Answers by kind, what went wrong, and the server's memory in kilobytes, ten times."""
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained(max_seq_length=2000)
    known = {
        (kind, question): decoder.generate(QUESTIONS[question], 48, **KINDS[kind][1])
        for kind in range(len(KINDS))
        for question in range(len(QUESTIONS))
    }
    with process("--max-seq-length", "2000", "--prompt-cache-bytes", str(20 << 20)) as server:
        load = Load(server, known, time.monotonic() + seconds)
        threads = [threading.Thread(target=load.client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        memory = []
        for _ in range(10):
            time.sleep(seconds / 10)
            memory.append(resident(server))
        for thread in threads:
            thread.join()
        until(lambda: server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0)
        assert server.send("GET", "/health")[0] == 200
        assert "Traceback" not in server.log()
    return load.counts, load.wrong, memory


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    counts, wrong, memory = run(parser.parse_args().seconds)
    print(dict(counts), f"memory in MB: {[kilobytes // 1024 for kilobytes in memory]}", *wrong[:10], sep="\n")
    raise SystemExit(bool(wrong) or max(memory[4:]) > 1.1 * max(memory[:4]))

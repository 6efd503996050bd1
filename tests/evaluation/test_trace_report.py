"""The report of traces: one file, no network, readable with a keyboard; read in a headless browser."""

import re
import sys
from pathlib import Path

import pytest
from support.browser import BROWSER, run_in_page
from support.cli import assert_one_error, invoke
from support.errors import refused
from support.models import TEXT_VOCAB, random_drafter, wrapped_tokenizer, writer

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, TraceFile
from dflash.core.errors import DataError, DFlashError
from dflash.decoding.trace import read_records
from dflash.evaluation.trace_report import report
from dflash.evaluation.traces import survival
from dflash.policies.base import Drafts, Policy
from dflash.study import read_traces

ANSWER = "one <b>two</b> three & four </script> five six seven eight nine ten eleven twelve"
PROMPT = [65, 66]
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> list[Path]:
    """Two drafters on the same prompt; one has logits."""
    folder = tmp_path_factory.mktemp("traces")
    often, logits = folder / "often.jsonl", folder / "random.jsonl"
    with TraceFile(often, drafter="scripted") as file:
        writer(ANSWER, PROMPT, p=0.8).generate(PROMPT, trace=file, policy="full")
    loaded = LoadedTargetModel(writer(ANSWER, PROMPT).target_model, wrapped_tokenizer())
    drafter = random_drafter(3, TEXT_VOCAB, hidden_size=TEXT_VOCAB, num_target_layers=1, target_layer_ids=(0,))
    DFlashSpeculativeDecoder(loaded, drafter).generate(PROMPT, trace=logits, policy="full")
    return [often, logits]


@pytest.fixture(scope="module")
def page(traces, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    result = invoke("report", *traces, "-o", path)
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r".*report.html \(\d+ kB\)\n", result.stdout, re.S)
    return path


def test_the_page_refers_to_nothing_outside(page):
    text = page.read_text()
    assert re.findall(r'\s(?:src|href|srcset|action|poster)="?([^"\s>]*)', text) == ["data:,"]
    assert {link[0] for link in re.findall(r'xlink:href="([^"]*)"', text)} == {"#"}
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)|fetch\(|XMLHttpRequest|import\(", text)


def test_plots_say_what_they_show_and_share_no_ids_and_equal_traces_have_equal_bytes(page, traces):
    text = page.read_text()
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids)) > 4
    assert len(re.findall(r'<svg[^>]* role="img" aria-label="[^"]', text)) == 4
    assert text == report(read_traces(*traces))


def test_an_answer_that_a_trace_was_cut_in_is_named_on_stderr_and_on_the_page(traces, tmp_path, caplog):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(traces[1].read_bytes()[:-400])
    text = report(read_traces(traces[0], cut))
    assert caplog.messages == ["The trace cut ends within answer 1, of which only the beginning was recorded."]
    assert text.count("; of the answer only the beginning was recorded.") == 1


def test_without_matplotlib_the_extra_is_named(monkeypatch, traces):
    monkeypatch.delitem(sys.modules, "dflash.evaluation.trace_plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DFlashError) as error:
        report(read_traces(*traces))
    refused(error, "matplotlib", "pip install '.[study]'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.jsonl", "-o", "x.html"), "nothing.jsonl"),
        (("-o", "no/x.html"), "--output .*x.html: there is no folder .*no; make it, or name another"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_no_page(traces, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert_one_error(invoke("report", traces[0], *arguments), message)
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="at least one text, got 0"):
        report(read_traces(*traces), texts=0)


class Choosy(Policy):
    """Verifies one draft of each block."""

    def verify_length(self, drafts: Drafts) -> int:
        return 1


class Napping(Policy):
    """A plain step after each block."""

    awake = False

    def sleep(self) -> int:
        self.awake = not self.awake
        return 0 if self.awake else 1


@pytest.mark.parametrize(("requests", "policy"), [(1, Policy), (2, Choosy), (2, Napping)])
def test_survival_has_bands_of_several_requests_and_says_what_a_policy_does_to_it(requests, policy):
    records: list[dict] = []
    for _ in range(requests):
        writer(ANSWER, PROMPT, p=0.8).generate(PROMPT, trace=records.append, policy=policy())
    traces = read_traces(records)
    text = report(traces)
    assert ("fill-opacity: 0.18" in text) == ("Bands are 95 % intervals" in text) == (requests > 1)
    assert ("makes this rise" in text) == (policy is Choosy)
    assert ("no property of the drafter" in text) == (policy is Napping)
    counted = [str(count) for count in survival(traces.drafts).blocks]
    assert re.findall(r"<text[^>]*font-size: 6px[^>]*>(\d+)<", text) == counted


@needs_browser
def test_texts_stand_side_by_side_and_a_block_tells_its_drafts_when_pointed_at_or_clicked(page, traces, tmp_path):
    _, *blocks = read_records(traces[1])
    texts: dict[str, str] = {}
    for block in blocks[:3]:
        texts |= block["texts"]
    drafts = [texts[str(token)].replace("\n", "⏎") or "·" for token in blocks[2]["drafts"]]
    found = run_in_page(
        page,
        """const text = (node) => { const copy = node.cloneNode(true);
             copy.querySelectorAll('.tail').forEach((n) => n.remove()); return copy.textContent; };
           const place = document.getElementById('text1-block2'), detail = document.getElementById('detail');
           const read = () => detail.classList.contains('empty') ? null : [detail.querySelector('h3').textContent,
             ...[...detail.querySelectorAll('tbody tr')].map((r) => r.children[1].firstChild.textContent)];
           const press = (key) =>
             document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {bubbles: true, key}));
           const boxes = [...document.querySelectorAll('.text')];
           const seen = {texts: boxes.map(text), tops: boxes.map((b) => b.getBoundingClientRect().top),
             plots: document.querySelectorAll('svg[role=img][aria-label]').length, first: read()};
           place.dispatchEvent(new MouseEvent('mouseover', {bubbles: true})); seen.hover = read();
           place.click(); seen.clicked = read();
           place.focus(); press('Escape'); seen.escaped = read();
           press('ArrowRight'); seen.next = document.activeElement.id;
           return seen;""",
        tmp_path,
    )
    assert found["texts"] == [ANSWER, ANSWER]
    assert found["tops"][0] == found["tops"][1]
    assert found["plots"] == 4
    counts = f"{blocks[2]['accepted']} of {blocks[2]['verified']}"
    assert found["hover"] == found["clicked"] == [f"random, block 2: {counts} checked drafts accepted", *drafts]
    assert (found["first"], found["escaped"], found["next"]) == (None, None, "text1-block3")

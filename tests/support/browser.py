"""A headless browser for pages on disk: opens one, runs a script in it, and gives back what the page then holds."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def run_in_page(page: Path, script: str, scratch: Path, width: int = 1280, height: int = 900) -> Any:
    """What the JavaScript function body ``script`` returns, as JSON, in ``page`` that was loaded from disk.

    The browser resolves no name, so that whatever the page would fetch fails. Errors of the page's own script fail
    the call too.
    """
    probe = (
        "<script>const failed = [];"
        " addEventListener('error', (e) => failed.push(e.message || String(e.target.src)), true);</script>"
    )
    report = (
        "<script>addEventListener('load', () => { let result; try { result = {value: (() => {" + script + "})()} }"
        " catch (error) { result = {error: String(error)} }"
        " document.body.replaceChildren(Object.assign(document.createElement('pre'),"
        " {id: 'result', textContent: JSON.stringify({...result, failed})})) });</script>"
    )
    copy = scratch / "page.html"
    text = page.read_text(encoding="utf-8")
    assert text.count("<head>") == text.count("</body>") == 1
    copy.write_text(text.replace("<head>", "<head>" + probe).replace("</body>", report + "</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    options += [
        f"--user-data-dir={scratch / 'profile'}",
        f"--window-size={width},{height}",
        "--virtual-time-budget=4000",
    ]
    done = subprocess.run(
        [str(BROWSER), *options, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    result = json.loads(html.unescape(found[1]))
    assert result["failed"] == [], result["failed"]
    assert "error" not in result, result["error"]
    return result.get("value")

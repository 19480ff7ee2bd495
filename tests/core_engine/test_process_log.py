"""Log lines of engine processes: the form and the level that the one who started them uses."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import logging
from suimon.core_engine.process_log import set_up_logging
set_up_logging("100% mine")
logging.getLogger("suimon.core_engine.x").info("quiet")
try:
    raise ValueError("two\\nlines \\udcff")
except ValueError as error:
    logging.getLogger("suimon.core_engine.x").error("failed: %s", error, exc_info=True)
"""


def lines(**environ: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_text_is_for_people() -> None:
    quiet, failed, *rest = lines()
    assert quiet[8:] == " INFO    engine[100% mine]: quiet"
    assert failed[8:] == " ERROR   engine[100% mine]: failed: two" and "Traceback (most recent call last):" in rest


def test_json_is_one_object_a_line_from_the_wanted_level_on() -> None:
    (line,) = lines(SUIMON_LOG_FORMAT="json", SUIMON_LOG_LEVEL="error")
    entry = json.loads(line)
    assert (entry["level"], entry["logger"]) == ("error", "engine[100% mine]")
    assert entry["message"] == "failed: two\nlines \udcff" and "ValueError" in entry["error"]


def test_a_level_that_there_is_not_is_the_usual_one() -> None:
    assert len(lines(SUIMON_LOG_FORMAT="json", SUIMON_LOG_LEVEL="loud")) == 2

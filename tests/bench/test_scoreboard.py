"""Each broken promise of another library is shown by a short program of its own, and the page by its record."""

import re
import warnings

import pytest
import torch

from bench import scoreboard
from bench.reproductions import run_program

PROGRAMS = {f"{s.name}, {promise}": (s, promise) for s in scoreboard.OTHERS for promise in s.reproductions}


@pytest.mark.skipif(
    scoreboard.read_record()["versions"]["torch"].partition("+")[0] != torch.__version__.partition("+")[0],
    reason="the page is of another release of torch, which may have mended it",
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_shows_the_broken_promise(name):
    subject, promise = PROGRAMS[name]
    pytest.importorskip(subject.library)
    program = subject.program(promise)
    assert len(list(filter(str.strip, program.splitlines()))) <= 10
    assert not re.search(r"\b(subclasses|desugar|examples)\b", program)
    with warnings.catch_warnings(action="ignore"), pytest.raises(Exception) as found:
        run_program(program)
    assert re.match(subject.reproductions[promise].error, f"{found.type.__name__}: {found.value}")


def test_the_page_is_that_of_the_record_and_each_program_is_on_it():
    record, page = scoreboard.read_record(), scoreboard.PAGE.read_text()
    assert page == scoreboard.emit_page(record) and set(record["classes"]) == set(scoreboard.SUBJECTS)
    broken = {
        f"{subject.name}, {promise}"
        for subject in scoreboard.OTHERS
        for promise, state in record["classes"][subject.name].items()
        if state == "broken"
    }
    assert broken == set(PROGRAMS) and all(s.program(p) in page for s, p in PROGRAMS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MXTensor", "MXFP8 here"])
def test_the_kit_finds_what_the_record_has(name):
    pytest.importorskip(scoreboard.SUBJECTS[name].library)
    assert scoreboard.put_to_the_kit(scoreboard.SUBJECTS[name]) == scoreboard.read_record()["classes"][name]

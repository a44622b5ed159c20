"""Which vector instruction sets are tried with the C++ compiler, in processes with empty caches."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from desugar import _torch as private
from desugar.backends.vector_isa import WorkingSets, tried_when_asked

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="several sets are known for x86-64 on Linux",
)


class Candidate:
    """An instruction set; notes when it is tried."""

    def __init__(self, name, works, tried):
        self.name, self.works, self.tried = name, works, tried

    def __bool__(self):
        self.tried.append(self.name)
        return self.works


def candidates(*works):
    tried = []
    return [Candidate(n, w, tried) for n, w in enumerate(works)], tried


def test_none_is_tried_before_somebody_looks_and_none_twice():
    sets, tried = candidates(False, True, True, False, True)
    found = WorkingSets(sets)
    assert tried == []
    assert found and found[0] is sets[1] and tried == [0, 1]
    assert next(s for s in found if s.name == 2) is sets[2] and tried == [0, 1, 2]
    assert len(found) == 3 and list(found) == [sets[1], sets[2], sets[4]] and found[-1] is sets[4]
    assert tried == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        found[3]


def test_no_set_works():
    sets, tried = candidates(False, False)
    assert not WorkingSets(sets) and list(WorkingSets(sets)) == [] and tried == [0, 1, 0, 1]
    assert not WorkingSets([])


def test_threads_share_what_was_found():
    sets, tried = candidates(False, True, True)
    found = WorkingSets(sets)
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda _: (found[0], len(found)), range(8)))
    assert got == [(sets[1], 2)] * 8 and tried == [0, 1, 2]


def test_outside_of_the_context_the_list_is_pytorchs():
    module = private.cpu_vec_isa
    with tried_when_asked():
        pass
    everywhere = module.valid_vec_isa_list()
    assert isinstance(everywhere, list)
    with tried_when_asked():
        assert module.valid_vec_isa_list() is everywhere  # known already


SCRIPT = """
import json, torch
import desugar
from torch._inductor import cpu_vec_isa
tried, check = [], cpu_vec_isa.VecISA.check_build
def noted(isa, code):
    tried.append(str(isa))
    return check(isa, code)
cpu_vec_isa.VecISA.check_build = noted
BEFORE
value = desugar.compile(lambda x: x * 2 + 1)(torch.ones(64))
ours = list(tried)
torch.compile(lambda x: x * 2 + 1)(torch.ones(65))
assert value.tolist() == [3.0] * 64
print(json.dumps([ours, tried, str(cpu_vec_isa.pick_vec_isa()), list(map(str, cpu_vec_isa.valid_vec_isa_list()))]))
"""


def run_with_empty_caches(folder, before="", **environment):
    """Returns the sets that our compile tried, those that stock's tried then, the chosen one, and all that work."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "DESUGAR_STORE": "0"} | environment
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.replace("BEFORE", before)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # the C++ compiler builds each set's probe
@pytest.mark.parametrize("capability", ["", "avx2"])
def test_a_first_start_tries_no_set_after_the_one_that_it_chooses(tmp_path, capability):
    environment = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
    ours, tried, chosen, working = run_with_empty_caches(tmp_path, **environment)
    assert chosen in working and (not capability or chosen == capability)
    assert set(ours) == set(tried[: len(ours)]) and not set(ours) & set(working[working.index(chosen) + 1 :])
    assert len(set(tried)) == len(working), "stock's compile tries all of them"


@pytest.mark.slow
def test_a_set_that_does_not_build_gives_way_to_the_next(tmp_path):
    *_, working = run_with_empty_caches(tmp_path)
    if len(working) < 2:
        pytest.skip("this processor has one vector instruction set")
    fail = (
        "cpu_vec_isa.VecISA.check_build = lambda isa, code: "
        f"False if str(isa) == {working[0]!r} else noted(isa, code)"
    )
    ours, *_, chosen, others = run_with_empty_caches(tmp_path, fail)
    assert chosen == others[0] == working[1] and ours

"""The conformance kit: checks that a tensor subclass has the properties that PyTorch and its users rely on.

``check(factory)`` checks a class; ``TestMine = suite(factory)`` makes a test class for pytest.
"""

from subclasses.testing.contexts import PATHS, named
from subclasses.testing.op_infos import Verdicts, sweep
from subclasses.testing.report import Failure, Outcome, Promise, Report
from subclasses.testing.runner import ConformanceError, check, examine, suite
from subclasses.testing.subject import Options

__all__ = [
    "PATHS",
    "ConformanceError",
    "Failure",
    "Options",
    "Outcome",
    "Promise",
    "Report",
    "Verdicts",
    "check",
    "examine",
    "named",
    "suite",
    "sweep",
]

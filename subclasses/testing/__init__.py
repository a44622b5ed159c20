"""The conformance kit: does a tensor subclass keep what PyTorch and its users rely on?

``check(factory)`` puts a class to the test; ``TestMine = suite(factory)`` makes it a test class for pytest.
"""

from subclasses.testing.opinfo import Verdicts, sweep
from subclasses.testing.paths import PATHS, named
from subclasses.testing.promise import Outcome, Promise
from subclasses.testing.runner import ConformanceError, Report, check, examine, suite
from subclasses.testing.subject import Options

__all__ = [
    "PATHS",
    "ConformanceError",
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

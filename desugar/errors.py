"""The errors of the library, with the user's line."""

from __future__ import annotations

from desugar.user_code import find_line, find_line_of


class DesugarError(RuntimeError):
    """Raised for a function that desugaring does not support. The arguments of the call are unchanged.

    The message names the problem (`what`), a line of the user's code (`where`) and a remedy (`instead`). By default,
    the line is the innermost line of the user's code on the stack.

    Attributes:
        what, where, instead: The parts of the message.
        stock_is_wrong: Whether PyTorch's own AOTAutograd computes a wrong result for the function, so that it cannot
            compile the graph instead.
    """

    def __init__(
        self,
        what: str,
        *,
        instead: str,
        where: str | None = None,
        stock_is_wrong: bool = False,
    ) -> None:
        self.what, self.instead, self.stock_is_wrong = what, instead, stock_is_wrong
        super().__init__()
        self.move(where or user_line())

    def move(self, where: str | None) -> None:
        """Makes the message name another line of the user's code."""
        self.where = where
        line = f"\n  where: {where}" if where else ""
        self.args = (f"{self.what}{line}\n  instead: {self.instead}",)


class PackageError(RuntimeError):
    """Raised where a package cannot be written, read or used on this machine; the message names cause and remedy."""


class SignatureError(TypeError):
    """Raised for a call for which a package has no program. The arguments are unchanged.

    Attributes:
        argument: The argument that does not match, or its inner tensor (`x.values`); None for the call as a whole.
        expected, got: The kind of argument that the package accepts, and the kind that was passed.
    """

    def __init__(self, argument: str | None, expected: str, got: str) -> None:
        self.argument, self.expected, self.got = argument, expected, got
        where = "" if argument is None else f"{argument}: "
        super().__init__(f"{where}expected {expected}, got {got}")

    def __reduce__(self) -> tuple[type, tuple[str | None, str, str]]:
        return type(self), (self.argument, self.expected, self.got)


def user_line(error: BaseException | None = None) -> str | None:
    """Returns the innermost line of the user's code, as `file:line: code`; None if there is none.

    Args:
        error: An error, in whose traceback the line is found; None for the stack.
    """
    line = find_line() if error is None else find_line_of(error)
    return None if line is None else str(line)

"""The error of the pass, which names the user's line."""

from __future__ import annotations

from desugar.user_code import find_line


class DesugarError(RuntimeError):
    """Raised for a function that the pass does not support. The arguments of the call are unchanged.

    The message says what the pass found, where in the user's code (`where`, by default the innermost line of the
    user's code on the stack), and what to do instead.

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


def user_line() -> str | None:
    """Returns the innermost line of the user's code on the stack, as `file:line: code`; None if there is none."""
    line = find_line()
    return None if line is None else str(line)

"""The one error of the pass, and how it names the user's line."""

from __future__ import annotations

from desugar.user_code import find_line, is_library_file as is_library_file


class DesugarError(RuntimeError):
    """A function cannot be desugared as it stands.

    The message says what was met, where in the user's code (`where`, else the innermost line on the stack that
    is the user's), and what to do instead. Arguments are untouched when it is raised.

    Attributes:
        what, where, instead: The parts of the message.
        stock_is_wrong: PyTorch's own AOTAutograd gives a wrong result here, so it is no way out.
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
        """Names another line of the user's."""
        self.where = where
        place = f"\n  where: {where}" if where else ""
        self.args = (f"{self.what}{place}\n  instead: {self.instead}",)


def user_line() -> str | None:
    """The innermost line on the stack that is the user's, as `file:line: code`."""
    line = find_line()
    return None if line is None else str(line)
